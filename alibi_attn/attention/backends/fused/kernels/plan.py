"""From reach to tiles: the tiles of keys that every block of queries visits, and the blocks that may visit a tile of keys.

The same as `attention/certificate/tiles.py`, as one small program per head.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.certificate import CHOICES, UNLIMITED_REACH, among, outliers_in
from alibi_attn.attention.backends.fused.kernels.positions import (
    distance_moved,
    load_offset,
    load_window,
    reach_before_move,
)
from alibi_attn.attention.backends.fused.kernels.tiles import OUTLIERS, TILE
from alibi_attn.attention.certificate import constants

NO_TILE = tl.constexpr(constants.NO_TILE)


@triton.jit
def cheapest(COSTS, bh):
    """The choice of outlier tiles with which the blocks of a head visit the fewest keys, of equal ones the first."""
    choice = tl.arange(0, CHOICES)
    cost = tl.load(COSTS + bh * CHOICES + choice)
    return tl.min(tl.where(cost == tl.min(cost, 0), choice, CHOICES), 0)


@triton.jit
def seen_keys(ALLOWED, row, start, end, there, S, window, CAUSAL: tl.constexpr):
    """(low, high): the queries at [start, end) see no key outside. ALLOWED [B, blocks, 2]: the limits of the masks."""
    low, high = start * 0, start * 0 + S
    if window is not None:
        low, high = tl.maximum(low, start - window + 1), tl.minimum(high, end - 1 + window)
    if CAUSAL:
        high = tl.minimum(high, end)
    if ALLOWED is not None:
        low = tl.maximum(low, tl.load(ALLOWED + row * 2, mask=there, other=0))
        high = tl.minimum(high, tl.load(ALLOWED + row * 2 + 1, mask=there, other=0))
    return low, high


@triton.jit
def in_tiles(low, high, there):
    """(first, last): the tiles of the keys [low, high), which are not negative unless there are none."""
    some = there & (low < high)
    return tl.where(some, low // TILE, NO_TILE), tl.where(some, (high + TILE - 1) // TILE, 0)


@triton.jit
def plan_head(certificate, ALLOWED, plan, call, bh, ROWS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr):
    """Writes `plan` of one head, in blocks of ROWS queries, from `certificate`; None = visit all allowed keys. Returns a weight.

    ALLOWED [B, ⌈T / TILE⌉, 2] int32: the keys that masks allow; None = no masks. With a key bias [B, H, ⌈T / TILE⌉, 2].
    """
    H, T, S = call.H, call.T, call.S
    b, h = (bh.to(tl.int32) // H).to(tl.int64), bh.to(tl.int32) % H
    N, blocks, offset = tl.cdiv(T, ROWS), tl.cdiv(T, TILE), load_offset(call.query_offset, b, T, S)
    heads = (bh * 0 + call.B) * H * blocks
    moved = distance_moved(call.query_offset, b, T, S)
    window = load_window(call, b)
    best, slots = 0, tl.arange(0, OUTLIERS)
    outliers = tl.full([OUTLIERS], -1, tl.int32)
    if certificate is not None:
        best = cheapest(certificate.costs, bh)
        choosable = certificate.outliers + bh * OUTLIERS
        outliers = tl.where(slots < outliers_in(best), tl.load(choosable + slots), -1)
    tl.store(plan.outliers + b * plan.row + h * OUTLIERS + slots, outliers)
    weight = bh * 0
    for from_block in range(0, N, WIDTH):
        n = from_block + tl.arange(0, WIDTH)
        first, low = tl.full([WIDTH], NO_TILE, tl.int32), tl.full([WIDTH], NO_TILE, tl.int32)
        last, high = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
        for part in tl.static_range(ROWS // TILE):
            block = n * (ROWS // TILE) + part
            there = block < blocks
            start = offset + block * TILE
            end = tl.minimum(start + TILE, offset + T)
            left, right = tl.full([WIDTH], UNLIMITED_REACH, tl.int32), tl.full([WIDTH], UNLIMITED_REACH, tl.int32)
            if certificate is not None:
                at = certificate.reach + best * heads + bh * blocks + block
                left = tl.load(at, mask=there, other=0)
                if not CAUSAL:
                    right = tl.load(at + CHOICES * heads, mask=there, other=0)
            if plan.reach is not None:
                tl.store(plan.reach + bh * blocks + block, reach_before_move(left, moved), mask=there)
                tl.store(plan.reach + heads + bh * blocks + block, reach_before_move(right, -moved), mask=there)
            row = b * blocks + block
            if call.key_bias is not None:
                row = bh * blocks + block
            lowest, highest = seen_keys(ALLOWED, row, start, end, there, S, window, CAUSAL)
            near, far = tl.maximum(lowest, start - left + 1), highest
            if not CAUSAL:
                far = tl.minimum(far, end - 1 + right)
            some, more = in_tiles(near, far, there)
            first, last = tl.minimum(first, some), tl.maximum(last, more)
            some, more = in_tiles(lowest, highest, there)
            low, high = tl.minimum(low, some), tl.maximum(high, more)
        there = n < N
        band = plan.bands + b * plan.row + (h * N + n) * 4
        tl.store(band, first, mask=there)
        tl.store(band + 1, last, mask=there)
        tl.store(band + 2, low, mask=there)
        tl.store(band + 3, high, mask=there)
        beside = plan.beside + b * plan.row + (h * N + n) * OUTLIERS
        count = tl.zeros([WIDTH], tl.int32)
        for slot in tl.static_range(OUTLIERS):
            tile = tl.max(tl.where(slots == slot, outliers, -1), 0)
            mine = there & (tile >= low) & (tile < high) & ((tile < first) | (tile >= last))
            tl.store(beside + count, tl.zeros([WIDTH], tl.int32) + tile, mask=mine)
            count += mine.to(tl.int32)
        for slot in tl.static_range(OUTLIERS):
            tl.store(beside + slot, tl.full([WIDTH], -1, tl.int32), mask=there & (slot >= count))
        weight += tl.sum(tl.maximum(last - first, 0) + count, 0)
    weight = tl.minimum(weight, 2**31 - 1).to(tl.int32)
    tl.store(plan.weight + b * plan.row + h, weight)
    return weight


@triton.jit
def plan_group(certificate, ALLOWED, plan, call, bk, CAUSAL: tl.constexpr):
    """Like `plan_head`, for at most TILE queries of the heads of one key head, which share the widest band."""
    H, G, T, S = call.H, call.G, call.T, call.S
    b, kv = bk // (H // G), bk % (H // G)
    offset, leader = load_offset(call.query_offset, b, T, S), b * H + kv * G
    heads = (bk * 0 + call.B) * H
    moved = distance_moved(call.query_offset, b, T, S)
    window = load_window(call, b)
    slots = tl.arange(0, OUTLIERS)
    row = tl.zeros([1], tl.int32)
    start, there = row + offset, row == 0
    end = start + T
    if call.key_bias is not None:
        low, high = row + S, row
        for g in range(G):
            lowest, highest = seen_keys(ALLOWED, leader + g + row, start, end, there, S, window, CAUSAL)
            low, high = tl.minimum(low, lowest), tl.maximum(high, highest)
    else:
        low, high = seen_keys(ALLOWED, b + row, start, end, there, S, window, CAUSAL)
    near, far, outliers = low, high, tl.full([OUTLIERS], -1, tl.int32)
    if certificate is not None:
        near, far, count = high, low, 0
        for g in range(G):
            best = cheapest(certificate.costs, leader + g)
            count = tl.maximum(count, outliers_in(best))
            left = tl.load(certificate.reach + best * heads + leader + g)
            near = tl.minimum(near, start - left + 1)
            if not CAUSAL:
                far = tl.maximum(far, end - 1 + tl.load(certificate.reach + (CHOICES + best) * heads + leader + g))
        # The choices are nested: the longest choice in a group includes the others.
        choosable = certificate.outliers + leader * OUTLIERS
        outliers = tl.where(slots < count, tl.load(choosable + slots, mask=slots < count, other=-1), -1)
        near = tl.maximum(near, low)
        far = high if CAUSAL else tl.minimum(far, high)
    first, last = in_tiles(near, far, there)
    low, high = in_tiles(low, high, there)
    mine = (outliers >= low) & (outliers < high) & ((outliers < first) | (outliers >= last))
    place = tl.sum((mine[None, :] & (slots[None, :] < slots[:, None])).to(tl.int32), 1)
    total = tl.sum(mine.to(tl.int32), 0)
    for g in range(G):
        at, h = b * plan.row, kv * G + g
        tl.store(plan.bands + at + h * 4 + row, first)
        tl.store(plan.bands + at + h * 4 + 1 + row, last)
        tl.store(plan.bands + at + h * 4 + 2 + row, low)
        tl.store(plan.bands + at + h * 4 + 3 + row, high)
        tl.store(plan.outliers + at + h * OUTLIERS + slots, outliers)
        tl.store(plan.beside + at + h * OUTLIERS + slots, tl.full([OUTLIERS], -1, tl.int32), mask=slots >= total)
        tl.store(plan.beside + at + h * OUTLIERS + place, outliers, mask=mine)
        tl.store(plan.weight + at + h + row, tl.maximum(last - first, 0) + total)
        if plan.reach is not None:
            tl.store(plan.reach + leader + g + row, reach_before_move(start - near + 1, moved))
            tl.store(plan.reach + heads + leader + g + row, reach_before_move(far - end + 1, -moved))


@triton.jit
def plan_kernel(
    ALLOWED, plan, call, ROWS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr
):
    """Program: one head, or with SHARED one key head. The plan without a certificate: all keys that the masks allow."""
    if SHARED:
        plan_group(None, ALLOWED, plan, call, tl.program_id(0).to(tl.int64), CAUSAL)
    else:
        plan_head(None, ALLOWED, plan, call, tl.program_id(0).to(tl.int64), ROWS, WIDTH, CAUSAL)


@triton.jit
def octave(weight):
    """The half octave of a head's weight; the first is that of the largest weights."""
    return 63 - (2.0 * tl.log2(weight.to(tl.float32) + 1.0)).to(tl.int32)


