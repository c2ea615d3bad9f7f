"""The certificate for calls with a bias per key (docs/certificate.md, step 10): certified bands from torch operations.

With biases, the weights of distant keys do not form a geometric series, but the actual keys can be summed. With R the
largest |scale|·‖q‖ of a head, one running log-sum-exp per head gives the total weight of all keys before a tile, for
every block of queries:

    F(p) = ln Σ_{j < p} exp(R·‖k_j‖ + b_j + m·j) ,    Σ_{j < p} exp(R·‖k_j‖ + b_j − m·(i − j)) = exp(F(p) − m·i) ,

and another from the other end, with −m·j, for keys to the right. b need not be monotone in the distance, and m may be 0 or
negative. Everything is fp64 and nothing is read on the host. Only differences are exponentiated, because m·j and b may be 10⁶.
"""

import dataclasses
import math

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions, shown_keys
from alibi_attn.attention.certificate import constants
from alibi_attn.attention.certificate.bounds import Bounds, longer_far_values, longer_values
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.key_rule import largest_share
from alibi_attn.attention.certificate.lse_bound import NEAR, biased_lower_bound
from alibi_attn.attention.certificate.norms import in_tiles, norm_bound
from alibi_attn.attention.certificate.tiles import allowed_keys
from alibi_attn.reach import UNLIMITED

Spec = AttentionSpec[Tensor]

# Relative to the largest exponent: this much for each tile summed in fp64, and 64 times as much for the exponents.
ROUNDING = 2.0**-50


def biased_bounds(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, *, for_gradients: bool = True
) -> Bounds:
    """The keys with biases that every block of queries must visit; without `value` the values are assumed to have similar norms.

    `left` is relative to a block's first query, `right` to its last: all queries of the block may skip the keys beyond.
    If a number is not finite, nothing is skipped.

    Args:
        for_gradients: every key obeys the key rule too (`key_rule.py`), so that it keeps its gradient; the reach is wider.
    """
    device = query.device
    assert spec.key_bias is not None
    if spec.tolerance == 0.0 or spec.query_len == 0 or spec.key_len == 0:
        return Bounds.unlimited(spec, device)
    first = first_positions(spec, device)
    bias = spec.key_bias.detach().double()
    shown = shown_keys(spec)
    assert shown is not None
    hidden = ~shown
    norms = norm_bound(key).repeat_interleave(spec.group, 1)
    longest = norms.masked_fill(hidden, 0.0).amax(-1, keepdim=True)
    shortest = norms.masked_fill(hidden, math.inf).amin(-1, keepdim=True)
    longer = None if value is None else longer_values(spec, value, first)
    lower = biased_lower_bound(spec, query, key, first)
    rate, constant = biased_numerator_parts(spec, query, lower, longer, longest, shortest)
    own = rate.amax(-1, keepdim=True) * norms + bias
    at = torch.arange(spec.key_len, device=device)
    sides = [(1, spec.slopes)] if spec.causal else [(1, spec.slopes), (-1, spec.right_slopes)]
    values = []
    for side, slopes in sides:
        m = (spec.slopes if slopes is None else slopes).detach().double().reshape(-1, spec.num_heads, 1)
        # A head that never attends to the right has nothing to skip there.
        nats = own + side * m.masked_fill(m.isinf(), 0.0) * at
        nats = nats.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).masked_fill(hidden, -math.inf)
        values.append((side, m, in_tiles(nats, -math.inf)))
    outlier_tiles = _outlier_tiles([nats.amax(-1) for _, _, nats in values], [side for side, _, _ in values])
    farthest = _farthest_keys(spec, shown, first) if for_gradients else (None, None)
    reaches = [
        _reach(spec, nats, m, constant, outlier_tiles, first, side, far)
        for (side, m, nats), far in zip(values, farthest, strict=False)
    ]
    return Bounds(reaches[0], reaches[-1], outlier_tiles)


