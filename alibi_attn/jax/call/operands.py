"""Separates differentiable from non-differentiable arguments of a validated call; shared by all JAX paths."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.jax.call.dropout import Array, seed_words

NO_LIMIT = 2**29  # of a window: int32 holds every sum and difference of it and two positions


class Arrays(NamedTuple):
    """The differentiable arrays."""

    query: Array  # [B, T, H, D]
    key: Array  # [B, S, K, D]
    value: Array  # [B, S, K, D]
    left: Array  # [B, H]
    right: Array  # [B, H]
    key_bias: Array | None  # [B, H, S]
    query_bias: Array | None  # [B, H, T]


class Rest(NamedTuple):
    """The arrays without gradients."""

    scale: Array  # scalar
    tolerance: Array  # scalar
    window: Array | None  # int32 scalar
    numbers: Array  # [5] uint32: scale and tolerance in fp64, two words each, and window, 0 = none
    offset: Array  # [B] int32
    key_mask: Array | None  # [B, S] bool
    query_segments: Array | None  # [B, T] int32
    key_segments: Array | None  # [B, S] int32
    dropout_seed: Array | None  # [2] uint32
    key_bias_low: Array | None = None  # [B, H, S]
    query_bias_low: Array | None = None  # [B, H, T]
    query_start: Array | None = None  # [B, H, T] int32
    query_points: Array | None = None  # [B, T, 2 or 3]
    key_points: Array | None = None  # [B, S, 2 or 3]
    query_numbers: Array | None = None  # [B, T] int32
    key_numbers: Array | None = None  # [B, S] int32


def operands(
    spec: AttentionSpec[Array], query: Array, key: Array, value: Array, dropout_key: Array | None
) -> tuple[Arrays, Rest]:
    """All arguments that can change without recompiling, as arrays."""
    heads = (spec.batch, spec.num_heads)
    left = jnp.broadcast_to(spec.slopes, heads)
    right = left if spec.right_slopes is None else jnp.broadcast_to(spec.right_slopes, heads)
    arrays = Arrays(
        jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), left, right, spec.key_bias, spec.query_bias
    )
    window = 0 if spec.window is None else min(spec.window, NO_LIMIT)
    rest = Rest(
        scale=jnp.asarray(spec.scale, left.dtype),
        tolerance=jnp.asarray(spec.tolerance, left.dtype),
        window=None if spec.window is None else jnp.asarray(window, jnp.int32),
        numbers=jnp.asarray(np.append(np.array([spec.scale, spec.tolerance]).view(np.uint32), np.uint32(window))),
        offset=jnp.broadcast_to(jnp.asarray(spec.query_offset, jnp.int32), spec.batch),
        key_mask=None if spec.key_mask is None else jnp.asarray(spec.key_mask),
        query_segments=spec.query_segments,
        key_segments=spec.key_segments,
        dropout_seed=None if dropout_key is None else seed_words(dropout_key),
        query_points=spec.query_coordinates,
        key_points=spec.coordinates,
        query_numbers=spec.query_numbers,
        key_numbers=spec.key_numbers,
    )
    return _varying_alike(arrays, rest)


def _varying_alike(arrays: Arrays, rest: Rest) -> tuple[Arrays, Rest]:
    """Inside `shard_map`, makes all arrays vary over the mesh axes that any of them varies over, because loops need equal types.

    A zero made from an array varies as the array does, and so does a sum with it (whose gradient is summed). Outside `shard_map`
    nothing is added, because XLA would flush denormal numbers to zero.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays, rest
    both = (arrays, rest._replace(dropout_seed=None))
    leaves = jax.tree.leaves(both)
    zeros = [jnp.zeros_like(x, dtype=jnp.int32, shape=()) for x in leaves]
    zero = sum(zeros[1:], zeros[0])
    arrays, varying = jax.tree.map(
        lambda x: x ^ zero.astype(bool) if x.dtype == bool else x + zero.astype(x.dtype), both
    )
    return arrays, varying._replace(dropout_seed=rest.dropout_seed)
