"""Tokens in the plane or in space, in an order in which neighbors are close: by segment, then along a Hilbert curve.

In this order the tokens of a tile lie in a small box, and the distance of two boxes bounds all distances between their tokens. So
kernels can leave out tiles that are far away (docs/maths.md). A call is sorted once, and its results are put back in order.
Source of the curve: Skilling 2004, Programming the Hilbert curve (AIP Conference Proceedings 707, 381).
"""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.call.dropout import numbered
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import is_traced

BITS = 16  # of each coordinate along the curve

Spec = AttentionSpec[Tensor]


def sorted_in_space(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Spec, Tensor, Tensor, Tensor, Tensor]:
    """(spec, query, key, value, places): the same call in sorted order, and where each query of the call is in it, [B, T]."""
    spec = numbered(spec, query.device)
    of_keys = _order(spec, spec.coordinates, spec.key_segments)
    is_self = spec.query_coordinates is spec.coordinates
    of_queries = of_keys if is_self else _order(spec, spec.query_coordinates, spec.query_segments)
    coordinates = _in_order(spec.coordinates, of_keys)

    part = dataclasses.replace(
        spec,
        coordinates=coordinates,
        query_coordinates=coordinates if is_self else _in_order(spec.query_coordinates, of_queries),
        key_mask=_in_order(spec.key_mask, of_keys),
        key_segments=_in_order(spec.key_segments, of_keys),
        query_segments=_in_order(spec.query_segments, of_queries),
        query_numbers=_in_order(spec.query_numbers, of_queries),
        key_numbers=_in_order(spec.key_numbers, of_keys),
    )
    places = torch.empty_like(of_queries)
    places.scatter_(1, of_queries, torch.arange(spec.query_len, device=query.device).expand_as(of_queries))
    return part, _rows(query, of_queries), _rows(key, of_keys), _rows(value, of_keys), places


def back_in_order(output: Tensor, lse: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor | None]:
    """(output, lse) of the sorted call, in the order of the queries of the call."""
    return _rows(output, places), None if lse is None else _rows(lse, places)


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


def _in_order(x: Tensor | None, order: Tensor) -> Tensor | None:
    """[B, N] or [B, N, C] in the given order."""
    if x is None:
        return None
    return x.gather(1, order if x.ndim == 2 else order[..., None].expand_as(x))
