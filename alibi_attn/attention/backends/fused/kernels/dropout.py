"""Attention dropout by a counter-based generator: nothing is stored, and backward draws the numbers that forward drew.

`attention/call/dropout.py` has the definition: Philox 2x32 with seven rounds (Salmon, Moraes, Dror, Shaw 2011, "Parallel random
numbers: as easy as 1, 2, 3"). The two words of a draw are those of neighboring keys; here each key computes both,
because sharing them would need an exchange between threads.
"""

# mypy: ignore-errors
# ruff: noqa: RET503
# A missing part of a call is None: Triton 3.6 returns that only implicitly.
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import HeadDropout, Numbers
from alibi_attn.attention.backends.fused.kernels.positions import distance_moved, load_offset

_MULTIPLIER = tl.constexpr(0xD256D193)
_WEYL = tl.constexpr(0x9E3779B9)
_ROUNDS = tl.constexpr(7)


@triton.jit
def head_dropout(call, b, h):
    """The `HeadDropout` of sequence b and head h, or of heads of any shape; None = every weight is kept."""
    dropout = call.dropout
    if dropout is not None:
        seed = dropout.seed + b // dropout.alike * 4
        high = tl.load(seed)
        sequence, h = (b % dropout.alike + tl.load(seed + 1)).to(tl.uint32), (h + tl.load(seed + 2)).to(tl.uint32)
        x, y = drawn_words(high.to(tl.uint32), sequence, h)
        key, shift = drawn_words((high >> 32).to(tl.uint32), x, y)
        if call.key_numbers is None:
            moved = distance_moved(call.query_offset, b, call.T, call.S)
            shift = tl.add(shift, moved.to(tl.uint32), sanitize_overflow=False)
        return HeadDropout(dropout.threshold, dropout.factor, key, shift, tl.load(seed + 3).to(tl.uint32))


@triton.jit
def numbers_of(call, b):
    """The `Numbers` of sequence b; None = queries and keys are in order."""
    if call.key_numbers is not None:
        start = load_offset(call.query_offset, b, call.T, call.S)
        queries = call.query_numbers + (b * call.T - start)
        return Numbers(queries, call.key_numbers + b * call.S, start + call.T, call.S)


@triton.jit
def kept_weights(dropout, numbers, i, first, BN: tl.constexpr):
    """[BM, BN]: 1 / (1 − p) where the weight of the query at position i [BM] and a key from `first` on is kept, else 0."""
    if numbers is not None:
        i = tl.load(numbers.queries + i, mask=i < numbers.stop, other=0)
    i = tl.add(i.to(tl.uint32), dropout.first_key, sanitize_overflow=False)[:, None]
    if numbers is not None:
        j = first + tl.arange(0, BN)
        j = tl.load(numbers.keys + j, mask=j < numbers.S, other=0).to(tl.uint32)
        bits = bits_of_keys(dropout, i, tl.add(j, dropout.first_key, sanitize_overflow=False)[None, :])
    else:
        first = tl.add(tl.cast(first, tl.uint32), dropout.first_key, sanitize_overflow=False)
        if (first & 1) == 0:
            bits = bits_of_pairs(dropout, i, first >> 1, BN)
        else:  # a part that begins in the middle of a pair
            j = tl.add(first, tl.arange(0, BN).to(tl.uint32), sanitize_overflow=False)
            bits = bits_of_keys(dropout, i, j[None, :])
    return tl.where(bits >= tl.cast(dropout.threshold, tl.uint32), dropout.factor, 0.0)


@triton.jit
def kept_by_keys(dropout, numbers, i, j):
    """The same [BN, BM], for queries at positions i [BM] and keys j [BN]; the keys of a pair are in different threads here."""
    if numbers is not None:
        i = tl.load(numbers.queries + i, mask=i < numbers.stop, other=0)
        j = tl.load(numbers.keys + j, mask=j < numbers.S, other=0)
    i = tl.add(i.to(tl.uint32), dropout.first_key, sanitize_overflow=False)[None, :]
    j = tl.add(j.to(tl.uint32), dropout.first_key, sanitize_overflow=False)[:, None]
    bits = bits_of_keys(dropout, i, j)
    return tl.where(bits >= tl.cast(dropout.threshold, tl.uint32), dropout.factor, 0.0)


@triton.jit
def bits_of_pairs(dropout, i, pair, BN: tl.constexpr):
    """[BM, BN] for i [BM, 1] and the keys of BN / 2 pairs."""
    pairs = (pair + tl.arange(0, BN // 2).to(tl.uint32) & 0x7FFFFFFF)[None, :]  # keys are numbered modulo 2³²
    i, pairs = tl.broadcast(tl.add(i, dropout.shift, sanitize_overflow=False), pairs)
    of_even, of_odd = drawn_words(dropout.key, i, pairs)
    return tl.interleave(of_even, of_odd)


@triton.jit
def bits_of_keys(dropout, i, j):
    """The random bits of i and j, in their broadcast shape."""
    i, j = tl.broadcast(tl.add(i, dropout.shift, sanitize_overflow=False), j)
    of_even, of_odd = drawn_words(dropout.key, i, j >> 1)
    return tl.where((j & 1) == 0, of_even, of_odd)


@triton.jit
def drawn_words(key, x, y):
    """The two words of Philox 2x32-7; arguments and results are uint32."""
    for _ in tl.static_range(_ROUNDS):
        low = tl.mul(x, _MULTIPLIER, sanitize_overflow=False)
        x = tl.umulhi(x, _MULTIPLIER) ^ key ^ y
        y = low
        key = tl.add(key, _WEYL, sanitize_overflow=False)
    return x, y