def gated_bounds(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, log_fgate: Tensor, *, tile_norms: tuple[Tensor, Tensor]
) -> Bounds:
    """The keys that the last few queries must visit with gates, b_j = Σ_{l > j} ln f_l up to the last position.

    Only the last keys are read; the others are represented by their tiles' norms and sums of gates. b never decreases along the
    text, so the last key of a tile has its largest b.

    Args:
        spec: causal, at most TILE queries at the end of the keys, without masks and biases.
        log_fgate: [B, H, S], finite and at most 0.
        tile_norms: upper bounds on the norms in each tile of keys and of values, [B, K, ⌈S / TILE⌉] fp64 each.
    """
    n = tile_norms[0].shape[-1]
    assert spec.causal
    assert spec.query_len <= TILE
    if spec.tolerance == 0.0:
        return Bounds.unlimited(spec, query.device)
    first = first_positions(spec, query.device)
    near = min(spec.key_len, spec.query_len + NEAR)  # the keys from which the log-sum-exp is bounded
    bias = sums_behind(log_fgate[..., spec.key_len - near :])
    last = dataclasses.replace(spec, key_len=near, query_offset=near - spec.query_len, key_bias=bias)
    lower = biased_lower_bound(last, query, key[:, :, spec.key_len - near :], first_positions(last, query.device))
    norms = tile_norms[0].repeat_interleave(spec.group, 1)
    longest = norms.amax(-1, keepdim=True)
    longer = longer_far_values(spec, value, tile_norms[1])
    # Tiles bound their longest key only; the shortest is unknown.
    rate, constant = biased_numerator_parts(spec, query, lower, longer, longest, torch.zeros_like(longest))

    # The sums of the gates after each tile, and the slope's term at its nearest or farthest key.
    behind = sums_behind(in_tiles(log_fgate.detach()).double().sum(-1))
    m = spec.slopes.detach().double().reshape(-1, spec.num_heads, 1)
    start = torch.arange(n, device=query.device) * TILE
    nats = (
        rate.amax(-1, keepdim=True) * norms + behind + torch.maximum(m * start, m * (start + TILE - 1)) + math.log(TILE)
    )
    nats = nats.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    outlier_tiles = _outlier_tiles([nats], [1])
    with_all, left = (
        _reach(spec, nats[..., None], m, constant, tiles, first, 1, None)
        for tiles in (torch.full_like(outlier_tiles, -1), outlier_tiles)
    )
    # Each outlier tile is a separate call, which is worth its cost if it cuts the reach to less than half.
    worth = 2 * left < with_all.clamp(max=spec.key_len)
    left = torch.where(worth, left, with_all)
    return Bounds(left, left, outlier_tiles.masked_fill(~worth, -1))


def sums_behind(numbers: Tensor) -> Tensor:
    """[..., n] fp64: for every number, the sum of the numbers after it."""
    after = torch.nn.functional.pad(numbers.detach().double()[..., 1:], (0, 1))
    return after.flip(-1).cumsum(-1).flip(-1)


def biased_numerator_parts(
    spec: Spec, query: Tensor, lower: Tensor, longer: Tensor | None, longest: Tensor, shortest: Tensor
) -> tuple[Tensor, Tensor]:
    """(|scale|·‖q‖, the nats to add to the largest exponents of the keys), each [B, H, T] fp64.

    The latter is −λ (λ is `lower`, [B, H, T]), plus its rounding error, plus the nats that `longer` values cost, minus
    the nats that a query gains by being shorter than the head's longest; inf if nothing may be skipped. `longest` and
    `shortest` bound the norms of all visible keys, [B, H, 1].
    """
    wide = query.dtype == torch.float64
    error = (spec.head_dim + constants.SCORE_UNITS) * constants.UNIT["float64" if wide else "float32"]
    rate = abs(spec.scale) * (1.0 + error) * norm_bound(query)
    products = error if wide else error + constants.REDUCED_PRODUCTS
    constant = products * rate * longest + 2.0**-48 * lower.abs() - lower
    if longer is not None:
        constant = constant + longer
    bad = ~(constant.isfinite() & rate.isfinite())
    rate = rate.masked_fill(bad, 0.0)
    constant = constant - (rate.amax(-1, keepdim=True) - rate) * shortest.nan_to_num(nan=0.0, posinf=0.0)
    return rate, constant.masked_fill(bad, math.inf)


