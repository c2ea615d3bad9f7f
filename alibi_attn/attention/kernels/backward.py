"""Backward: the exact gradient of what forward computed, on the tiles that forward visited, without atomics.

With p = exp(score − lse), δ_i = Σ out·dout − dlse and ds = p·(dp − δ):

    dq_i = scale·Σ_j ds_ij·k_j     dk_j = scale·Σ_i ds_ij·q_i     dv_j = Σ_i p_ij·dout_i     dm = −Σ_ij ds_ij·|i − j|

`query_kernel` walks the keys of a block of queries as forward does, and leaves δ and the slope's gradient of every query;
`key_kernel` walks the queries that may have visited a tile of keys, and asks each block's plan whether it did.
"""

# mypy: ignore-errors
# Triton is a language of its own in the clothes of Python; types mean nothing to it.

import triton
import triton.language as tl

from alibi_attn.attention.kernels.forward import LOG2E, PINS, biased_scores, kept_weights


@triton.jit
def query_tile(
    tile, q, do, lse, delta, dq, to_left, to_right, K, V, FLAGS, KEY_SEGMENTS, own, i, position, head, k_s, v_s, m, right,
    scale, window, dropout, seed, S,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_DROPOUT: tl.constexpr, SLOPES_WANTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: (dq / scale, −Σ ds·|i − j| to the left, to the right) after it."""
    start = tl.cast(tile, tl.int64) * BN
    jj = tl.arange(0, BN)
    d = tl.arange(0, DP)
    inside = tile * BN + jj < S
    flag = tl.load(FLAGS + start + jj, mask=inside, other=1)
    fine = (flag == 0)[:, None]
    if D != DP:
        fine = fine & (d < D)[None, :]
    k = tl.load(K + start * k_s + jj[:, None] * k_s + d[None, :], mask=fine, other=0.0)
    v = tl.load(V + start * v_s + jj[:, None] * v_s + d[None, :], mask=fine, other=0.0)
    j = (tile * BN + jj)[None, :]
    same = True
    if HAS_SEGMENTS:
        same = own == tl.load(KEY_SEGMENTS + start + jj, mask=inside, other=0)[None, :]
    distance = position - j
    products = tl.dot(q, k.T, input_precision=PRECISION)
    scores, seen = biased_scores(
        products, distance, flag[None, :], same, m, right, scale, window, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS
    )
    p = tl.exp2(scores - lse[:, None])
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    if HAS_DROPOUT:
        dp = dp * kept_weights(seed, head, i, j, dropout)
    ds = tl.where(seen & (lse > float("-inf"))[:, None], p * (dp - delta[:, None]), 0.0)
    if SLOPES_WANTED:
        moment = ds * distance.to(tl.float32)
        if HAS_RIGHT:
            to_left -= tl.sum(tl.where(distance > 0, moment, 0.0), 1)
            to_right += tl.sum(tl.where(distance < 0, moment, 0.0), 1)
        else:
            to_left -= tl.sum(tl.where(distance > 0, moment, -moment), 1)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, to_left, to_right


@triton.jit
def query_kernel(
    Q, K, V, OUT, DOUT, LSE, DLSE, DELTA, DQ, DSLOPES, SLOPES, RIGHT, FIRST, PLAN, PIN_TABLE, FLAGS, QUERY_SEGMENTS,
    KEY_SEGMENTS, ORDER, SEED,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, slopes_b, right_b, first_b,
    scale, window, dropout, H, G, T, S, N,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_DLSE: tl.constexpr, SLOPES_WANTED: tl.constexpr, PRECISION: tl.constexpr,
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
    FLAGS += (b * (H // G) + kv) * S
    KEY_SEGMENTS += b * S
    m = tl.load(SLOPES + b * slopes_b + h) * LOG2E
    right = tl.load(RIGHT + b * right_b + h) * LOG2E
    seed = tl.load(SEED)

    rows = tl.arange(0, BM)
    d = tl.arange(0, DP)
    i = n * BM + rows
    lse = tl.load(LSE + bh * T + i, mask=i < T, other=float("-inf")) * LOG2E
    # A query that saw nothing is never used, whatever is in it.
    ours = ((i < T) & (lse != float("-inf")))[:, None]
    if D != DP:
        ours = ours & (d < D)[None, :]
    q = tl.load(Q + rows[:, None] * q_t + d[None, :], mask=ours, other=0.0)
    do = tl.load(DOUT + rows[:, None] * do_t + d[None, :], mask=ours, other=0.0)
    out = tl.load(OUT + rows[:, None] * o_t + d[None, :], mask=ours, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + bh * T + i, mask=(i < T) & (lse != float("-inf")), other=0.0)
    tl.store(DELTA + bh * T + i, delta, mask=i < T)
    own = i[:, None]
    if HAS_SEGMENTS:
        own = tl.load(QUERY_SEGMENTS + b * T + i, mask=i < T, other=0)[:, None]
    position = (i + tl.load(FIRST + b * first_b).to(tl.int32))[:, None]
    dq = tl.zeros([BM, DP], tl.float32)
    to_left = tl.zeros([BM], tl.float32)
    to_right = tl.zeros([BM], tl.float32)

    block = bh * N + n * BM // ROWS
    first = tl.load(PLAN + block * 4) * (TILE // BN)
    last = tl.minimum(tl.load(PLAN + block * 4 + 1) * (TILE // BN), tl.cdiv(S, BN))
    for tile in tl.range(first, last):
        dq, to_left, to_right = query_tile(
            tile, q, do, lse, delta, dq, to_left, to_right, K, V, FLAGS, KEY_SEGMENTS, own, i[:, None], position, bh, k_s, v_s,
            m, right, scale * LOG2E, window, dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS,
            HAS_DROPOUT, SLOPES_WANTED, PRECISION,
        )  # fmt: skip
    pinned = tl.sum((tl.load(PIN_TABLE + block * PINS + tl.arange(0, PINS)) >= 0).to(tl.int32), 0)
    for x in tl.range(0, pinned * (TILE // BN), num_stages=1):
        tile = tl.load(PIN_TABLE + block * PINS + x // (TILE // BN)) * (TILE // BN) + x % (TILE // BN)
        dq, to_left, to_right = query_tile(
            tile, q, do, lse, delta, dq, to_left, to_right, K, V, FLAGS, KEY_SEGMENTS, own, i[:, None], position, bh, k_s, v_s,
            m, right, scale * LOG2E, window, dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS,
            HAS_DROPOUT, SLOPES_WANTED, PRECISION,
        )  # fmt: skip

    mine = (i < T)[:, None]
    if D != DP:
        mine = mine & (d < D)[None, :]
    # Read once more, so that no register holds the addresses of results through the loop.
    bh = tl.load(ORDER + tl.program_id(0) // programs, volatile=True).to(tl.int64)
    DQ += bh // H * dq_b + bh % H * dq_h + at * dq_t
    tl.store(DQ + rows[:, None] * dq_t + d[None, :], (dq * scale).to(DQ.dtype.element_ty), mask=mine)
    if SLOPES_WANTED:
        every = tl.num_programs(0).to(tl.int64) // programs * T
        tl.store(DSLOPES + bh * T + i, to_left, mask=i < T)
        tl.store(DSLOPES + every + bh * T + i, to_right, mask=i < T)


@triton.jit
def key_kernel(
    Q, K, V, DOUT, LSE, DELTA, DK, DV, SLOPES, RIGHT, FIRST, PLAN, ASKED, FLAGS, QUERY_SEGMENTS, KEY_SEGMENTS, ORDER, SEED,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, slopes_b, right_b, first_b,
    scale, window, dropout, H, G, T, S, N,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
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
    key_tile = t * BN // TILE

    jj = tl.arange(0, BN)
    rows = tl.arange(0, BM)
    d = tl.arange(0, DP)
    j = t * BN + jj
    flag = tl.load(FLAGS + (b * kv_heads + kv) * S + j, mask=j < S, other=1)
    fine = (flag == 0)[:, None]
    if D != DP:
        fine = fine & (d < D)[None, :]
    k = tl.load(K + jj[:, None] * k_s + d[None, :], mask=fine, other=0.0)
    v = tl.load(V + jj[:, None] * v_s + d[None, :], mask=fine, other=0.0)
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
        asked = ASKED + (bh * tl.cdiv(S, TILE) + key_tile) * 3
        pinned = tl.load(asked + 2)
        stop = tl.minimum(tl.load(asked + 1) * (ROWS // BM), tl.cdiv(T, BM))
        q_head = Q + b * q_b + h.to(tl.int64) * q_h
        do_head = DOUT + b * do_b + h.to(tl.int64) * do_h
        for n in tl.range(tl.load(asked) * (ROWS // BM), stop):
            at = tl.cast(n, tl.int64) * BM
            i = n * BM + rows
            # Inside a pinned tile's range the plan of what masks allow decides (2, 3), else that of the band (0, 1).
            plan = PLAN + (bh * N + n * BM // ROWS) * 4 + 2 * pinned
            visits = (tl.load(plan) <= key_tile) & (key_tile < tl.load(plan + 1))
            lse = tl.load(LSE + bh * T + i, mask=i < T, other=float("-inf")) * LOG2E
            delta = tl.load(DELTA + bh * T + i, mask=i < T, other=0.0)
            saw = lse != float("-inf")
            ours = (i < T)[:, None]
            if D != DP:
                ours = ours & (d < D)[None, :]
            q = tl.load(q_head + at * q_t + rows[:, None] * q_t + d[None, :], mask=ours, other=0.0)
            do = tl.load(do_head + at * do_t + rows[:, None] * do_t + d[None, :], mask=ours, other=0.0)
            same = True
            if HAS_SEGMENTS:
                same = theirs == tl.load(QUERY_SEGMENTS + b * T + i, mask=i < T, other=0)[None, :]
            products = tl.dot(k, q.T, input_precision=PRECISION)
            scores, seen = biased_scores(
                products, (i + origin)[None, :] - j[:, None], flag[:, None], same, m, right, scale * LOG2E, window,
                CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS,
            )  # fmt: skip
            seen = seen & (saw & visits)[None, :]
            p = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
            dp = tl.dot(v, do.T, input_precision=PRECISION)
            if HAS_DROPOUT:
                kept = kept_weights(seed, bh, i[None, :], j[:, None], dropout)
                dv = tl.dot((p * kept).to(do.dtype), do, dv, input_precision=PRECISION)
                dp = dp * kept
            else:
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
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
