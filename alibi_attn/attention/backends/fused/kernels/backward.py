"""Backward: the exact gradient of forward's result, over the tiles that matter, without atomics.

With p = exp(score − lse), δ_i = Σ out·dout − dlse and ds = p·(dp − δ):

    dq_i = scale·Σ_j ds_ij·k_j     dk_j = scale·Σ_i ds_ij·q_i     dv_j = Σ_i p_ij·dout_i     dm = −Σ_ij ds_ij·|i − j|

`query_kernel` walks the keys of a block of queries as forward does, and writes δ and the slope's gradient of every query;
`key_kernel` (backward_keys.py) walks the queries that may visit a tile of keys, and checks whether they do. The bands are those
that forward measured, or else those of its plan. Both have one loop for full tiles, where the bias is one number per key and one
per query, and one for partial tiles. The gradients of key_bias and query_bias are sums of ds over queries and over keys, added
tile by tile without loss: a gate's gradient is a sum of their differences.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Head, Outputs, Queries, Rows
from alibi_attn.attention.backends.fused.kernels.bands import (
    band_of,
    full_count,
    full_tile,
    outlier_tile,
    partial_tile,
    uniform_outlier_count,
)
from alibi_attn.attention.backends.fused.kernels.dropout import head_dropout, kept_weights, numbers_of
from alibi_attn.attention.backends.fused.kernels.positions import (
    distance_moved,
    load_first_key,
    load_offset,
    load_window,
    table_of,
)
from alibi_attn.attention.backends.fused.kernels.tiles import (
    LOG2E,
    OUTLIERS,
    TILE,
    add_exactly,
    all_finite,
    base_of,
    bias_for,
    in_log2,
    linear_bias,
    load_rows,
    load_segments,
    load_slope,
    load_tile,
    lse_rows,
    of_head,
    pair_rows,
    partial_scores,
    power,
    shown_keys,
    store_rows,
)


@triton.jit
def query_full(
    tile, queries, head, outputs, found, K, V, least, C, SLOPES_WANTED: tl.constexpr, SUMS_WANTED: tl.constexpr
):
    """The same as `query_partial`, for a tile of keys that every query sees in full."""
    dq, to_left, to_right, sums = found
    lse = outputs.lse
    slope, near = linear_bias(tile, queries.start, head, C.BN, C.CAUSAL)
    j = tile * C.BN + tl.arange(0, C.BN)
    # Load keys and values.
    k, v = load_tile(K, tile, C.BN, C.D), load_tile(V, tile, C.BN, C.D)  # [BN, DP]
    # Scores, their bias, and the weights.
    products = tl.dot(queries.q, k.T, input_precision=C.PRECISION)  # [BM, BN]
    row = (queries.position - queries.start).to(tl.float32)  # [BM]
    if head.table is not None:
        scores = products * head.scale + tl.load(head.table + (queries.position[:, None] - j[None, :]))
        p = power(scores - lse[:, None], head.table)
    else:
        column = slope * (j - near).to(tl.float32)
        if head.bias is not None:
            column += tl.load(head.bias.rest + j)
            lse -= base_of(head.bias, tile, C.BN) - outputs.origin[0]
        scores = products * head.scale + column[None, :]
        p = tl.exp2(scores - (lse + slope * (row + (queries.start - near).to(tl.float32)))[:, None])
    # Gradient of the scores.
    dp = tl.dot(outputs.do, v.T, input_precision=C.PRECISION)
    if head.dropout is not None:
        dp = dp * kept_weights(head.dropout, head.numbers, queries.position, tile * C.BN, C.BN)
    ds = p * (dp - outputs.delta[:, None])
    # Gradients of slopes and biases, and of the queries.
    if SLOPES_WANTED:
        # Σ ds·(position − least − j), counted from the key nearest to the queries.
        away = row + (queries.start - least - near).to(tl.float32)
        moment = tl.sum(ds * (near - j).to(tl.float32)[None, :], 1) + away * tl.sum(ds, 1)
        if C.CAUSAL:
            to_left -= moment
        else:
            is_left = near <= queries.start
            if head.right is not None:
                to_left -= tl.where(is_left, moment, 0.0)
                to_right += tl.where(is_left, 0.0, moment)
            else:
                to_left -= tl.where(is_left, moment, -moment)
    if SUMS_WANTED:
        sums = add_exactly(sums[0], sums[1], tl.sum(ds, 1))
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=C.PRECISION)
    return dq, to_left, to_right, sums


@triton.jit
def causal_weights(tile, queries, head, lse, K, masks, S, C):
    """(p, k, the keys that are read) of a tile in which some keys are hidden from some queries, without key biases.

    Takes few instructions: hidden keys are at a distance of −inf, and a minimum makes p 0 where the distance is negative. NaN
    is not a minimum: it becomes inf if the key is seen.
    """
    jj = tl.arange(0, C.BN)
    j = tile * C.BN + jj
    here = shown_keys(masks, queries.sequence, j, j < S, S)
    k = load_rows(K, tile * C.BN, here, C.BN, C.D)  # [BN, DP]
    products = tl.dot(queries.q, k.T, input_precision=C.PRECISION)  # [BM, BN]
    column = tl.where(here, jj.to(tl.float32), float("inf"))
    distance = (queries.position - tile * C.BN).to(tl.float32)[:, None] - column[None, :]
    exponents = products * head.scale - (head.slope * distance + lse[:, None])
    p = tl.exp2(tl.minimum(exponents, distance * 1e30 + 1e29))
    if head.window is not None:
        p = tl.where((queries.position - head.window)[:, None] < j[None, :], p, 0.0)
    if masks.key_segments is not None:
        segments = tl.load(masks.key_segments + queries.sequence * S + j, mask=here, other=0)
        p = tl.where(queries.segments[:, None] == segments[None, :], p, 0.0)
    if queries.first_key is not None:
        p = tl.where(j[None, :] >= queries.first_key[:, None], p, 0.0)
    return p, k, here


@triton.jit
def query_partial(
    tile, queries, head, outputs, found, K, V, masks, least, S, C, SLOPES_WANTED: tl.constexpr, SUMS_WANTED: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """(dq / scale, −Σ ds·|i − j − least| to the left, to the right, Σ ds and its rounding error) after a tile in which some keys
    are hidden from some queries.

    Unless CAREFUL, a key or value that is not finite also makes dq of the queries from which it is hidden NaN.
    """
    LEAN: tl.constexpr = C.CAUSAL and head.bias is None and head.table is None
    dq, to_left, to_right, sums = found
    j = tile * C.BN + tl.arange(0, C.BN)
    # Keys, masks, scores, their bias, and the weights.
    if LEAN:
        p, k, here = causal_weights(tile, queries, head, outputs.lse, K, masks, S, C)
    else:
        scores, seen, k, here, _ = partial_scores(tile, queries, head, K, masks, S, outputs.origin, C)
        p = tl.where(seen, power(scores - outputs.lse[:, None], head.table), 0.0)  # [BM, BN]
    v = load_rows(V, tile * C.BN, here, C.BN, C.D)  # [BN, DP]
    # Gradient of the scores.
    dp = tl.dot(outputs.do, v.T, input_precision=C.PRECISION)
    if head.dropout is not None:
        dp = dp * kept_weights(head.dropout, head.numbers, queries.position, tile * C.BN, C.BN)
    ds = p * (dp - outputs.delta[:, None])
    if CAREFUL:
        ds = tl.where(p == 0.0, 0.0, ds)
    # Gradients of slopes and biases, and of the queries.
    if SLOPES_WANTED:
        distance = queries.position[:, None] - j[None, :]
        moment = ds * (distance - least).to(tl.float32)
        if LEAN:
            first = tile * C.BN
            away = (queries.position - first - least).to(tl.float32)
            to_left += tl.sum(ds * (j - first).to(tl.float32)[None, :], 1) - away * tl.sum(ds, 1)
        elif head.right is not None:
            to_left -= tl.sum(tl.where(distance > 0, moment, 0.0), 1)
            to_right += tl.sum(tl.where(distance < 0, moment, 0.0), 1)
        elif C.CAUSAL:
            to_left -= tl.sum(moment, 1)
        else:
            to_left -= tl.sum(tl.where(distance > 0, moment, -moment), 1)
    if SUMS_WANTED:
        sums = add_exactly(sums[0], sums[1], tl.sum(ds, 1))
    if CAREFUL:
        # 0·NaN is NaN: zero the bad keys. The queries that see one have a ds of NaN already.
        k = tl.where(all_finite(k)[:, None], k, 0.0).to(k.dtype)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=C.PRECISION)
    return dq, to_left, to_right, sums


@triton.jit
def over_tiles(
    queries, head, outputs, K, V, masks, band, outliers, least, S, C, SLOPES_WANTED: tl.constexpr, SUMS_WANTED: tl.constexpr,
    CAREFUL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The results of `query_partial` after all tiles of a block of queries; STAGES of both loops, None = the kernel's."""
    zero = tl.zeros([queries.q.shape[0]], tl.float32)
    found = tl.zeros(queries.q.shape, tl.float32), zero, zero, (zero, zero)
    for x in tl.range(0, full_count(band), num_stages=STAGES):
        tile = full_tile(x, band, C.CAUSAL)
        found = query_full(tile, queries, head, outputs, found, K, V, least, C, SLOPES_WANTED, SUMS_WANTED)
    partial = tl.maximum(band.last - band.first, 0) - full_count(band)
    for x in tl.range(0, partial + uniform_outlier_count(outliers) * (TILE // C.BN), num_stages=STAGES):
        tile = tl.where(
            x < partial, partial_tile(x, band, C.CAUSAL), outlier_tile(tl.maximum(x - partial, 0), outliers, C.BN)
        )
        found = query_partial(
            tile, queries, head, outputs, found, K, V, masks, least, S, C, SLOPES_WANTED, SUMS_WANTED, CAREFUL
        )
    return found


@triton.jit
def of_each_query(bh, T, C):
    """Where the numbers of a head begin that `query_kernel` leaves to `key_kernel`, one per query of all blocks of the plan."""
    return bh * (tl.cdiv(T, C.ROWS) * C.ROWS)


@triton.jit
def query_kernel(Q, K, V, OUT, DOUT, DQ, LSE, DLSE, DELTA, SHIFTED, DSLOPES, SUMS, call, visited, ORDER, C):
    """Program: one block of BM queries of one head, as in forward; a block of the plan has ROWS, one of `bands` UNIT.

    Args:
        DESCRIBED: K and V are descriptors. No row is masked while loading, so if dq is not finite, all is done again with care.
        LSE, DLSE, DELTA: [B, H, T] fp32, LSE in the layout of `lse_rows`; DLSE may be None.
        SHIFTED: [B, H, T] fp32: lse + slope·(i mod TILE), which spares `key_kernel` a bias per query; None = not wanted.
        DSLOPES: [2, B, H, T] fp32, from the keys to the left and to the right; None = not wanted.
        SUMS: [2, B, H, T] fp32: Σ ds over keys, and its rounding error; None = not wanted.
    """
    H, G, T, S = call.H, call.G, call.T, call.S
    programs = tl.cdiv(T, C.BM)
    bh = tl.load(ORDER + tl.program_id(0) // programs).to(tl.int64)
    n = programs - 1 - tl.program_id(0) % programs
    b, h = bh // H, (bh % H).to(tl.int32)
    kv = (h // G).to(tl.int64)
    if C.DESCRIBED:
        K, V = Rows(K, b.to(tl.int32), kv.to(tl.int32), None), Rows(V, b.to(tl.int32), kv.to(tl.int32), None)
    else:
        K, V = of_head(K, b, kv), of_head(V, b, kv)
    right = load_slope(call.right_slopes, b, h)
    dropout = head_dropout(call, b, h)
    numbers = numbers_of(call, b)
    window = load_window(call, b)
    bias = bias_for(call.key_bias, bh, bh * tl.cdiv(T, C.ROWS) + n * C.BM // C.ROWS, tl.cdiv(S, TILE), S)
    unit: tl.constexpr = LOG2E if call.table is None else 1.0
    table = table_of(call, b, h)
    head = Head(bh, load_slope(call.slopes, b, h), right, call.scale * unit, window, dropout, bias, numbers, table)

    rows = tl.arange(0, C.BM)
    i = n * C.BM + rows
    # A query that sees no key is never used, whatever it contains: an infinite lse makes its weights 0.
    LSE, origin = lse_rows(LSE, bh, b, H, T, call.key_bias), None
    lse = in_log2(tl.load(LSE + i, mask=i < T, other=float("-inf")), call)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # [BM]
    if call.key_bias is not None:
        high, low = pair_rows(LSE, H, T)
        origin = tl.load(high + i, mask=i < T, other=0.0), tl.load(low + i, mask=i < T, other=0.0)
    used = (i < T) & (lse != float("inf"))
    q = load_rows(of_head(Q, b, h), n * C.BM, used, C.BM, C.D)  # [BM, DP]
    do = load_rows(of_head(DOUT, b, h), n * C.BM, used, C.BM, C.D)
    out = load_rows(of_head(OUT, b, h), n * C.BM, used, C.BM, C.D)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + bh * T + i, mask=used, other=0.0)
    at = of_each_query(bh, T, C)
    tl.store(DELTA + at + i, delta)
    if SHIFTED is not None:
        tl.store(SHIFTED + at + i, lse + head.slope * (i % TILE).to(tl.float32))
    segments = load_segments(call.masks.query_segments, b, i, i < T, T)
    start = n * C.BM + load_offset(call.query_offset, b, T, S)
    first_key = load_first_key(call, bh, i, i < T)
    position = start + rows
    if call.table is not None:  # it has no numbers for queries past the last one
        position = tl.minimum(position, start + (T - 1 - n * C.BM))
    queries = Queries(q, i, position, start, segments, b, first_key)
    # If a whole block lies beyond the keys, a constant is left out of its distances, because a row of ds adds up to dlse.
    # Otherwise the rounding of products with distances of 10⁶ would exceed their sum.
    least = tl.maximum(start - (S - 1), 0) + tl.minimum(start + C.BM - 1, 0)
    blocks = tl.cdiv(T, C.ROWS)
    band = band_of(visited, b, h, n, start, head, T, S, C)
    outliers = visited.beside + b * visited.row + (h * blocks + n * C.BM // C.ROWS) * OUTLIERS
    outputs = Outputs(do, lse, origin, delta)
    dq, to_left, to_right, sums = over_tiles(
        queries, head, outputs, K, V, call.masks, band, outliers, least, S, C, DSLOPES is not None, SUMS is not None,
        CAREFUL=not C.DESCRIBED, STAGES=None,
    )  # fmt: skip
    if C.DESCRIBED:
        is_finite = tl.min(all_finite(dq).to(tl.int32), 0) != 0
        if not is_finite:
            dq, to_left, to_right, sums = over_tiles(
                queries, head, outputs, K, V, call.masks, band, outliers, least, S, C, DSLOPES is not None, SUMS is not None,
                CAREFUL=True, STAGES=1,
            )  # fmt: skip

    # Loaded once more, so that no register holds the addresses of results during the loop.
    bh = tl.load(ORDER + tl.program_id(0) // programs, volatile=True).to(tl.int64)
    store_rows(of_head(DQ, bh // H, bh % H), n * C.BM, dq * call.scale, i < T, C.BM, C.D)
    if DSLOPES is not None:
        if DLSE is not None:
            due = tl.load(DLSE + bh * T + i, mask=used, other=0.0)
            least += distance_moved(call.query_offset, bh // H, T, S)
            if call.right_slopes is not None:
                to_left -= tl.maximum(least, 0).to(tl.float32) * due
                to_right += tl.minimum(least, 0).to(tl.float32) * due
            else:
                to_left -= tl.abs(least).to(tl.float32) * due
        every = tl.num_programs(0).to(tl.int64) // programs * T
        tl.store(DSLOPES + bh * T + i, to_left, mask=i < T)
        tl.store(DSLOPES + every + bh * T + i, to_right, mask=i < T)
    if SUMS is not None:
        tl.store(SUMS + bh * T + i, sums[0], mask=i < T)
        tl.store(SUMS + tl.num_programs(0).to(tl.int64) // programs * T + bh * T + i, sums[1], mask=i < T)
