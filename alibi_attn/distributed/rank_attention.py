"""Computes one rank's attention: its queries over its own rows, the halo around them, and distant outlier tiles.

Halo and shard are one range of positions, so they are one call of `alibi_attention` with a query offset. Heads with halos of
about the same width share a call. If their widths differ, they become sequences of a batch: each then has its own mask, which
hides the rows that it did not request. Each outlier tile is a separate call; results are merged by their log-sum-exps. Dropout
gets the indices of these sequences, heads and rows in the full call.
"""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.execution import attend
from alibi_attn.attention.merging import merged
from alibi_attn.attention.spec import AttentionSpec, index_of, query_heads
from alibi_attn.attention.validation import make_spec
from alibi_attn.distributed.exchange import Pieces
from alibi_attn.distributed.halos import Halo, Span

Spec = AttentionSpec[Tensor]

BEFORE, AFTER, FAR = 0, 1, 2  # indices into `Halo.spans`: halo before the shard, halo after it, first outlier


@dataclasses.dataclass(frozen=True)
class RankInputs:
    """The rows of a rank's shard, and those received from other ranks.

    Args:
        spec: the call of the shard alone, with its masks, segments and biases.
        halo, rank: the rows that were requested, and this process's rank.
        query: [B, H, L, D].
        key, value: [B, K, L, D], and the received pieces, [B, 1, rows, D] per key head and span.
        bias: [B, H, L], and pieces [B, H / K, rows]; or None.
        start: [B, H, L], the position in the whole sequence of each query's last cut; or None.
        marks: (visible, segment) of each key, [B, 1, L, 2] int64, and the pieces of `halo.widest()`; or None.
        backend: as for `alibi_attention`.
    """

    spec: Spec
    halo: Halo
    rank: int
    query: Tensor
    key: tuple[Tensor, Pieces]
    value: tuple[Tensor, Pieces]
    bias: tuple[Tensor, Pieces] | None
    start: Tensor | None
    marks: tuple[Tensor, Pieces] | None
    backend: str


@dataclasses.dataclass(frozen=True)
class KeySpan:
    """Consecutive rows of some key heads, attended to in one call.

    Args:
        heads: the key heads, n of them.
        offset: the position of the first query, counted from the span's first row.
        key, value: [B, n, W, D].
        bias: [B, n·H / K, W], or None.
        marks: [B, W, 2], or None.
        requested: [n, W] bool, False for rows that a head did not request; None if every head requested all of them.
    """

    heads: list[int]
    offset: int
    key: Tensor
    value: Tensor
    bias: Tensor | None
    marks: Tensor | None
    requested: Tensor | None


def attend_rank(inputs: RankInputs) -> tuple[Tensor, Tensor | None]:
    """(output [B, H, L, D], lse [B, H, L] or None) of this rank's queries over the rows of all ranks."""
    far = _far_spans(inputs)
    needs_lse = inputs.spec.return_lse or bool(far)
    parts, order = [], []
    for heads in _buckets(inputs):
        parts.append(_call(inputs, _near(inputs, heads), needs_lse))
        order += query_heads(heads, inputs.spec.group)
    output = _in_order([output for output, _ in parts], order)
    lse = _in_order([lse for _, lse in parts if lse is not None], order) if needs_lse else None
    if lse is None or not far:
        return output, lse
    output = output.to(lse.dtype)
    for span, heads in far.items():
        index = torch.tensor(query_heads(heads, inputs.spec.group), device=output.device)
        more, more_lse = _call(inputs, _outlier(inputs, span, heads), True)
        assert more_lse is not None
        both, both_lse = merged(output[:, index], lse[:, index], more.to(output.dtype), more_lse)
        output, lse = output.index_copy(1, index, both), lse.index_copy(1, index, both_lse)
    return output.to(inputs.query.dtype), lse


