"""`attention_rows`: the weights of a few queries over all keys, for looking at what they attend to."""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from alibi_attn.attention.backends.reference import scores_of
from alibi_attn.attention.call.bias import Slopes, score_bias, widest
from alibi_attn.attention.call.hints import unknown_argument
from alibi_attn.attention.call.options import DEFAULTS, AttentionOptions
from alibi_attn.attention.call.reads import MASKS, PARTS, SPACE, Reads
from alibi_attn.attention.call.transforms import autocast, may_read
from alibi_attn.attention.call.validation import check_tensor, make_spec
from alibi_attn.attention.call.visibility import chosen_queries, visible
from alibi_attn.attention.forgetting import check_gates, gate_sums, with_gates
from alibi_attn.attention.run.execution import scaled_by_sinks
from alibi_attn.attention.run.guards import guard

Rows = Sequence[int] | slice | Tensor

_READS = Reads("attention_rows", MASKS - {"return_lse"} | PARTS | SPACE | {"key_bias", "sink_logits"})
_WITH_GATES = Reads(
    "attention_rows with log_fgate",
    frozenset({"window", "key_mask", "query_segments", "key_segments", "key_bias", "sink_logits"}),
)
_WITHOUT_MEANING = {
    "tolerance": "the weights are exact: nothing is skipped",
    "dropout_p": "the weights are those before dropout",
    "return_lse": "alibi_attention(..., return_lse=True) returns it",
    "backend": "there is only one",
}


def attention_rows(
    query: Tensor,
    key: Tensor,
    slopes: Slopes | None = None,
    *,
    rows: Rows,
    log_fgate: Tensor | None = None,
    **options: Unpack[AttentionOptions[Tensor]],
) -> Tensor:
    """The exact attention weights of a few queries, [B, H, R, S] in fp32 (fp64 for fp64 input), in memory linear in S.

        weights[b, h, r, j] = softmax_j(scale·q_i·k_j − m·|i − j| + b_j),  i the query at rows[r]

    Nothing is skipped, and no score of another query is computed. Every row sums to 1, to σ(lse − sink) with `sink_logits`, and
    to 0 if the query sees no key. Differentiable in query, key, slopes, key_bias, sink_logits and log_fgate.

    Args:
        rows: R indices of queries, counted from 0, negative ones from the end: a sequence, a 1-D integer tensor or a slice.
        log_fgate: gates, as for `forgetting_attention`; without slopes there is then no ALiBi.
        options: those of `alibi_attention` but tolerance, dropout_p, return_lse and backend.

    Raises:
        ValueError, TypeError: as `alibi_attention` and `forgetting_attention`; rows that do not exist; options without meaning.

    >>> q = k = torch.randn(1, 8, 1024, 64)
    >>> weights = attention_rows(q, k, rows=[-1])
    >>> weights.shape, bool((weights.sum(-1) - 1 < 1e-5).all())
    (torch.Size([1, 8, 1, 1024]), True)
    """
    for name in options:
        if name in _WITHOUT_MEANING:
            raise TypeError(f"attention_rows() has no argument {name!r}: {_WITHOUT_MEANING[name]}")
        if name not in DEFAULTS:
            raise unknown_argument("attention_rows", [name])
    query, key = autocast(query, key)
    if log_fgate is not None and slopes is None:
        slopes = [0.0] * (query.shape[1] if isinstance(query, Tensor) and query.ndim == 4 else 0)
    spec = make_spec(query, key, key, slopes, **options)
    _READS.check(spec)
    if log_fgate is not None:
        _WITH_GATES.check(spec)
        offset = options.get("query_offset")
        assert not isinstance(offset, Tensor)
        spec = with_gates(spec, gate_sums(log_fgate), check_gates(spec, log_fgate, query, offset), log_fgate)
    at = _indices(rows, spec.query_len, query.device)
    part, distance = chosen_queries(spec, at)
    query = query.index_select(2, at)
    if 0 in (part.batch, part.query_len, part.key_len):  # an empty tensor that depends on its inputs
        return (query.sum() + key.sum()).expand(part.batch, part.num_heads, part.query_len, part.key_len)
    seen = visible(part, distance)
    call = guard(part, query, key, key, seen, score_bias(part, distance, seen))
    scores = scores_of(part, call.query, call.key, call.pairs)
    weights = scores.softmax(-1, dtype=widest(scores)).to(scores.dtype).masked_fill(~seen, 0.0)
    if part.sink_logits is not None:
        lse = call._replace(poison=None).result(part, weights, scores.logsumexp(-1))[1]
        assert lse is not None
        weights = scaled_by_sinks(weights, lse, part.sink_logits)
    return call.result(part, weights, None)[0]


def _indices(rows: Rows, query_len: int, device: torch.device) -> Tensor:
    """[R] int64, all from 0 on."""
    if isinstance(rows, slice):
        return torch.arange(*rows.indices(query_len), device=device)
    if isinstance(rows, Tensor):
        check_tensor("rows", rows, device)
        fits = rows.ndim == 1 and not (rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex())
    else:
        fits = isinstance(rows, Sequence) and all(isinstance(row, int) and not isinstance(row, bool) for row in rows)
    if not fits:
        raise TypeError(
            f"rows is {rows!r} but must be indices of queries: a sequence as [0, -1], an integer tensor [R] or a slice"
        )
    at = torch.as_tensor(rows, dtype=torch.int64, device=device)
    if may_read(at) and not bool(((at >= -query_len) & (at < query_len)).all()):
        raise ValueError(
            f"rows is {at.tolist()} but there are {query_len} queries; pass indices from {-query_len} to {query_len - 1}"
        )
    return torch.where(at < 0, at + query_len, at)
