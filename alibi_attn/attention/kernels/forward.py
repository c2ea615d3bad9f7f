"""Forward: a block of queries meets the tiles of its certified band, with online softmax.

The band's first tile is known before the loop starts, so the loop is a `tl.range` that Triton pipelines; pinned tiles (keys with
outstanding norms, see `attention/bounds.py`) are visited in a small loop of their own. Scores live in units of log2. The bias is
formed in the tile, in fp32, from integer distances.

Flags of keys are those of `attention/tiles.py`: 0 fine, 1 hidden, 2 bad (seen, but NaN or inf).
"""

# mypy: ignore-errors
# Triton is a language of its own in the clothes of Python; types mean nothing to it.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PINS = tl.constexpr(4)


@triton.jit
def biased_scores(
    products, distance, flag, same, m, right, scale, window,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """(scores, seen) of one tile, in log2 units; everything broadcasts. `m`, `right` and `scale` are in log2 units too."""
    away = tl.abs(distance).to(tl.float32)
    slope = m
    if HAS_RIGHT:
        slope = tl.where(distance < 0, right, m)
    seen = flag != 1
    if CAUSAL:
        seen = seen & (distance >= 0)
    elif HAS_RIGHT:
        # An infinite slope forbids.
        seen = seen & (slope < float("inf"))
        slope = tl.where(slope < float("inf"), slope, 0.0)
    if HAS_WINDOW:
        seen = seen & (tl.abs(distance) < window)
    if HAS_SEGMENTS:
        seen = seen & same
    scores = products * scale - slope * away
    return tl.where(flag == 2, float("nan"), scores), seen


@triton.jit
def kept_weights(seed, head, i, j, dropout):
    """1 / (1 − p) where the weight of query i and key j is kept, else 0: counter-based, so that backward draws the same."""
    j, i = tl.broadcast(j.to(tl.uint32), i.to(tl.uint32))
    head = i * 0 + head.to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, j, i, head, i * 0)
    return tl.where(tl.uint_to_uniform_float(bits) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def all_finite(rows):
    """Of every row of a tile, whether no number in it is NaN or inf."""
    return tl.min((tl.abs(rows) < float("inf")).to(tl.int32), 1) == 1


@triton.jit
def attend(
    tile, q, acc, peak, total, K, V, FLAGS, KEY_SEGMENTS, own, i, position, head, k_s, v_s, m, right, scale, window,
    dropout, seed, S,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HAS_FLAGS: tl.constexpr = True, CHECKS: tl.constexpr = False,
):  # fmt: skip
    """One tile of BN keys: (acc, peak, total) after it. `i`, `position`, `own`, `m`, `right`, `head` are scalars or columns.

    With CHECKS nobody has looked for bad keys before, and they are found in the tile. Without HAS_FLAGS none is hidden.
    """
    start = tl.cast(tile, tl.int64) * BN
    jj = tl.arange(0, BN)
    d = tl.arange(0, DP)
    inside = tile * BN + jj < S
    flag = tl.where(inside, 0, 1)
    if HAS_FLAGS:
        flag = tl.load(FLAGS + start + jj, mask=inside, other=1)
    fine = (flag == 0)[:, None]
    if D != DP:
        fine = fine & (d < D)[None, :]
    k = tl.load(K + start * k_s + jj[:, None] * k_s + d[None, :], mask=fine, other=0.0)
    if CHECKS:
        flag = tl.where(all_finite(k), flag, 2)
    j = (tile * BN + jj)[None, :]
    same = True
    if HAS_SEGMENTS:
        same = own == tl.load(KEY_SEGMENTS + start + jj, mask=inside, other=0)[None, :]
    products = tl.dot(q, k.T, input_precision=PRECISION)
    scores, seen = biased_scores(
        products,
        position - j,
        flag[None, :],
        same,
        m,
        right,
        scale,
        window,
        CAUSAL,
        HAS_RIGHT,
        HAS_WINDOW,
        HAS_SEGMENTS,
    )
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    known = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(scores - known[:, None])
    shrink = tl.exp2(peak - known)
    v = tl.load(V + start * v_s + jj[:, None] * v_s + d[None, :], mask=fine, other=0.0)
    if CHECKS:
        sound = all_finite(v)
        v = tl.where(sound[:, None], v, 0.0).to(v.dtype)
        p = tl.where(seen & ~sound[None, :], float("nan"), p)
    total = total * shrink + tl.sum(p, 1)
    if HAS_DROPOUT:
        p = p * kept_weights(seed, head, i, j, dropout)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit
def forward_kernel(
    Q, K, V, OUT, LSE, SLOPES, RIGHT, FIRST, PLAN, PIN_TABLE, FLAGS, QUERY_SEGMENTS, KEY_SEGMENTS, ORDER, SEED, COUNT,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, slopes_b, right_b, first_b,
    scale, window, dropout, H, G, T, S, N,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: one block of BM queries of one head; the heaviest heads, and in them the last blocks, come first."""
    bh = tl.load(ORDER + tl.program_id(0) // N).to(tl.int64)
    n = N - 1 - tl.program_id(0) % N
    b, h = bh // H, (bh % H).to(tl.int32)
    kv = (h // G).to(tl.int64)
    Q += b * q_b + h.to(tl.int64) * q_h + n.to(tl.int64) * BM * q_t
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
    ours = (i < T)[:, None]
    if D != DP:
        ours = ours & (d < D)[None, :]
    q = tl.load(Q + rows[:, None] * q_t + d[None, :], mask=ours, other=0.0)
    own = i[:, None]
    if HAS_SEGMENTS:
        own = tl.load(QUERY_SEGMENTS + b * T + i, mask=i < T, other=0)[:, None]
    position = (i + tl.load(FIRST + b * first_b).to(tl.int32))[:, None]
    acc = tl.zeros([BM, DP], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)

    visits = 0
    plan = PLAN + (bh * N + n) * 4
    first = tl.load(plan) * (TILE // BN)
    last = tl.minimum(tl.load(plan + 1) * (TILE // BN), tl.cdiv(S, BN))
    for tile in tl.range(first, last):
        acc, peak, total = attend(
            tile, q, acc, peak, total, K, V, FLAGS, KEY_SEGMENTS, own, i[:, None], position, bh, k_s, v_s, m, right,
            scale * LOG2E, window, dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS, HAS_DROPOUT,
            PRECISION,
        )  # fmt: skip
        if COUNTS:
            visits += 1
    pins = PIN_TABLE + (bh * N + n) * PINS
    pinned = tl.sum((tl.load(pins + tl.arange(0, PINS)) >= 0).to(tl.int32), 0)
    for x in tl.range(0, pinned * (TILE // BN), num_stages=1):
        tile = tl.load(pins + x // (TILE // BN)) * (TILE // BN) + x % (TILE // BN)
        acc, peak, total = attend(
            tile, q, acc, peak, total, K, V, FLAGS, KEY_SEGMENTS, own, i[:, None], position, bh, k_s, v_s, m, right,
            scale * LOG2E, window, dropout, seed, S, D, DP, BN, CAUSAL, HAS_RIGHT, HAS_WINDOW, HAS_SEGMENTS, HAS_DROPOUT,
            PRECISION,
        )  # fmt: skip
        if COUNTS:
            visits += 1
    if COUNTS:
        tl.store(COUNT + bh * N + n, visits)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    OUT += b * o_b + h.to(tl.int64) * o_h + n.to(tl.int64) * BM * o_t
    tl.store(OUT + rows[:, None] * o_t + d[None, :], out.to(OUT.dtype.element_ty), mask=ours)
    tl.store(LSE + bh * T + i, (peak + tl.log2(total)) / LOG2E, mask=i < T)