def _buckets(inputs: RankInputs) -> list[list[int]]:
    """Groups key heads by the widths of their halos, rounded up to a power of two of at least one tile."""
    buckets: dict[tuple[int, ...], list[int]] = {}
    for head in range(inputs.halo.num_kv_heads):
        widths = inputs.halo.left[inputs.rank][head], inputs.halo.right[inputs.rank][head]
        buckets.setdefault(tuple((max(n, TILE) - 1).bit_length() for n in widths), []).append(head)
    return list(buckets.values())


def _far_spans(inputs: RankInputs) -> dict[Span, list[int]]:
    """The key heads that requested each span of outlier tiles."""
    requesters: dict[Span, list[int]] = {}
    for head, spans in enumerate(inputs.halo.outliers[inputs.rank]):
        for span in spans:
            requesters.setdefault(span, []).append(head)
    return requesters


def _near(inputs: RankInputs, heads: list[int]) -> KeySpan:
    """The shard with the widest of the heads' halos around it."""
    left, right = ([side[inputs.rank][head] for head in heads] for side in (inputs.halo.left, inputs.halo.right))
    widths = max(left), max(right)
    key, value = (_around(own, pieces, heads, heads, widths) for own, pieces in (inputs.key, inputs.value))
    bias = None if inputs.bias is None else _around(*inputs.bias, query_heads(heads, inputs.spec.group), heads, widths)
    marks, requested = None, None
    if inputs.marks is not None:
        own, ((before, after, *_),) = inputs.marks
        before = before[:, :, before.shape[2] - widths[0] :]
        marks = torch.cat([before, own, after[:, :, : widths[1]]], 2)[:, 0]
    if len(set(left)) > 1 or len(set(right)) > 1:
        at = torch.arange(-widths[0], key.shape[2] - widths[0], device=key.device)
        low, high = (torch.tensor(side, device=key.device)[:, None] for side in (left, right))
        requested = (at >= -low) & (at < inputs.spec.key_len + high)
    return KeySpan(heads, widths[0], key, value, bias, marks, requested)


def _around(own: Tensor, pieces: Pieces, heads: list[int], key_heads: list[int], widths: tuple[int, int]) -> Tensor:
    """The shard's rows between the received ones, [B, heads, W, …], padded with zeros if a head requested fewer."""
    before = [_widened(pieces[head][BEFORE], widths[0], in_front=True) for head in key_heads]
    after = [_widened(pieces[head][AFTER], widths[1], in_front=False) for head in key_heads]
    whole = len(heads) == own.shape[1]
    parts = [torch.cat(before, 1), own if whole else own[:, index_of(heads)], torch.cat(after, 1)]
    parts = [part for part in parts if part.shape[2]] or parts[1:2]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _widened(rows: Tensor, width: int, *, in_front: bool) -> Tensor:
    missing = width - rows.shape[2]
    padding = (missing, 0) if in_front else (0, missing)
    return torch.nn.functional.pad(rows, (0, 0) * (rows.ndim - 3) + padding) if missing else rows


def _outlier(inputs: RankInputs, span: Span, heads: list[int]) -> KeySpan:
    """A span of outlier tiles, for the heads that requested it."""
    places = [FAR + inputs.halo.outliers[inputs.rank][head].index(span) for head in heads]

    def received(pieces: Pieces) -> Tensor:
        return torch.cat([pieces[head][at] for head, at in zip(heads, places, strict=True)], 1)

    marks = None
    if inputs.marks is not None:
        at = FAR + inputs.halo.widest().outliers[inputs.rank][0].index(span)
        marks = inputs.marks[1][0][at][:, 0]
    offset = inputs.halo.offsets[inputs.rank] - span[0]
    bias = None if inputs.bias is None else received(inputs.bias[1])
    return KeySpan(heads, offset, received(inputs.key[1]), received(inputs.value[1]), bias, marks, None)


