"""The certificate of `certificate/bounds.py` in three kernels, where torch operations would be some three hundred launches.

`lengths_kernel` reads every key and value once, for their norms. `outliers_kernel` finds the tiles with the largest and, for
every choice of how many of them are pinned, the largest norm before and after each tile. `reach_kernel` bounds the log-sum-exp
of a block's queries from below by the keys around it, and divides. All in fp32: whatever fp32, and the device's approximate
roots, exponentials and logarithms, may be off is added (`_ROUNDING`, `_NATS`), so that the reach is never too short.
"""

# mypy: ignore-errors
# Triton compiles these functions itself and takes no type annotations but its own.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.forward import LOG2E, PINS, rows_of
from alibi_attn.attention.certificate import constants

UNIT = tl.constexpr(constants.UNIT["float32"])
_ROUNDING = tl.constexpr(constants.DEVICE_ROUNDING)
_NATS = tl.constexpr(constants.LSE_NATS["fused"])
_PRODUCTS = tl.constexpr(constants.DEVICE_PRODUCTS)
_TINY = tl.constexpr(16.0 * constants.VANISHING["float32"])  # √256 entries whose squares vanish
FARTHEST = tl.constexpr(2**29)  # the reach of a head that skips nothing
CHOICES = tl.constexpr(len(constants.OUTLIER_CHOICES))


@triton.jit
def pins_of(choice):
    """How many tiles a choice pins: those with the largest norms."""
    return (1 << choice) >> 1


@triton.jit
def longest(rows, D: tl.constexpr):
    """An upper bound of the norm of every row, fp32; inf where it cannot tell. See `bounds.norm_bound`."""
    x = rows.to(tl.float32)
    length = tl.sqrt(tl.sum(x * x, 1)) * (1.0 + (D + 32) * UNIT) + _TINY
    return tl.where(length < float("inf"), length, float("inf"))


