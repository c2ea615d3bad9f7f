"""Reach from tensors: the certificate of `alibi_attn/reach.py` for every block of queries, without reading a value on the host.

For a query, U = |scale|·‖q‖·κ bounds all its scores (Cauchy–Schwarz), κ = the largest norm among the keys that may be skipped: to
the left a prefix maximum, to the right a suffix maximum. λ is the log-sum-exp over a few keys near the query, those it may
really see. Tiles of keys with the largest norms may be *pinned*: they are always visited and left out of κ, so one giant key
costs one tile and not the whole band.

Floating point is part of the certificate: `norm_bound` never falls short of a norm, and the numerator grows by what the near
scores may be off.
"""

import dataclasses
import math

import torch
from torch import Tensor

from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.reach import UNLIMITED

Spec = AttentionSpec[Tensor]

TILE = 64  # queries whose reach is decided together, and keys whose norms are
NEAR = 16  # queries that share one small tile of near keys, 2·NEAR of them, for λ
PIN_CHOICES = (0, 1, 2, 4)  # how many tiles may be pinned; the cheapest choice is taken, per head
KEPT = 4  # the nearest keys, which no reach ever leaves out

_VALUE_RATIO = 4.0  # a skipped value may be this many times longer than the longest kept one; more widens the reach


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What must be visited, N = ⌈T / TILE⌉ blocks of queries.

    Args:
        left: [B, H, N] int64: a key that is not pinned, at i − j ≥ left, may be skipped by every query of the block.
        right: [B, H, N] int64: the same at j − i ≥ right.
        pins: [B, H, P] int64: tiles of keys that are always visited, ascending; −1 = none.
    """

    left: Tensor
    right: Tensor
    pins: Tensor


def bounds(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, *, pin_choices: tuple[int, ...] = PIN_CHOICES
) -> Bounds:
    """The certified reach of every block of queries. Without `value` the values are taken to be of like length.

    Keys and values must be finite (a NaN in them skips nothing, which is safe and slow).
    """
    b, h, n = spec.batch, spec.num_heads, -(-spec.query_len // TILE)
    device = query.device
    if spec.tolerance == 0.0 or spec.query_len == 0 or spec.key_len == 0:
        unlimited = torch.full((b, h, n), UNLIMITED, device=device)
        return Bounds(unlimited, unlimited, torch.full((b, h, max(PIN_CHOICES)), -1, device=device))
    first = first_positions(spec, device)
    key_norms = norm_bound(key)
    if spec.key_mask is not None:
        key_norms = key_norms.masked_fill(~spec.key_mask[:, None], 0.0)
    rate, constant = _numerator_parts(spec, query, key, value, key_norms, first)
    tiles = _tile_maxima(key_norms)
    found = [_with_pins(spec, rate, constant, tiles, count, first) for count in pin_choices]
    left, right, pins, cost = found[0]
    for wider_left, wider_right, more_pins, asked in found[1:]:
        better = (asked < cost)[..., None]
        left, right = torch.where(better, wider_left, left), torch.where(better, wider_right, right)
        pins, cost = torch.where(better, more_pins, pins), torch.minimum(asked, cost)
    return Bounds(left, right, pins)


def first_positions(spec: Spec, device: torch.device) -> Tensor:
    """[B], or [1] where all sequences agree, int64: the position of query 0."""
    if isinstance(spec.query_offset, Tensor):
        return spec.query_offset.reshape(-1)
    return torch.full((1,), spec.query_offset, device=device)


def norm_bound(tensor: Tensor) -> Tensor:
    """An upper bound of the Euclidean norms over the last axis, fp64: true of every finite input, and inf where it cannot tell.

    Squares below the smallest normal number may be lost, each entry less than 2^−63 in fp32; a sum of D squares is off by less
    than (D + 2) units; squares that overflow give inf, and inf skips nothing. fp64 is scaled by its largest entry first.
    """
    d = tensor.shape[-1]
    if tensor.dtype == torch.float64:
        largest = tensor.abs().amax(-1, keepdim=True)
        scaled = tensor / largest.masked_fill(largest == 0, 1.0)
        length = torch.linalg.vector_norm(scaled, dim=-1) * largest.squeeze(-1)
        return length * (1.0 + (d + 4) * 2.0**-53) + math.sqrt(d) * 2.0**-511
    length = torch.linalg.vector_norm(tensor.float(), dim=-1).double()
    return length * (1.0 + (d + 4) * 2.0**-24) + math.sqrt(d) * 2.0**-63


def _numerator_parts(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, key_norms: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """(rate, constant), each [B, H, T] fp64: the reach's numerator is rate·κ + constant.

    `constant` has −λ, what rounding may have done to it, and the lengths of the values; inf where nothing may be skipped.
    """
    unit = 2.0**-53 if query.dtype == torch.float64 else 2.0**-24
    lower = _near_mass(spec, query, key, first) if query.device.type != "cpu" else _near_mass_by_head(spec, query, key)
    error = (spec.head_dim + 64) * unit
    rate = abs(spec.scale) * (1.0 + error) * norm_bound(query)
    largest = key_norms.amax(-1, keepdim=True).repeat_interleave(spec.group, 1)
    constant = error * (1.0 + rate * largest + lower.abs()) - lower
    if value is not None:
        constant = constant + _longer_values(spec, value, first)
    constant = constant.masked_fill(~(constant.isfinite() & rate.isfinite()), math.inf)
    if spec.key_mask is not None and spec.causal and spec.query_segments is None:
        constant = constant.masked_fill(_blind(spec.key_mask, first, spec.query_len)[:, None], -math.inf)
    return rate.masked_fill(~rate.isfinite(), 0.0), constant


def _near_mass_by_head(spec: Spec, query: Tensor, key: Tensor) -> Tensor:
    """`_near_mass`, one key head at a time: on a CPU large temporaries cost more than all the arithmetic."""
    mass = torch.empty(query.shape[:3], dtype=torch.float64)
    first = first_positions(spec, query.device).expand(spec.batch)
    for b in range(spec.batch):
        for k in range(spec.num_kv_heads):
            heads = slice(k * spec.group, (k + 1) * spec.group)
            one = dataclasses.replace(
                spec, batch=1, num_heads=spec.group, num_kv_heads=1,
                slopes=_of_heads(spec.slopes, b, heads),
                right_slopes=None if spec.right_slopes is None else _of_heads(spec.right_slopes, b, heads),
                query_offset=first[b : b + 1] if isinstance(spec.query_offset, Tensor) else spec.query_offset,
                key_mask=None if spec.key_mask is None else spec.key_mask[b : b + 1],
                query_segments=None if spec.query_segments is None else spec.query_segments[b : b + 1],
                key_segments=None if spec.key_segments is None else spec.key_segments[b : b + 1],
            )  # fmt: skip
            mass[b, heads] = _near_mass(one, query[b : b + 1, heads], key[b : b + 1, k : k + 1], first[b : b + 1])[0]
    return mass


def _of_heads(slopes: Tensor, b: int, heads: slice) -> Tensor:
    return slopes[heads] if slopes.ndim == 1 else slopes[b : b + 1, heads]


def _blind(key_mask: Tensor, first: Tensor, query_len: int) -> Tensor:
    """[B, T]: causal queries that see no key at all."""
    at = (first[:, None] + torch.arange(query_len, device=first.device)).expand(key_mask.shape[0], -1)
    known = key_mask.cumsum(-1).gather(1, at.clamp(0, key_mask.shape[1] - 1))
    return (known == 0) | (at < 0)


def _near_mass(spec: Spec, query: Tensor, key: Tensor, first: Tensor) -> Tensor:
    """λ [B, H, T] fp64: the log-sum-exp over the near keys that a query sees; −inf where it sees none of them."""
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    near, at = _near_keys(spec, key, first)
    groups, width = at.shape[1:]
    rows = groups * NEAR
    query = torch.nn.functional.pad(query, (0, 0, 0, rows - spec.query_len)).to(work)
    query = query.reshape(spec.batch, spec.num_kv_heads, spec.group, groups, NEAR, spec.head_dim)
    scores = (
        (query @ near[:, :, None].to(work).mT).reshape(spec.batch, spec.num_heads, groups, NEAR, width).mul_(spec.scale)
    )

    i = (first[:, None] + torch.arange(rows, device=first.device)).reshape(-1, groups, NEAR, 1)
    distance = i - at[:, :, None, :]
    away = distance.abs().to(work)[:, None]
    slopes = spec.slopes.detach().reshape(-1, spec.num_heads, 1, 1, 1)
    hidden = ((at < 0) | (at >= spec.key_len))[:, :, None]
    if spec.causal:
        hidden = hidden | (distance < 0)
    if spec.right_slopes is not None:
        right = spec.right_slopes.detach().reshape(-1, spec.num_heads, 1, 1, 1)
        slopes = torch.where(distance[:, None] < 0, right, slopes).masked_fill((distance == 0)[:, None], 0.0)
    scores = scores.sub_(slopes * away)
    if spec.window is not None:
        hidden = hidden | (distance.abs() >= spec.window)
    if spec.key_mask is not None:
        hidden = hidden | ~_per_sequence(spec.key_mask, at)
    if spec.query_segments is not None and spec.key_segments is not None:
        own = torch.nn.functional.pad(spec.query_segments, (0, rows - spec.query_len)).reshape(-1, groups, NEAR, 1)
        theirs = _per_sequence(spec.key_segments, at)
        hidden = hidden | (own != theirs)
    mass = scores.masked_fill_(hidden[:, None], -math.inf).logsumexp(-1)
    return mass.flatten(2)[..., : spec.query_len].double()


def _near_keys(spec: Spec, key: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The 2·NEAR keys around every small group of queries, [B, K, G, W, D], and their positions [B|1, G, W], some outside."""
    groups = -(-spec.query_len // NEAR)
    offset = spec.query_offset
    if not isinstance(offset, Tensor) and offset >= 0 and offset + spec.query_len <= spec.key_len:
        # Every group's own keys and those of the group before, as overlapping views of one padded copy: no gathering.
        padded = torch.nn.functional.pad(key, (0, 0, NEAR - offset, offset + groups * NEAR - spec.key_len))
        b, k, s, d = padded.stride()
        shape = (key.shape[0], key.shape[1], groups, 2 * NEAR, key.shape[3])
        near = padded.as_strided(shape, (b, k, NEAR * s, s, d))
        start = torch.arange(groups, device=key.device) * NEAR + (offset - NEAR)
        return near, start[None, :, None] + torch.arange(2 * NEAR, device=key.device)
    width = min(2 * NEAR, spec.key_len)
    start = first[:, None] + torch.arange(groups, device=key.device) * NEAR - NEAR
    at = start.clamp(0, spec.key_len - width)[..., None] + torch.arange(width, device=key.device)
    index = at.reshape(-1, 1, groups * width, 1).expand(spec.batch, spec.num_kv_heads, -1, spec.head_dim)
    return key.gather(2, index).unflatten(2, (groups, width)), at


def _per_sequence(row: Tensor, at: Tensor) -> Tensor:
    """[B, G, 1, W] of a mask or of segment ids [B, S]."""
    index = at.clamp(0, row.shape[1] - 1).flatten(1).expand(row.shape[0], -1)
    return row.gather(1, index).reshape(row.shape[0], at.shape[1], 1, at.shape[2])


def _longer_values(spec: Spec, value: Tensor, first: Tensor) -> Tensor:
    """[B, H, T] nats ≥ 0: ln f, where some value is f times longer than 4 times the longest that the query surely keeps.

    Surely kept are the query's own key and the `KEPT` − 1 before it where they are seen, and in any case some key that is seen.
    """
    length = norm_bound(value)
    seen = length if spec.key_mask is None else length.masked_fill(~spec.key_mask[:, None], 0.0)
    least = length if spec.key_mask is None else length.masked_fill(~spec.key_mask[:, None], math.inf)
    kept = least.amin(-1, keepdim=True)
    if spec.query_segments is None and (spec.window is None or spec.window >= KEPT):
        nearest = seen
        for back in range(1, KEPT):
            nearest = torch.maximum(nearest, torch.nn.functional.pad(seen, (back, 0))[..., : spec.key_len])
        at = first[:, None] + torch.arange(spec.query_len, device=value.device)
        inside = ((at >= 0) & (at < spec.key_len)).expand(spec.batch, -1)[:, None]
        index = at.clamp(0, spec.key_len - 1).expand(spec.batch, -1)[:, None].expand(-1, spec.num_kv_heads, -1)
        kept = torch.maximum(kept, nearest.gather(2, index).masked_fill(~inside, 0.0))
    longest = seen.amax(-1, keepdim=True)
    nats = (longest / (_VALUE_RATIO * kept)).log().clamp(min=0.0).masked_fill(longest == 0, 0.0)
    return nats.expand(-1, -1, spec.query_len).repeat_interleave(spec.group, 1)


def _tile_maxima(length: Tensor) -> Tensor:
    """[B, K, ⌈S / TILE⌉]"""
    tiles = -(-length.shape[-1] // TILE)
    padded = torch.nn.functional.pad(length, (0, tiles * TILE - length.shape[-1]))
    return padded.unflatten(-1, (tiles, TILE)).amax(-1)


def _with_pins(
    spec: Spec, rate: Tensor, constant: Tensor, tiles: Tensor, count: int, first: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(left, right, pins, cost) if the `count` tiles with the largest norms are pinned; pins [B, H, P]."""
    count = min(count, tiles.shape[-1])
    chosen = tiles.topk(count, dim=-1).indices.sort(-1).values
    left, right = _sides(spec, rate, constant, tiles.scatter(-1, chosen, 0.0), first)
    pins = torch.nn.functional.pad(chosen.repeat_interleave(spec.group, 1), (0, max(PIN_CHOICES) - count), value=-1)
    return left, right, pins, _cost(spec, left, right, pinned=count, first=first)


def _sides(spec: Spec, rate: Tensor, constant: Tensor, tiles: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """(left, right), each [B, H, N] int64, with the largest norm of every tile of keys in `tiles` [B, K, ⌈S / TILE⌉]."""
    n = -(-spec.query_len // TILE)
    start = first[:, None] + torch.arange(n, device=first.device) * TILE
    to_left = tiles.cummax(-1).values, start + TILE - 1
    left = _reach(spec, spec.slopes, rate, constant, *to_left)
    if spec.causal:
        return left, left
    to_right = tiles.flip(-1).cummax(-1).values.flip(-1), start
    right = _reach(spec, spec.slopes if spec.right_slopes is None else spec.right_slopes, rate, constant, *to_right)
    return left, right


def _reach(spec: Spec, slopes: Tensor, rate: Tensor, constant: Tensor, maxima: Tensor, position: Tensor) -> Tensor:
    """[B, H, N] int64: ⌈numerator / m⌉ of the worst query of every block, with κ read from `maxima` at `position`."""
    n = position.shape[1]
    tile = (position.clamp(min=0) // TILE).clamp(max=maxima.shape[-1] - 1)
    kappa = maxima.gather(2, tile.expand(spec.batch, -1)[:, None].expand(-1, spec.num_kv_heads, -1))
    kappa = kappa.repeat_interleave(spec.group, 1)[..., None]
    short = n * TILE - spec.query_len
    pad = torch.nn.functional.pad
    numerator = pad(rate, (0, short)).unflatten(2, (n, TILE)) * kappa
    numerator = numerator + pad(constant, (0, short), value=-math.inf).unflatten(2, (n, TILE))
    m = slopes.detach().double().reshape(-1, spec.num_heads, 1)
    tolerance = spec.tolerance if spec.causal else spec.tolerance / 2
    # A NaN (inf · 0) becomes inf; a block of queries that see nothing stays −inf and needs no key.
    worst = numerator.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).amax(-1)
    quotient = (worst - math.log(tolerance) - torch.log(-torch.expm1(-m))) / m
    reach = (quotient + 1e-12 * quotient.abs()).ceil().nan_to_num(nan=UNLIMITED, posinf=UNLIMITED, neginf=0.0)
    reach = reach.clamp(KEPT, UNLIMITED).to(torch.int64)
    reach = reach.masked_fill(~(m > 0), UNLIMITED)
    return reach.masked_fill(m.isinf() & (m > 0), 1)


def _cost(spec: Spec, left: Tensor, right: Tensor, *, pinned: int, first: Tensor) -> Tensor:
    """[B, H]: keys that a query of every block visits, summed over the blocks, pins included."""
    start = (first[:, None] + torch.arange(left.shape[-1], device=first.device) * TILE)[:, None]
    asked = torch.minimum(left, (start + TILE).clamp(0, spec.key_len))
    if not spec.causal:
        asked = asked + torch.minimum(right, (spec.key_len - start).clamp(0, spec.key_len))
    # A tile on its own costs about twice its width: it is one more call, and one more merge.
    return asked.sum(-1) + pinned * (2 * TILE) * left.shape[-1]
