"""Forward with a table: the bias is a number per head and distance, as in `toeplitz_attention`.

A table gives no bound for far keys, so all tiles are visited that the masks allow. The loops are those of `forward.py`.
Scores are in natural units, because a finite number of the table may overflow in units of log2.
Read next: `table_gradients.py`.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Head, Queries
from alibi_attn.attention.backends.fused.kernels.bands import band_of, full_count, full_tile, partial_tile
from alibi_attn.attention.backends.fused.kernels.dropout import head_dropout, kept_weights
from alibi_attn.attention.backends.fused.kernels.positions import distance_moved, load_offset, load_window
from alibi_attn.attention.backends.fused.kernels.tiles import (
    LOG2E,
    all_finite,
    load_rows,
    load_segments,
    load_tile,
    normalized,
    of_head,
    padded,
    partial_scores,
    store_rows,
)


@triton.jit
def numbers_of(table, call, b, h):
    """The address of a head's number for distance 0, where distances are those after the move of `positions.py`."""
    moved = distance_moved(call.query_offset, b, call.T, call.S)
    column = tl.minimum(tl.maximum(moved - table.first, -(2**30)), 2**30)  # beyond, no key is seen
    return table.numbers + h.to(tl.int64) * table.columns + column


@triton.jit
def nats(x):
    """e^x."""
    return tl.exp2(x * LOG2E)


@triton.jit
def table_scores(tile, queries, head, numbers, K, call, C, FULL: tl.constexpr):
    """(scores, k, here) of a tile: −inf where a key is hidden; `here` are the keys that are read. FULL: none is hidden."""
    j = tile * C.BN + tl.arange(0, C.BN)
    distance = queries.position[:, None] - j[None, :]  # [BM, BN]
    if FULL:
        here = j < call.S
        k = load_tile(K, tile, C.BN, C.D)  # [BN, DP]
        scores = tl.dot(queries.q, k.T, input_precision=C.PRECISION) * head.scale + tl.load(numbers + distance)
    else:
        scores, seen, k, here, _ = partial_scores(tile, queries, head, K, call.masks, call.S, None, C)
        bias = tl.load(numbers + distance, mask=seen, other=0.0)
        scores = tl.where(seen, scores + bias, float("-inf"))
    return scores, k, here


@triton.jit
def attend(tile, queries, head, numbers, m_i, l_i, acc, K, V, call, C, FULL: tl.constexpr):
    """(m_i, l_i, acc) after a tile.

    A value with NaN or inf in a tile that is not FULL is zeroed (0·NaN is NaN), and the queries that see it get NaN.
    """
    # Keys, scores and their bias.
    scores, _k, here = table_scores(tile, queries, head, numbers, K, call, C, FULL)
    # Online softmax.
    new = tl.maximum(m_i, tl.max(scores, 1))
    known = tl.where(new == float("-inf"), 0.0, new)
    shrink = nats(m_i - known)  # [BM]
    p = nats(scores - known[:, None])  # [BM, BN]
    l_i = l_i * shrink + tl.sum(p, 1)
    # Values.
    if FULL:
        v = load_tile(V, tile, C.BN, C.D)  # [BN, DP]
    else:
        v = load_rows(V, tile * C.BN, here, C.BN, C.D)
        sound = all_finite(v)
        v = tl.where(sound[:, None], v, 0.0).to(v.dtype)
        hurt = tl.max(tl.where(scores == float("-inf"), 0.0, tl.where(sound, 0.0, 1.0)[None, :]), 1)
        l_i += tl.where(hurt > 0.0, float("nan"), 0.0)
    if head.dropout is not None:
        p = p * kept_weights(head.dropout, head.numbers, queries.position, tile * C.BN, C.BN)
    return new, l_i, tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=C.PRECISION)


@triton.jit
def table_forward_kernel(Q, K, V, OUT, LSE, GIVEN_LSE, table, call, visited, C):
    """Program: (one block of BM queries of one head, part of its keys); the last blocks of a head come first.

    Args:
        OUT, LSE: Rows and [B, H, T] fp32; of every part, one after another, if the keys are split.
        GIVEN_LSE: a copy of LSE; None = not wanted.
    """
    H, G, T, S = call.H, call.G, call.T, call.S
    blocks = tl.cdiv(T, C.BM)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    n = blocks - 1 - tl.program_id(0) % blocks
    part, parts = tl.program_id(1), tl.num_programs(1)
    b, h = bh // H, (bh % H).to(tl.int32)
    K, V = of_head(K, b, (h // G).to(tl.int64)), of_head(V, b, (h // G).to(tl.int64))
    dropout = head_dropout(call, b, h)
    window = load_window(call, b)
    head = Head(bh, 0.0, None, call.scale, window, dropout)
    numbers = numbers_of(table, call, b, h)

    rows = tl.arange(0, C.BM)
    i = n * C.BM + rows
    segments = load_segments(call.masks.query_segments, b, i, i < T, T)
    start = n * C.BM + load_offset(call.query_offset, b, T, S)
    # The table has no numbers for queries past the last one.
    position = tl.minimum(start + rows, start + (T - 1 - n * C.BM))
    queries = Queries(load_rows(of_head(Q, b, h), n * C.BM, i < T, C.BM, C.D), i, position, start, segments, b, None)
    m_i = tl.zeros([C.BM], tl.float32) + float("-inf")
    l_i = tl.zeros([C.BM], tl.float32)
    acc = tl.zeros([C.BM, padded(C.D)], tl.float32)

    band = band_of(visited, b, h, n, start, head, T, S, C)
    for x in tl.range(part, full_count(band), parts):
        tile = full_tile(x, band, C.CAUSAL)
        m_i, l_i, acc = attend(tile, queries, head, numbers, m_i, l_i, acc, K, V, call, C, FULL=True)
    for x in tl.range(part, tl.maximum(band.last - band.first, 0) - full_count(band), parts, num_stages=1):
        tile = partial_tile(x, band, C.CAUSAL)
        m_i, l_i, acc = attend(tile, queries, head, numbers, m_i, l_i, acc, K, V, call, C, FULL=False)

    sequence = part.to(tl.int64) * call.B + b
    store_rows(of_head(OUT, sequence, h), n * C.BM, normalized(acc, l_i), i < T, C.BM, C.D)
    lse = m_i + tl.log2(l_i) / LOG2E
    tl.store(LSE + (sequence * H + h) * T + i, lse, mask=i < T)
    if GIVEN_LSE is not None:
        tl.store(GIVEN_LSE + bh * T + i, lse, mask=i < T)
