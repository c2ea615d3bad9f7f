"""The heads of ALiBi in numbers: slope, half-life, and the distance beyond which a key is negligible."""

import math

from alibi_attn import alibi_slopes
from alibi_lab.records import MAX_COUNT

NEGLIGIBLE = 1e-6  # a key with a smaller factor is negligible and is drawn without color


def head_rows(num_heads: int) -> list[tuple[str, str, str, str]]:
    """Head, slope, half-life and the distance from which the factor is below 1e-6, for every head."""
    return [
        (f"{head}", fraction(m), f"{half_life(m):,.1f}", f"{math.floor(-math.log(NEGLIGIBLE) / m) + 1:,}")
        for head, m in enumerate(alibi_slopes(num_heads).tolist(), start=1)
    ]


def half_life(slope: float) -> float:
    """The distance in tokens at which a head's factor e^(−m·d) is one half, ln 2 / m; infinite for slope 0."""
    return math.log(2) / slope if slope > 0 else math.inf


def fraction(slope: float) -> str:
    """A slope as text: "1/256" if it is one over an integer, otherwise three digits."""
    if slope > 1 / MAX_COUNT and abs(1 / slope - round(1 / slope)) < 1e-9 / slope:
        return f"1/{round(1 / slope)}" if slope != 1 else "1"
    return f"{slope:.3g}"
