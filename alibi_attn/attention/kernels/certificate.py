"""What comes before attention: the certificate of `attention/bounds.py` for plain causal calls.

Two kernels where that takes some three hundred small operations. `lengths_kernel` reads every key and value once, for their
norms. `reach_kernel` bounds the log-sum-exp of a block's queries from below by the 65 to 128 keys that end at it, and divides.
All in fp32: whatever fp32, and the device's approximate roots, exponentials and logarithms, may be off is added (`_ROUNDING`,
`_NATS`), so that the reach is never too short.
"""

# mypy: ignore-errors
# Triton is a language of its own in the clothes of Python; types mean nothing to it.

import triton
import triton.language as tl

from alibi_attn.attention.kernels.forward import LOG2E

UNIT = tl.constexpr(2.0**-24)
_ROUNDING = tl.constexpr(1.0 + 2.0**-18)  # of a number: a few operations, each off by less than 2⁻²²
_NATS = tl.constexpr(2.0**-10)  # of a logarithm, and of 1 / (1 − e^(−m))
_TF32 = tl.constexpr(2.0**-9)  # of ‖q‖·‖k‖: both lose all but eleven bits in a product that only bounds
_TINY = tl.constexpr(2.0**-59)  # √256 entries whose squares vanish, each below 2⁻⁶³
_FARTHEST = tl.constexpr(2.0**30)


@triton.jit
def longest(rows, D: tl.constexpr):
    """An upper bound of the norm of every row, fp32; inf where it cannot tell. See `bounds.norm_bound`."""
    x = rows.to(tl.float32)
    length = tl.sqrt(tl.sum(x * x, 1)) * (1.0 + (D + 32) * UNIT) + _TINY
    return tl.where(length < float("inf"), length, float("inf"))


@triton.jit
def loaded(
    K, V, bk, tile, k_b, k_h, k_s, v_b, v_h, v_s, kv_heads, S, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(positions, keys, values) of one tile of key head `bk` of all sequences; zeros behind the last key."""
    b, kv = bk // kv_heads, bk % kv_heads
    j = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, DP)
    inside = (j < S)[:, None] & (d < D)[None, :]
    k = tl.load(K + b * k_b + kv * k_h + j[:, None] * k_s + d[None, :], mask=inside, other=0.0)
    v = tl.load(V + b * v_b + kv * v_h + j[:, None] * v_s + d[None, :], mask=inside, other=0.0)
    return j, k, v


@triton.jit
def lengths_kernel(
    K, V, KEY_NORMS, VALUE_NORMS, SHORTEST, k_b, k_h, k_s, v_b, v_h, v_s, begin, count, kv_heads, S, N,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program: one tile of keys of `count`, from tile `begin` on; all [B, K, N] fp32: largest norms, and the value's smallest."""
    bk, tile = (tl.program_id(0) // count).to(tl.int64), begin + tl.program_id(0) % count
    j, k, v = loaded(K, V, bk, tile, k_b, k_h, k_s, v_b, v_h, v_s, kv_heads, S, D, DP, TILE)
    tl.store(KEY_NORMS + bk * N + tile, tl.max(longest(k, D), 0))
    length = longest(v, D)
    tl.store(VALUE_NORMS + bk * N + tile, tl.max(length, 0))
    tl.store(SHORTEST + bk * N + tile, tl.min(tl.where(j < S, length, float("inf")), 0))


@triton.jit
def reach_kernel(
    Q, K, V, SLOPES, FIRST, KAPPA, LONGEST_VALUE, SHORTEST_VALUE, LEFT,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, slopes_b, first_b, scale, nats_of_tolerance, ratio, window, B, H, G, T, S, N,
    CHOICES: tl.constexpr, KEPT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Program: one block of TILE queries of one head; writes its reach for every choice of pins, LEFT [CHOICES, B, H, blocks].

    KAPPA [CHOICES, B, K, N]: the largest norm of the keys up to a tile that a choice does not pin; LONGEST_VALUE,
    SHORTEST_VALUE [B, K].
    """
    blocks = tl.cdiv(T, TILE)
    n, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // H, (bh % H).to(tl.int32)
    kv_heads = H // G
    bk = b * kv_heads + h // G
    x, d = tl.arange(0, TILE), tl.arange(0, DP)
    i = n * TILE + x
    start = n * TILE + tl.load(FIRST + b * first_b).to(tl.int32)
    position = (start + x)[:, None]
    m = tl.load(SLOPES + b * slopes_b + h).to(tl.float32)
    Q += b * q_b + h.to(tl.int64) * q_h
    K += b * k_b + (h // G).to(tl.int64) * k_h
    V += b * v_b + (h // G).to(tl.int64) * v_h
    q = tl.load(Q + i.to(tl.int64)[:, None] * q_t + d[None, :], mask=(i < T)[:, None] & (d < D)[None, :], other=0.0)

    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    # The longest of the nearest values, which are always visited; where there are none, some value is.
    kept = tl.zeros([TILE], tl.float32) + tl.load(SHORTEST_VALUE + bk)
    last = tl.minimum(start, tl.maximum(S - TILE, 0))  # queries may stand behind all keys
    for before in tl.static_range(2):
        j = last - TILE * before + x
        here = (j >= 0) & (j < S)
        inside = here[:, None] & (d < D)[None, :]
        row = j.to(tl.int64)[:, None]
        k = tl.load(K + row * k_s + d[None, :], mask=inside, other=0.0)
        distance = position - j[None, :]
        seen = here[None, :] & (distance >= 0)
        if HAS_WINDOW:
            seen = seen & (distance < window)
        scores = tl.dot(q, k.T, input_precision="tf32") * scale - m * distance.to(tl.float32)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        known = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - known) + tl.sum(tl.exp2(scores - known[:, None]), 1)
        peak = new_peak
        v = tl.load(V + row * v_s + d[None, :], mask=inside, other=0.0)
        nearest = seen & (distance < KEPT)
        kept = tl.maximum(kept, tl.max(tl.where(nearest, longest(v, D)[None, :], 0.0), 1))

    lower = (peak + tl.log2(total)) / LOG2E
    rate = tl.abs(scale) * longest(q, D) * _ROUNDING
    at = tl.minimum(tl.maximum(start + TILE - 1, 0), S - 1) // TILE
    most = tl.load(LONGEST_VALUE + bk)
    longer = tl.where(most == 0.0, 0.0, tl.maximum(tl.log2(most / (ratio * kept)) / LOG2E, 0.0))
    upper = rate * tl.load(KAPPA + bk * N + at)
    off = (D + 64) * UNIT * (1.0 + upper + tl.abs(lower)) + _NATS
    if Q.dtype.element_ty == tl.float32:
        off += upper * _TF32
    real = (i < T) & (start + x >= 0)
    # −ln(1 − e^(−m)) ≤ m/2 − ln m.
    tail = m * 0.5 - tl.log2(m) / LOG2E + nats_of_tolerance
    for choice in tl.static_range(CHOICES):
        upper = rate * tl.load(KAPPA + (choice * B * kv_heads + bk) * N + at)
        nats = upper * _ROUNDING - lower + off + tl.abs(lower) * (_ROUNDING - 1.0) + longer
        nats = tl.where(nats < float("inf"), nats, float("inf"))
        worst = tl.max(tl.where(real, nats, float("-inf")), 0)
        reach = tl.maximum((worst + tail) / m * _ROUNDING + 1.0, KEPT)
        reach = tl.where((m > 0.0) & (reach < _FARTHEST), reach, _FARTHEST)
        tl.store(LEFT + (choice * B * H + bh) * blocks + n, reach.to(tl.int32))
