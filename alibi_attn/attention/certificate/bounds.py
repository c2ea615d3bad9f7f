"""Reach from tensors: the certificate of `alibi_attn/reach.py` for every block of queries, without reading a value on the host.

For a query, U = |scale|·‖q‖·κ bounds all its scores (Cauchy–Schwarz), κ = the largest norm among the keys that may be
skipped: to the left a prefix maximum, to the right a suffix maximum. Few keys are that long. A sum over keys,
Σ exp(|scale|·‖q‖·‖k_j‖ − m·d), bounds the same tail and is tighter for many keys; the smaller bound is used. λ comes
from `lse_bound.py`. Tiles of keys with the largest norms may be *outlier tiles*: always visited and left out of both
bounds, so one giant key costs one tile and not the whole band.

Floating point is part of the certificate: `norm_bound` is never below a norm, and the possible error of the near scores is added
to the numerator.
"""

import dataclasses
import math

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions, shown_keys
from alibi_attn.attention.certificate import constants
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.key_rule import obeys_key_rule, reach_by_key_rule
from alibi_attn.attention.certificate.lse_bound import NEAR, lower_bound
from alibi_attn.attention.certificate.norms import in_tiles, norm_bound, tile_maxima
from alibi_attn.reach import UNLIMITED

Spec = AttentionSpec[Tensor]