def _call(inputs: RankInputs, span: KeySpan, needs_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attends to one span: (output [B, n·H / K, L, D], lse)."""
    spec, heads = inputs.spec, query_heads(span.heads, inputs.spec.group)

    def of_span(x: Tensor | None, axis: int) -> Tensor | None:
        """Selects the query heads of the span."""
        if x is None or len(heads) == spec.num_heads:
            return x
        return x[:, index_of(heads)] if axis == 1 else x[..., index_of(heads)]

    seen = segments = None
    if span.marks is not None:
        seen = span.marks[..., 0].bool() if spec.key_mask is not None else None
        segments = span.marks[..., 1] if spec.key_segments is not None else None
    # Masks are per sequence: heads with different masks become sequences of a batch. With dropout, so do heads that are not
    # adjacent, because dropout counts heads from the first one.
    scattered = spec.dropout_p > 0 and not isinstance(index_of(heads), slice)
    count = len(span.heads) if span.requested is not None or scattered else 1
    if span.requested is not None:
        seen = span.requested.expand(spec.batch, -1, -1) if seen is None else span.requested & seen[:, None]
        seen = seen.flatten(0, 1)
    elif seen is not None:
        seen = seen.repeat_interleave(count, 0)

    def split(x: Tensor | None) -> Tensor | None:
        """[B, n·m, …] -> [B·n, m, …]"""
        return x if x is None or count == 1 else x.unflatten(1, (count, -1)).flatten(0, 1)

    def split_slopes(x: Tensor | None) -> Tensor | None:
        return x if x is None or count == 1 else split(x.expand(spec.batch, -1))

    def repeated(x: Tensor | None) -> Tensor | None:
        return x if x is None else x.repeat_interleave(count, 0)

    query, key, value = split(of_span(inputs.query, 1)), split(span.key), split(span.value)
    of_query, of_key = repeated(spec.query_segments), repeated(segments)
    assert query is not None
    assert key is not None
    assert value is not None
    part = make_spec(
        query,
        key,
        value,
        split_slopes(of_span(spec.slopes, -1)),
        causal=spec.causal,
        window=spec.window,
        scale=spec.scale,
        right_slopes=split_slopes(of_span(spec.right_slopes, -1)),
        query_offset=span.offset,
        key_mask=seen,
        segment_ids=None if of_query is None or of_key is None else (of_query, of_key),
        key_bias=split(span.bias),
        dropout_p=spec.dropout_p,
        tolerance=spec.tolerance,
        return_lse=needs_lse,
    )
    seed = _dropout_seed(inputs, span, count)
    start = split(of_span(inputs.start, 1))
    if start is not None:
        start = (start - (inputs.halo.offsets[inputs.rank] - span.offset)).clamp(min=0)
    part = dataclasses.replace(
        part, query_bias=split(of_span(spec.query_bias, 1)), query_start=start, dropout_seed=seed
    )
    outputs = attend(part, query, key, value, inputs.backend)
    output, lse = outputs if isinstance(outputs, tuple) else (outputs, None)
    if count == 1:
        return output, lse
    together = output.unflatten(0, (-1, count)).flatten(1, 2)
    return together, None if lse is None else lse.unflatten(0, (-1, count)).flatten(1, 2)


def _dropout_seed(inputs: RankInputs, span: KeySpan, count: int) -> Tensor | None:
    """The seed, with the indices of a span's sequences, heads and rows in the full call; one row per sequence if split."""
    spec = inputs.spec
    if spec.dropout_seed is None:
        return None
    seed, row = int(spec.dropout_seed[0, 0]), inputs.halo.offsets[inputs.rank] - span.offset
    heads = [head * spec.group for head in span.heads]
    firsts = [(0, heads[0])] if count == 1 else [(b, head) for b in range(spec.batch) for head in heads]
    return spec.dropout_seed.new_tensor([[seed, b, head, row] for b, head in firsts])


def _in_order(parts: list[Tensor], order: list[int]) -> Tensor:
    """Joins the parts and sorts their heads, [B, H, …]; `order` has the index of each head."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if order == sorted(order):
        return whole
    return whole[:, torch.tensor(order, device=whole.device).argsort()]
