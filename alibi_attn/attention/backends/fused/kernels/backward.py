"""Backward: the exact gradient of what forward computed, on the tiles that forward visited, without atomics.

With p = exp(score − lse), δ_i = Σ out·dout − dlse and ds = p·(dp − δ):

    dq_i = scale·Σ_j ds_ij·k_j     dk_j = scale·Σ_i ds_ij·q_i     dv_j = Σ_i p_ij·dout_i     dm = −Σ_ij ds_ij·|i − j|

`query_kernel` walks the keys of a block of queries as forward does, and leaves δ and the slope's gradient of every query;
`key_kernel` walks the queries that may have visited a tile of keys, and asks each block's plan whether it did. Both have a loop
for tiles that are seen in full, where the bias is a number a key and a number a query, and one for the others.
"""

# mypy: ignore-errors
# Triton compiles these functions itself and takes no type annotations but its own.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.dropout import kept_weights
from alibi_attn.attention.backends.fused.kernels.forward import (
    LOG2E,
    PINS,
    all_finite,
    biased_scores,
    edge_tile,
    planned_tiles,
    rows_of,
    slope_inside,
    tile_of,
)

NEVER = tl.constexpr(2**20)  # a block of queries behind the last


@triton.jit
def query_tile_inside(
    tile, q, do, lse, delta, dq, to_left, to_right, K, V, i, position, begin, least, head, k_s, v_s, m, right, scale, dropout,
    seed, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SLOPES_WANTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys that every query sees in full: what `query_tile` returns."""
    slope, near = slope_inside(tile, begin, m, right, BN, CAUSAL, HAS_RIGHT)
    j = tile * BN + tl.arange(0, BN)
    k = tile_of(K, tile, k_s, D, DP, BN)
    v = tile_of(V, tile, v_s, D, DP, BN)
    scores = tl.dot(q, k.T, input_precision=PRECISION) * scale + (slope * (j - near).to(tl.float32))[None, :]
    row = (position - begin).to(tl.float32)
    p = tl.exp2(scores - (lse + slope * (row + (begin - near).to(tl.float32)))[:, None])
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    if HAS_DROPOUT:
        dp = dp * kept_weights(seed, head, i, j[None, :], dropout)
    ds = p * (dp - delta[:, None])
    if SLOPES_WANTED:
        # Σ ds·(position − least − j), from the key nearest to the queries on.
        away = row + (begin - least - near).to(tl.float32)
        moment = tl.sum(ds * (near - j).to(tl.float32)[None, :], 1) + away * tl.sum(ds, 1)
        if CAUSAL:
            to_left -= moment
        else:
            is_left = near <= begin
            if HAS_RIGHT:
                to_left -= tl.where(is_left, moment, 0.0)
                to_right += tl.where(is_left, 0.0, moment)
            else:
                to_left -= tl.where(is_left, moment, -moment)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, to_left, to_right


@triton.jit
def query_tile(
    tile, q, do, lse, delta, dq, to_left, to_right, K, V, MASK, KEY_SEGMENTS, own, i, position, least, head, k_s, v_s, m, right,
    scale, window, dropout, seed, S,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_MASK: tl.constexpr,
    SLOPES_WANTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: (dq / scale, −Σ ds·|i − j − least| to the left, to the right) after it."""
    start = tl.cast(tile, tl.int64) * BN
    jj = tl.arange(0, BN)
    here = tile * BN + jj < S
    if HAS_MASK:
        here = tl.load(MASK + start + jj, mask=here, other=0) != 0
    k = rows_of(K, tile * BN, k_s, here, D, DP, BN)
    v = rows_of(V, tile * BN, v_s, here, D, DP, BN)
    j = (tile * BN + jj)[None, :]
    same = True
    if HAS_SEGMENTS:
        same = own == tl.load(KEY_SEGMENTS + start + jj, mask=here, other=0)[None, :]
    distance = position - j
    products = tl.dot(q, k.T, input_precision=PRECISION)
    scores, seen = biased_scores(
        products, distance, here[None, :], same, m, right, scale, window, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS
    )  # fmt: skip
    p = tl.exp2(scores - lse[:, None])
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    if HAS_DROPOUT:
        dp = dp * kept_weights(seed, head, i, j, dropout)
    ds = tl.where(seen, p * (dp - delta[:, None]), 0.0)
    if SLOPES_WANTED:
        moment = ds * (distance - least).to(tl.float32)
        if HAS_RIGHT:
            to_left -= tl.sum(tl.where(distance > 0, moment, 0.0), 1)
            to_right += tl.sum(tl.where(distance < 0, moment, 0.0), 1)
        elif CAUSAL:
            to_left -= tl.sum(moment, 1)
        else:
            to_left -= tl.sum(tl.where(distance > 0, moment, -moment), 1)
    # 0·NaN: a bad key is told only to the queries that see it, whose ds is NaN already.
    k = tl.where(all_finite(k)[:, None], k, 0.0).to(k.dtype)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, to_left, to_right


@triton.jit
def query_kernel(
    Q, K, V, OUT, DOUT, LSE, DLSE, DELTA, DQ, DSLOPES, SLOPES, RIGHT, FIRST, PLAN, PIN_TABLE, OPEN, MASK, QUERY_SEGMENTS,
    KEY_SEGMENTS, ORDER, SEED,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, slopes_b, right_b, first_b,
    scale, window, dropout, H, G, T, S, N,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OPEN: tl.constexpr, HAS_DLSE: tl.constexpr,
    SLOPES_WANTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: one block of BM queries of one head, as in forward; a block of the plan has ROWS. DSLOPES is [2, B, H, T]."""
    programs = tl.cdiv(T, BM)
    bh = tl.load(ORDER + tl.program_id(0) // programs).to(tl.int64)
    n = programs - 1 - tl.program_id(0) % programs
    b, h = bh // H, (bh % H).to(tl.int32)
    kv = (h // G).to(tl.int64)
    at = tl.cast(n, tl.int64) * BM
    Q += b * q_b + h.to(tl.int64) * q_h + at * q_t
    OUT += b * o_b + h.to(tl.int64) * o_h + at * o_t
    DOUT += b * do_b + h.to(tl.int64) * do_h + at * do_t
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
    # A query that saw nothing is never used, whatever is in it: an infinite lse makes its weights 0.
    lse = tl.load(LSE + bh * T + i, mask=i < T, other=float("-inf")) * LOG2E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    ours = ((i < T) & (lse != float("inf")))[:, None]
    if D != DP:
        ours = ours & (d < D)[None, :]
    q = tl.load(Q + rows[:, None] * q_t + d[None, :], mask=ours, other=0.0)
    do = tl.load(DOUT + rows[:, None] * do_t + d[None, :], mask=ours, other=0.0)
    out = tl.load(OUT + rows[:, None] * o_t + d[None, :], mask=ours, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + bh * T + i, mask=(i < T) & (lse != float("inf")), other=0.0)
    tl.store(DELTA + bh * T + i, delta, mask=i < T)
    own = i[:, None]
    if HAS_SEGMENTS:
        own = tl.load(QUERY_SEGMENTS + b * T + i, mask=i < T, other=0)[:, None]
    begin = n * BM + tl.load(FIRST + b * first_b).to(tl.int32)
    position = begin + rows
    # Where a whole block stands beyond the keys, a constant is left out of its distances: a row of ds adds up to dlse, and
    # products with distances of 10⁶ would round by more than what is left of their sum.
    least = tl.maximum(begin - (S - 1), 0) + tl.minimum(begin + BM - 1, 0)
    dq = tl.zeros([BM, DP], tl.float32)
    to_left = tl.zeros([BM], tl.float32)
    to_right = tl.zeros([BM], tl.float32)

    block = bh * N + n * BM // ROWS
    first, last, low, high, after, until = planned_tiles(
        PLAN, OPEN, block, b * N + n * BM // ROWS, begin, right, window, S, BM, BN, TILE, CAUSAL, HAS_WINDOW, HAS_OPEN
    )
    for x in tl.range(0, high - low + until - after):
        tile = low + x
        if not CAUSAL:
            tile += tl.where(tile >= high, after - high, 0)
        dq, to_left, to_right = query_tile_inside(
            tile, q, do, lse, delta, dq, to_left, to_right, K, V, i[:, None], position, begin, least, bh, k_s, v_s, m, right,
            scale * LOG2E, dropout, seed, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_DROPOUT, SLOPES_WANTED, PRECISION,
        )  # fmt: skip
    pins = PIN_TABLE + block * PINS
    pinned = tl.sum((tl.load(pins + tl.arange(0, PINS)) >= 0).to(tl.int32), 0) * (TILE // BN)
    edges = tl.maximum(last - first, 0) - (high - low + until - after)
    for x in tl.range(0, edges + pinned, num_stages=1):
        tile = edge_tile(x, edges, first, low, high, after, until, pins, TILE // BN, CAUSAL)
        dq, to_left, to_right = query_tile(
            tile, q, do, lse, delta, dq, to_left, to_right, K, V, MASK, KEY_SEGMENTS, own, i[:, None], position[:, None], least,
            bh, k_s, v_s, m, right, scale * LOG2E, window, dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW,
            HAS_SEGMENTS, HAS_DROPOUT, HAS_MASK, SLOPES_WANTED, PRECISION,
        )  # fmt: skip

    mine = (i < T)[:, None]
    if D != DP:
        mine = mine & (d < D)[None, :]
    # Read once more, so that no register holds the addresses of results through the loop.
    bh = tl.load(ORDER + tl.program_id(0) // programs, volatile=True).to(tl.int64)
    DQ += bh // H * dq_b + bh % H * dq_h + at * dq_t
    tl.store(DQ + rows[:, None] * dq_t + d[None, :], (dq * scale).to(DQ.dtype.element_ty), mask=mine)
    if SLOPES_WANTED:
        if HAS_DLSE:
            due = tl.load(DLSE + bh * T + i, mask=(i < T) & (lse != float("inf")), other=0.0)
            if HAS_RIGHT:
                to_left -= tl.maximum(least, 0).to(tl.float32) * due
                to_right += tl.minimum(least, 0).to(tl.float32) * due
            else:
                to_left -= tl.abs(least).to(tl.float32) * due
        every = tl.num_programs(0).to(tl.int64) // programs * T
        tl.store(DSLOPES + bh * T + i, to_left, mask=i < T)
        tl.store(DSLOPES + every + bh * T + i, to_right, mask=i < T)


@triton.jit
def inside_blocks(
    first, last, tile_begin, origin, right, window, T,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """(low, high, after, until): of the blocks of BM queries from `first` to before `last`, those that see in full the BN keys
    from `tile_begin` on: from low to before high stand before the keys, from after to before until behind them.
    """
    tile_end = tile_begin + BN - 1 - origin  # positions that count from the first query
    tile_begin = tile_begin - origin
    until = tl.minimum(last, T // BM)
    low, high = first, first
    if not CAUSAL:
        if HAS_WINDOW:
            low = tl.maximum(low, tl.maximum(tile_end - window + BM, 0) // BM)
        high = tl.minimum(tl.maximum(tile_begin + 1, 0) // BM, until)
        high = tl.where(right < float("inf"), tl.maximum(high, low), low)
    after = tl.maximum(high, tl.cdiv(tl.maximum(tile_end, 0), BM))
    if HAS_WINDOW:
        until = tl.minimum(until, tl.maximum(tile_begin + window, 0) // BM)
    return low, high, after, tl.maximum(until, after)


@triton.jit
def visits(plan, key_tile, pinned):
    """Of every key, whether the queries of a plan's block visit its tile: where it is pinned, whatever the masks allow (2, 3),
    else the certified band (0, 1).
    """
    first = tl.where(pinned, tl.load(plan + 2), tl.load(plan))
    last = tl.where(pinned, tl.load(plan + 3), tl.load(plan + 1))
    return (first <= key_tile) & (key_tile < last)


@triton.jit
def of_values(p, v, do, dv, i, j, head, dropout, seed, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr):
    """(dp, dv) after a tile of weights p, keys by queries; with dropout the weights are those that forward kept."""
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    if HAS_DROPOUT:
        kept = kept_weights(seed, head, i[None, :], j[:, None], dropout)
        dp, p = dp * kept, p * kept
    return dp, tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)


@triton.jit
def key_kernel(
    Q, K, V, DOUT, LSE, DELTA, DK, DV, SLOPES, RIGHT, FIRST, PLAN, ASKED, OPEN_TO, MASK, QUERY_SEGMENTS, KEY_SEGMENTS,
    ORDER, SEED,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, slopes_b, right_b, first_b,
    scale, window, dropout, H, G, T, S, N,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OPEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: BN keys of one key head, and all its query heads one after another. ASKED is [B, H, ⌈S / TILE⌉, 3].

    Queries and output gradients that saw nothing hold zeros here (masking their loads would spill registers).
    """
    programs = tl.cdiv(S, BN)
    bk = tl.load(ORDER + tl.program_id(0) // programs).to(tl.int64)
    t = tl.program_id(0) % programs
    kv_heads = H // G
    b, kv = bk // kv_heads, bk % kv_heads
    start = t.to(tl.int64) * BN
    K += b * k_b + kv * k_h + start * k_s
    V += b * v_b + kv * v_h + start * v_s
    origin = tl.load(FIRST + b * first_b).to(tl.int32)
    seed = tl.load(SEED)
    tiles = tl.cdiv(S, TILE)

    jj = tl.arange(0, BN)
    rows = tl.arange(0, BM)
    d = tl.arange(0, DP)
    j = t * BN + jj
    key_tile = j // TILE
    here = j < S
    loaded = here[:, None]
    if D != DP:
        loaded = loaded & (d < D)[None, :]
    k = tl.load(K + jj[:, None] * k_s + d[None, :], mask=loaded, other=0.0)
    v = tl.load(V + jj[:, None] * v_s + d[None, :], mask=loaded, other=0.0)
    if HAS_MASK:
        here = tl.load(MASK + b * S + j, mask=here, other=0) != 0
    theirs = j[:, None]
    if HAS_SEGMENTS:
        theirs = tl.load(KEY_SEGMENTS + b * S + j, mask=j < S, other=0)[:, None]
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)

    for g in range(G):
        h = kv.to(tl.int32) * G + g
        bh = b * H + h
        m = tl.load(SLOPES + b * slopes_b + h) * LOG2E
        right = tl.load(RIGHT + b * right_b + h) * LOG2E
        asked = ASKED + (bh * tiles + key_tile) * 3
        first = tl.min(tl.load(asked, mask=key_tile < tiles, other=NEVER), 0) * (ROWS // BM)
        last = tl.max(tl.load(asked + 1, mask=key_tile < tiles, other=0), 0) * (ROWS // BM)
        last = tl.maximum(tl.minimum(last, tl.cdiv(T, BM)), first)
        pinned = tl.load(asked + 2, mask=key_tile < tiles, other=0) == 1
        plan = PLAN + bh * N * 4
        q_head = Q + b * q_b + h.to(tl.int64) * q_h
        do_head = DOUT + b * do_b + h.to(tl.int64) * do_h
        open_first, open_last = first, last
        if HAS_OPEN:
            open_to = OPEN_TO + (b * tiles + key_tile) * 2
            open_first = tl.max(tl.load(open_to, mask=key_tile < tiles, other=0), 0) * (ROWS // BM)
            open_last = tl.min(tl.load(open_to + 1, mask=key_tile < tiles, other=NEVER), 0) * (ROWS // BM)
        low, high, after, until = inside_blocks(
            tl.maximum(first, open_first), tl.minimum(last, open_last), t * BN, origin, right, window, T, BM, BN, CAUSAL,
            HAS_WINDOW,
        )  # fmt: skip
        for x in tl.range(0, high - low + until - after):
            n = low + x
            n += tl.where(n >= high, after - high, 0)
            i = n * BM + rows
            visited = visits(plan + n * BM // ROWS * 4, key_tile, pinned)
            lse = tl.load(LSE + bh * T + i) * LOG2E
            delta = tl.load(DELTA + bh * T + i)
            q = tile_of(q_head, n, q_t, D, DP, BM)
            do = tile_of(do_head, n, do_t, D, DP, BM)
            slope, near = m, t * BN + BN - 1
            if not CAUSAL:
                if HAS_RIGHT:
                    slope = tl.where(n >= after, m, -right)
                else:
                    slope = tl.where(n >= after, m, -m)
                near = tl.where(n >= after, near, t * BN)
            row = lse + slope * (i + (origin - near)).to(tl.float32)
            row = tl.where(lse != float("-inf"), row, float("inf"))
            column = tl.where(visited, slope * (j - near).to(tl.float32), float("-inf"))
            p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2E) + column[:, None] - row[None, :])
            dp, dv = of_values(p, v, do, dv, i, j, bh, dropout, seed, HAS_DROPOUT, PRECISION)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        for x in tl.range(0, last - first - (high - low + until - after), num_stages=1):
            n = first + x
            if not CAUSAL:
                n += tl.where(n >= low, high - low, 0)
            n += tl.where(n >= after, until - after, 0)
            i = n * BM + rows
            visited = visits(plan + n * BM // ROWS * 4, key_tile, pinned)
            lse = tl.load(LSE + bh * T + i, mask=i < T, other=float("-inf")) * LOG2E
            lse = tl.where(lse != float("-inf"), lse, float("inf"))
            delta = tl.load(DELTA + bh * T + i, mask=i < T, other=0.0)
            q = rows_of(q_head, n * BM, q_t, i < T, D, DP, BM)
            do = rows_of(do_head, n * BM, do_t, i < T, D, DP, BM)
            same = True
            if HAS_SEGMENTS:
                same = theirs == tl.load(QUERY_SEGMENTS + b * T + i, mask=i < T, other=0)[None, :]
            products = tl.dot(k, q.T, input_precision=PRECISION)
            scores, seen = biased_scores(
                products, i[None, :] - (j - origin)[:, None], (here & visited)[:, None], same, m, right, scale * LOG2E, window,
                CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS,
            )  # fmt: skip
            seen = seen & (lse < float("inf"))[None, :]
            p = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
            dp, dv = of_values(p, v, do, dv, i, j, bh, dropout, seed, HAS_DROPOUT, PRECISION)
            ds = tl.where(seen, p * (dp - delta[None, :]), 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    mine = (j < S)[:, None]
    if D != DP:
        mine = mine & (d < D)[None, :]
    # Read once more, so that no register holds the addresses of results through the loop.
    bk = tl.load(ORDER + tl.program_id(0) // programs, volatile=True).to(tl.int64)
    b, kv = bk // kv_heads, bk % kv_heads
    DK += b * dk_b + kv * dk_h + start * dk_s
    DV += b * dv_b + kv * dv_h + start * dv_s
    tl.store(DK + jj[:, None] * dk_s + d[None, :], (dk * scale).to(DK.dtype.element_ty), mask=mine)
    tl.store(DV + jj[:, None] * dv_s + d[None, :], dv.to(DV.dtype.element_ty), mask=mine)
