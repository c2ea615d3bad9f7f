"""The certificate, in plain numbers: slope + a bound on the scores + a tolerance -> a distance beyond which keys cannot matter.

Let a query's scaled scores be at most U, its log-sum-exp at least λ, and its head's slope m > 0. The keys at distance ≥ r weigh

    Σ_{d ≥ r} exp(U − m·d) / exp(λ)  =  exp(U − λ − m·r) / (1 − e^(−m))

together, whatever they are, and that is at most ε for every

    r ≥ reach = ⌈ (U − λ + ln(1/ε) − ln(1 − e^(−m))) / m ⌉ .

`attention/certificate/bounds.py` computes U and λ from tensors; `docs/maths.md` has the derivation and the bounds on gradients.
"""

import math

UNLIMITED = 2**60  # the reach of a head that may skip nothing: farther than any key
_NORM_ROUNDING = 2.0**-7  # of ‖q‖: two roundings to bfloat16 are 2⁻⁸, and the arithmetic of the norm stays far below


def tail_nats(slope: float) -> float:
    """−ln(1 − e^(−m)): ln of the weight of all keys from a distance on, relative to the first of them; m > 0."""
    return -math.log(-math.expm1(-slope))


def reach(slope: float, upper: float, lower: float, tolerance: float, *, slack: float = 0.0) -> int:
    """The smallest certified distance: all keys at |i − j| ≥ it weigh at most `tolerance` of the query's softmax mass.

    Args:
        slope: m of the head; a slope ≤ 0 has no reach.
        upper: U, an upper bound on the scaled scores of the keys that may be skipped.
        lower: λ, a lower bound on the query's log-sum-exp.
        tolerance: ε in [0, 1); with 0 nothing is skipped.
        slack: nats added to the numerator (rounding errors; ln 2 for the two sides of a symmetric head).

    Returns:
        A distance ≥ 1, or `UNLIMITED` if nothing may be skipped (also for bounds that are not finite).

    >>> reach(0.5, 8.0, 0.0, 2.0**-28)
    57
    """
    numerator = upper - lower + slack
    if not (slope > 0 and 0 < tolerance < 1 and math.isfinite(numerator)):
        return UNLIMITED
    nats = numerator - math.log(tolerance) + tail_nats(slope)
    quotient = nats / slope
    if not quotient < UNLIMITED:
        return UNLIMITED
    # Rounded up by more than the rounding error of this line.
    return max(1, math.ceil(quotient + 1e-12 * abs(quotient)))


def score_bound_of_norms(scale: float, head_dim: int, query_norm_weight: float, key_norm_weight: float) -> float:
    """U of a head whose queries and keys are RMS-normalized: |scale|·D·max|g_q|·max|g_k|, a constant of the weights.

    RMS normalization without offset gives ‖q‖ ≤ √D·max|g_q|. U allows for the rounding of q and of k, also in bfloat16, the
    coarsest dtype, and for that of their product in fp32.
    """
    rounding = _NORM_ROUNDING + (head_dim + 16) * 2.0**-24
    return abs(scale) * head_dim * abs(query_norm_weight) * abs(key_norm_weight) * (1.0 + rounding) ** 2


def static_reach(slope: float, upper: float, tolerance: float, *, slack: float = 0.0) -> int:
    """A reach that holds for all queries, known in advance: every query sees its own key, so λ ≥ −U.

    reach = ⌈(2U + ln(1/ε) − ln(1 − e^(−m))) / m⌉. A cache may drop the keys beyond it (see `nn.ALiBiAttention`).

    >>> static_reach(0.5, 8.0, 2.0**-28)
    73
    """
    return reach(slope, upper, -upper, tolerance, slack=slack)
