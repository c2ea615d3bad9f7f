"""Which blocks of keys matter to which blocks of queries, in the plane and in space.

Tokens come sorted along a curve that fills the space (`run/space.py`), so each block of them lies in a small box, and the
distance of two boxes bounds all distances between them. `backends/native/space.hpp` decides the same while it computes;
docs/maths.md has the proof. In linear memory, except for the result.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import REDUCED_PRODUCTS, UNIT, VALUE_RATIO
from alibi_attn.attention.certificate.key_rule import obeys_key_rule
from alibi_attn.attention.certificate.norms import norm_bound

Spec = AttentionSpec[Tensor]


def blocks_in_space(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, size: int) -> Tensor:
    """[B, H, ⌈T / size⌉, ⌈S / size⌉] bool: whether a block of queries needs a block of keys.

    All others obey the key rule: a block of n keys at distance δ weighs at most n·exp(U − m·δ − λ), where U bounds its scores,
    and λ bounds the log-sum-exp of each query from below, by the keys of one near block.
    """
    assert spec.coordinates is not None
    assert spec.query_coordinates is not None
    of_query, of_key = spec.query_coordinates.double(), spec.coordinates.double()
    shown = spec.key_mask if spec.key_mask is not None else torch.ones_like(of_key[..., 0], dtype=torch.bool)
    exists = torch.ones_like(of_query[..., 0], dtype=torch.bool)
    (q_low, q_high), (k_low, k_high) = (_extremes(x, seen, size) for x, seen in ((of_query, exists), (of_key, shown)))
    gap = torch.maximum(q_low[:, :, None] - k_high[:, None], k_low[:, None] - q_high[:, :, None])
    apart = gap.clamp(min=0.0).square().sum(-1).sqrt()  # inf for a block without visible keys
    allowed = apart.isfinite()
    if spec.query_segments is not None and spec.key_segments is not None:
        first, last = _extremes(spec.query_segments.double()[..., None], exists, size)
        low, high = _extremes(spec.key_segments.double()[..., None], shown, size)
        allowed = allowed & ((low[:, None] <= last[:, :, None]) & (high[:, None] >= first[:, :, None])).squeeze(-1)
    rows, columns = (torch.arange(n, device=apart.device) * size for n in apart.shape[1:])
    tokens = spec.query_offset + rows[:, None] - columns
    tokens = torch.maximum(tokens, -tokens).sub(size - 1).clamp(min=0)
    near = apart.masked_fill(~allowed, math.inf).argmin(-1)  # [B, blocks of queries]
    if spec.query_coordinates is spec.coordinates:
        near = (rows // size).expand_as(near)  # a query's own key is nearest
    rate = abs(spec.scale) * _largest(norm_bound(query), size)
    norms = _largest(norm_bound(key).masked_fill(~shown[:, None], 0.0), size).repeat_interleave(spec.group, 1)
    most = rate[..., None] * norms[:, :, None]  # of the scores, [B, H, blocks of queries, blocks of keys]
    error = (spec.head_dim + 64) * UNIT["float32"] + REDUCED_PRODUCTS
    of_near = torch.gather(most, 3, near[:, None, :, None].expand(-1, spec.num_heads, -1, 1))[..., 0]
    least = _least_lse(spec, query, key, shown, near, size) - error * (1.0 + of_near)
    slope = spec.slopes.detach().double().reshape(-1, spec.num_heads, 1, 1)
    nats = math.log(size) + most * (1.0 + error) - slope * apart[:, None] * (1.0 - error) - least[..., None]
    if value is not None:
        lengths = _largest(norm_bound(value).masked_fill(~shown[:, None], 0.0), size).repeat_interleave(spec.group, 1)
        kept = lengths.gather(2, near[:, None].expand(-1, spec.num_heads, -1))
        nats = nats + (lengths.amax(-1, keepdim=True) / (VALUE_RATIO * kept)).log().clamp(min=0.0)[..., None]
    if spec.tolerance == 0.0:
        return allowed[:, None].expand_as(nats)
    light = obeys_key_rule(nats, tokens.double(), spec.tolerance) & (slope > 0)
    is_near = torch.arange(apart.shape[2], device=near.device) == near[..., None]
    return allowed[:, None] & (is_near[:, None] | ~light)


def _least_lse(spec: Spec, query: Tensor, key: Tensor, shown: Tensor, near: Tensor, size: int) -> Tensor:
    """[B, H, blocks]: the least log-sum-exp of a block's queries over one block of keys, −inf if a query sees none there."""
    assert spec.coordinates is not None
    assert spec.query_coordinates is not None

    def chosen(x: Tensor, axis: int) -> Tensor:
        """Keys of the near blocks, [..., blocks, size, ...]."""
        x = _in_blocks(x, size, axis)
        at = near.reshape(near.shape[0], *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1))
        return x.gather(axis, at.expand(*x.shape[:axis], near.shape[1], *x.shape[axis + 1 :]))

    q = _in_blocks(query.float(), size, 2).unflatten(1, (-1, spec.group))
    scores = (spec.scale * (q @ chosen(key.float(), 2)[:, :, None].mT)).flatten(1, 2).double()
    away = torch.cdist(
        _in_blocks(spec.query_coordinates.double(), size, 1),
        chosen(spec.coordinates.double(), 1),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    scores = scores - spec.slopes.detach().double().reshape(-1, spec.num_heads, 1, 1, 1) * away[:, None]
    seen = chosen(shown, 1)[:, :, None]
    if spec.query_segments is not None and spec.key_segments is not None:
        same = _in_blocks(spec.query_segments, size, 1)[..., None] == chosen(spec.key_segments, 1)[:, :, None]
        seen = seen & same
    lse = scores.masked_fill(~seen[:, None], -math.inf).logsumexp(-1)
    real = _in_blocks(torch.ones_like(query[0, 0, :, 0], dtype=torch.bool), size, 0)
    return lse.masked_fill(~real, math.inf).amin(-1)


def _extremes(x: Tensor, seen: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The least and the largest [B, blocks, C] of what is seen in each block, inf and −inf if nothing is."""
    low, high = (x.masked_fill(~seen[..., None], fill) for fill in (math.inf, -math.inf))
    return _in_blocks(low, size, 1, math.inf).amin(2), _in_blocks(high, size, 1, -math.inf).amax(2)


def _largest(x: Tensor, size: int) -> Tensor:
    """[B, H, blocks]"""
    return _in_blocks(x, size, 2).amax(-1)


def _in_blocks(x: Tensor, size: int, axis: int, fill: float = 0.0) -> Tensor:
    """[..., N, ...] -> [..., ⌈N / size⌉, size, ...], padded."""
    more = -x.shape[axis] % size
    padded = functional.pad(x, (0, 0) * (x.ndim - axis - 1) + (0, more), value=fill) if more else x
    return padded.unflatten(axis, (-1, size))
