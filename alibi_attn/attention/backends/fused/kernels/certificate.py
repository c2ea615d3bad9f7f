"""The norms that the certificate of `certificate/bounds.py` needs; `reach.py` divides, and goes on to the plan.

`norms_kernel` reads every key and value once, for their norms. `survey` finds the tiles with the largest norms and, for each
possible number of outlier tiles, the largest norm before and after a block of queries; `survey_kernel` does so once for all
blocks. Everything is fp32. The error of
fp32, and of the device's approximate roots, exponentials and logarithms, is added (`ROUNDING`, `NATS`): no reach is too short.

Biased keys do not form a geometric series: `write_tile_sums` sums the biases of each tile.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.positions import load_offset
from alibi_attn.attention.backends.fused.kernels.tiles import (
    OUTLIERS,
    TILE,
    load_rows,
    load_slope,
    of_head,
    shown_keys,
)
from alibi_attn.attention.certificate import constants

UNIT = tl.constexpr(constants.UNIT["float32"])
ROUNDING = tl.constexpr(constants.DEVICE_ROUNDING)
NATS = tl.constexpr(constants.LSE_NATS["fused"])
PRODUCTS = tl.constexpr(constants.DEVICE_PRODUCTS)
FIXED_DIGITS = tl.constexpr(constants.FIXED_DIGITS)
FIXED_HALF_DIGITS = tl.constexpr(constants.FIXED_HALF_DIGITS)
_TINY = tl.constexpr(16.0 * constants.VANISHING["float32"])  # √256 entries whose squares vanish
KEPT = tl.constexpr(constants.KEPT)
KEY_RULE_TOKENS = tl.constexpr(constants.KEY_RULE_TOKENS)
CERTAIN = tl.constexpr(1.0 - 2.0**-8)  # a sum in fp32 over up to 2¹⁶ tiles is certain up to this factor
VALUE_RATIO = tl.constexpr(constants.VALUE_RATIO)
UNLIMITED_REACH = tl.constexpr(2**29)  # the reach of a head that skips nothing
CHOICES = tl.constexpr(len(constants.OUTLIER_CHOICES))


@triton.jit
def outliers_in(choice):
    """The number of outlier tiles of a choice; they are those with the largest norms."""
    return (1 << choice) >> 1


@triton.jit
def norm_bound(rows, D: tl.constexpr):
    """An upper bound of the norm of every row, fp32; inf if it is unknown. See `norms.norm_bound`."""
    x = rows.to(tl.float32)
    norm = tl.sqrt(tl.sum(x * x, 1)) * (1.0 + (D + 32) * UNIT) + _TINY
    return tl.where(norm < float("inf"), norm, float("inf"))


@triton.jit
def norms_kernel(
    K, V, call, norms, ARRIVED, COSTS, begin, count, D: tl.constexpr, VALUES: tl.constexpr, NEAR: tl.constexpr
):
    """Program: one of `count` tiles of keys, from tile `begin` on; writes `tiles` and `each_value` of Norms.

    Args:
        ARRIVED, COSTS: of Plan and of Certificate; become zeros.
        VALUES: False = the values are assumed to have equal norms, and V is not read.
        NEAR: instead of `begin`, the first tile that the certificate of the queries reads, at the latest the last `count` tiles.
    """
    bk = (tl.program_id(0) // count).to(tl.int64)
    H, G, S = call.H, call.G, call.S
    b, kv = bk // (H // G), bk % (H // G)
    tiles = tl.cdiv(S, TILE)
    if NEAR:
        nearest = tl.minimum(load_offset(call.query_offset, b, call.T, S), S - TILE) - TILE
        begin = tl.minimum(tl.maximum(nearest, 0) // TILE, tiles - count)
    tile = begin + tl.program_id(0) % count
    j = tile * TILE + tl.arange(0, TILE)
    if tile == begin:
        for g in range(G):
            tl.store(ARRIVED + bk * G + g, 0)
            tl.store(COSTS + (bk * G + g) * CHOICES + tl.arange(0, CHOICES), tl.zeros([CHOICES], tl.int64))
        if bk == 0:
            tl.store(ARRIVED + tl.num_programs(0).to(tl.int64) // count * G, 0)
    here = shown_keys(call.masks, b, j, j < S, S)
    if call.key_bias is not None:  # a key that no head of its group may see is not measured
        most = tl.full([TILE], float("-inf"), tl.float32)
        for g in range(G):
            most = tl.maximum(most, tl.load(call.key_bias.rest + (bk * G + g) * S + j, mask=here, other=float("-inf")))
        here = here & (most > float("-inf"))
    k = load_rows(of_head(K, b, kv), tile * TILE, here, TILE, D)  # [TILE, DP]
    every = tl.num_programs(0).to(tl.int64) // count * tiles
    at = norms.tiles + bk * tiles + tile
    if VALUES:
        of_values = norm_bound(load_rows(of_head(V, b, kv), tile * TILE, here, TILE, D), D)  # [TILE]
    else:
        of_values = tl.zeros([TILE], tl.float32)
    tl.store(norms.each_value + bk * S + j, tl.where(here, of_values, 0.0), mask=j < S)
    tl.store(at, tl.max(tl.where(here, norm_bound(k, D), 0.0), 0))
    tl.store(at + every, tl.max(tl.where(here, of_values, 0.0), 0))
    tl.store(at + 2 * every, tl.min(tl.where(here, of_values, float("inf")), 0))


@triton.jit
def norms_of(norms, known_norms, bk, tile, known, tiles, beyond):
    """The norms of some tiles, `beyond` past the last; known_norms [B, K, known] fp64 are those of the first tiles."""
    of_tiles = tl.load(norms + bk * tiles + tile, mask=(tile >= known) & (tile < tiles), other=beyond)
    if known_norms is not None:
        of_known = tl.load(known_norms + bk * known + tile, mask=tile < known, other=0.0).to(tl.float32) * ROUNDING
        of_tiles = tl.where(tile < known, of_known, of_tiles)
    return of_tiles


@triton.jit
def among(tile, some):
    return tl.max((tile[:, None] == some[None, :]).to(tl.int32), 1) == 1


@triton.jit
def survey(norms, bk, every, tiles, left, right, seen, WIDTH: tl.constexpr, BOTH_SIDES: tl.constexpr):
    """What a block of queries needs of the norms of a key head, in two walks over its tiles:

    (its OUTLIERS tiles with the largest norms, descending, padded with −1; by choice of outlier tiles, [CHOICES], the largest
    norm of the other keys up to tile `left`, and from tile `right` on; the largest and the smallest norm of its values; the last
    tile with a visible key up to tile `seen`, else −1).
    """
    at, slots, choice = tl.arange(0, WIDTH), tl.arange(0, OUTLIERS), tl.arange(0, CHOICES)
    taken = tl.full([OUTLIERS], -1, tl.int32)
    for outlier in range(OUTLIERS):
        most, place = -1.0, -1
        for start in range(0, tiles, WIDTH):
            tile = start + at
            x = norms_of(norms.tiles, norms.known_keys, bk, tile, norms.known, tiles, -1.0)  # [WIDTH]
            x = tl.where(among(tile, taken), -1.0, x)
            largest = tl.max(x, 0)
            place = tl.where(largest > most, tl.min(tl.where(x == largest, tile, tiles), 0), place)
            most = tl.maximum(most, largest)
        taken = tl.where(slots == outlier, place, taken)
    to_left, to_right = tl.zeros([CHOICES], tl.float32), tl.zeros([CHOICES], tl.float32)
    largest, smallest, latest = 0.0, float("inf"), -1
    for start in range(0, tiles, WIDTH):
        tile = start + at
        x = norms_of(norms.tiles, norms.known_keys, bk, tile, norms.known, tiles, 0.0)
        for one in range(CHOICES):
            rest = tl.where(among(tile, tl.where(slots < outliers_in(one), taken, -1)), 0.0, x)
            most = tl.max(tl.where(tile <= left, rest, 0.0), 0)
            to_left = tl.where(choice == one, tl.maximum(to_left, most), to_left)
            if BOTH_SIDES:
                most = tl.max(tl.where(tile >= right, rest, 0.0), 0)
                to_right = tl.where(choice == one, tl.maximum(to_right, most), to_right)
        of_values = norms_of(norms.tiles + every, norms.known_values, bk, tile, norms.known, tiles, 0.0)
        largest = tl.maximum(largest, tl.max(of_values, 0))
        least = norms.tiles + 2 * every + bk * tiles + tile
        least = tl.load(least, mask=(tile >= norms.known) & (tile < tiles), other=float("inf"))
        smallest = tl.minimum(smallest, tl.min(tl.where(tile < norms.known, 0.0, least), 0))
        latest = tl.maximum(latest, tl.max(tl.where((least < float("inf")) & (tile <= seen), tile, -1), 0))
    return taken, to_left, to_right, largest, smallest, latest


@triton.jit
def survey_kernel(norms, found, heads, tiles, WIDTH: tl.constexpr, SPAN: tl.constexpr, BOTH_SIDES: tl.constexpr):
    """Program: SPAN tiles of keys of one of `heads` key heads; writes `found`, the Survey, for queries at these tiles."""
    parts = tl.cdiv(tiles, SPAN)
    bk, first = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * SPAN
    every, slots, choice = (bk * 0 + heads) * tiles, tl.arange(0, OUTLIERS), tl.arange(0, CHOICES)
    outliers, to_left, to_right, most, least, latest = survey(
        norms, bk, every, tiles, first - 1, first + SPAN, first - 1, WIDTH, BOTH_SIDES
    )
    own = first + tl.arange(0, SPAN)
    there, at = own < tiles, bk * tiles + own
    row, column = own[:, None], own[None, :]
    x = norms_of(norms.tiles, norms.known_keys, bk, own, norms.known, tiles, 0.0)
    for one in range(CHOICES):
        rest = tl.where(among(own, tl.where(slots < outliers_in(one), outliers, -1)), 0.0, x)[None, :]
        longest = tl.max(tl.where(column <= row, rest, 0.0), 1)
        longest = tl.maximum(longest, tl.max(tl.where(choice == one, to_left, 0.0), 0))
        tl.store(found.longest + one * every + at, longest, mask=there)
        if BOTH_SIDES:
            longest = tl.max(tl.where(column >= row, rest, 0.0), 1)
            longest = tl.maximum(longest, tl.max(tl.where(choice == one, to_right, 0.0), 0))
            tl.store(found.longest + (CHOICES + one) * every + at, longest, mask=there)
    shown = tl.load(norms.tiles + 2 * every + at, mask=there & (own >= norms.known), other=float("inf")) < float("inf")
    seen = tl.max(tl.where((column <= row) & shown[None, :], column, -1), 1)
    tl.store(found.latest + at, tl.maximum(seen, latest), mask=there)
    if first == 0:
        tl.store(found.outliers + bk * OUTLIERS + slots, outliers)
        tl.store(found.of_values + bk, most)
        tl.store(found.of_values + heads + bk, least)


@triton.jit
def write_tile_sums(call, rest, SUMS, bh, tile, CAUSAL: tl.constexpr):
    """Writes `sums` of Norms for one tile of keys of one head; `rest` [TILE] is −inf for keys that are hidden."""
    H, tiles = call.H, tl.cdiv(call.S, TILE)
    b, h, x = bh // H, (bh % H).to(tl.int32), tl.arange(0, TILE)
    for side in tl.static_range(1 if CAUSAL else 2):
        slope = load_slope(call.slopes, b, h)
        if side == 1:
            if call.right_slopes is not None:
                slope = load_slope(call.right_slopes, b, h)
            slope = -slope
        weights = tl.where(rest == float("-inf"), rest, rest + slope * x.to(tl.float32))
        most = tl.max(weights, 0)
        known = tl.where(most == float("-inf"), 0.0, most)
        at = SUMS + (side * (bh * 0 + call.B) * H + bh) * tiles + tile
        tl.store(at, known + tl.log2(tl.sum(tl.exp2(weights - known), 0)))
