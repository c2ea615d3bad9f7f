"""Slopes: one fixed number m per head, which multiplies the distance (Press et al. 2022, sec. 3, arXiv:2108.12409).

The bias of a head is −m·|i − j|: a larger slope is steeper and sees less far. Plain numpy: no framework is loaded.
Next: `attention/call/bias.py`, which turns slopes into biases; `docs/maths.md`, on which models use which rule.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Rule = Literal["authors", "formula"]
Method = Literal["linear", "ntk"]


def alibi_slopes(num_heads: int, *, bias_max: float = 8.0, rule: Rule = "authors") -> NDArray[np.float64]:
    """The published slopes of all heads, [H] float64; as a tensor, `torch.tensor(alibi_slopes(8), device="cuda")`.

    For H a power of two both rules give m_h = 2^(−bias_max·h/H), h = 1 … H. For other H, c = 2^⌊log2 H⌋ and
    P(n) the slopes of n heads:

        rule="authors":  P(c) ++ P(2c)[0::2][:H − c]     the authors' code, and BLOOM, MPT and Falcon: not sorted,
                                                         and checkpoints depend on the order
        rule="formula":  2^(−bias_max·h/H)               the sentence of the paper, for every H

    Args:
        num_heads: H ≥ 1. Under tensor parallelism compute all heads and slice: `alibi_slopes(64)[8:16]`.
        bias_max: exponent of the flattest head; MPT calls it `alibi_bias_max`.

    Raises:
        TypeError: `num_heads` is not an integer.
        ValueError: `num_heads` < 1, `bias_max` not finite and positive, or an unknown rule.

    >>> alibi_slopes(8)
    array([0.5       , 0.25      , 0.125     , 0.0625    , 0.03125   ,
           0.015625  , 0.0078125 , 0.00390625])

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409); `get_slopes` in the authors' fairseq fork.
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, int | np.integer):
        raise TypeError(f"num_heads must be an integer but is {num_heads!r}")
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads} but there must be at least 1 head")
    if not (np.isfinite(bias_max) and bias_max > 0):
        raise ValueError(f"bias_max is {bias_max} but must be finite and positive; published models use 8")
    if rule == "formula":
        return _geometric(num_heads, bias_max)
    if rule != "authors":
        raise ValueError(f"rule is {rule!r} but must be one of {', '.join(map(repr, get_args(Rule)))}")
    closest = 1 << (int(num_heads).bit_length() - 1)
    extra = _geometric(2 * closest, bias_max)[0::2][: num_heads - closest]
    return np.concatenate([_geometric(closest, bias_max), extra])


def interpolate_slopes(
    slopes: Sequence[float] | NDArray[np.floating], trained: int, target: int, *, method: Method = "linear"
) -> NDArray[np.float64]:
    """Flatter slopes for a model that was trained at one length and is used at a longer one, [H] float64.

    With s = target / trained:

        "linear":  m·1/s                position interpolation: every distance appears s times shorter
        "ntk":     m·s^(−t)             t = ln(m_max/m) / ln(m_max/m_min): the steepest head is unchanged, the
                                        flattest is divided by s, and slopes in between are interpolated
                                        geometrically; the order of the heads does not matter

    Heads of slope 0 stay 0. With "ntk" and one distinct slope the result is that of "linear". A target that is not
    longer than the trained length changes nothing.

    Args:
        slopes: [H], non-negative.
        trained, target: lengths in tokens, ≥ 1.

    Raises:
        ValueError: lengths below 1, slopes that are negative, not finite or not one-dimensional, an unknown method.

    >>> interpolate_slopes([0.5, 0.25, 0.125], 1024, 4096, method="ntk")
    array([0.5    , 0.125  , 0.03125])

    Source: "linear": Al-Khateeb et al. 2023 (arXiv:2310.13017); "ntk": NTK-ALiBi, keezen/ntk_alibi, 2023.
    """
    m = np.asarray(slopes, dtype=np.float64)
    if m.ndim != 1 or m.size == 0:
        raise ValueError(
            f"slopes has shape {list(m.shape)} but must be [H], one slope per head, such as alibi_slopes(H)"
        )
    if not np.all(np.isfinite(m)) or np.any(m < 0):
        raise ValueError(f"slopes must be finite and not negative to be interpolated but are {m.tolist()}")
    for name, length in (("trained", trained), ("target", target)):
        if length > 2**60:
            raise ValueError(f"{name} is a length in tokens but is above 2⁶⁰; pass a smaller one")
        if not length >= 1:
            raise ValueError(f"{name} is {length} but a length is at least 1 token")
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r} but must be one of {', '.join(map(repr, get_args(Method)))}")
    stretch = max(target / trained, 1.0)
    positive = m[m > 0]
    if method == "linear" or positive.size == 0 or positive.max() == positive.min():
        return m / stretch
    steepest = positive.max()
    with np.errstate(divide="ignore"):
        t = np.log(steepest / m) / np.log(steepest / positive.min())
    return np.where(m > 0, m * stretch ** -np.where(m > 0, t, 0.0), 0.0)


def _geometric(num_heads: int, bias_max: float) -> NDArray[np.float64]:
    return np.exp2(-bias_max * np.arange(1, num_heads + 1) / num_heads)
