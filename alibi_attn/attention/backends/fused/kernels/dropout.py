"""Attention dropout: which weights are kept is counted, not remembered, so that backward draws what forward drew in other tiles.

Philox 2x32 with seven rounds, the fewest that pass BigCrush (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy
as 1, 2, 3"), counts query and key, and its key is drawn for the call and the head. Triton's own draws four numbers at a time, of
which one would be used, at more than twice the cost.
"""

# mypy: ignore-errors
# Triton compiles these functions itself and takes no type annotations but its own.

import triton
import triton.language as tl

_MULTIPLIER = tl.constexpr(0xD256D193)
_WEYL = tl.constexpr(0x9E3779B9)
_ROUNDS = tl.constexpr(7)


@triton.jit
def kept_weights(dropout, head, i, j):
    """1 / (1 − p) where the weight of query i and key j is kept, else 0."""
    head = head.to(tl.uint32)
    key, _, _, _ = tl.philox(dropout.seed, head, head * 0, head * 0, head * 0)
    j, i = tl.broadcast(j.to(tl.uint32), i.to(tl.uint32))
    bits = drawn_bits(key, i, j)
    return tl.where(bits >= tl.cast(dropout.share * 4294967296.0, tl.uint32), 1.0 / (1.0 - dropout.share), 0.0)


@triton.jit
def drawn_bits(key, counter, other):
    """The first of the two numbers that Philox 2x32 draws, uint32."""
    for _ in tl.static_range(_ROUNDS):
        low = tl.mul(counter, _MULTIPLIER, sanitize_overflow=False)
        counter = tl.umulhi(counter, _MULTIPLIER) ^ key ^ other
        other = low
        key = tl.add(key, _WEYL, sanitize_overflow=False)
    return counter