LEVELS = (0.25, 0.5, 0.8, 1.0)  # quantiles of the blocks' largest query norms, for which tails are summed
LONG = 4096  # from this many keys on, a tighter and more expensive bound is worth its cost


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The keys that each of N = ⌈T / TILE⌉ blocks of queries must visit.

    Args:
        left: [B, H, N] int64: every query of the block may skip keys at i − j ≥ left, except in outlier tiles.
        right: [B, H, N] int64: the same at j − i ≥ right.
        outlier_tiles: [B, H, P] int64: tiles of keys that are always visited, ascending; −1 = none.
    """

    left: Tensor
    right: Tensor
    outlier_tiles: Tensor

    @classmethod
    def unlimited(cls, spec: Spec, device: torch.device) -> "Bounds":
        """Bounds that skip nothing."""
        heads = spec.batch, spec.num_heads
        reach = torch.full((*heads, -(-spec.query_len // TILE)), UNLIMITED, device=device)
        return cls(reach, reach, torch.full((*heads, constants.OUTLIER_TILES), -1, device=device))


def bounds(
    spec: Spec,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    outliers: Tensor | None = None,
    refine: bool | None = None,
    tile_norms: tuple[Tensor, Tensor] | None = None,
    for_gradients: bool = True,
) -> Bounds:
    """The certified reach of every block of queries. Without `value` the values are assumed to have similar norms.

    Keys and values should be finite (with a NaN nothing is skipped, which is safe and slow).

    Args:
        outliers: [B, K] bool, the key heads that may have outlier tiles; None = all. Read on the host.
        refine: sum tails key by key, and compute λ from farther keys too; None = if there are at least `LONG` keys.
        tile_norms: upper bounds on the norms in each tile of keys and of values, [B, K, ⌈S / TILE⌉] fp64 each. Then only keys
            near the queries are read; for causal queries among the keys, without key mask and segments.
        for_gradients: every key obeys the key rule too (`key_rule.py`), so that it keeps its gradient; the reach is wider.
    """
    refine = spec.key_len >= LONG and tile_norms is None if refine is None else refine
    device = query.device
    if spec.tolerance == 0.0 or spec.query_len == 0 or spec.key_len == 0:
        return Bounds.unlimited(spec, device)
    first = first_positions(spec, device)
    if tile_norms is None:
        key_norms = norm_bound(key)
        if spec.key_mask is not None:
            key_norms = key_norms.masked_fill(~spec.key_mask[:, None], 0.0)
        tiles, longer = tile_maxima(key_norms), None if value is None else longer_values(spec, value, first)
    else:
        tiles, longer = tile_norms[0], None if value is None else longer_far_values(spec, value, tile_norms[1])
    lower = lower_bound(spec, query, key, first, stretches=refine)
    rate, constant = numerator_parts(spec, query, lower, longer, tiles.amax(-1))
    if spec.key_mask is not None and spec.causal and spec.query_segments is None:
        constant = constant.masked_fill(_blind(spec.key_mask, first, spec.query_len)[:, None], -math.inf)
    tails = _Tails.of(spec, rate, key_norms) if refine else None
    choices = constants.OUTLIER_CHOICES if outliers is None or bool(outliers.any()) else constants.OUTLIER_CHOICES[:1]
    blocks = _Blocks(spec, rate, constant, first, for_gradients)
    candidates = [blocks.with_outliers(tiles, tails, count) for count in choices]
    left, right, outlier_tiles, cost = candidates[0]
    for wider_left, wider_right, more_tiles, more_cost in candidates[1:]:
        better = (more_cost < cost)[..., None]
        if outliers is not None:
            better &= outliers.repeat_interleave(spec.group, 1)[..., None]
        left, right = torch.where(better, wider_left, left), torch.where(better, wider_right, right)
        outlier_tiles, cost = torch.where(better, more_tiles, outlier_tiles), torch.minimum(more_cost, cost)
    return Bounds(left, right, outlier_tiles)


def worth_leaving_out(norms: Tensor, *, times: float, count: Tensor | None = None) -> Tensor:
    """[B, K] bool, the `outliers` for keys of these norms, [B, K, n]: heads in which some norm is more than `times` the mean.

    Args:
        count: [B, 1], the number of norms of visible keys, if the others are 0; None = n.
    """
    mean = norms.mean(-1) if count is None else norms.sum(-1) / count.clamp(min=1)
    return norms.amax(-1) > times * mean


def numerator_parts(
    spec: Spec, query: Tensor, lower: Tensor, longer: Tensor | None, largest: Tensor
) -> tuple[Tensor, Tensor]:
    """(rate, constant), each [B, H, T] fp64: the reach's numerator is rate·κ + constant.

    `constant` is −λ (λ is `lower`, [B, H, T]), plus its possible rounding error (from the `largest` norm of a key, [B, K]), plus
    the nats that `longer` values cost [B, H, T]; inf if nothing may be skipped.
    """
    unit = constants.UNIT["float64" if query.dtype == torch.float64 else "float32"]
    error = (spec.head_dim + constants.SCORE_UNITS) * unit
    rate = abs(spec.scale) * (1.0 + error) * norm_bound(query)
    largest = largest.repeat_interleave(spec.group, 1)[..., None]
    products = error if query.dtype == torch.float64 else error + constants.REDUCED_PRODUCTS
    constant = products * rate * largest + error * (1.0 + lower.abs()) - lower
    if longer is not None:
        constant = constant + longer
    constant = constant.masked_fill(~(constant.isfinite() & rate.isfinite()), math.inf)
    return rate.masked_fill(~rate.isfinite(), 0.0), constant


def _blind(key_mask: Tensor, first: Tensor, query_len: int) -> Tensor:
    """[B, T]: causal queries that see no key."""
    at = (first[:, None] + torch.arange(query_len, device=first.device)).expand(key_mask.shape[0], -1)
    known = key_mask.cumsum(-1).gather(1, at.clamp(0, key_mask.shape[1] - 1))
    return (known == 0) | (at < 0)


def longer_values(spec: Spec, value: Tensor, first: Tensor, elsewhere: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """[B, H, T] nats ≥ 0: ln f, if some value is f times longer than 4 times the longest value that the query certainly keeps.

    It certainly keeps its own key and the `KEPT` − 1 before it if they are visible, and in any case some visible key.

    Args:
        elsewhere: the largest and the smallest norm, each [K], of visible values that are not in `value`.
    """
    length = norm_bound(value)
    if spec.key_bias is not None:
        length = length.repeat_interleave(spec.group, 1)
    shown = shown_keys(spec)
    seen = length if shown is None else length.masked_fill(~shown, 0.0)
    least = length if shown is None else length.masked_fill(~shown, math.inf)
    kept, longest = least.amin(-1, keepdim=True), seen.amax(-1, keepdim=True)
    if elsewhere is not None:
        more, less = (x.repeat_interleave(length.shape[1] // spec.num_kv_heads)[:, None] for x in elsewhere)
        kept, longest = torch.minimum(kept, less), torch.maximum(longest, more)
    if spec.query_segments is None and (spec.window is None or spec.window >= constants.KEPT):
        nearest = seen
        for back in range(1, constants.KEPT):
            nearest = torch.maximum(nearest, torch.nn.functional.pad(seen, (back, 0))[..., : spec.key_len])
        at = first[:, None] + torch.arange(spec.query_len, device=value.device)
        inside = ((at >= 0) & (at < spec.key_len)).expand(spec.batch, -1)[:, None]
        index = at.clamp(0, spec.key_len - 1).expand(spec.batch, -1)[:, None].expand(-1, length.shape[1], -1)
        kept = torch.maximum(kept, nearest.gather(2, index).masked_fill(~inside, 0.0))
    nats = _nats_of_longer(longest, kept)
    return nats.expand(-1, -1, spec.query_len).repeat_interleave(spec.num_heads // length.shape[1], 1)


def longer_far_values(spec: Spec, value: Tensor, tiles: Tensor) -> Tensor:
    """The same as `longer_values`, from the largest norms of every tile of values and the last few values."""
    assert isinstance(spec.query_offset, int)
    before = min(spec.query_offset, constants.KEPT - 1 if spec.window is None or spec.window >= constants.KEPT else 0)
    near = norm_bound(value[:, :, spec.query_offset - before : spec.query_offset + spec.query_len])
    kept = near.unfold(-1, before + 1, 1).amax(-1)
    return _nats_of_longer(tiles.amax(-1, keepdim=True), kept).repeat_interleave(spec.group, 1)


def _nats_of_longer(longest: Tensor, kept: Tensor) -> Tensor:
    return (longest / (constants.VALUE_RATIO * kept)).log().clamp(min=0.0).masked_fill(longest == 0, 0.0)


@dataclasses.dataclass(frozen=True)
class _Tails:
    """Σ exp(level·‖k_j‖) over every NEAR consecutive keys, for a few levels of |scale|·‖q‖.

    Args:
        mass: [B, H, levels, G] fp64, the logarithm of the sum.
        level: [B, H, N] int64: the lowest level that is at least every |scale|·‖q‖ of the block.
    """

    mass: Tensor
    level: Tensor

    @classmethod
    def of(cls, spec: Spec, rate: Tensor, key_norms: Tensor) -> "_Tails":
        """From the [B, H, T] rates and [B, K, S] norms; not finite if these are not."""
        n, groups = -(-spec.query_len // TILE), -(-spec.key_len // NEAR)
        worst = in_tiles(rate).amax(-1)
        ascending = worst.sort(-1).values
        levels = torch.stack([ascending[..., max(math.ceil(n * share) - 1, 0)] for share in LEVELS], -1)
        level = (levels[..., None, :] < worst[..., None]).sum(-1).clamp(max=len(LEVELS) - 1)
        norms = torch.nn.functional.pad(key_norms, (0, groups * NEAR - spec.key_len)).repeat_interleave(spec.group, 1)
        longest = norms.amax(-1, keepdim=True)
        # The exponent is clamped at −600, which can only increase the sum.
        weight = (levels[..., None] * (norms - longest)[:, :, None]).clamp_(min=-600.0).exp_()
        return cls(weight.unflatten(-1, (groups, NEAR)).sum(-1).log() + levels[..., None] * longest[..., None], level)

    def without(self, spec: Spec, tiles: Tensor) -> Tensor:
        """The mass, [B, H, levels, G], without the tiles [B, K, P]."""
        hidden = torch.zeros(*tiles.shape[:2], -(-spec.key_len // TILE), dtype=torch.bool, device=tiles.device)
        hidden = hidden.scatter(-1, tiles, value=True).repeat_interleave(TILE // NEAR, -1)[..., : self.mass.shape[-1]]
        return self.mass.masked_fill(hidden.repeat_interleave(spec.group, 1)[:, :, None], -math.inf)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """All blocks of queries: the call, its numerator's parts [B, H, T], and the position of query 0."""

    spec: Spec
    rate: Tensor
    constant: Tensor
    first: Tensor
    for_gradients: bool

    def with_outliers(self, tiles: Tensor, tails: _Tails | None, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(left, right, outlier_tiles [B, H, P], cost) if the `count` tiles with the largest norms are left out."""
        spec, count = self.spec, min(count, tiles.shape[-1])
        chosen = tiles.topk(count, dim=-1).indices.sort(-1).values
        if tails is not None and count:
            tails = dataclasses.replace(tails, mass=tails.without(spec, chosen))
        left, right = self._sides(tiles.scatter(-1, chosen, 0.0), tails)
        outlier_tiles = torch.nn.functional.pad(
            chosen.repeat_interleave(spec.group, 1), (0, constants.OUTLIER_TILES - count), value=-1
        )
        return left, right, outlier_tiles, self._cost(left, right, count)

    def _sides(self, tiles: Tensor, tails: _Tails | None) -> tuple[Tensor, Tensor]:
        """(left, right), each [B, H, N] int64, with the largest norm of every tile of keys in `tiles` [B, K, ⌈S / TILE⌉]."""
        spec = self.spec
        n = -(-spec.query_len // TILE)
        start = self.first[:, None] + torch.arange(n, device=self.first.device) * TILE
        at = start + TILE - 1
        tail = None if tails is None else _tail_nats(spec, spec.slopes, tails, at)
        left = self._reach(spec.slopes, tiles.cummax(-1).values, tail, at)
        if spec.causal:
            return left, left
        slopes = spec.slopes if spec.right_slopes is None else spec.right_slopes
        tail = None if tails is None else _tail_nats(spec, slopes, tails, start, to_right=True)
        return left, self._reach(slopes, tiles.flip(-1).cummax(-1).values.flip(-1), tail, start)

    def _reach(self, slopes: Tensor, maxima: Tensor, tail: Tensor | None, position: Tensor) -> Tensor:
        """[B, H, N] int64: ⌈numerator / m⌉ of the worst query of every block, with κ read from `maxima` at `position`."""
        spec = self.spec
        tile = (position.clamp(min=0) // TILE).clamp(max=maxima.shape[-1] - 1)
        kappa = maxima.gather(2, tile.expand(spec.batch, -1)[:, None].expand(-1, spec.num_kv_heads, -1))
        kappa = kappa.repeat_interleave(spec.group, 1)[..., None]
        constant = in_tiles(self.constant, -math.inf)
        numerator = in_tiles(self.rate) * kappa + constant
        m = slopes.detach().double().reshape(-1, spec.num_heads, 1)
        each = _worst(numerator)
        together = each - torch.log(-torch.expm1(-m))
        if tail is not None:
            summed = (tail + _worst(constant)).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
            each, together = torch.minimum(each, summed), torch.minimum(together, summed)
        return reach_of_nats(spec, each, together, m, for_gradients=self.for_gradients)

    def _cost(self, left: Tensor, right: Tensor, outliers: int) -> Tensor:
        """[B, H]: keys that a query of every block visits, summed over the blocks, outlier tiles included."""
        spec, blocks = self.spec, left.shape[-1]
        start = (self.first[:, None] + torch.arange(blocks, device=self.first.device) * TILE)[:, None]
        visited = torch.minimum(left, (start + TILE).clamp(0, spec.key_len))
        if not spec.causal:
            visited = visited + torch.minimum(right, (spec.key_len - start).clamp(0, spec.key_len))
        # A separate tile costs about twice its width: one more call, and one more merge.
        return visited.sum(-1) + outliers * (2 * TILE) * blocks


def _tail_nats(spec: Spec, slopes: Tensor, tails: _Tails, position: Tensor, *, to_right: bool = False) -> Tensor:
    """[B, H, N]: the largest ln Σ exp(level·‖k_j‖ − m·|p − j|) over the keys beyond p, of any p beyond a block's `position`.

    Within a group of keys distances count as 0. The running sum is off by less than one unit of its largest term per group.
    """
    mass = tails.mass.flip(-1) if to_right else tails.mass
    groups = mass.shape[-1]
    m = slopes.detach().double().reshape(-1, spec.num_heads, 1, 1)
    away = m * NEAR * torch.arange(groups, device=mass.device)
    until = torch.logcumsumexp(mass + away, -1) - away
    before = torch.nn.functional.pad(until[..., :-1], (1, 0), value=-math.inf)
    largest = mass.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax(-1, keepdim=True)
    slack = 2.0**-50 * groups * (1.0 + m * spec.key_len + largest)
    nats = torch.logaddexp(before, mass).cummax(-1).values + slack
    group = (position.clamp(min=0) // NEAR).clamp(max=groups - 1)
    group = groups - 1 - group if to_right else group
    at = group.expand(spec.batch, -1)[:, None, None].expand(-1, spec.num_heads, len(LEVELS), -1)
    return nats.gather(-1, at).gather(2, tails.level[:, :, None])[:, :, 0]


def reach_of_nats(spec: Spec, each: Tensor, together: Tensor, m: Tensor, *, for_gradients: bool) -> Tensor:
    """int64: the reach if a key at distance d weighs at most e^(each − m·d), and all at distance ≥ r at most e^(together − m·r).

    Args:
        m: fp64, the slopes to that side.
        for_gradients: whether every key must obey the key rule too (`key_rule.py`).
    """
    quotient = ((together - math.log(spec.tolerance if spec.causal else spec.tolerance / 2)) / m).clamp(min=0.0)
    if for_gradients:
        # NaN is kept by this order, and skips nothing.
        quotient = torch.maximum(quotient, reach_by_key_rule(each, m, spec.tolerance))
    reach = (quotient + 1e-12 * quotient.abs()).ceil().nan_to_num(nan=UNLIMITED, posinf=UNLIMITED)
    reach = reach.clamp(constants.KEPT, UNLIMITED)
    if for_gradients:  # the inequality itself, for the rounded number
        reach = reach.masked_fill(~obeys_key_rule(each - m * reach, reach, spec.tolerance), UNLIMITED)
    reach = reach.to(torch.int64).masked_fill(~(m > 0), UNLIMITED)
    return reach.masked_fill(m.isinf() & (m > 0), 1)


def _worst(numerator: Tensor) -> Tensor:
    """The largest number of every block: inf in place of NaN (inf · 0), −inf for a block whose queries see no key."""
    return numerator.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).amax(-1)
