"""The gradients of queries, keys and values with a table, over the tiles that forward visited; formulas as in `backward.py`.

Read next: `table_diagonals.py`, for the gradient of the table.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Head, Queries
from alibi_attn.attention.backends.fused.kernels.bands import band_of, blocks_of, full_count, full_tile, partial_tile
from alibi_attn.attention.backends.fused.kernels.dropout import head_dropout, kept_by_keys, kept_weights
from alibi_attn.attention.backends.fused.kernels.positions import load_offset, load_window
from alibi_attn.attention.backends.fused.kernels.table import nats, numbers_of, table_scores
from alibi_attn.attention.backends.fused.kernels.tiles import (
    TILE,
    all_finite,
    biased_scores,
    load_rows,
    load_segments,
    load_tile,
    of_head,
    padded,
    shown_keys,
    store_rows,
)

NO_BLOCK = tl.constexpr(2**20)  # past the last block of queries


@triton.jit
def load_lse(LSE, i, T):
    """lse of queries i; +inf where a query sees no key, or does not exist, so that its weights are 0."""
    lse = tl.load(LSE + i, mask=i < T, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def query_tile(tile, queries, head, numbers, do, lse, delta, dq, K, V, call, C, FULL: tl.constexpr):
    """dq / scale after a tile."""
    # Keys, scores and their bias.
    scores, k, here = table_scores(tile, queries, head, numbers, K, call, C, FULL)
    # Values.
    if FULL:
        v = load_tile(V, tile, C.BN, C.D)  # [BN, DP]
    else:
        v = load_rows(V, tile * C.BN, here, C.BN, C.D)
        # 0·NaN is NaN: zero the bad keys. The queries that see one have a ds of NaN already.
        k = tl.where(all_finite(k)[:, None], k, 0.0).to(k.dtype)
    # Weights, and the gradient of scores.
    p = nats(scores - lse[:, None])  # [BM, BN]
    dp = tl.dot(do, v.T, input_precision=C.PRECISION)
    if head.dropout is not None:
        dp = dp * kept_weights(head.dropout, head.numbers, queries.position, tile * C.BN, C.BN)
    ds = p * (dp - delta[:, None])
    if not FULL:
        ds = tl.where(scores == float("-inf"), 0.0, ds)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=C.PRECISION)


@triton.jit
def table_query_kernel(Q, K, V, OUT, DOUT, DQ, DLSE, LSE, DELTA, table, call, visited, C):
    """Program: one block of BM queries of one head, as in forward. LSE, DELTA, DLSE (may be None): [B, H, T] fp32."""
    H, G, T, S = call.H, call.G, call.T, call.S
    blocks = tl.cdiv(T, C.BM)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    n = blocks - 1 - tl.program_id(0) % blocks
    b, h = bh // H, (bh % H).to(tl.int32)
    K, V = of_head(K, b, (h // G).to(tl.int64)), of_head(V, b, (h // G).to(tl.int64))
    dropout = head_dropout(call, b, h)
    window = load_window(call, b)
    head = Head(bh, 0.0, None, call.scale, window, dropout)
    numbers = numbers_of(table, call, b, h)

    rows = tl.arange(0, C.BM)
    i = n * C.BM + rows
    lse = load_lse(LSE + bh * T, i, T)
    used = (i < T) & (lse != float("inf"))  # others are never used, whatever they contain
    q = load_rows(of_head(Q, b, h), n * C.BM, used, C.BM, C.D)  # [BM, DP]
    do = load_rows(of_head(DOUT, b, h), n * C.BM, used, C.BM, C.D)
    out = load_rows(of_head(OUT, b, h), n * C.BM, used, C.BM, C.D)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + bh * T + i, mask=used, other=0.0)
    tl.store(DELTA + bh * T + i, delta, mask=i < T)
    segments = load_segments(call.masks.query_segments, b, i, i < T, T)
    start = n * C.BM + load_offset(call.query_offset, b, T, S)
    position = tl.minimum(start + rows, start + (T - 1 - n * C.BM))
    queries = Queries(q, i, position, start, segments, b, None)
    dq = tl.zeros([C.BM, padded(C.D)], tl.float32)

    band = band_of(visited, b, h, n, start, head, T, S, C)
    for x in tl.range(0, full_count(band)):
        tile = full_tile(x, band, C.CAUSAL)
        dq = query_tile(tile, queries, head, numbers, do, lse, delta, dq, K, V, call, C, FULL=True)
    for x in tl.range(0, tl.maximum(band.last - band.first, 0) - full_count(band), num_stages=1):
        tile = partial_tile(x, band, C.CAUSAL)
        dq = query_tile(tile, queries, head, numbers, do, lse, delta, dq, K, V, call, C, FULL=False)
    store_rows(of_head(DQ, b, h), n * C.BM, dq * call.scale, i < T, C.BM, C.D)


@triton.jit
def key_tile(n, keys, segments, rows, head, offset, numbers, found, call, b, C, FULL: tl.constexpr):
    """(dk / scale, dv) after a block of queries; FULL: none of the keys is hidden from any of them.

    Args:
        keys: (k, v, their indices, those that are read).
        rows: of the queries and of their outputs' gradients, and the addresses of lse and δ, of one head.
        found: the result so far.
    """
    k, v, j, here = keys
    Q, DOUT, LSE, DELTA = rows
    dk, dv = found
    T = call.T
    i = n * C.BM + tl.arange(0, C.BM)
    # Load the queries, and the gradients of their outputs.
    if FULL:  # and every query sees a key
        lse, delta = tl.load(LSE + i), tl.load(DELTA + i)  # [BM]
        q, do = load_tile(Q, n, C.BM, C.D), load_tile(DOUT, n, C.BM, C.D)  # [BM, DP]
    else:
        lse, delta = load_lse(LSE, i, T), tl.load(DELTA + i, mask=i < T, other=0.0)
        q, do = load_rows(Q, n * C.BM, i < T, C.BM, C.D), load_rows(DOUT, n * C.BM, i < T, C.BM, C.D)
    # Scores and their bias, and the weights.
    distance = (i + offset)[None, :] - j[:, None]  # [BN, BM]
    products = tl.dot(k, q.T, input_precision=C.PRECISION)
    if FULL:
        p = nats(products * head.scale + tl.load(numbers + distance) - lse[None, :])
    else:
        shown = here[:, None] & ((i < T) & (lse != float("inf")))[None, :]
        if segments is not None:
            theirs = load_segments(call.masks.query_segments, b, i, i < T, T)
            shown = shown & (segments[:, None] == theirs[None, :])
        scores, seen = biased_scores(products, distance, shown, head, C.CAUSAL)
        scores += tl.load(numbers + distance, mask=seen, other=0.0)
        p = tl.where(seen, nats(scores - lse[None, :]), 0.0)
    # Gradients of values, of scores and of keys.
    dp = tl.dot(v, do.T, input_precision=C.PRECISION)
    kept = p
    if head.dropout is not None:
        factor = kept_by_keys(head.dropout, head.numbers, i + offset, j)
        dp, kept = dp * factor, p * factor
    dv = tl.dot(kept.to(do.dtype), do, dv, input_precision=C.PRECISION)
    ds = p * (dp - delta[None, :])
    if not FULL:
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=C.PRECISION), dv


@triton.jit
def table_key_kernel(Q, K, V, DOUT, DK, DV, LSE, DELTA, table, call, visitors, C):
    """Program: BN keys of one key head, and all its query heads one after another. BN divides TILE.

    Queries that see no key, and their output gradients, must be zeros.
    """
    H, G, T, S = call.H, call.G, call.T, call.S
    programs, tiles = tl.cdiv(S, C.BN), tl.cdiv(S, TILE)
    bk = (tl.program_id(0) // programs).to(tl.int64)
    t = tl.program_id(0) % programs
    b, kv = bk // (H // G), bk % (H // G)
    offset = load_offset(call.query_offset, b, T, S)
    window = load_window(call, b)
    j = t * C.BN + tl.arange(0, C.BN)
    k = load_rows(of_head(K, b, kv), t * C.BN, j < S, C.BN, C.D)  # [BN, DP]
    v = load_rows(of_head(V, b, kv), t * C.BN, j < S, C.BN, C.D)
    here = shown_keys(call.masks, b, j, j < S, S)
    segments = load_segments(call.masks.key_segments, b, j, j < S, S)
    keys = k, v, j, here
    found = tl.zeros([C.BN, padded(C.D)], tl.float32), tl.zeros([C.BN, padded(C.D)], tl.float32)
    own = t * C.BN // TILE
    full_first = 0
    full_last = tl.where(t * C.BN + C.BN > S, 0, NO_BLOCK)  # the table has no numbers for keys past the last one
    if visitors.full is not None:
        full = visitors.full + b * visitors.row + own * 2
        full_first = tl.load(full) * (C.ROWS // C.BM)
        full_last = tl.minimum(full_last, tl.load(full + 1) * (C.ROWS // C.BM))

    for g in range(G):
        h = kv.to(tl.int32) * G + g
        bh = b * H + h
        head = Head(bh, 0.0, None, call.scale, window, head_dropout(call, b, h))
        numbers = numbers_of(table, call, b, h)
        candidates = visitors.candidates + (bh * tiles + own) * 3
        first = tl.load(candidates) * (C.ROWS // C.BM)
        last = tl.maximum(tl.minimum(tl.load(candidates + 1) * (C.ROWS // C.BM), tl.cdiv(T, C.BM)), first)
        band = blocks_of(first, last, full_first, full_last, t * C.BN, offset, head, T, C)
        rows = of_head(Q, b, h), of_head(DOUT, b, h), LSE + bh * T, DELTA + bh * T
        for x in tl.range(0, full_count(band)):
            n = full_tile(x, band, CAUSAL=False)
            found = key_tile(n, keys, segments, rows, head, offset, numbers, found, call, b, C, FULL=True)
        for x in tl.range(0, last - first - full_count(band), num_stages=1):
            n = partial_tile(x, band, CAUSAL=False)
            found = key_tile(n, keys, segments, rows, head, offset, numbers, found, call, b, C, FULL=False)
    store_rows(of_head(DK, b, kv), t * C.BN, found[0] * call.scale, j < S, C.BN, C.D)
    store_rows(of_head(DV, b, kv), t * C.BN, found[1], j < S, C.BN, C.D)
