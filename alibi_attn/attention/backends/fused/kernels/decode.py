"""Decoding: few queries, many keys. The query heads that share a key head are packed into the rows of one tile, so every key is
read once for all of them, and the keys are split among programs; the parts are merged by their log-sum-exps.

MASK is [B, S] int8, 1 = may be seen; bad keys are found on the way, since looking for them before would read all.
"""

# mypy: ignore-errors
# Triton compiles these functions itself and takes no type annotations but its own.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.forward import LOG2E, PINS, attend


@triton.jit
def decode_kernel(
    Q, K, V, PARTIAL, MASSES, SLOPES, RIGHT, FIRST, PLAN, PIN_TABLE, MASK, QUERY_SEGMENTS, KEY_SEGMENTS, SEED, COUNT,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, slopes_b, right_b, first_b,
    scale, window, dropout, H, G, T, S,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_MASK: tl.constexpr, COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: (key head, chunk of ROWS packed rows, part of the keys); row g·T + t is query t of the group's head g.

    PARTIAL is [parts, B, H, T, D] and MASSES [parts, B, H, T], both fp32. The heads of a group share one plan.
    """
    bk, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_heads = H // G
    b, kv = bk // kv_heads, bk % kv_heads
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    real = rows < G * T
    h = kv.to(tl.int32) * G + rows // T
    i = rows % T
    K += b * k_b + kv * k_h
    V += b * v_b + kv * v_h
    MASK += b * S
    KEY_SEGMENTS += b * S
    m = (tl.load(SLOPES + b * slopes_b + h, mask=real, other=0.0) * LOG2E)[:, None]
    right = (tl.load(RIGHT + b * right_b + h, mask=real, other=0.0) * LOG2E)[:, None]
    seed = tl.load(SEED)
    ours = real[:, None]
    if D != DP:
        ours = ours & (d < D)[None, :]
    q = tl.load(Q + b * q_b + h.to(tl.int64)[:, None] * q_h + i[:, None] * q_t + d[None, :], mask=ours, other=0.0)
    own = i[:, None]
    if HAS_SEGMENTS:
        own = tl.load(QUERY_SEGMENTS + b * T + i, mask=real, other=0)[:, None]
    position = (i + tl.load(FIRST + b * first_b).to(tl.int32))[:, None]
    head = (b * H + h)[:, None]
    acc = tl.zeros([ROWS, DP], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    leader = b * H + kv * G
    first = tl.load(PLAN + leader * 4) * (TILE // BN)
    last = tl.minimum(tl.load(PLAN + leader * 4 + 1) * (TILE // BN), tl.cdiv(S, BN))
    share = tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(2))
    begin = first + part * share
    end = tl.minimum(begin + share, last)
    pins = PIN_TABLE + leader * PINS
    pinned = tl.sum((tl.load(pins + tl.arange(0, PINS)) >= 0).to(tl.int32), 0)
    visits = 0
    for tile in tl.range(begin, end):
        acc, peak, total = attend(
            tile, q, acc, peak, total, K, V, MASK, KEY_SEGMENTS, own, i[:, None], position, head, k_s, v_s, m, right,
            scale * LOG2E, window, dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS, HAS_DROPOUT,
            HAS_MASK, PRECISION,
        )  # fmt: skip
        if COUNTS:
            visits += 1
    for x in tl.range(part, pinned * (TILE // BN), tl.num_programs(2), num_stages=1):
        tile = tl.load(pins + x // (TILE // BN)) * (TILE // BN) + x % (TILE // BN)
        acc, peak, total = attend(
            tile, q, acc, peak, total, K, V, MASK, KEY_SEGMENTS, own, i[:, None], position, head, k_s, v_s, m, right,
            scale * LOG2E, window, dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS, HAS_DROPOUT,
            HAS_MASK, PRECISION,
        )  # fmt: skip
        if COUNTS:
            visits += 1
    if COUNTS:
        tl.store(COUNT + bk * tl.num_programs(2) + part, visits)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    row = (part.to(tl.int64) * tl.num_programs(0) // kv_heads + b) * H + h
    row = row * T + i
    tl.store(PARTIAL + row[:, None] * D + d[None, :], out, mask=ours)
    tl.store(MASSES + row, (peak + tl.log2(total)) / LOG2E, mask=real)


@triton.jit
def merge_kernel(
    OUTPUTS, MASSES, OUT, LSE, parts, rows, o_b, o_h, o_t, H, T, SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Program: one row, of one query and head. OUTPUTS [parts, rows, D], MASSES [parts, rows] become OUT, LSE; SLOTS ≥ parts."""
    row = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, SLOTS), tl.arange(0, DP)
    mass = tl.load(MASSES + part.to(tl.int64) * rows + row, mask=part < parts, other=float("-inf"))
    most = tl.max(mass, 0)
    known = tl.where(most == float("-inf"), 0.0, most)
    share = tl.exp2((mass - known) * LOG2E)
    total = tl.sum(share, 0)
    there = (part < parts)[:, None] & (d < D)[None, :]
    outputs = tl.load(OUTPUTS + (part.to(tl.int64)[:, None] * rows + row) * D + d[None, :], mask=there, other=0.0)
    out = tl.sum(outputs * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    OUT += row // T // H * o_b + row // T % H * o_h + row % T * o_t
    tl.store(OUT + d, out.to(OUT.dtype.element_ty), mask=d < D)
    tl.store(LSE + row, known + tl.log2(total) / LOG2E)
