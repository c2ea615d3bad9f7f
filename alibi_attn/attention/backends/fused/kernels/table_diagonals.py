"""The gradient of a table, without atomics: dt_{h, d} = Σ ds_ij over the pairs with i − j = d, and over the batch.

All tiles on one diagonal of the score matrix have the same distances. A program adds the tiles of one diagonal number by number,
always in the same order, and then the numbers of each distance. `total_kernel` adds diagonals and sequences.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.backward import of_each_query
from alibi_attn.attention.backends.fused.kernels.dropout import head_dropout, kept_weights
from alibi_attn.attention.backends.fused.kernels.positions import given_offset, load_offset, load_window, table_of
from alibi_attn.attention.backends.fused.kernels.tiles import load_rows, of_head, power, shown_keys


@triton.jit
def diagonal_kernel(Q, K, V, DOUT, SUMS, LSE, DELTA, call, C):
    """Program: the tiles of N = BM = BN queries and keys on one diagonal, of one head; the longest diagonals come first.

    SUMS [B, H, diagonals, 2·N] fp32: number x of diagonal g is Σ ds over the pairs with i − j = N·(g − ⌈S / N⌉) + offset + 1 + x.
    Queries that see no key, and their output gradients, must be zeros.
    """
    H, G, T, S = call.H, call.G, call.T, call.S
    N: tl.constexpr = C.BN
    blocks, tiles = tl.cdiv(T, N), tl.cdiv(S, N)
    diagonals, heads = blocks + tiles - 1, call.B * H
    bh = (tl.program_id(0) % heads).to(tl.int64)
    g = (tiles - 1 + tl.program_id(0) // heads) % diagonals
    b, h = bh // H, (bh % H).to(tl.int32)
    offset = load_offset(call.query_offset, b, T, S)
    Q, DOUT, LSE, DELTA = of_head(Q, b, h), of_head(DOUT, b, h), LSE + bh * T, DELTA + of_each_query(bh, T, C)
    K, V = of_head(K, b, (h // G).to(tl.int64)), of_head(V, b, (h // G).to(tl.int64))
    masks = call.masks
    dropout = head_dropout(call, b, h)

    ahead = g - (tiles - 1)  # of a block of queries over its tile of keys
    row, column = tl.arange(0, N), tl.arange(0, N)
    distance = ahead * N + offset + row[:, None] - column[None, :]  # [N, N]
    seen = (distance <= offset + T - 1) & (distance >= offset - (S - 1))  # those that occur
    if C.CAUSAL:
        seen = seen & (distance >= 0)
    if call.window is not None:
        seen = seen & (tl.abs(distance) < load_window(call, b))
    first, last = tl.maximum(ahead, 0), tl.minimum(blocks, tiles + ahead)
    last = tl.where(tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0, last, first)
    table = table_of(call, b, h)
    bias = tl.load(table + distance, mask=seen, other=0.0)
    total = tl.zeros([N, N], tl.float32)
    for n in tl.range(first, last):
        t = n - ahead
        i, j = n * N + row, t * N + column
        lse, delta = tl.load(LSE + i, mask=i < T, other=float("-inf")), tl.load(DELTA + i, mask=i < T, other=0.0)
        lse = tl.where(lse == float("-inf"), float("inf"), lse)  # the weights of a query that sees no key are 0
        here = shown_keys(masks, b, j, j < S, S)
        q, do = load_rows(Q, n * N, i < T, N, C.D), load_rows(DOUT, n * N, i < T, N, C.D)  # [N, DP]
        k, v = load_rows(K, t * N, here, N, C.D), load_rows(V, t * N, here, N, C.D)
        products = tl.dot(q, k.T, input_precision=C.PRECISION)
        p = power(products * call.scale + bias - lse[:, None], table)  # [N, N]
        dp = tl.dot(do, v.T, input_precision=C.PRECISION)
        if dropout is not None:
            dp = dp * kept_weights(dropout, None, i + offset, t * N, N)
        shown = here[None, :]
        if masks.key_segments is not None:
            of_queries = tl.load(masks.query_segments + b * T + i, mask=i < T, other=0)
            of_keys = tl.load(masks.key_segments + b * S + j, mask=here, other=0)
            shown = shown & (of_queries[:, None] == of_keys[None, :])
        total += tl.where(shown, p * (dp - delta[:, None]), 0.0)

    total = tl.where(seen, total, 0.0)  # a pair that is not seen may have any number
    x = tl.arange(0, 2 * N)
    column = row[:, None] + (N - 1) - x[None, :]  # of the pair in this row whose distance is that of x
    inside = (column >= 0) & (column < N)
    skewed = tl.gather(total, tl.where(inside, column, 0), 1)  # [N, 2·N]
    tl.store(SUMS + (bh * diagonals + g) * (2 * N) + x, tl.sum(tl.where(inside, skewed, 0.0), 0))


@triton.jit
def total_kernel(SUMS, DTABLE, call, N: tl.constexpr, WIDTH: tl.constexpr):
    """Program: WIDTH columns of one head of the table's gradient, DTABLE [H, columns] fp32, from SUMS of `diagonal_kernel`."""
    T, S = call.T, call.S
    tiles = tl.cdiv(S, N)
    diagonals = tl.cdiv(T, N) + tiles - 1
    programs = tl.cdiv(call.table.columns, WIDTH)
    h = tl.program_id(0) // programs
    column = tl.program_id(0) % programs * WIDTH + tl.arange(0, WIDTH)
    # Number x of diagonal g has this place N·g + x, and so has number x + N of the diagonal before.
    place = column + (call.table.first + N * tiles - 1 - given_offset(call.query_offset, 0))  # int64
    g, x = place // N, place % N
    is_first, is_second = (place >= 0) & (g < diagonals), (g > 0) & (g <= diagonals)
    total = tl.zeros([WIDTH], tl.float64)
    for b in range(call.B):
        of_head = SUMS + (tl.cast(b, tl.int64) * call.H + h) * diagonals * (2 * N)
        total += tl.load(of_head + g * (2 * N) + x, mask=is_first, other=0.0).to(tl.float64)
        total += tl.load(of_head + (g - 1) * (2 * N) + N + x, mask=is_second, other=0.0).to(tl.float64)
    tl.store(
        DTABLE + h.to(tl.int64) * call.table.columns + column, total.to(tl.float32), mask=column < call.table.columns
    )
