"""Tokens in the plane or in space: in an order in which neighbors are close, by segment, then along a Hilbert curve; or by rows.

In this order the tokens of a tile lie in a small box, and the distance of two boxes bounds all distances between their tokens. So
kernels can leave out tiles that are far away (docs/maths.md). A call is sorted once, and its results are put back in order.
A call that no kernel supports is dense, in linear memory: a few queries at a time, which backward computes again.
Source of the curve: Skilling 2004, Programming the Hilbert curve (AIP Conference Proceedings 707, 381).
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from alibi_attn.attention.call.dropout import numbered
from alibi_attn.attention.call.reads import DROPOUT, SPACE, Reads
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import is_traced

BITS = 16  # of each coordinate along the curve
MOST_SCORES = 2**27  # of all sequences and heads together, and of one chunk of rows: 512 MiB in fp32
# What a call has in sorted order, and in chunks of rows.
SORTED = Reads(
    "a backend that skips tokens in space",
    SPACE | DROPOUT | {"causal", "key_mask", "query_segments", "key_segments", "return_lse"},
    instead="backend='dense'",
)
BY_ROWS = Reads("a call of many tokens in space", SORTED.fields | {"key_bias", "registers"}, instead="fewer tokens")

Spec = AttentionSpec[Tensor]
Run = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def attend(
    run: Run, spec: Spec, query: Tensor, key: Tensor, value: Tensor, *, skips: bool, in_chunks: bool
) -> tuple[Tensor, Tensor | None]:
    """(output, lse) of a call with coordinates by a backend that `run` runs.

    Args:
        skips: the backend skips tiles, so it needs the tokens in order.
        in_chunks: a backend that does not may compute the queries in chunks.
    """
    if skips:
        part, of_query, of_key, of_value, places = sorted_in_space(spec, query, key, value)
        output, lse = run(part, of_query, of_key, of_value)
        return _rows(output, places), None if lse is None else _rows(lse, places)
    if in_chunks and spec.batch * spec.num_heads * spec.query_len * spec.key_len > MOST_SCORES:
        return run_by_rows(run, spec, query, key, value)
    return run(spec, query, key, value)


def sorted_in_space(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Spec, Tensor, Tensor, Tensor, Tensor]:
    """(spec, query, key, value, places): the same call in sorted order, and where each query of the call is in it, [B, T]."""
    SORTED.check(spec)
    spec = numbered(spec, query.device)
    of_keys = _order(spec, spec.coordinates, spec.key_segments)
    is_self = spec.query_coordinates is spec.coordinates
    of_queries = of_keys if is_self else _order(spec, spec.query_coordinates, spec.query_segments)
    arrays = spec.along("S", lambda x, _: _in_order(x, of_keys)) | spec.along(
        "T", lambda x, _: _in_order(x, of_queries)
    )
    if is_self:
        arrays["query_coordinates"] = arrays["coordinates"]
    part = dataclasses.replace(spec, **arrays)
    places = torch.empty_like(of_queries)
    places.scatter_(1, of_queries, torch.arange(spec.query_len, device=query.device).expand_as(of_queries))
    return part, _rows(query, of_queries), _rows(key, of_keys), _rows(value, of_keys), places


def run_by_rows(run: Run, spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """(output, lse) of `run` for a few queries at a time, which a checkpoint computes again; a dropout seed must have been drawn.

    At most `MOST_SCORES` scores are in memory, on every device and with every option.
    """
    BY_ROWS.check(spec)
    step = max(1, MOST_SCORES // max(1, spec.batch * spec.num_heads * spec.key_len))
    results = []
    for start in range(0, spec.query_len, step):
        stop = min(start + step, spec.query_len)
        part = spec.on_queries(start, stop)
        results.append(
            checkpoint(run, part, query[:, :, start:stop], key, value, use_reentrant=False, preserve_rng_state=False)
        )
    outputs, lses = zip(*results, strict=True)
    return torch.cat(outputs, 2), torch.cat(lses, 2) if spec.return_lse else None


def hilbert_index(points: Tensor) -> Tensor:
    """[..., N] int64: the place of each point along a Hilbert curve through the box around all N points, [..., N, 2 or 3].

    >>> corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    >>> hilbert_index(corners).argsort().tolist()
    [0, 3, 2, 1]
    """
    low, high = points.amin(-2, keepdim=True), points.amax(-2, keepdim=True)
    side = (high - low).amax(-1, keepdim=True).clamp(min=torch.finfo(points.dtype).tiny)
    axes = list(((points - low) / side * (2**BITS - 1)).long().unbind(-1))
    for bit in range(BITS - 1, 0, -1):
        below = 2**bit - 1
        for at, axis in enumerate(axes):
            has_bit = (axis >> bit & 1).bool()
            swapped = (axes[0] ^ axis) & below
            first = torch.where(has_bit, axes[0] ^ below, axes[0] ^ swapped)
            if at > 0:
                axes[at] = torch.where(has_bit, axis, axis ^ swapped)
            axes[0] = first
    for at in range(1, len(axes)):
        axes[at] = axes[at] ^ axes[at - 1]
    flips = torch.zeros_like(axes[0])
    for bit in range(BITS - 1, 0, -1):
        flips = torch.where((axes[-1] >> bit & 1).bool(), flips ^ (2**bit - 1), flips)
    index = torch.zeros_like(flips)
    for bit in range(BITS - 1, -1, -1):
        for axis in axes:
            index = index << 1 | ((axis ^ flips) >> bit & 1)
    return index


def _order(spec: Spec, points: Tensor | None, segments: Tensor | None) -> Tensor:
    """[B, N] int64: a permutation of the tokens."""
    assert points is not None
    order = hilbert_index(points).argsort(dim=-1, stable=True)
    if segments is None:
        return order.expand(spec.batch, -1)
    return order.gather(1, segments.gather(1, order).argsort(dim=-1, stable=True))


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """[B, H, N, …] in the given order; copying whole rows takes a third of the time of `gather`, forward and backward."""
    if is_traced() or x.shape[0] == 0:  # a list of sequences would fix their number
        at = order[:, None] if x.ndim == 3 else order[:, None, :, None]
        return x.gather(2, at.expand(-1, x.shape[1], -1, *x.shape[3:]))
    return torch.stack([rows.index_select(1, at) for rows, at in zip(x.unbind(), order.unbind(), strict=True)])


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """[B, N] or [B, N, C] in the given order."""
    return x.gather(1, order if x.ndim == 2 else order[..., None].expand_as(x))
