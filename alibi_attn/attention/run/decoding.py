"""Decoding: the last few queries of a long text read only the keys within their reach.

`alibi_attention` reads every key once to compute its norm. With remembered norms (`norms.py`), the reach of a new query is
known before any far key is read. On a GPU the kernels' plan is computed from these norms, also for chunks of a long prompt. On a
CPU a kernel moves outward from each query and skips tile by tile. Without a compiler, with gates, or with numbers that are
not finite, each head of each row attends to a slice instead (`near_keys.py`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused import groups
from alibi_attn.attention.backends.fused.configs import DECODE_QUERIES
from alibi_attn.attention.backends.native import decoding as native
from alibi_attn.attention.backends.native.backend import WIDTH
from alibi_attn.attention.call.checks import GATES_RULE, check_numbers, dtype_name, usable_tolerance
from alibi_attn.attention.call.options import DEFAULTS
from alibi_attn.attention.call.spec import GATE_FLOOR, AttentionSpec, index_of, query_heads
from alibi_attn.attention.call.transforms import are_ordinary, autocasts
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.biased import sums_behind
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run.execution import attend
from alibi_attn.attention.run.merging import merged
from alibi_attn.attention.run.near_keys import Runs, buckets, needed_keys, visible_runs

Spec = AttentionSpec[Tensor]

MAX_QUERIES = 16  # of the CPU kernel
CHUNKS = 4  # for more than MAX_QUERIES queries, a CPU uses `attend_near` only with at least this many keys per query
# Elements of the cached keys of a sequence, on a CPU without the kernel: with fewer, reading all is as fast.
LONG = 2**23
# The options of a call that may read near keys only; `alibi_attention` computes the others.
READS = frozenset({"window", "scale", "key_mask"})


class Kept(NamedTuple):
    """The keys of a group of heads, all of which keep the same tokens.

    Args:
        key, value: [B, K, S, D] of the group's key heads.
        heads: the group's query heads; None = all.
        first: the index of query 0 among these keys, an int or a 0-d int64 tensor, which is not read on the host.
        norms: returns upper bounds of the norms of these keys and values; None = unknown.
        log_fgate: [B, H, S] of the group's query heads: forget gates.
        exists: [B, S] bool: which keys exist; None = all.
        window: at most this many keys, up to the query's own, exist; None = all.
        select: `heads` as a slice or as indices on the device; None = made from `heads`.
        firsts: [groups] int64, `first` of all groups, if one call reads all groups.
    """

    key: Tensor
    value: Tensor
    heads: Sequence[int] | None = None
    first: int | Tensor = 0
    norms: Callable[[], Norms] | None = None
    log_fgate: Tensor | None = None
    exists: Tensor | None = None
    window: int | None = None
    select: slice | Tensor | None = None
    firsts: Tensor | None = None


def attend_if_near(query: Tensor, kept: Kept, slopes: Tensor | None, options: Mapping[str, Any]) -> Tensor | None:
    """Causal attention [B, H, T, D] over the keys within reach; None unless few queries and many known keys make it faster.

    Args:
        options: of `alibi_attention`, without defaults.
    """
    key, value, norms, first, log_fgate = kept.key, kept.value, kept.norms, kept.first, kept.log_fgate
    window, mask = options.get("window"), options.get("key_mask")
    if slopes is None or not options.keys() <= READS or isinstance(window, tuple | list):
        return None
    numbers = {"window": window, "scale": options.get("scale")}
    if isinstance(first, Tensor):
        if norms is None or mask is not None or log_fgate is not None or not reads_near_at(query):
            return None
        return attend_at(query, key, value, slopes, norms(), first, **numbers)
    if (norms is None and first == 0) or first + query.shape[2] != key.shape[2]:  # a text without a cache; not the last
        return None
    if not reads_near(query, key, masked=mask is not None, gated=log_fgate is not None, remembered=norms is not None):
        if norms is not None and not torch.is_grad_enabled() and has_kernel(query, key, value):
            norms()  # during the prompt, so that new tokens are fast
        return None
    visible = None if mask is None else visible_runs(mask)
    if (mask is not None and visible is None) or (log_fgate is not None and _has_cut(query, log_fgate)):
        return None
    known = None if norms is None else norms()
    return attend_near(query, key, value, slopes, known, visible=visible, log_fgate=log_fgate, **numbers)


def _has_cut(query: Tensor, log_fgate: Tensor) -> bool:
    """Whether a cut lies between the queries: biases of keys cannot express which queries it applies to."""
    return bool((log_fgate[..., log_fgate.shape[2] - query.shape[2] + 1 :] < GATE_FLOOR).any())


def reads_near(
    query: Tensor, key: Tensor, *, masked: bool = False, gated: bool = False, remembered: bool = True
) -> bool:
    """Whether `attend_near` supports these queries and keys and is faster; decided without reading a tensor.

    `attend_near` has no gradient, and torch.compile cannot trace it.

    Args:
        masked: there is a key mask. `visible_runs` checks it for holes.
        gated: there are forget gates. A GPU scores all keys with a mask or gates, a CPU only with both.
        remembered: the norms of the keys and values are known; if not, the CPU kernel reads all keys.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if _on_cpu(query):
        long = remembered and key.shape[1:].numel() >= LONG
        if query.shape[2] > MAX_QUERIES:
            return long and not masked and not gated and key.shape[2] >= CHUNKS * query.shape[2]
        if masked and gated:
            return False
        return long or (not gated and has_kernel(query, key))
    return remembered and not masked and not gated and fused.why_not_rows(query) is None


def skips_on_device(query: Tensor) -> bool:
    """Whether the device has kernels that read only the keys within reach of these queries, given the norms of all keys."""
    return not _on_cpu(query) and fused.why_not_rows(query) is None