@triton.jit
def lengths_kernel(
    K, V, MASK, NORMS, EACH, k_b, k_h, k_s, v_b, v_h, v_s, begin, count, kv_heads, S, N,
    HAS_MASK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program: one tile of keys of `count`, from tile `begin` on.

    NORMS [3, B, K, N] fp32: of the keys that may be seen the largest norm, of their values the largest and the smallest. EACH
    [B, K, S] fp32: the norm of each value.
    """
    bk, tile = (tl.program_id(0) // count).to(tl.int64), begin + tl.program_id(0) % count
    b, kv = bk // kv_heads, bk % kv_heads
    j = tile * TILE + tl.arange(0, TILE)
    here = j < S
    if HAS_MASK:
        here = tl.load(MASK + b * S + j, mask=here, other=0) != 0
    k = rows_of(K + b * k_b + kv * k_h, tile * TILE, k_s, here, D, DP, TILE)
    v = rows_of(V + b * v_b + kv * v_h, tile * TILE, v_s, here, D, DP, TILE)
    every = tl.num_programs(0).to(tl.int64) // count * N
    at = NORMS + bk * N + tile
    of_values = longest(v, D)
    tl.store(EACH + bk * S + j, tl.where(here, of_values, 0.0), mask=j < S)
    tl.store(at, tl.max(tl.where(here, longest(k, D), 0.0), 0))
    tl.store(at + every, tl.max(tl.where(here, of_values, 0.0), 0))
    tl.store(at + 2 * every, tl.min(tl.where(here, of_values, float("inf")), 0))


@triton.jit
def norms_of(NORMS, KNOWN, bk, tile, known, N, beyond, HAS_KNOWN: tl.constexpr):
    """The norms of some tiles, `beyond` for those behind the last; KNOWN [B, K, known] fp64 are those of the first."""
    found = tl.load(NORMS + bk * N + tile, mask=(tile >= known) & (tile < N), other=beyond)
    if HAS_KNOWN:
        told = tl.load(KNOWN + bk * known + tile, mask=tile < known, other=0.0).to(tl.float32) * _ROUNDING
        found = tl.where(tile < known, told, found)
    return found


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def outliers_kernel(
    NORMS, KNOWN_KEYS, KNOWN_VALUES, CHOSEN, KAPPA, VALUES, BEFORE, BK, N, known,
    WIDTH: tl.constexpr, BOTH_SIDES: tl.constexpr, HAS_KNOWN: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Program: one key head of one sequence. NORMS are those of `lengths_kernel`, from tile `known` on; before, KNOWN says them.

    CHOSEN [B, K, PINS] int32: the tiles with the largest norms, the largest first, −1 where there are no more. KAPPA [sides,
    CHOICES, B, K, N]: the largest norm of the tiles that a choice does not pin, up to each tile, and from it on. VALUES
    [2, B, K]: the largest norm of a value and the smallest. BEFORE [B, K, N] int32, with a mask: up to each tile the last one
    that has a key to be seen, else −1.
    """
    bk = tl.program_id(0).to(tl.int64)
    every = (bk * 0 + BK) * N
    at, slots = tl.arange(0, WIDTH), tl.arange(0, PINS)
    taken = tl.full([PINS], -1, tl.int32)
    for pin in tl.static_range(PINS):
        most, place = -1.0, -1
        for start in range(0, N, WIDTH):
            tile = start + at
            x = norms_of(NORMS, KNOWN_KEYS, bk, tile, known, N, -1.0, HAS_KNOWN)
            x = tl.where(among(tile, taken), -1.0, x)
            largest = tl.max(x, 0)
            place = tl.where(largest > most, tl.min(tl.where(x == largest, tile, N), 0), place)
            most = tl.maximum(most, largest)
        taken = tl.where(slots == pin, place, taken)
    tl.store(CHOSEN + bk * PINS + slots, taken)
    largest, smallest = 0.0, float("inf")
    for start in range(0, N, WIDTH):
        tile = start + at
        largest = tl.maximum(
            largest, tl.max(norms_of(NORMS + every, KNOWN_VALUES, bk, tile, known, N, 0.0, HAS_KNOWN), 0)
        )
        least = tl.load(NORMS + 2 * every + bk * N + tile, mask=(tile >= known) & (tile < N), other=float("inf"))
        smallest = tl.minimum(smallest, tl.min(tl.where(tile < known, 0.0, least), 0))
    if HAS_MASK:
        most_recent = -1
        for start in range(0, N, WIDTH):
            tile = start + at
            some = tl.load(NORMS + 2 * every + bk * N + tile, mask=tile < N, other=float("inf")) < float("inf")
            run = tl.maximum(tl.associative_scan(tl.where(some, tile, -1), 0, larger), most_recent)
            tl.store(BEFORE + bk * N + tile, run, mask=tile < N)
            most_recent = tl.max(run, 0)
    tl.store(VALUES + bk, largest)
    tl.store(VALUES + BK + bk, smallest)
    for choice in tl.static_range(CHOICES):
        pinned = tl.where(slots < pins_of(choice), taken, -1)
        most = 0.0
        for start in range(0, N, WIDTH):
            tile = start + at
            x = tl.where(among(tile, pinned), 0.0, norms_of(NORMS, KNOWN_KEYS, bk, tile, known, N, 0.0, HAS_KNOWN))
            run = tl.maximum(tl.associative_scan(x, 0, larger), most)
            tl.store(KAPPA + choice * every + bk * N + tile, run, mask=tile < N)
            most = tl.max(run, 0)
        if BOTH_SIDES:
            most = 0.0
            for step in range(tl.cdiv(N, WIDTH)):
                tile = (tl.cdiv(N, WIDTH) - 1 - step) * WIDTH + at
                x = tl.where(among(tile, pinned), 0.0, norms_of(NORMS, KNOWN_KEYS, bk, tile, known, N, 0.0, HAS_KNOWN))
                run = tl.maximum(tl.associative_scan(x, 0, larger, reverse=True), most)
                tl.store(KAPPA + (CHOICES + choice) * every + bk * N + tile, run, mask=tile < N)
                most = tl.max(run, 0)


@triton.jit
def among(tile, some):
    return tl.max((tile[:, None] == some[None, :]).to(tl.int32), 1) == 1


@triton.jit
def reach_kernel(
    Q, K, EACH, MASK, QUERY_SEGMENTS, KEY_SEGMENTS, SLOPES, RIGHT, FIRST, FIRST_SEEN, BEFORE, KAPPA, VALUES, REACH,
    q_b, q_h, q_t, k_b, k_h, k_s, slopes_b, right_b, first_b, scale, nats_of_tolerance, ratio, window,
    B, H, G, T, S, N,
    KEPT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Program: one block of TILE queries of one head; REACH [sides, CHOICES, B, H, blocks] int32, to the left and to the right.

    FIRST_SEEN [B]: the first key that the key mask lets be seen. EACH is that of `lengths_kernel`; BEFORE, KAPPA and VALUES are
    those of `outliers_kernel`.
    """
    blocks = tl.cdiv(T, TILE)
    n, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // H, (bh % H).to(tl.int32)
    kv_heads = H // G
    bk = b * kv_heads + h // G
    x = tl.arange(0, TILE)
    i = n * TILE + x
    start = n * TILE + tl.load(FIRST + b * first_b).to(tl.int32)
    position = start + x
    m = tl.load(SLOPES + b * slopes_b + h).to(tl.float32)
    right = tl.load(RIGHT + b * right_b + h).to(tl.float32)
    Q += b * q_b + h.to(tl.int64) * q_h
    K += b * k_b + (h // G).to(tl.int64) * k_h
    EACH += bk * S
    q = rows_of(Q, n * TILE, q_t, i < T, D, DP, TILE)
    own = position
    if HAS_SEGMENTS:
        own = tl.load(QUERY_SEGMENTS + b * T + i, mask=i < T, other=0)

    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    # The keys that end where the block does and as many before; and behind, if they may be seen. Queries may stand outside.
    last = tl.maximum(tl.minimum(start, S - TILE), 0)
    if HAS_MASK:
        # Behind a padding, the keys before it.
        seen_tile = tl.load(BEFORE + bk * N + tl.minimum(tl.maximum(start + TILE - 1, 0), S - 1) // TILE)
        last = tl.where(seen_tile < 0, last, tl.minimum(last, seen_tile * TILE))
    for step in tl.static_range(2 if CAUSAL else 3):
        j = last - TILE * step + x
        if not CAUSAL:
            j += TILE
        here = (j >= 0) & (j < S)
        if HAS_MASK:
            here = tl.load(MASK + b * S + j, mask=here, other=0) != 0
        k = rows_of(K, last - TILE * step + (0 if CAUSAL else TILE), k_s, here, D, DP, TILE)
        distance = position[:, None] - j[None, :]
        seen = here[None, :]
        products = tl.dot(q, k.T, input_precision="tf32") * (scale * LOG2E)
        if CAUSAL:
            seen = seen & (distance >= 0)
            scores = products + (m * LOG2E * (j - start).to(tl.float32))[None, :]  # and less, by the place of the query
        else:
            slope = m
            if HAS_RIGHT:
                slope = tl.where(distance < 0, right, m)
                seen = seen & (slope < float("inf"))
                slope = tl.where(slope < float("inf"), slope, 0.0)
            scores = products - slope * LOG2E * tl.abs(distance).to(tl.float32)
        if HAS_WINDOW:
            seen = seen & (tl.abs(distance) < window)
        if HAS_SEGMENTS:
            seen = seen & (own[:, None] == tl.load(KEY_SEGMENTS + b * S + j, mask=here, other=0)[None, :])
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        known = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - known) + tl.sum(tl.exp2(scores - known[:, None]), 1)
        peak = new_peak
    lower = (peak + tl.log2(total)) / LOG2E
    if CAUSAL:
        lower -= m * x.to(tl.float32)

    # The longest of the nearest values, which are always visited; where there are none, some value is.
    kept = tl.zeros([TILE], tl.float32) + tl.load(VALUES + B * kv_heads + bk)
    for back in tl.static_range(KEPT):
        j = position - back
        here = (j >= 0) & (j < S)
        if HAS_WINDOW:
            here = here & (position - j < window)
        if HAS_SEGMENTS:
            here = here & (own == tl.load(KEY_SEGMENTS + b * S + j, mask=here, other=0))
        kept = tl.maximum(kept, tl.load(EACH + j, mask=here, other=0.0))
    most = tl.load(VALUES + bk)
    longer = tl.where(most == 0.0, 0.0, tl.maximum(tl.log2(most / (ratio * kept)) / LOG2E, 0.0))
    rate = tl.abs(scale) * longest(q, D) * _ROUNDING
    real = (i < T) & (position >= 0)
    if not CAUSAL:
        real = i < T
    elif HAS_MASK:
        real = real & (position >= tl.load(FIRST_SEEN + b))  # the others see no key at all
    every, heads, choice = (bh * 0 + B) * kv_heads * N, (bh * 0 + B) * H * blocks, tl.arange(0, CHOICES)
    for side in tl.static_range(1 if CAUSAL else 2):
        slope, at = m, tl.minimum(tl.maximum(start + TILE - 1, 0), S - 1) // TILE
        if side == 1:
            at = tl.minimum(tl.maximum(start, 0), S - 1) // TILE
            if HAS_RIGHT:
                slope = right
        kappa = KAPPA + side * CHOICES * every + bk * N + at
        upper = rate * tl.load(kappa)
        off = (4 * D + 64) * UNIT * (1.0 + upper + tl.abs(lower)) + _NATS + 512 * UNIT * tl.abs(m)
        if Q.dtype.element_ty == tl.float32:
            off += upper * _PRODUCTS
        nats = (rate * _ROUNDING)[:, None] * tl.load(kappa + choice * every)[None, :]
        nats += (off - lower + tl.abs(lower) * (_ROUNDING - 1.0) + longer)[:, None]
        nats = tl.where(nats < float("inf"), nats, float("inf"))
        worst = tl.max(tl.where(real[:, None], nats, float("-inf")), 0)
        # −ln(1 − e^(−m)) ≤ m/2 − ln m.
        tail = slope * 0.5 - tl.log2(slope) / LOG2E + nats_of_tolerance
        reach = tl.maximum((worst + tail) / slope * _ROUNDING + 1.0, KEPT)
        reach = tl.where(slope > 0.0, tl.where(reach < FARTHEST, reach, FARTHEST), FARTHEST)
        reach = tl.where(slope == float("inf"), 1.0, reach)
        tl.store(REACH + (side * CHOICES + choice) * heads + bh * blocks + n, reach.to(tl.int32))
