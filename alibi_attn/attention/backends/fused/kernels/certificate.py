"""The certificate of `certificate/bounds.py` in three kernels, in place of about three hundred launches of torch operations.

`norms_kernel` reads every key and value once, for their norms. `outliers_kernel` finds the tiles with the largest norms and, for
each possible number of outlier tiles, the largest norm before and after each tile. `reach_kernel` bounds the
log-sum-exp of a block's queries from below by the keys around it, and divides. Everything is fp32. The error of fp32,
and of the device's approximate roots, exponentials and logarithms, is added (`_ROUNDING`, `_NATS`): no reach is too short.

Biased keys do not form a geometric series: `tile_sums_kernel` sums the biases of each tile, and `reach_kernel` adds up, from the
far end, the most that each tile can weigh for a block, given its longest key. There are no outlier tiles then.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Head
from alibi_attn.attention.backends.fused.kernels.positions import load_offset, load_window
from alibi_attn.attention.backends.fused.kernels.tiles import (
    LOG2E,
    OUTLIERS,
    TILE,
    bias_for,
    biased_scores,
    load_rows,
    load_slope,
    natural_lse,
    of_head,
    raised_maximum,
    shown_keys,
)
from alibi_attn.attention.certificate import constants

UNIT = tl.constexpr(constants.UNIT["float32"])
_ROUNDING = tl.constexpr(constants.DEVICE_ROUNDING)
_NATS = tl.constexpr(constants.LSE_NATS["fused"])
_PRODUCTS = tl.constexpr(constants.DEVICE_PRODUCTS)
_TINY = tl.constexpr(16.0 * constants.VANISHING["float32"])  # √256 entries whose squares vanish
_KEPT = tl.constexpr(constants.KEPT)
_CERTAIN = tl.constexpr(1.0 - 2.0**-8)  # a sum in fp32 over up to 2¹⁶ tiles is certain up to this factor
_VALUE_RATIO = tl.constexpr(constants.VALUE_RATIO)
FARTHEST = tl.constexpr(2**29)  # the reach of a head that skips nothing
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
def norms_kernel(K, V, masks, norms, begin, count, kv_heads, S, D: tl.constexpr, OF_HEADS: tl.constexpr):
    """Program: one of `count` tiles of keys, from tile `begin` on; writes `tiles` and `each_value` of Norms.

    OF_HEADS: the mask is [B, K, S], True for keys that some query head may see.
    """
    bk, tile = (tl.program_id(0) // count).to(tl.int64), begin + tl.program_id(0) % count
    b, kv = bk // kv_heads, bk % kv_heads
    tiles = tl.cdiv(S, TILE)
    j = tile * TILE + tl.arange(0, TILE)
    sequence = b
    if OF_HEADS:
        sequence = bk
    here = shown_keys(masks, sequence, j, j < S, S)
    k = load_rows(of_head(K, b, kv), tile * TILE, here, TILE, D)  # [TILE, DP]
    v = load_rows(of_head(V, b, kv), tile * TILE, here, TILE, D)
    every = tl.num_programs(0).to(tl.int64) // count * tiles
    at = norms.tiles + bk * tiles + tile
    of_values = norm_bound(v, D)  # [TILE]
    tl.store(norms.each_value + bk * S + j, tl.where(here, of_values, 0.0), mask=j < S)
    tl.store(at, tl.max(tl.where(here, norm_bound(k, D), 0.0), 0))
    tl.store(at + every, tl.max(tl.where(here, of_values, 0.0), 0))
    tl.store(at + 2 * every, tl.min(tl.where(here, of_values, float("inf")), 0))


@triton.jit
def norms_of(norms, known_norms, bk, tile, known, tiles, beyond):
    """The norms of some tiles, `beyond` past the last; known_norms [B, K, known] fp64 are those of the first tiles."""
    of_tiles = tl.load(norms + bk * tiles + tile, mask=(tile >= known) & (tile < tiles), other=beyond)
    if known_norms is not None:
        of_known = tl.load(known_norms + bk * known + tile, mask=tile < known, other=0.0).to(tl.float32) * _ROUNDING
        of_tiles = tl.where(tile < known, of_known, of_tiles)
    return of_tiles


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def among(tile, some):
    return tl.max((tile[:, None] == some[None, :]).to(tl.int32), 1) == 1


@triton.jit
def outliers_kernel(
    norms, KNOWN_KEYS, KNOWN_VALUES, OUTLIER_TILES, BK, tiles, known, WIDTH: tl.constexpr, BOTH_SIDES: tl.constexpr
):  # fmt: skip
    """Program: one key head of one sequence. Reads `tiles` of Norms from tile `known` on; KNOWN has the earlier ones, or is None.

    Writes OUTLIER_TILES [B, K, OUTLIERS] int32, the tiles with the largest norms, descending, padded with −1,
    and `prefix`, `extremes` and `latest` of Norms.
    """
    bk = tl.program_id(0).to(tl.int64)
    every = (bk * 0 + BK) * tiles
    at, slots = tl.arange(0, WIDTH), tl.arange(0, OUTLIERS)
    taken = tl.full([OUTLIERS], -1, tl.int32)
    for outlier in tl.static_range(OUTLIERS):
        most, place = -1.0, -1
        for start in range(0, tiles, WIDTH):
            tile = start + at
            x = norms_of(norms.tiles, KNOWN_KEYS, bk, tile, known, tiles, -1.0)  # [WIDTH]
            x = tl.where(among(tile, taken), -1.0, x)
            largest = tl.max(x, 0)
            place = tl.where(largest > most, tl.min(tl.where(x == largest, tile, tiles), 0), place)
            most = tl.maximum(most, largest)
        taken = tl.where(slots == outlier, place, taken)
    tl.store(OUTLIER_TILES + bk * OUTLIERS + slots, taken)
    largest, smallest = 0.0, float("inf")
    for start in range(0, tiles, WIDTH):
        tile = start + at
        of_values = norms_of(norms.tiles + every, KNOWN_VALUES, bk, tile, known, tiles, 0.0)
        largest = tl.maximum(largest, tl.max(of_values, 0))
        least = norms.tiles + 2 * every + bk * tiles + tile
        least = tl.load(least, mask=(tile >= known) & (tile < tiles), other=float("inf"))
        smallest = tl.minimum(smallest, tl.min(tl.where(tile < known, 0.0, least), 0))
    if norms.latest is not None:
        latest = -1
        for start in range(0, tiles, WIDTH):
            tile = start + at
            least = norms.tiles + 2 * every + bk * tiles + tile
            some = tl.load(least, mask=tile < tiles, other=float("inf")) < float("inf")
            run = tl.maximum(tl.associative_scan(tl.where(some, tile, -1), 0, larger), latest)
            tl.store(norms.latest + bk * tiles + tile, run, mask=tile < tiles)
            latest = tl.max(run, 0)
    tl.store(norms.extremes + bk, largest)
    tl.store(norms.extremes + BK + bk, smallest)
    for choice in tl.static_range(CHOICES):
        outliers = tl.where(slots < outliers_in(choice), taken, -1)
        most = 0.0
        for start in range(0, tiles, WIDTH):
            tile = start + at
            x = norms_of(norms.tiles, KNOWN_KEYS, bk, tile, known, tiles, 0.0)
            x = tl.where(among(tile, outliers), 0.0, x)
            run = tl.maximum(tl.associative_scan(x, 0, larger), most)
            tl.store(norms.prefix + choice * every + bk * tiles + tile, run, mask=tile < tiles)
            most = tl.max(run, 0)
        if BOTH_SIDES:
            most = 0.0
            for step in range(tl.cdiv(tiles, WIDTH)):
                tile = (tl.cdiv(tiles, WIDTH) - 1 - step) * WIDTH + at
                x = norms_of(norms.tiles, KNOWN_KEYS, bk, tile, known, tiles, 0.0)
                x = tl.where(among(tile, outliers), 0.0, x)
                run = tl.maximum(tl.associative_scan(x, 0, larger, reverse=True), most)
                tl.store(norms.prefix + (CHOICES + choice) * every + bk * tiles + tile, run, mask=tile < tiles)
                most = tl.max(run, 0)


@triton.jit
def tile_sums_kernel(call, norms, CAUSAL: tl.constexpr):
    """Program: one tile of keys of one head; writes `sums` of Norms."""
    H, S = call.H, call.S
    tiles = tl.cdiv(S, TILE)
    bh, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h, x = bh // H, (bh % H).to(tl.int32), tl.arange(0, TILE)
    here = shown_keys(call.masks, b, tile * TILE + x, tile * TILE + x < S, S)
    rest = tl.load(call.key_bias.rest + bh * S + tile * TILE + x, mask=here, other=float("-inf"))
    for side in tl.static_range(1 if CAUSAL else 2):
        slope = load_slope(call.slopes, b, h)
        if side == 1:
            if call.right_slopes is not None:
                slope = load_slope(call.right_slopes, b, h)
            slope = -slope
        weights = tl.where(rest == float("-inf"), rest, rest + slope * x.to(tl.float32))
        most = tl.max(weights, 0)
        known = tl.where(most == float("-inf"), 0.0, most)
        at = norms.sums + side * tl.num_programs(0).to(tl.int64) + bh * tiles + tile
        tl.store(at, known + tl.log2(tl.sum(tl.exp2(weights - known), 0)))


@triton.jit
def tiles_of_little(
    norms, sums, bias, bk, tiles, from_tile, count, step, origin, slope, rate, worst, WIDTH: tl.constexpr
):  # fmt: skip
    """How many of `count` tiles, in the order `from_tile`, `from_tile` + `step` …, together weigh at most 2^(−worst).

    Everything is in log2 units. `rate` times a norm bounds a score. A tile's sum is relative to the position `origin`, from
    which it loses slope·step·(origin − the first key). `bias` is the BlockBias.
    """
    skippable, total = count, 0.0
    for start in range(0, count, WIDTH):
        place = start + tl.arange(0, WIDTH)
        there = place < count
        tile = from_tile + place * step
        norm = tl.load(norms + bk * tiles + tile, mask=there, other=0.0)
        inner = tl.load(sums + tile, mask=there, other=float("-inf"))
        some, base = inner > float("-inf"), tl.load(bias.bases + tile, mask=there, other=0.0) - bias.reference
        away = slope * ((origin - tile * TILE) * step).to(tl.float32)
        inner = tl.where(some, inner, 0.0)
        bound = rate * norm
        # Each of these numbers is rounded, and their sum.
        rounded = tl.abs(inner) + tl.abs(base) + tl.abs(away) + bound + tl.abs(worst) + tl.abs(slope) * TILE
        weight = ((inner + base) - away) + bound + worst + rounded * (_ROUNDING - 1.0)
        weight = tl.where(weight < 64.0, weight, 64.0)  # also if it is NaN
        weight = tl.where(some, tl.exp2(weight), 0.0)
        sum_here = total + tl.cumsum(weight, 0)
        skippable = tl.minimum(skippable, tl.min(tl.where(there & (sum_here > _CERTAIN), place, count), 0))
        total += tl.sum(weight, 0)
    return skippable


@triton.jit
def reach_kernel(
    Q, K, call, norms, FIRST_SEEN, ALLOWED, REACH, B, nats_of_tolerance, D: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program: one block of TILE queries of one head; REACH [sides, CHOICES, B, H, blocks] int32, to the left and to the right.

    With a key bias a reach is a distance from the block's nearest query, and is the same for all choices.

    Args:
        FIRST_SEEN: [B] int32: the first key that the masks leave visible; None if no key is hidden. With a key bias [B, H].
        ALLOWED: [B, H, blocks, 2] int32, with a key bias: see `plan_kernel`. ROWS: queries of a block of the plan.
    """
    H, G, T, S, masks = call.H, call.G, call.T, call.S, call.masks
    blocks, tiles, kv_heads = tl.cdiv(T, TILE), tl.cdiv(S, TILE), H // G
    n, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // H, (bh % H).to(tl.int32)
    bk = b * kv_heads + h // G
    x = tl.arange(0, TILE)
    i = n * TILE + x
    start = n * TILE + load_offset(call.query_offset, b, T, S)
    position = start + x
    right = call.right_slopes
    if right is not None:
        right = load_slope(right, b, h)
    window = call.window
    if window is not None:
        window = load_window(call, b)
    head = Head(bh, load_slope(call.slopes, b, h), right, call.scale * LOG2E, window, None)
    m = tl.load(call.slopes.pointer + b * call.slopes.batch + h)
    K = of_head(K, b, (h // G).to(tl.int64))
    q = load_rows(of_head(Q, b, h), n * TILE, i < T, TILE, D)  # [TILE, DP]
    segments = masks.query_segments
    if segments is not None:
        segments = tl.load(segments + b * T + i, mask=i < T, other=0)

    m_i = tl.full([TILE], float("-inf"), tl.float32)
    l_i = tl.zeros([TILE], tl.float32)
    # The keys at the block's positions, the same number before it, and after it if visible. Queries may lie outside the
    # keys.
    bias = call.key_bias
    if bias is not None:
        bias = bias_for(bias, bh, bh * tl.cdiv(T, ROWS) + n * TILE // ROWS, tiles, S)
    last = tl.maximum(tl.minimum(start, S - TILE), 0)
    if norms.latest is not None:
        # After padding, the keys before it.
        seen_tile = tl.minimum(tl.maximum(start + TILE - 1, 0), S - 1) // TILE
        seen_tile = tl.load(norms.latest + bk * tiles + seen_tile)
        last = tl.where(seen_tile < 0, last, tl.minimum(last, seen_tile * TILE))
    for step in tl.static_range(2 if CAUSAL else 3):
        from_key = last - TILE * step + (0 if CAUSAL else TILE)
        j = from_key + x
        here = shown_keys(masks, b, j, (j >= 0) & (j < S), S)
        if bias is not None:
            rest = tl.load(bias.rest + j, mask=here, other=float("-inf"))
            here = here & (rest > float("-inf"))
        k = load_rows(K, from_key, here, TILE, D)  # [TILE, DP]
        shown = here[None, :]
        if segments is not None:
            theirs = tl.load(masks.key_segments + b * S + j, mask=here, other=0)
            shown = shown & (segments[:, None] == theirs[None, :])
        products = tl.dot(q, k.T, input_precision="tf32")  # [TILE, TILE]
        scores, seen = biased_scores(products, position[:, None] - j[None, :], shown, head, CAUSAL)
        if CAUSAL:  # minus the query's place in the block
            scores = products * head.scale + (head.slope * (j - start).to(tl.float32))[None, :]
        if bias is not None:
            base = tl.load(bias.bases + j // TILE, mask=here, other=0.0) - bias.reference
            # Minus the rounding error: a lower bound may leave out a key.
            own = (base + rest) - (tl.abs(base) + tl.abs(rest)) * (_ROUNDING - 1.0)
            scores += tl.where(here, own, 0.0)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        m_i, known, shrink = raised_maximum(m_i, tl.max(scores, 1))
        l_i = l_i * shrink + tl.sum(tl.exp2(scores - known[:, None]), 1)
    lse_bound = natural_lse(m_i, l_i)  # [TILE]
    if CAUSAL:
        lse_bound -= m * x.to(tl.float32)

    # The largest norm of the nearest values, which are always visited; if there are none, of some value.
    kept = tl.zeros([TILE], tl.float32) + tl.load(norms.extremes + B * kv_heads + bk)
    for back in tl.static_range(_KEPT):
        j = position - back
        here = (j >= 0) & (j < S)
        if window is not None:
            here = here & (position - j < window)
        if segments is not None:
            here = here & (segments == tl.load(masks.key_segments + b * S + j, mask=here, other=0))
        if bias is not None:
            here = here & (tl.load(bias.rest + j, mask=here, other=float("-inf")) > float("-inf"))
        kept = tl.maximum(kept, tl.load(norms.each_value + bk * S + j, mask=here, other=0.0))
    most = tl.load(norms.extremes + bk)
    longer = tl.where(most == 0.0, 0.0, tl.maximum(tl.log2(most / (_VALUE_RATIO * kept)) / LOG2E, 0.0))
    rate = tl.abs(call.scale) * norm_bound(q, D) * _ROUNDING
    real = (i < T) & (position >= 0)
    if not CAUSAL:
        real = i < T
    elif FIRST_SEEN is not None:
        of_sequence = b
        if bias is not None:
            of_sequence = bh
        real = real & (position >= tl.load(FIRST_SEEN + of_sequence))  # the others see no key
    every, heads, choice = (bh * 0 + B) * kv_heads * tiles, (bh * 0 + B) * H * blocks, tl.arange(0, CHOICES)
    for side in tl.static_range(1 if CAUSAL else 2):
        slope, at = m, tl.minimum(tl.maximum(start + TILE - 1, 0), S - 1) // TILE
        if side == 1:
            at = tl.minimum(tl.maximum(start, 0), S - 1) // TILE
            if call.right_slopes is not None:
                slope = tl.load(call.right_slopes.pointer + b * call.right_slopes.batch + h)
        prefix = norms.prefix + side * CHOICES * every + bk * tiles + at
        upper = rate * tl.load(prefix)
        off = (4 * D + 64) * UNIT * (1.0 + upper + tl.abs(lse_bound)) + _NATS + 512 * UNIT * tl.abs(m)
        if Q.pointer.dtype.element_ty == tl.float32:
            off += upper * _PRODUCTS
        if bias is not None:
            tail = tl.minimum(n * TILE + TILE, T) + (start - n * TILE) - 1  # the position of the last query
            need = off - lse_bound + tl.abs(lse_bound) * (_ROUNDING - 1.0) + longer + nats_of_tolerance
            behind = x if side == 0 else tail - position
            need -= tl.where(slope < float("inf"), slope, 0.0) * behind.to(tl.float32)
            need += tl.abs(need) * (_ROUNDING - 1.0) + 512 * UNIT * tl.abs(slope)
            need = tl.where(need < float("inf"), need, float("inf"))
            worst = tl.max(tl.where(real, need, float("-inf")), 0) * LOG2E
            most_rate = (
                tl.max(tl.where(real, tl.where(rate < float("inf"), rate, float("inf")), 0.0), 0) * _ROUNDING * LOG2E
            )
            low = tl.load(ALLOWED + (bh * blocks + n) * 2)
            high = tl.load(ALLOWED + (bh * blocks + n) * 2 + 1)
            if window is not None:
                low, high = tl.maximum(low, start - window + 1), tl.minimum(high, tail + window)
            sums = norms.sums + (side * (bh * 0 + B) * H + bh) * tiles
            if side == 0:
                from_tile, origin, step = low // TILE, start, 1
                count = tl.maximum(tl.minimum(tl.maximum(start - _KEPT + 1, 0), S) // TILE - from_tile, 0)
            else:
                from_tile, origin, step = tl.cdiv(high, TILE) - 1, tail, -1
                count = tl.maximum(from_tile + 1 - tl.cdiv(tl.maximum(tail + _KEPT, 0), TILE), 0)
            skippable = tiles_of_little(
                norms.tiles,
                sums,
                bias,
                bk,
                tiles,
                from_tile,
                count,
                step,
                origin,
                slope * LOG2E,
                most_rate,
                worst,
                WIDTH,
            )
            farthest = (from_tile + skippable * step) * TILE
            reach = start - farthest + 1
            if side == 1:
                reach = farthest + TILE - tail
            reach = tl.minimum(tl.maximum(reach, _KEPT), FARTHEST)
            reach = choice * 0 + tl.where(slope == float("inf"), 1, reach)
        else:
            nats = (rate * _ROUNDING)[:, None] * tl.load(prefix + choice * every)[None, :]  # [TILE, CHOICES]
            nats += (off - lse_bound + tl.abs(lse_bound) * (_ROUNDING - 1.0) + longer)[:, None]
            nats = tl.where(nats < float("inf"), nats, float("inf"))
            worst = tl.max(tl.where(real[:, None], nats, float("-inf")), 0)
            # −ln(1 − e^(−m)) ≤ m/2 − ln m.
            tail = slope * 0.5 - tl.log2(slope) / LOG2E + nats_of_tolerance
            reach = tl.maximum((worst + tail) / slope * _ROUNDING + 1.0, _KEPT)
            reach = tl.where(slope > 0.0, tl.where(reach < FARTHEST, reach, FARTHEST), FARTHEST)
            reach = tl.where(slope == float("inf"), 1.0, reach)
        tl.store(REACH + (side * CHOICES + choice) * heads + bh * blocks + n, reach.to(tl.int32))