@triton.jit
def order_heads(plan, B, H):
    """Writes `order` of the plan: a counting sort by half octaves, which `arrived` holds now. No heavy head then starts last."""
    x, bins = tl.arange(0, 32), tl.arange(0, 64)
    total = B * H
    counts = tl.zeros([64], tl.int32)
    for start in range(0, total, 32):
        counts += tl.sum(in_bins(plan, start + x, total, bins), 0)
    begin = tl.cumsum(counts, 0) - counts
    for start in range(0, total, 32):
        mine = in_bins(plan, start + x, total, bins)
        place = tl.sum(mine * (begin[None, :] + tl.cumsum(mine, 0)), 1) - 1
        tl.store(plan.order + place, start + x, mask=start + x < total)
        begin += tl.sum(mine, 0)


@triton.jit
def in_bins(plan, bh, total, bins):
    """[heads, bins] int32: 1 for the half octave of each head."""
    own = tl.load(plan.arrived + bh, mask=bh < total, other=-1)
    return (own[:, None] == bins[None, :]).to(tl.int32)


@triton.jit
def visitors_kernel(plan, CANDIDATES, KEY_ORDER, B, H, G, N, tiles, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Program: WIDTH tiles of keys of one head. CANDIDATES [B, H, tiles, 3] int32: the half-open range of blocks of queries that
    may have visited a tile, and 1 if it is an outlier tile. Some blocks in the range may not have visited it; their
    bands show it.

    The first program of each head also writes its place in `order` of the plan, and in KEY_ORDER [B·K] int32, that of key heads;
    None if these are the heads.
    """
    parts = tl.cdiv(tiles, WIDTH)
    bh = (tl.program_id(0) // parts).to(tl.int64)
    b, h = bh // H, (bh % H).to(tl.int32)
    if tl.program_id(0) % parts == 0:
        heavier = heavier_heads(plan, bh, B * H, H, 1, BLOCKS)
        tl.store(plan.order + heavier, bh.to(tl.int32))
        if KEY_ORDER is not None:
            write_key_order(plan, KEY_ORDER, bh, B, H, G, BLOCKS)
    tile = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    is_outlier = among(tile, tl.load(plan.outliers + b * plan.row + h * OUTLIERS + tl.arange(0, OUTLIERS)))
    start, stop = tl.zeros([WIDTH, BLOCKS], tl.int32) + N, tl.zeros([WIDTH, BLOCKS], tl.int32)
    for from_block in range(0, N, BLOCKS):
        n = from_block + tl.arange(0, BLOCKS)
        band = plan.bands + b * plan.row + (h * N + n) * 4
        first = tl.load(band, mask=n < N, other=NO_TILE)[None, :]
        last = tl.load(band + 1, mask=n < N, other=0)[None, :]
        low = tl.load(band + 2, mask=n < N, other=NO_TILE)[None, :]
        high = tl.load(band + 3, mask=n < N, other=0)[None, :]
        wide = is_outlier[:, None]
        ends_behind = tl.where(wide, high, last) > tile[:, None]
        begins_before = tl.where(wide, low, first) <= tile[:, None]
        start = tl.minimum(start, tl.where(ends_behind, n[None, :], N))
        stop = tl.maximum(stop, tl.where(begins_before, n[None, :] + 1, 0))
    candidates = CANDIDATES + (bh * tiles + tile) * 3
    there = tile < tiles
    tl.store(candidates, tl.min(start, 1), mask=there)
    tl.store(candidates + 1, tl.max(stop, 1), mask=there)
    tl.store(candidates + 2, is_outlier.to(tl.int32), mask=there)


@triton.jit
def weight_of(plan, head, total, H, G):
    """The number of tiles that G heads of a sequence visit, counted from head `head`·G of all sequences on; int64."""
    weight = head * 0
    for g in range(G):
        bh = head * G + g
        weight += tl.load(plan.weight + bh // H * plan.row + bh % H, mask=head < total, other=0).to(tl.int64)
    return weight


@triton.jit
def heavier_heads(plan, head, total, H, G, WIDTH: tl.constexpr):
    """How many of `total` heads, or groups of G heads, come before one: those with more tiles, and of equal ones the earlier."""
    own, count = weight_of(plan, head, total, H, G), 0
    for start in range(0, total, WIDTH):
        other = (start + tl.arange(0, WIDTH)).to(tl.int64)
        weight = weight_of(plan, other, total, H, G)
        before = (other < total) & ((weight > own) | ((weight == own) & (other < head)))
        count += tl.sum(before.to(tl.int32), 0)
    return count


@triton.jit
def write_key_order(plan, KEY_ORDER, bh, B, H, G, WIDTH: tl.constexpr):
    """Writes the place of a key head, if `bh` is the first of its group."""
    if bh % G == 0:
        place = heavier_heads(plan, bh // G, B * H // G, H, G, WIDTH)
        tl.store(KEY_ORDER + place, (bh // G).to(tl.int32))
