"""The keys that JAX's backends visit, and their gradients of values, for `keys_attack.py`.

Calls have masks, segments and windows that hide nothing where an attack has none, so that few shapes are compiled.
"""

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
from certificate_attack import keys_of

from alibi_attn.attention.backends.native.visited import Visited
from alibi_attn.jax import alibi_attention, attention
from alibi_attn.jax.call.operands import operands

BLOCK = 32  # queries and keys that the loop leaves out together
ALL = 10_000  # a window that hides nothing


def small_tiles(side: int = BLOCK) -> contextlib.AbstractContextManager[object]:
    """In this context the loop has blocks and tiles of this many queries and keys."""
    return unittest.mock.patch.multiple(attention, QUERY_BLOCK=side, KEY_TILE=side)


def arguments_of(spec, tensors: tuple[torch.Tensor, ...]) -> tuple[list[jax.Array], dict]:
    """The arrays and options of a call in JAX."""
    narrow = tensors[0].dtype == torch.bfloat16
    rows = [x.transpose(1, 2).float() if narrow else x.transpose(1, 2) for x in tensors]
    arrays = [jnp.asarray(x.numpy(), jnp.bfloat16 if narrow else None) for x in rows]
    slopes = jnp.asarray(spec.slopes.numpy(), jnp.float64 if tensors[0].dtype == torch.float64 else jnp.float32)
    segments = torch.zeros(spec.batch, spec.query_len), torch.zeros(spec.batch, spec.key_len)
    if spec.key_segments is not None:
        segments = spec.query_segments, spec.key_segments
    seen = torch.ones(spec.batch, spec.key_len, dtype=torch.bool) if spec.key_mask is None else spec.key_mask
    options = {
        "causal": spec.causal,
        "right_slopes": None if spec.right_slopes is None else jnp.asarray(spec.right_slopes.numpy()),
        "window": ALL if spec.window is None else spec.window,
        "key_mask": jnp.asarray(seen.numpy()),
        "segment_ids": tuple(jnp.asarray(x.numpy().astype(np.int32)) for x in segments),
        "query_offset": spec.query_offset,
        "tolerance": spec.tolerance,
    }
    if spec.key_bias is not None:
        options["key_bias"] = jnp.asarray(spec.key_bias.numpy())
    return [*arrays, slopes], options


def visited(
    backend: str, spec, query, key, value, *, side: int = BLOCK, x64: bool = True, for_gradients: bool = True
) -> list[torch.Tensor]:
    """[B, H, T, S] each: the keys that forward visits, and those that backward visits; in tiles of `side` keys."""
    with jax.enable_x64(x64), small_tiles(side):
        arrays, options = arguments_of(spec, (query, key, value))
        described = attention.make_spec(*arrays, **options)
        plan = dataclasses.replace(attention.make_plan(described, arrays[0], backend), for_gradients=for_gradients)
        return list(keys_read(plan, spec, *attention._forward(plan, *operands(described, *arrays[:3], None))[3:]))


def keys_read(plan, spec, of_xla, of_native) -> Iterator[torch.Tensor]:
    """[B, H, T, S] each: the keys that forward of this plan has visited, and those that backward visits."""
    if of_native is not None:
        first = np.broadcast_to(np.asarray(spec.query_offset, np.int64), 1)
        kept = Visited.of(spec, first, np.array(of_native.visited))
        yield keys_of(kept, spec)
        yield keys_of(kept.for_backward, spec)
    else:
        yield _keys_of_tiles(plan, spec, of_xla.visited)
        yield _keys_of_tiles(plan, spec, of_xla.needed)


def _keys_of_tiles(plan, spec, of_blocks) -> torch.Tensor:
    number = np.arange(-(-spec.key_len // plan.key_tile))
    read = (number >= np.asarray(of_blocks.first)[:, None]) & (number <= np.asarray(of_blocks.last)[:, None])
    for outlier in of_blocks.outliers:
        single = number == np.asarray(outlier)[:, None]
        assert not (read & single).any(), "a tile was read twice"
        read |= single
    read = read.reshape(spec.batch, spec.num_heads, -1, len(number)).repeat(plan.key_tile, 3)[..., : spec.key_len]
    return torch.from_numpy(read.repeat(plan.query_block, 2)[:, :, : spec.query_len])


def gradient_of_values(backend: str, spec, tensors: tuple[torch.Tensor, ...], norms: torch.Tensor) -> torch.Tensor:
    """[K, S] float64: the first column of dv, where that of do is `norms` [H, T] and the others are 0."""
    with jax.enable_x64(True), small_tiles():
        (query, key, value, slopes), options = arguments_of(spec, tensors)
        weights = jnp.asarray(norms.T.numpy(), query.dtype)

        def loss(value: jax.Array) -> jax.Array:
            output = alibi_attention(query, key, value, slopes, backend=backend, **options)
            return (output[0, ..., 0] * weights).sum()

        return torch.tensor(np.asarray(jax.grad(loss)(value)[0, :, :, 0].T, np.float64))
