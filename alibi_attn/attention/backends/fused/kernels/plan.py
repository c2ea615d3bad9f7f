"""From reach to tiles: which tiles of keys every block of queries visits, and which blocks a tile of keys must ask.

What `attention/certificate/tiles.py` does in torch operations, one small program a head.
"""

# mypy: ignore-errors
# Triton compiles these functions itself and takes no type annotations but its own.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.certificate import CHOICES, FARTHEST, among, pins_of
from alibi_attn.attention.backends.fused.kernels.forward import PINS

NEVER = tl.constexpr(2**28)  # the first tile of a block that visits none; small enough to be multiplied


@triton.jit
def cheapest(REACH, heads, bh, origin, T, S, TILE: tl.constexpr, WIDTH: tl.constexpr, BOTH_SIDES: tl.constexpr):
    """The choice of pins with which the blocks of a head ask for the fewest keys; see `bounds._cost`."""
    blocks = tl.cdiv(T, TILE)
    least, best = bh * 0 + 2**62, 0
    for choice in tl.static_range(CHOICES):
        cost = (bh * 0 + blocks) * (pins_of(choice) * 2 * TILE)
        for start in range(0, blocks, WIDTH):
            n = start + tl.arange(0, WIDTH)
            there = n < blocks
            begin = origin + n * TILE
            at = REACH + choice * heads + bh * blocks + n
            asked = tl.minimum(tl.load(at, mask=there, other=0), tl.minimum(tl.maximum(begin + TILE, 0), S))
            if BOTH_SIDES:
                more = tl.load(at + CHOICES * heads, mask=there, other=0)
                asked += tl.minimum(more, tl.minimum(tl.maximum(S - begin, 0), S))
            cost += tl.sum(tl.where(there, asked, 0).to(tl.int64), 0)
        best = tl.where(cost < least, choice, best)
        least = tl.minimum(least, cost)
    return best


@triton.jit
def seen_keys(
    ALLOWED,
    row,
    begin,
    end,
    there,
    S,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
):
    """(low, high): outside of these keys the queries at [begin, end) see none. ALLOWED [B, blocks, 2]: what masks say of it."""
    low, high = begin * 0, begin * 0 + S
    if HAS_WINDOW:
        low, high = tl.maximum(low, begin - window + 1), tl.minimum(high, end - 1 + window)
    if CAUSAL:
        high = tl.minimum(high, end)
    if HAS_ALLOWED:
        low = tl.maximum(low, tl.load(ALLOWED + row * 2, mask=there, other=0))
        high = tl.minimum(high, tl.load(ALLOWED + row * 2 + 1, mask=there, other=0))
    return low, high


