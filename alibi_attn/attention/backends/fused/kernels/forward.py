"""Forward: a block of queries meets the tiles of its certified band, with online softmax.

The band's first tile is known before the loop starts, so the loop over tiles that every query sees in full is a `tl.range` that
Triton pipelines. So is the one over the tiles of the diagonal, where all numbers in them are known to be finite. The others, and
pinned tiles (keys with outstanding norms, see `certificate/bounds.py`), have a third loop. Scores live in units of log2.
The bias is formed in fp32 from integer distances, relative to the tile.
"""

# mypy: ignore-errors
# Triton compiles these functions itself and takes no type annotations but its own.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.dropout import kept_weights
from alibi_attn.attention.certificate import constants

LOG2E = tl.constexpr(1.4426950408889634)
PINS = tl.constexpr(constants.OUTLIER_TILES)


@triton.jit
def biased_scores(
    products, distance, here, same, m, right, scale, window,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """(scores, seen) of one tile, in log2 units; everything broadcasts. `m`, `right` and `scale` are in log2 units too.

    `here` says which keys there are, `same` which pairs share a segment. A score that is not seen may be anything.
    """
    slope, away = m, distance
    if not CAUSAL:
        away = tl.abs(distance)
    if HAS_RIGHT:
        slope = tl.where(distance < 0, right, m)
    seen = here
    if CAUSAL:
        seen = seen & (distance >= 0)
    elif HAS_RIGHT:
        # An infinite slope forbids.
        seen = seen & (slope < float("inf"))
        slope = tl.where(slope < float("inf"), slope, 0.0)
    if HAS_WINDOW:
        seen = seen & (away < window)
    if HAS_SEGMENTS:
        seen = seen & same
    return products * scale - slope * away.to(tl.float32), seen


@triton.jit
def inside_tiles(
    first, last, begin, right, window, S,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """(low, high, after, until): of the tiles from `first` to before `last`, those that BM queries from position `begin` on see
    in full: from low to before high to their left, from after to before until to their right. Either may be none.
    """
    end = begin + BM - 1
    until = tl.minimum(last, S // BN)
    low = first
    if HAS_WINDOW:
        low = tl.maximum(low, tl.maximum(end - window + BN, 0) // BN)
    high = tl.maximum(tl.minimum(tl.maximum(begin + 1, 0) // BN, until), low)
    after = high
    if CAUSAL:
        until = high
    else:
        after = tl.maximum(after, tl.cdiv(tl.maximum(end, 0), BN))
        if HAS_WINDOW:
            until = tl.minimum(until, tl.maximum(begin + window, 0) // BN)
        until = tl.where(right < float("inf"), tl.maximum(until, after), after)  # an infinite slope forbids
    return low, high, after, until


@triton.jit
def planned_tiles(
    PLAN, OPEN, block, of_sequence, begin, right, window, S,
    BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_OPEN: tl.constexpr,
):  # fmt: skip
    """(first, last) of the certified band of a plan's block, in tiles of BN keys, and what `inside_tiles` says of it.

    `of_sequence` is the block's number among those of all sequences, of which OPEN [B, N, 2] says where masks hide nothing.
    """
    first = tl.load(PLAN + block * 4) * (TILE // BN)
    last = tl.minimum(tl.load(PLAN + block * 4 + 1) * (TILE // BN), tl.cdiv(S, BN))
    open_first, open_last = first, last
    if HAS_OPEN:
        open_first = tl.load(OPEN + of_sequence * 2) * (TILE // BN)
        open_last = tl.load(OPEN + of_sequence * 2 + 1) * (TILE // BN)
    low, high, after, until = inside_tiles(
        tl.maximum(first, open_first), tl.minimum(last, open_last), begin, right, window, S, BM, BN, CAUSAL, HAS_WINDOW
    )
    return first, last, low, high, after, until


@triton.jit
def edge_tile(x, edges, first, low, high, after, until, pins, RATIO: tl.constexpr, CAUSAL: tl.constexpr):
    """The tile number x of those that are not inside: `edges` of the band, from `first` on, then the pinned ones."""
    tile = first + x
    tile += tl.where(tile >= low, high - low, 0)
    if not CAUSAL:
        tile += tl.where(tile >= after, until - after, 0)
    pin = tl.maximum(x - edges, 0)
    return tl.where(x < edges, tile, tl.load(pins + pin // RATIO) * RATIO + pin % RATIO)


@triton.jit
def slope_inside(tile, begin, m, right, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """(slope, near): inside a tile the bias is slope·(j − near) − slope·(position − near), near = its key next to the queries."""
    near = tile * BN + BN - 1
    if CAUSAL:
        return m, near
    to_left = near <= begin
    away = m
    if HAS_RIGHT:
        away = right
    return tl.where(to_left, m, -away), tl.where(to_left, near, near - (BN - 1))


@triton.jit
def all_finite(rows):
    """Of every row of a tile, whether no number in it is NaN or inf."""
    return tl.sum(rows.to(tl.float32) * 0.0, 1) == 0.0


@triton.jit
def tile_of(P, tile, p_s, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    """BN rows of DP numbers, all of them there; zeros beyond D."""
    d = tl.arange(0, DP)
    at = P + tl.cast(tile, tl.int64) * BN * p_s + tl.arange(0, BN)[:, None] * p_s + d[None, :]
    if D == DP:
        return tl.load(at)
    return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def rows_of(P, first, p_s, here, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    """BN rows of DP numbers from row `first` on; zeros where they are not `here`, and beyond D."""
    d = tl.arange(0, DP)
    inside = here[:, None]
    if D != DP:
        inside = inside & (d < D)[None, :]
    at = P + tl.cast(first, tl.int64) * p_s + tl.arange(0, BN)[:, None] * p_s + d[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def until_sound(NORMS, of_head, heads, high, last, S, BN: tl.constexpr, TILE: tl.constexpr):
    """`last` where in the few tiles from `high` on every key and value is finite, by their norms; else `high`."""
    tile = high * BN // TILE + tl.arange(0, 4)
    tiles = tl.cdiv(S, TILE)
    at = NORMS + of_head * tiles + tile
    there = tile < tl.cdiv(last * BN, TILE)
    longest = tl.load(at, mask=there, other=0.0) + tl.load(at + heads * tiles, mask=there, other=0.0)
    return tl.where(tl.max(longest, 0) < float("inf"), tl.maximum(last, high), high)


@triton.jit
def attend_inside(
    tile, q, acc, peak, total, K, V, i, position, begin, head, k_s, v_s, m, right, scale, window, dropout, seed, S,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_DROPOUT: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile that every query sees in full: (acc, peak, total) after it. The bias is a number a key and a number a query.

    A score costs one instruction more than in attention without any bias. On the DIAGONAL of causal attention, where the nearest
    keys are, the distance is formed first, exactly.
    """
    slope, near = slope_inside(tile, begin, m, right, BN, CAUSAL, HAS_RIGHT)
    j = tile * BN + tl.arange(0, BN)
    if DIAGONAL:
        k = rows_of(K, tile * BN, k_s, j < S, D, DP, BN)
    else:
        k = tile_of(K, tile, k_s, D, DP, BN)
    products = tl.dot(q, k.T, input_precision=PRECISION) * scale
    column, row = (j - near).to(tl.float32), (position - near).to(tl.float32)
    if DIAGONAL:
        distance = row[:, None] - tl.where(j < S, column, float("inf"))[None, :]
        seen = distance >= 0.0
        if HAS_WINDOW:
            seen = seen & (distance < window)
        scores = tl.where(seen, products - slope * distance, float("-inf"))
        row = tl.zeros_like(row)
    else:
        scores = products + (slope * column)[None, :]
        row = slope * row
    new_peak = tl.maximum(peak, tl.max(scores, 1) - row)
    known = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(scores - (known + row)[:, None])
    shrink = tl.exp2(peak - known)
    total = total * shrink + tl.sum(p, 1)
    if HAS_DROPOUT:
        p = p * kept_weights(seed, head, i, j[None, :], dropout)
    if DIAGONAL:
        v = rows_of(V, tile * BN, v_s, j < S, D, DP, BN)
    else:
        v = tile_of(V, tile, v_s, D, DP, BN)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit
def attend(
    tile, q, acc, peak, total, K, V, MASK, KEY_SEGMENTS, own, i, position, head, k_s, v_s, m, right, scale, window,
    dropout, seed, S,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BN keys: (acc, peak, total) after it. `i`, `position`, `own`, `m`, `right`, `head` are scalars or columns.

    Some queries may not see some keys: a value with NaN or inf in it is held back (0·NaN is NaN) and told to those that do.
    """
    start = tl.cast(tile, tl.int64) * BN
    jj = tl.arange(0, BN)
    here = tile * BN + jj < S
    if HAS_MASK:
        here = tl.load(MASK + start + jj, mask=here, other=0) != 0
    k = rows_of(K, tile * BN, k_s, here, D, DP, BN)
    j = (tile * BN + jj)[None, :]
    same = True
    if HAS_SEGMENTS:
        same = own == tl.load(KEY_SEGMENTS + start + jj, mask=here, other=0)[None, :]
    products = tl.dot(q, k.T, input_precision=PRECISION)
    scores, seen = biased_scores(
        products, position - j, here[None, :], same, m, right, scale, window, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS
    )  # fmt: skip
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    known = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(scores - known[:, None])
    shrink = tl.exp2(peak - known)
    v = rows_of(V, tile * BN, v_s, here, D, DP, BN)
    sound = all_finite(v)
    v = tl.where(sound[:, None], v, 0.0).to(v.dtype)
    hurt = tl.max(tl.where(scores == float("-inf"), 0.0, tl.where(sound, 0.0, 1.0)[None, :]), 1)
    total = total * shrink + tl.sum(p, 1) + tl.where(hurt > 0.0, float("nan"), 0.0)
    if HAS_DROPOUT:
        p = p * kept_weights(seed, head, i, j, dropout)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit
def forward_kernel(
    Q, K, V, OUT, LSE, SLOPES, RIGHT, FIRST, PLAN, PIN_TABLE, OPEN, NORMS, MASK, QUERY_SEGMENTS, KEY_SEGMENTS, ORDER, SEED,
    COUNT,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, slopes_b, right_b, first_b,
    scale, window, dropout, H, G, T, S, N,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OPEN: tl.constexpr, HAS_NORMS: tl.constexpr,
    COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: one block of BM queries of one head; the heaviest heads, and in them the last blocks, come first.

    A block of the plan has ROWS queries, and a head N such blocks. NORMS is what `lengths_kernel` found.
    """
    programs = tl.cdiv(T, BM)
    bh = tl.load(ORDER + tl.program_id(0) // programs).to(tl.int64)
    n = programs - 1 - tl.program_id(0) % programs
    b, h = bh // H, (bh % H).to(tl.int32)
    kv = (h // G).to(tl.int64)
    Q += b * q_b + h.to(tl.int64) * q_h + n.to(tl.int64) * BM * q_t
    K += b * k_b + kv * k_h
    V += b * v_b + kv * v_h
    MASK += b * S
    KEY_SEGMENTS += b * S
    m = tl.load(SLOPES + b * slopes_b + h) * LOG2E
    right = tl.load(RIGHT + b * right_b + h) * LOG2E
    seed = tl.load(SEED)

    rows = tl.arange(0, BM)
    d = tl.arange(0, DP)
    i = n * BM + rows
    ours = (i < T)[:, None]
    if D != DP:
        ours = ours & (d < D)[None, :]
    q = tl.load(Q + rows[:, None] * q_t + d[None, :], mask=ours, other=0.0)
    own = i[:, None]
    if HAS_SEGMENTS:
        own = tl.load(QUERY_SEGMENTS + b * T + i, mask=i < T, other=0)[:, None]
    begin = n * BM + tl.load(FIRST + b * first_b).to(tl.int32)
    position = begin + rows
    acc = tl.zeros([BM, DP], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)

    block = bh * N + n * BM // ROWS
    first, last, low, high, after, until = planned_tiles(
        PLAN, OPEN, block, b * N + n * BM // ROWS, begin, right, window, S, BM, BN, TILE, CAUSAL, HAS_WINDOW, HAS_OPEN
    )
    visits = 0
    for x in tl.range(0, high - low + until - after):
        tile = low + x
        if not CAUSAL:
            tile += tl.where(tile >= high, after - high, 0)
        acc, peak, total = attend_inside(
            tile, q, acc, peak, total, K, V, i[:, None], position, begin, bh, k_s, v_s, m, right, scale * LOG2E, window,
            dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_DROPOUT, False, PRECISION,
        )  # fmt: skip
        if COUNTS:
            visits += 1
    if HAS_NORMS:
        diagonal = until_sound(NORMS, b * (H // G) + kv, tl.num_programs(0) // programs // G, high, last, S, BN, TILE)
        for tile in tl.range(high, diagonal):
            acc, peak, total = attend_inside(
                tile, q, acc, peak, total, K, V, i[:, None], position, begin, bh, k_s, v_s, m, right, scale * LOG2E, window,
                dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_DROPOUT, True, PRECISION,
            )  # fmt: skip
            if COUNTS:
                visits += 1
        high, after, until = diagonal, diagonal, diagonal
    pins = PIN_TABLE + block * PINS
    pinned = tl.sum((tl.load(pins + tl.arange(0, PINS)) >= 0).to(tl.int32), 0) * (TILE // BN)
    edges = tl.maximum(last - first, 0) - (high - low + until - after)
    for x in tl.range(0, edges + pinned, num_stages=1):
        tile = edge_tile(x, edges, first, low, high, after, until, pins, TILE // BN, CAUSAL)
        acc, peak, total = attend(
            tile, q, acc, peak, total, K, V, MASK, KEY_SEGMENTS, own, i[:, None], position[:, None], bh, k_s, v_s, m, right,
            scale * LOG2E, window, dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS, HAS_DROPOUT,
            HAS_MASK, PRECISION,
        )  # fmt: skip
        if COUNTS:
            visits += 1
    if COUNTS:
        tl.store(COUNT + bh * programs + n, visits)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    OUT += b * o_b + h.to(tl.int64) * o_h + n.to(tl.int64) * BM * o_t
    tl.store(OUT + rows[:, None] * o_t + d[None, :], out.to(OUT.dtype.element_ty), mask=ours)
    tl.store(LSE + bh * T + i, (peak + tl.log2(total)) / LOG2E, mask=i < T)
