"""Backward for keys and values: the gradients of `backward.py`, summed over the queries that visit a tile of keys.

One loop is for blocks of queries that see all of the keys, and one for the others.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Head
from alibi_attn.attention.backends.fused.kernels.backward import of_each_query
from alibi_attn.attention.backends.fused.kernels.bands import blocks_of, full_count, full_tile, partial_tile
from alibi_attn.attention.backends.fused.kernels.dropout import head_dropout, kept_by_keys, numbers_of
from alibi_attn.attention.backends.fused.kernels.positions import (
    load_first_key,
    load_offset,
    load_window,
    table_of,
)
from alibi_attn.attention.backends.fused.kernels.tiles import (
    LOG2E,
    TILE,
    add_exactly,
    biased_scores,
    in_log2,
    load_described,
    load_rows,
    load_segments,
    load_slope,
    load_tile,
    lse_rows,
    of_head,
    padded,
    pair_rows,
    power,
    shown_keys,
    store_rows,
)

STEEPEST = tl.constexpr(16.0 * 1.4426950408889634)  # the largest slope with a `SHIFTED` lse of enough digits


@triton.jit
def is_visited(band, key_tile):
    """Whether a block of queries visits a tile of keys; `band` is the interval that holds for such tiles."""
    return (tl.load(band) <= key_tile) & (key_tile < tl.load(band + 1))


@triton.jit
def visitors_of(visitors, b, bh, h, key_tile, tiles, blocks):
    """(first, last, bands): the blocks that may visit a tile of keys, and the intervals of all `blocks`, 4 numbers apart: of an
    outlier tile where the masks allow it, of others the certified or the measured one.
    """
    candidates = visitors.candidates + (bh * tiles + key_tile) * 3
    bands = visitors.bands + b * visitors.row + h * blocks * 4
    first = tl.load(candidates)
    return first, tl.maximum(tl.load(candidates + 1), first), bands + tl.load(candidates + 2) * 2


@triton.jit
def last_repeated(X, j, S, C):
    """Rows j of a head, and the last one for rows past it: a mask would occupy registers. Their gradients are not stored."""
    at = X.pointer + tl.minimum(j, S - 1).to(tl.int64)[:, None] * X.row + tl.arange(0, padded(C.D))[None, :]
    if padded(C.D) == C.D:
        rows = tl.load(at)
    else:
        rows = tl.load(at, mask=(tl.arange(0, padded(C.D)) < C.D)[None, :], other=0.0)
    return rows


@triton.jit
def block_of(X, b, h, n, T, C, WHOLE: tl.constexpr):
    """Block n of BM queries of a head, [BM, DP]; zeros past the last. X: Rows, or a descriptor of their tensor."""
    if C.DESCRIBED:
        rows = load_described(X, b, h, n * C.BM, C.BM, C.D)
    elif WHOLE:
        rows = load_tile(of_head(X, b, h), n, C.BM, C.D)
    else:
        rows = load_rows(of_head(X, b, h), n * C.BM, n * C.BM + tl.arange(0, C.BM) < T, C.BM, C.D)
    return rows


@triton.jit
def full_exponents(n, i, j, products, head, lse, band, tile_start, offset, visited, rest, C):
    """score − lse, keys by queries, of a block of queries that sees the keys in full; −∞ if it does not visit them."""
    slope, near = head.slope, tile_start + C.BN - 1
    if not C.CAUSAL:
        away = head.slope
        if head.right is not None:
            away = head.right
        slope = tl.where(n >= band.after, head.slope, -away)
        near = tl.where(n >= band.after, near, tile_start)
    row = lse + slope * (i + (offset - near)).to(tl.float32)
    row = tl.where(lse != float("-inf"), row, float("inf"))
    column = slope * (j - near).to(tl.float32)  # [BN]
    if rest is not None:
        column += rest
    column += tl.where(visited, 0.0, float("-inf"))
    return products * head.scale + column[:, None] - row[None, :]


@triton.jit
def after_queries(p, seen, q, do, v, DELTA, position, j, head, dk, dv, sums, C, SUMS_WANTED: tl.constexpr):
    """(dk / scale, dv, Σ ds and its rounding error) after a block of queries with these weights, keys by queries.

    `seen` None: every weight counts.
    """
    # Gradient of the values.
    weights = p
    if head.dropout is not None:
        kept = kept_by_keys(head.dropout, head.numbers, position, j)
        weights = p * kept
    dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=C.PRECISION)
    # Gradients of the scores and of the keys.
    dp = tl.dot(v, do.T, input_precision=C.PRECISION)  # [BN, BM]
    if head.dropout is not None:
        dp = dp * kept
    ds = p * (dp - tl.load(DELTA + tl.arange(0, p.shape[1]))[None, :])
    if seen is not None:
        ds = tl.where(seen, ds, 0.0)
    if SUMS_WANTED:
        sums = add_exactly(sums[0], sums[1], tl.sum(ds, 1))
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=C.PRECISION), dv, sums


@triton.jit
def key_kernel(Q, K, V, DOUT, DK, DV, LSE, SHIFTED, DELTA, SUMS, call, visitors, ORDER, C):
    """Program: BN keys of one key head, and all its query heads one after another; ORDER [B·K] int32. BN divides TILE.
    A block of the plan has ROWS queries, one of `visitors` UNIT, a multiple of BM.

    DESCRIBED: Q and DOUT are descriptors.
    SHIFTED [B, H, T] fp32: as in `query_kernel`.
    SUMS [2, B, H, S] fp32: Σ ds over queries, and its rounding error; None = not wanted.
    Queries that see no key, and their output gradients, must be zeros (masking their loads would spill registers).
    """
    H, G, T, S = call.H, call.G, call.T, call.S
    unit: tl.constexpr = LOG2E if call.table is None else 1.0
    programs = tl.cdiv(S, C.BN)
    bk = tl.load(ORDER + tl.program_id(0) // programs).to(tl.int64)
    t = tl.program_id(0) % programs
    kv_heads = H // G
    b, kv = bk // kv_heads, bk % kv_heads
    offset = load_offset(call.query_offset, b, T, S)
    window = load_window(call, b)
    tiles, blocks = tl.cdiv(S, TILE), tl.cdiv(T, C.ROWS) * (C.ROWS // C.UNIT)
    key_tile = t * C.BN // TILE

    rows = tl.arange(0, C.BM)
    jj = tl.arange(0, C.BN)
    j = t * C.BN + jj
    k = last_repeated(of_head(K, b, kv), j, S, C)  # [BN, DP]
    v = last_repeated(of_head(V, b, kv), j, S, C)
    here = shown_keys(call.masks, b, j, j < S, S)
    segments = load_segments(call.masks.key_segments, b, j, j < S, S)
    dk = tl.zeros([C.BN, padded(C.D)], tl.float32)
    dv = tl.zeros([C.BN, padded(C.D)], tl.float32)

    for g in range(G):
        h = kv.to(tl.int32) * G + g
        bh = b * H + h
        right = load_slope(call.right_slopes, b, h)
        dropout = head_dropout(call, b, h)
        numbers = numbers_of(call, b)
        table = table_of(call, b, h)
        head = Head(bh, load_slope(call.slopes, b, h), right, call.scale * unit, window, dropout, None, numbers, table)
        first, last, bands = visitors_of(visitors, b, bh, h, key_tile, tiles, blocks)
        first = first * (C.UNIT // C.BM)
        last = tl.maximum(tl.minimum(last * (C.UNIT // C.BM), tl.cdiv(T, C.BM)), first)
        shown_here, of_sequence, rest = here, b * visitors.row, None
        if call.key_bias is not None:
            of_sequence += h * tiles * 2
            rest = tl.load(call.key_bias.rest + bh * S + j, mask=here, other=float("-inf"))  # [BN]
            shown_here = here & (rest > float("-inf"))
            base = tl.load(call.key_bias.bases + bh * tiles + key_tile)
        LSE_h, at = lse_rows(LSE, bh, b, H, T, call.key_bias), of_each_query(bh, T, C)
        sums = tl.zeros([C.BN], tl.float32), tl.zeros([C.BN], tl.float32)
        full_first, full_last = first, last
        if visitors.full is not None:
            full = visitors.full + of_sequence + key_tile * 2
            full_first, full_last = tl.load(full) * (C.ROWS // C.BM), tl.load(full + 1) * (C.ROWS // C.BM)
        if SHIFTED is not None:
            # The shift would cost digits: a tile or two are within reach of such a head.
            full_last = tl.where(tl.abs(head.slope) <= STEEPEST, full_last, 0)
        if call.table is not None:  # it has no numbers for keys past the last one
            full_last = tl.where(t * C.BN + C.BN > S, 0, full_last)
        band = blocks_of(first, last, full_first, full_last, t * C.BN, offset, head, T, C)
        for x in tl.range(0, full_count(band)):
            n = band.after + x  # if causal, no block before the keys sees them
            if not C.CAUSAL:
                n = full_tile(x, band, CAUSAL=False)
            i = n * C.BM + rows
            visited = is_visited(bands + n * C.BM // C.UNIT * 4, key_tile)
            if SHIFTED is not None:
                row = tl.load(SHIFTED + (at + n * C.BM) + rows)
            q = block_of(Q, b, h, n, T, C, WHOLE=True)
            do = block_of(DOUT, b, h, n, T, C, WHOLE=True)
            products = tl.dot(k, q.T, input_precision=C.PRECISION)  # [BN, BM]
            if SHIFTED is not None:
                column = head.slope * (jj + (t * C.BN - offset - n * C.BM // TILE * TILE)).to(tl.float32)
                if call.key_bias is not None:
                    column += rest
                    row -= base - tl.load(pair_rows(LSE_h, H, T)[0] + i)
                column += tl.where(visited, 0.0, float("-inf"))
                exponents = products * head.scale + column[:, None] - row[None, :]
            else:
                lse = in_log2(tl.load(LSE_h + i), call)  # [BM]
                if call.key_bias is not None:
                    lse -= base - tl.load(pair_rows(LSE_h, H, T)[0] + i)
                if call.table is not None:
                    distance = (i + offset)[None, :] - j[:, None]
                    exponents = products * head.scale + tl.load(head.table + distance) - lse[None, :]
                else:
                    exponents = full_exponents(n, i, j, products, head, lse, band, t * C.BN, offset, visited, rest, C)
            p = power(exponents, head.table)
            dk, dv, sums = after_queries(
                p, None, q, do, v, DELTA + (at + n * C.BM), i + offset, j, head, dk, dv, sums, C, SUMS is not None
            )
        for x in tl.range(0, last - first - full_count(band)):
            n = partial_tile(x, band, CAUSAL=False)
            i = n * C.BM + rows
            visited = is_visited(bands + n * C.BM // C.UNIT * 4, key_tile)
            lse = in_log2(tl.load(LSE_h + i, mask=i < T, other=float("-inf")), call)
            lse = tl.where(lse != float("-inf"), lse, float("inf"))
            q = block_of(Q, b, h, n, T, C, WHOLE=False)
            do = block_of(DOUT, b, h, n, T, C, WHOLE=False)
            shown = (shown_here & visited)[:, None]
            if segments is not None:
                theirs = tl.load(call.masks.query_segments + b * T + i, mask=i < T, other=0)
                shown = shown & (segments[:, None] == theirs[None, :])
            if call.query_start is not None:
                shown = shown & (j[:, None] >= load_first_key(call, bh, i, i < T)[None, :])
            products = tl.dot(k, q.T, input_precision=C.PRECISION)
            scores, seen = biased_scores(products, i[None, :] - (j - offset)[:, None], shown, head, C.CAUSAL)
            if call.key_bias is not None:
                # Loaded each time, or they would occupy registers in both loops.
                pairs = call.key_bias.pairs + bh * 2 * S + j
                own_high, own_low = tl.load(pairs, mask=here, other=0.0), tl.load(pairs + S, mask=here, other=0.0)
                high, low = pair_rows(LSE_h, H, T)
                high, low = tl.load(high + i, mask=i < T, other=0.0), tl.load(low + i, mask=i < T, other=0.0)
                scores += (own_high[:, None] - high[None, :]) + (own_low[:, None] - low[None, :])
            if call.table is not None:
                seen = (seen & (lse != float("inf"))[None, :]) != 0  # in the interpreter a mask must be bool
                scores += tl.load(head.table + ((i + offset)[None, :] - j[:, None]), mask=seen, other=0.0)
            else:
                seen = seen & (lse < float("inf"))[None, :]
            p = tl.where(seen, power(scores - lse[None, :], head.table), 0.0)
            dk, dv, sums = after_queries(
                p, seen, q, do, v, DELTA + (at + n * C.BM), i + offset, j, head, dk, dv, sums, C, SUMS is not None
            )
        if SUMS is not None:
            every = tl.num_programs(0).to(tl.int64) // programs * G * S
            tl.store(SUMS + bh * S + j, sums[0], mask=j < S)
            tl.store(SUMS + every + bh * S + j, sums[1], mask=j < S)

    # Loaded once more, so that no register holds the addresses of results during the loop.
    bk = tl.load(ORDER + tl.program_id(0) // programs, volatile=True).to(tl.int64)
    b, kv = bk // kv_heads, bk % kv_heads
    store_rows(of_head(DK, b, kv), t * C.BN, dk * call.scale, j < S, C.BN, C.D)
    store_rows(of_head(DV, b, kv), t * C.BN, dv, j < S, C.BN, C.D)