def _outlier_tiles(largest: list[Tensor], sides: list[int]) -> Tensor:
    """[B, H, P]: the tiles that stay the running maximum the longest, from the end where the sum begins; −1 = none.

    One spike would keep every later block from skipping the keys before it. Gates, whose biases only rise, have no spikes.
    """
    chosen = []
    for _ in range(constants.OUTLIER_TILES):
        lengths = torch.zeros_like(largest[0])
        for values, side in zip(largest, sides, strict=True):
            leader = (values if side > 0 else values.flip(-1)).cummax(-1)
            ones = (leader.values > -math.inf).to(lengths.dtype)
            length = torch.zeros_like(lengths).scatter_add(-1, leader.indices, ones)
            lengths = torch.maximum(lengths, length if side > 0 else length.flip(-1))
        most = lengths.max(-1, keepdim=True)
        tile = torch.where(most.values >= constants.WORTH_LEAVING_OUT, most.indices, -1)
        chosen.append(tile)
        at = torch.arange(lengths.shape[-1], device=lengths.device)
        largest = [values.masked_fill(at == tile, -math.inf) for values in largest]
    return torch.cat(chosen, -1)


def _farthest_keys(spec: Spec, shown: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H or 1, N] each: the largest distance from a query of each block to a key that it may see on the left, on the right."""
    start = first[:, None] + torch.arange(-(-spec.query_len // TILE), device=first.device) * TILE
    end = torch.minimum(start + TILE, first[:, None] + spec.query_len)
    low, high = (x[:, None] for x in allowed_keys(spec, start, end))
    at = torch.arange(spec.key_len, device=first.device)
    low = torch.maximum(low, torch.where(shown, at, spec.key_len).amin(-1, keepdim=True))
    high = torch.minimum(high, torch.where(shown, at + 1, 0).amax(-1, keepdim=True))
    return (end[:, None] - 1 - low).clamp(min=0), (high - 1 - start[:, None]).clamp(min=0)


def _reach(
    spec: Spec,
    nats: Tensor,
    m: Tensor,
    constant: Tensor,
    outlier_tiles: Tensor,
    first: Tensor,
    side: int,
    farthest: Tensor | None,
) -> Tensor:
    """[B, H, N] int64: the reach of a block to one side, from the exponents [B, H, tiles, TILE] of all keys.

    Args:
        farthest: [B, H or 1, N], the distance for which all keys together obey the key rule; None = they need not.
    """
    tiles = nats.shape[2]
    left_out = (torch.arange(tiles, device=nats.device)[:, None] == outlier_tiles[:, :, None]).any(-1)
    weights = nats.logsumexp(-1).masked_fill(left_out, -math.inf)
    weights = weights if side > 0 else weights.flip(-1)
    # The weight of all tiles from the far end up to each tile; no term is larger than the largest exponent.
    sums = weights.logcumsumexp(-1).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    sums = sums.cummax(-1).values
    size = nats.masked_fill(nats.isinf(), 0.0).abs().amax((-1, -2), keepdim=True)[..., 0] + 64.0
    queries = first[:, None] + torch.arange(spec.query_len, device=nats.device)
    away = side * m.masked_fill(m.isinf(), 0.0) * queries[:, None]
    worst = constant - away + ROUNDING * (tiles + 64) * (size + away.abs())
    worst = in_tiles(worst, -math.inf)
    share = spec.tolerance if spec.causal else spec.tolerance / 2
    room = math.log(share) - worst.amax(-1)
    if farthest is not None:
        room = torch.minimum(room, largest_share(farthest.double(), spec.tolerance).log() - worst.amax(-1))
    # The tiles from the far end that may be skipped.
    count = torch.searchsorted(sums.contiguous(), room.contiguous(), right=True)
    count = count.masked_fill(~room.isfinite(), 0)
    start = first[:, None, None] + torch.arange(worst.shape[-2], device=nats.device) * TILE
    if side > 0:
        reach = start + 1 - count * TILE
    else:
        reach = (tiles - count) * TILE - torch.minimum(start + TILE, first[:, None, None] + spec.query_len) + 1
    reach = torch.where(count > 0, reach, UNLIMITED).clamp(constants.KEPT, UNLIMITED)
    return reach if side > 0 else reach.masked_fill(m.isinf(), 1)