def reads_near_at(query: Tensor) -> bool:
    """Whether `attend_at` supports these queries; it has no gradient, and torch.compile cannot trace it."""
    return skips_on_device(query) and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


@torch.no_grad()
def attend_at(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    known_norms: Norms,
    query_offset: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of T positions from a tensor `query_offset` on, [B, H, T, D], if `reads_near_at` allows it.

    Args:
        known_norms: norms of all keys and values up to the queries, also in the last tile, which may not be whole.
    """
    spec = make_spec(query, key, value, slopes, query_offset=query_offset, window=window, scale=scale)
    return fused.decode(spec, query, key, value, known_norms)[0]


attend_groups = groups.attend_groups


def reads_groups(query: Tensor) -> bool:
    """Whether `attend_groups` supports these queries."""
    few = query.shape[2] <= DECODE_QUERIES and query.numel() > 0
    return few and reads_near_at(query) and are_ordinary(query) and not autocasts(query.device.type)


def has_kernel(*tensors: Tensor) -> bool:
    """Whether the CPU kernel for decoding supports these queries, keys and values."""
    return tensors[0].shape[3] % WIDTH == 0 and native.takes(*tensors)


def measured_norms(key: Tensor, value: Tensor) -> Norms:
    """`Norms.of`, computed by the kernel in one pass if there is one."""
    if key.shape[3] == value.shape[3] and has_kernel(key, value):
        return Norms(native.tile_norms(key.detach()), native.tile_norms(value.detach()))
    return Norms.of(key, value)


def attend_near(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    known_norms: Norms | None,
    *,
    visible: Runs | None = None,
    log_fgate: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
) -> Tensor:
    """Causal attention of the last T positions, [B, H, T, D], if `reads_near` allows it; on a CPU reads the reach on the host.

    Args:
        query, key, value, slopes, window, scale, tolerance: as for `alibi_attention`.
        known_norms: norms of the keys and values, of all but the last few; None = unknown.
        visible: the keys that each row may see, CPU only; None = all.
        log_fgate: [B, H, S] gates as for `forgetting_attention`, CPU only, with all keys visible and no cut between the queries.
    """
    few = query.shape[2] <= MAX_QUERIES
    if few and _on_cpu(query) and log_fgate is None and has_kernel(query, key, value):
        numbers = {**DEFAULTS, "window": window, "scale": scale, "tolerance": tolerance}
        factor, share = check_numbers(numbers, head_dim=query.shape[3], dtype=dtype_name(query.dtype))
        output = native.decode(
            query, key, value, slopes, norms=known_norms, visible=visible, window=window, scale=factor, tolerance=share
        )
        if output is not None:
            return output
    spec = make_spec(query, key, value, slopes, window=window, scale=scale, tolerance=tolerance)
    with torch.no_grad():
        known_norms = Norms.of(key, value) if known_norms is None else known_norms
        if _on_cpu(query):
            return _in_slices(spec, query, key, value, known_norms, visible, log_fgate)
        assert visible is None and log_fgate is None, "reads_near excludes key masks and gates here"  # noqa: PT018
        return fused.decode(spec, query, key, value, known_norms)[0]


def _on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _in_slices(
    spec: Spec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    known_norms: Norms,
    visible: Runs | None,
    log_fgate: Tensor | None,
) -> Tensor:
    """One call of `attend` per group of key heads that need about as many keys."""
    inside = 0.0
    if spec.query_len > MAX_QUERIES:
        # Many queries skip again inside their slice, so each step gets half of the tolerance.
        inside = usable_tolerance(spec.tolerance / 2)
        spec = spec.changed(tolerance=inside)
    runs = [(0, spec.key_len)] * spec.batch if visible is None else visible
    rows = needed_keys(spec, query, key, value, known_norms, runs, log_fgate)
    output = torch.empty_like(query)
    for b, row in enumerate(rows):
        if row.start == row.stop:
            output[b] = 0.0
            continue
        for keys, members in buckets(row.needed):
            heads = index_of(query_heads(members, spec.group))
            one, of_keys = slice(b, b + 1), index_of(members)
            part = spec.changed(
                batch=1,
                num_heads=len(members) * spec.group,
                num_kv_heads=len(members),
                tolerance=inside,
                slopes=spec.slopes[heads] if spec.slopes.ndim == 1 else spec.slopes[one, heads],
            )
            gates = None if log_fgate is None else log_fgate[one, heads]
            output[one, heads] = _attend(
                part, query[one, heads], key[one], value[one], of_keys, row.spans(keys, members), gates
            )
    return output


def _attend(
    spec: Spec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    members: list[int] | slice,
    spans: list[tuple[int, int]],
    log_fgate: Tensor | None,
) -> Tensor:
    """Attention of some key heads over some spans of keys."""

    def attended(low: int, high: int, *, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
        keys, values = key[:, :, low:high][:, members], value[:, :, low:high][:, members]
        # Counted from the last position: the rest of a query's gates is the same for all keys.
        bias = None
        if log_fgate is not None:
            after = log_fgate[..., high:].sum(-1, keepdim=True, dtype=torch.float64)
            bias = sums_behind(log_fgate[..., low:high]) + after
            if not bool((bias < torch.inf).all()):
                raise ValueError(GATES_RULE)
        span = spec.changed(
            key_len=high - low,
            query_offset=spec.key_len - spec.query_len - low,
            key_bias=bias,
            return_lse=return_lse,
        )
        return attend(span, query, keys, values, "auto")

    if len(spans) == 1:
        return cast("Tensor", attended(*spans[0], return_lse=False))
    parts = ((output, lse) for output, lse in (attended(*span, return_lse=True) for span in spans))
    return functools.reduce(lambda one, other: merged(*one, *other), parts)[0].to(query.dtype)
