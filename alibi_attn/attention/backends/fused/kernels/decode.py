"""Decoding: few queries, many keys. The query heads that share a key head are packed into the rows of one tile, so every key is
read once for all of them. Keys are split among programs, and the parts are merged by their log-sum-exps.

Keys with NaN or inf are detected in the loop, because a check before the loop would read every key.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import BlockBias, Head, Queries
from alibi_attn.attention.backends.fused.kernels.bands import outlier_count, outlier_tile
from alibi_attn.attention.backends.fused.kernels.dropout import head_dropout, numbers_of
from alibi_attn.attention.backends.fused.kernels.forward import attend_partial
from alibi_attn.attention.backends.fused.kernels.plan import seen_keys
from alibi_attn.attention.backends.fused.kernels.positions import (
    biased_lse_before_move,
    load_first_key,
    load_offset,
    load_window,
    lse_before_move,
)
from alibi_attn.attention.backends.fused.kernels.tiles import (
    LOG2E,
    OUTLIERS,
    TILE,
    ahead_of,
    bias_for,
    inside,
    kept_lse,
    load_segments,
    load_slope,
    lse_rows,
    no_maximum,
    normalized,
    of_head,
    padded,
    pair_rows,
)


@triton.jit
def decode_kernel(Q, K, V, OUTS, LSES, call, visited, C):
    """Program: (key head, chunk of BM packed rows, part of the keys); row g·T + t is query t of the group's head g.

    `visited.bands` is None if all keys are visited that the queries may see; Triton 3.6 cannot ask a tuple whether it is None.

    OUTS is [parts, B, H, T, D] and LSES [parts, B, H, T] (see `lse_rows`), both fp32. The heads of a group
    share one plan.
    """
    H, G, T, S = call.H, call.G, call.T, call.S
    bk, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_heads = H // G
    b, kv = bk // kv_heads, bk % kv_heads
    rows = tl.program_id(1) * C.BM + tl.arange(0, C.BM)
    d = tl.arange(0, padded(C.D))
    real = rows < G * T
    h = kv.to(tl.int32) * G + rows // T  # [BM]
    i = rows % T
    K, V = of_head(K, b, kv), of_head(V, b, kv)
    right = load_slope(call.right_slopes, b, h, real)
    if right is not None:
        right = right[:, None]
    dropout = head_dropout(call, b, h[:, None])
    numbers = numbers_of(call, b)
    slope = load_slope(call.slopes, b, h, real)[:, None]
    window = load_window(call, b)
    bias = call.key_bias
    if bias is not None:
        bh = tl.where(real, b * H + h, b * H + kv * G)
        bias = bias_for(bias, bh, bh, tl.cdiv(S, TILE), S)
        bias = BlockBias(bias.rest[:, None], bias.pairs[:, None], bias.bases, bias.reference)
    head = Head((b * H + h)[:, None], slope, right, call.scale * LOG2E, window, dropout, bias, numbers)
    segments = load_segments(call.masks.query_segments, b, i, real, T)
    at = Q.pointer + b * Q.batch + h.to(tl.int64)[:, None] * Q.head + i[:, None] * Q.row
    q = tl.load(at + d[None, :], mask=inside(real, C.D), other=0.0)  # [BM, DP]
    start = load_offset(call.query_offset, b, T, S)
    first_key = load_first_key(call, b * H + h, i, real)
    queries = Queries(q, i, i + start, start, segments, b, first_key)
    m_i = no_maximum(C.BM)
    l_i = tl.zeros([C.BM], tl.float32)
    acc = tl.zeros([C.BM, padded(C.D)], tl.float32)

    if visited.bands is None:
        low, high = seen_keys(None, 0, start, start + T, there=True, S=S, window=window, CAUSAL=C.CAUSAL)
        first, last = low // C.BN, tl.cdiv(high, C.BN)
    else:
        leader = b * visited.row + kv * G * 4
        first = tl.load(visited.bands + leader) * (TILE // C.BN)
        last = tl.minimum(tl.load(visited.bands + leader + 1) * (TILE // C.BN), tl.cdiv(S, C.BN))
    share = tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(2))
    begin = first + part * share
    for tile in tl.range(begin, tl.minimum(begin + share, last)):
        m_i, l_i, acc, _weight = attend_partial(tile, queries, head, m_i, l_i, acc, K, V, call.masks, S, C)
    if visited.bands is not None:
        outliers = visited.beside + b * visited.row + kv * G * OUTLIERS
        for x in tl.range(part, outlier_count(outliers) * (TILE // C.BN), tl.num_programs(2), num_stages=1):
            tile = outlier_tile(x, outliers, C.BN)
            m_i, l_i, acc, _weight = attend_partial(tile, queries, head, m_i, l_i, acc, K, V, call.masks, S, C)

    sequence = part.to(tl.int64) * tl.num_programs(0) // kv_heads + b
    row = (sequence * H + h) * T + i
    tl.store(OUTS + row[:, None] * C.D + d[None, :], normalized(acc, l_i), mask=inside(real, C.D))
    LSES = lse_rows(LSES, sequence * H + h, sequence, H, T, call.key_bias)
    tl.store(LSES + i, kept_lse(m_i[0], l_i, call.key_bias), mask=real)
    if call.key_bias is not None:
        high, low = pair_rows(LSES, H, T)
        tl.store(high + i, m_i[1], mask=real)
        tl.store(low + i, m_i[2], mask=real)


@triton.jit
def merge_kernel(OUTS, LSES, OUT, LSE, GIVEN_LSE, call, parts, rows, SLOTS: tl.constexpr, D: tl.constexpr):
    """Program: one row, of one query and head. OUTS [parts, rows, D], LSES [parts, rows] become OUT, LSE; SLOTS ≥ parts.

    With a key bias the lse are in log2 units (see `kept_lse`) and relative to pairs (see `lse_rows`). The merged one is
    relative to the pair of the part with the largest. GIVEN_LSE is that of forward.
    """
    H, T = call.H, call.T
    unit = LOG2E if call.key_bias is None else 1.0
    row = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, SLOTS), tl.arange(0, padded(D))
    if call.key_bias is None:
        lse = tl.load(LSES + part.to(tl.int64) * rows + row, mask=part < parts, other=float("-inf"))
    else:
        LSE += row // (H * T) * 2 * H * T
        at = LSES + part.to(tl.int64) * rows * 3 + row // (H * T) * 2 * H * T + row
        lse = tl.load(at, mask=part < parts, other=float("-inf"))
        high, low = (
            tl.load(at + H * T, mask=part < parts, other=0.0),
            tl.load(at + 2 * H * T, mask=part < parts, other=0.0),
        )
        largest = part == tl.argmax(high + lse, 0)
        origin = tl.sum(tl.where(largest, high, 0.0), 0), tl.sum(tl.where(largest, low, 0.0), 0)
        lse = tl.where(lse == float("-inf"), lse, lse + ahead_of((high, low), origin))
        tl.store(LSE + H * T + row, origin[0])
        tl.store(LSE + 2 * H * T + row, origin[1])
    m_i = tl.max(lse, 0)
    known = tl.where(m_i == float("-inf"), 0.0, m_i)
    share = tl.exp2((lse - known) * unit)  # [SLOTS]
    l_i = tl.sum(share, 0)
    there = (part < parts)[:, None] & (d < D)[None, :]
    outs = tl.load(OUTS + (part.to(tl.int64)[:, None] * rows + row) * D + d[None, :], mask=there, other=0.0)
    out = tl.sum(outs * share[:, None], 0) / tl.where(l_i == 0.0, 1.0, l_i)  # [DP]
    at = OUT.pointer + row // T // H * OUT.batch + row // T % H * OUT.head + row % T * OUT.row
    tl.store(at + d, out.to(OUT.pointer.dtype.element_ty), mask=d < D)
    merged = known + tl.log2(l_i) / unit
    tl.store(LSE + row, merged)
    if GIVEN_LSE is not None:
        if call.key_bias is None:
            given = lse_before_move(merged, call, row // T // H, row // T % H)
        else:
            given = biased_lse_before_move(
                merged, origin[0], origin[1], call, GIVEN_LSE, row // T // H, row // T, row % T, there=True
            )
        tl.store(GIVEN_LSE + row, given)