@triton.jit
def in_tiles(low, high, there, TILE: tl.constexpr):
    """(first, last): the tiles of the keys from `low` on and before `high`, which are not negative where there are any."""
    some = there & (low < high)
    return tl.where(some, low // TILE, NEVER), tl.where(some, (high + TILE - 1) // TILE, 0)


@triton.jit
def plan_kernel(
    REACH, CHOSEN, FIRST, ALLOWED, PLAN, BESIDES, PINNED, WEIGHT, FOUND, first_b, window, H, G, T, S, N,
    ROWS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_ALLOWED: tl.constexpr, UNLIMITED: tl.constexpr,
):  # fmt: skip
    """Program: one head. PLAN [B, H, N, 4], BESIDES [B, H, N, PINS], PINNED [B, H, PINS], WEIGHT [B, H]: the fields of
    `tiles.Tiles`; FOUND [2, B, H, blocks]: the reach of every TILE queries to both sides. All int32.
    """
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, (bh % H).to(tl.int32)
    blocks, origin = tl.cdiv(T, TILE), tl.load(FIRST + b * first_b).to(tl.int32)
    heads = tl.num_programs(0).to(tl.int64) * blocks
    best, slots = 0, tl.arange(0, PINS)
    pins = tl.full([PINS], -1, tl.int32)
    chosen = CHOSEN + (b * (H // G) + h // G) * PINS
    if not UNLIMITED:
        best = cheapest(REACH, heads, bh, origin, T, S, TILE, WIDTH, not CAUSAL)
        pins = tl.where(slots < pins_of(best), tl.load(chosen + slots), -1)
    tl.store(PINNED + bh * PINS + slots, pins)
    weight = 0
    for begin_n in range(0, N, WIDTH):
        n = begin_n + tl.arange(0, WIDTH)
        first, low = tl.full([WIDTH], NEVER, tl.int32), tl.full([WIDTH], NEVER, tl.int32)
        last, high = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
        for part in tl.static_range(ROWS // TILE):
            block = n * (ROWS // TILE) + part
            there = block < blocks
            begin = origin + block * TILE
            end = tl.minimum(begin + TILE, origin + T)
            left, right = tl.full([WIDTH], FARTHEST, tl.int32), tl.full([WIDTH], FARTHEST, tl.int32)
            if not UNLIMITED:
                at = REACH + best * heads + bh * blocks + block
                left = tl.load(at, mask=there, other=0)
                if not CAUSAL:
                    right = tl.load(at + CHOICES * heads, mask=there, other=0)
            tl.store(FOUND + bh * blocks + block, left, mask=there)
            tl.store(FOUND + heads + bh * blocks + block, right, mask=there)
            lowest, highest = seen_keys(
                ALLOWED, b * blocks + block, begin, end, there, S, window, CAUSAL, HAS_WINDOW, HAS_ALLOWED
            )
            near, far = tl.maximum(lowest, begin - left + 1), highest
            if not CAUSAL:
                far = tl.minimum(far, end - 1 + right)
            some, more = in_tiles(near, far, there, TILE)
            first, last = tl.minimum(first, some), tl.maximum(last, more)
            some, more = in_tiles(lowest, highest, there, TILE)
            low, high = tl.minimum(low, some), tl.maximum(high, more)
        there = n < N
        plan = PLAN + (bh * N + n) * 4
        tl.store(plan, first, mask=there)
        tl.store(plan + 1, last, mask=there)
        tl.store(plan + 2, low, mask=there)
        tl.store(plan + 3, high, mask=there)
        besides = BESIDES + (bh * N + n) * PINS
        count = tl.zeros([WIDTH], tl.int32)
        for slot in tl.static_range(PINS):
            pin = tl.max(tl.where(slots == slot, pins, -1), 0)
            mine = there & (pin >= low) & (pin < high) & ((pin < first) | (pin >= last))
            tl.store(besides + count, tl.zeros([WIDTH], tl.int32) + pin, mask=mine)
            count += mine.to(tl.int32)
        for slot in tl.static_range(PINS):
            tl.store(besides + slot, tl.full([WIDTH], -1, tl.int32), mask=there & (slot >= count))
        weight += tl.sum(tl.maximum(last - first, 0) + count, 0)
    tl.store(WEIGHT + bh, weight)


@triton.jit
def shared_plan_kernel(
    REACH, CHOSEN, FIRST, ALLOWED, PLAN, BESIDES, PINNED, WEIGHT, FOUND, first_b, window, H, G, T, S,
    TILE: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALLOWED: tl.constexpr, UNLIMITED: tl.constexpr,
):  # fmt: skip
    """Program: one key head and at most TILE queries. As `plan_kernel`, for N = 1; the heads of a group share the widest plan."""
    bk = tl.program_id(0).to(tl.int64)
    b, kv = bk // (H // G), bk % (H // G)
    origin, leader = tl.load(FIRST + b * first_b).to(tl.int32), b * H + kv * G
    heads = tl.num_programs(0).to(tl.int64) * G
    slots = tl.arange(0, PINS)
    row = tl.zeros([1], tl.int32)
    begin, there = row + origin, row == 0
    end = begin + T
    low, high = seen_keys(ALLOWED, b + row, begin, end, there, S, window, CAUSAL, HAS_WINDOW, HAS_ALLOWED)
    near, far, count = low, high, 0
    if not UNLIMITED:
        near, far = high, low
        for g in range(G):
            best = cheapest(REACH, heads, leader + g, origin, T, S, TILE, 16, not CAUSAL)
            count = tl.maximum(count, pins_of(best))
            left = tl.load(REACH + best * heads + leader + g)
            near = tl.minimum(near, begin - left + 1)
            if not CAUSAL:
                far = tl.maximum(far, end - 1 + tl.load(REACH + (CHOICES + best) * heads + leader + g))
        near = tl.maximum(near, low)
        far = high if CAUSAL else tl.minimum(far, high)
    first, last = in_tiles(near, far, there, TILE)
    low, high = in_tiles(low, high, there, TILE)
    # The choices are nested: the longest of a group holds them all.
    pins = tl.where(slots < count, tl.load(CHOSEN + bk * PINS + slots, mask=slots < count, other=-1), -1)
    mine = (pins >= low) & (pins < high) & ((pins < first) | (pins >= last))
    place = tl.sum((mine[None, :] & (slots[None, :] < slots[:, None])).to(tl.int32), 1)
    total = tl.sum(mine.to(tl.int32), 0)
    for g in range(G):
        bh = leader + g
        tl.store(PLAN + bh * 4 + row, first)
        tl.store(PLAN + bh * 4 + 1 + row, last)
        tl.store(PLAN + bh * 4 + 2 + row, low)
        tl.store(PLAN + bh * 4 + 3 + row, high)
        tl.store(PINNED + bh * PINS + slots, pins)
        tl.store(BESIDES + bh * PINS + slots, tl.full([PINS], -1, tl.int32), mask=slots >= total)
        tl.store(BESIDES + bh * PINS + place, pins, mask=mine)
        tl.store(WEIGHT + bh + row, tl.maximum(last - first, 0) + total)
        tl.store(FOUND + bh + row, begin - near + 1)
        tl.store(FOUND + heads + bh + row, far - end + 1)


@triton.jit
def asked_kernel(PLAN, PINNED, ASKED, N, tiles, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Program: WIDTH tiles of keys of one head. ASKED [B, H, tiles, 3] int32: the first block of queries that may have visited a
    tile, the block behind the last, and 1 where the tile is pinned. Some in between may not have; their plan says so.
    """
    parts = tl.cdiv(tiles, WIDTH)
    bh = (tl.program_id(0) // parts).to(tl.int64)
    tile = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    pins = tl.load(PINNED + bh * PINS + tl.arange(0, PINS))
    pinned = among(tile, pins)
    start, stop = tl.zeros([WIDTH], tl.int32) + N, tl.zeros([WIDTH], tl.int32)
    for begin in range(0, N, BLOCKS):
        n = begin + tl.arange(0, BLOCKS)
        plan = PLAN + (bh * N + n) * 4
        first = tl.load(plan, mask=n < N, other=NEVER)[None, :]
        last = tl.load(plan + 1, mask=n < N, other=0)[None, :]
        low = tl.load(plan + 2, mask=n < N, other=NEVER)[None, :]
        high = tl.load(plan + 3, mask=n < N, other=0)[None, :]
        wide = pinned[:, None]
        ends_behind = tl.where(wide, high, last) > tile[:, None]
        begins_before = tl.where(wide, low, first) <= tile[:, None]
        start = tl.minimum(start, tl.min(tl.where(ends_behind, n[None, :], N), 1))
        stop = tl.maximum(stop, tl.max(tl.where(begins_before, n[None, :] + 1, 0), 1))
    asked = ASKED + (bh * tiles + tile) * 3
    there = tile < tiles
    tl.store(asked, start, mask=there)
    tl.store(asked + 1, stop, mask=there)
    tl.store(asked + 2, pinned.to(tl.int32), mask=there)
