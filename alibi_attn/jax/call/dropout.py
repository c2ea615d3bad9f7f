"""Which attention weights dropout keeps: the definition of `attention/call/dropout.py`, whose seed n is `jax.random.key(n)`.

Philox 2x32-7 in uint32, because JAX has no larger integers unless x64 is enabled.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alibi_attn.attention.call.spec import dropout_numbers

Array = jax.Array

MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
ROUNDS = 7


class Origin(NamedTuple):
    """The numbers of a call's first head and first key in the computation that it is a part of; not traced."""

    head: int
    key: int


WHOLE = Origin(0, 0)  # of a call that is a part of no other


class HeadDropout(NamedTuple):
    """The generator of one head of one sequence; uint32 scalars."""

    key: Array
    shift: Array  # added to the positions of queries


def seed_words(dropout_key: Array) -> Array:
    """[2] uint32, the high and the low word of the seed: the words of a threefry key, or two words drawn from another key."""
    typed = jnp.issubdtype(dropout_key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(dropout_key) if typed else dropout_key
    return words if words.shape == (2,) else jax.random.bits(dropout_key, (2,), jnp.uint32)


def head_dropout(seed: Array | None, sequence: Array, head: Array) -> HeadDropout | None:
    """The generator of sequence b and head h; None without a seed."""
    if seed is None:
        return None
    x, y = philox(seed[1], sequence.astype(jnp.uint32), head.astype(jnp.uint32))
    return HeadDropout(*philox(seed[0], x, y))


def factors(
    mine: HeadDropout, dropout_p: float, i: Array, j: Array, shape: tuple[int, int], dtype: jnp.dtype, first_key: int
) -> Array:
    """[t, s] 1/(1 − p) if the weight of query i + row and key j + column is kept, 0 if it is dropped.

    Args:
        i, j: int32 scalars, counted from the call's first key; j is even.
        first_key: the number of that key, see `Origin`.
    """
    odd = first_key % 2
    rows, pairs = shape[0], (shape[1] + odd + 1) // 2
    row = lax.broadcasted_iota(jnp.uint32, (rows, pairs), 0)
    pair = lax.broadcasted_iota(jnp.uint32, (rows, pairs), 1)
    first = np.uint32(first_key % 2**32)
    row, pair = row + (i.astype(jnp.uint32) + first + mine.shift), pair + (j.astype(jnp.uint32) + first >> 1)
    words = philox(mine.key, row, pair & np.uint32(2**31 - 1))
    threshold, factor = dropout_numbers(dropout_p)
    kept = jnp.stack(words, -1).reshape(rows, 2 * pairs)[:, odd : odd + shape[1]] >= np.uint32(threshold)
    return jnp.where(kept, jnp.asarray(factor, dtype), 0)


def factors_of_numbers(
    mine: HeadDropout, dropout_p: float, i: Array, j: Array, dtype: jnp.dtype, first_key: int
) -> Array:
    """The same for queries and keys with the numbers i [t] and j [s], int32, relative to the first key."""
    first = np.uint32(first_key % 2**32)
    row, key = i.astype(jnp.uint32)[:, None] + (first + mine.shift), j.astype(jnp.uint32)[None] + first
    of_even, of_odd = philox(mine.key, row, key >> 1)
    threshold, factor = dropout_numbers(dropout_p)
    kept = jnp.where(key % 2 == 0, of_even, of_odd) >= np.uint32(threshold)
    return jnp.where(kept, jnp.asarray(factor, dtype), 0)


def philox(key: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Both words of Philox 2x32-7; arguments and results are uint32; shapes broadcast."""
    for _ in range(ROUNDS):
        x, y = _high_half(x) ^ key ^ y, x * np.uint32(MULTIPLIER)
        key = key + np.uint32(WEYL)
    return x, y


def _high_half(x: Array) -> Array:
    """⌊x · MULTIPLIER / 2³²⌋, by products of halves, none of which overflows."""
    low, high = np.uint32(MULTIPLIER & 0xFFFF), np.uint32(MULTIPLIER >> 16)
    x_low, x_high = x & np.uint32(0xFFFF), x >> 16
    middle = x_high * low + (x_low * low >> 16)
    return x_high * high + (middle >> 16) + (x_low * high + (middle & np.uint32(0xFFFF)) >> 16)
