"""Forget gates: the sums of their logarithms, as biases of keys and queries, and the sums that are their gradients.

    c_j = Σ_{l ≤ j} max(ln f_l, floor)     b_j = −c_j (+ the key's own bias)     b_i = c_i     ∂/∂ ln f_l = Σ_{j ≥ l} ∂/∂c_j

in fp64. Whole multiples of STEP are summed separately, exactly. Gates of −inf, cuts, add nothing: the queries after a cut may
not see the keys before it (`query_start`).
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl


@triton.jit
def later(a, b):
    return tl.maximum(a, b)


@triton.jit
def load_gates(GATES, row, j, here, FLOOR: tl.constexpr):
    """(gates j of a row in fp64, cuts as 0 and small ones as the floor; whether they have a gradient; whether they are cuts)"""
    gate = tl.load(GATES.pointer + row + j.to(tl.int64) * GATES.row, mask=here, other=0.0).to(tl.float64)
    is_cut = gate == float("-inf")
    has_gradient = ~(gate < FLOOR)
    gate = tl.where(is_cut, 0.0, tl.where(has_gradient, gate, FLOOR))
    return gate, has_gradient, is_cut


@triton.jit
def scan_kernel(
    GATES,
    OWN,
    KEY_BIAS,
    QUERY_BIAS,
    QUERY_START,
    first,
    rows,
    H,
    T,
    S,
    WIDTH: tl.constexpr,
    FLOOR: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program: one of `rows` rows of gates of a sequence, which H / rows query heads share.

    Args:
        GATES: Rows [B, rows, S, 1]. OWN: Rows [B, H, S, 1], the keys' own biases; None = none.
        KEY_BIAS: [B, H, S] fp64. QUERY_BIAS, QUERY_START: [B, H, T], fp64 and int64, of the queries from position `first` on.
    """
    b, r = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    row, group = b * GATES.batch + r.to(tl.int64) * GATES.head, H // rows
    whole, part, cut = tl.zeros([], tl.float64), tl.zeros([], tl.float64), 0
    for start in range(0, S, WIDTH):
        j = start + tl.arange(0, WIDTH)
        gate, _has_gradient, is_cut = load_gates(GATES, row, j, j < S, FLOOR)
        steps = -tl.floor(-gate / STEP) * STEP
        sums = (whole + tl.cumsum(steps, 0)) + (part + tl.cumsum(gate - steps, 0))
        whole += tl.sum(steps, 0)
        part += tl.sum(gate - steps, 0)
        cuts = tl.maximum(tl.associative_scan(tl.where(is_cut, j, 0), 0, later), cut)
        cut = tl.max(cuts, 0)
        i = j - first
        is_query = (i >= 0) & (i < T)
        for g in range(group):
            h = r * group + g
            bias = -sums
            if OWN is not None:
                at = OWN.pointer + b * OWN.batch + h.to(tl.int64) * OWN.head
                bias = tl.load(at + j.to(tl.int64) * OWN.row, mask=j < S, other=0.0).to(tl.float64) - sums
            tl.store(KEY_BIAS + (b * H + h) * S + j, bias, mask=j < S)
            tl.store(QUERY_BIAS + (b * H + h) * T + i, sums, mask=is_query)
            tl.store(QUERY_START + (b * H + h) * T + i, cuts.to(tl.int64), mask=is_query)


@triton.jit
def suffix_kernel(GATES, DKEY, DQUERY, DGATES, first, rows, H, T, S, WIDTH: tl.constexpr, FLOOR: tl.constexpr):
    """Program: one row of gates. DGATES [B, rows, S] is their gradient; DKEY and DQUERY, fp64, those of the biases, or None."""
    b, r = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    row, group = b * GATES.batch + r.to(tl.int64) * GATES.head, H // rows
    behind = tl.zeros([], tl.float64)
    for step in range(tl.cdiv(S, WIDTH)):
        j = (tl.cdiv(S, WIDTH) - 1 - step) * WIDTH + tl.arange(0, WIDTH)
        _gate, has_gradient, is_cut = load_gates(GATES, row, j, j < S, FLOOR)
        i, own = j - first, tl.zeros([WIDTH], tl.float64)
        for g in range(group):
            bh = b * H + r * group + g
            if DKEY is not None:
                own -= tl.load(DKEY + bh * S + j, mask=j < S, other=0.0)
            if DQUERY is not None:
                own += tl.load(DQUERY + bh * T + i, mask=(i >= 0) & (i < T), other=0.0)
        sums = behind + tl.cumsum(own, 0, reverse=True)
        behind += tl.sum(own, 0)
        gradient = tl.where(has_gradient & ~is_cut, sums, 0.0)
        at = DGATES + (b * rows + r) * S + j
        tl.store(at, gradient.to(DGATES.dtype.element_ty), mask=j < S)
