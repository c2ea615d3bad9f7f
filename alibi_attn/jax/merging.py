"""Calls whose keys split into disjoint sets, each an ordinary call that every backend computes; the results merge by their lse.

    windows per head      the heads that share a window
    sinks                 the first n keys, without the window, and all others, within it
    prefix_len            the keys to the left of each query (and itself), and those to its right

The same as `attention/merging.py`, which says why it is exact and how tolerances add up. `attention.attend` runs the parts.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.jax.plan import Array

Spec = AttentionSpec[Array]
Result = tuple[Array, Array]


class Part(NamedTuple):
    """Some keys of a call, or some of its heads.

    Args:
        heads: the query heads of the call; None = all.
        is_reversed: the sequences run backward, and distances are one too small.
    """

    spec: Spec
    query: Array
    key: Array
    value: Array
    heads: tuple[int, ...] | None = None
    is_reversed: bool = False


def parts(spec: Spec, query: Array, key: Array, value: Array) -> list[Part]:
    """The parts of a call; those of several heads, or of sinks, may have parts again."""
    if spec.head_windows is not None:
        windows = dict.fromkeys(spec.head_windows)
        return [_of_heads(spec, query, key, value, window) for window in windows]
    if spec.sinks > 0:
        return _sinks_and_others(spec, query, key, value)
    left = Part(dataclasses.replace(spec, prefix_len=None), query, key, value)
    # The first key after query 0; a traced offset may be anywhere.
    after = max(spec.query_offset + 1, 0) if isinstance(spec.query_offset, int) else 0
    if spec.window == 1 or after >= spec.key_len:
        return [left]
    part, key, value = _keys(spec, key, value, after, spec.key_len)
    return [left, _reversed(part, query, key, value)]


def joined(spec: Spec, of: Sequence[Part], results: Sequence[Result]) -> Result:
    """(output in query's dtype, lse) of the call whose parts gave these results."""
    if of[0].heads is not None:
        order = np.argsort([head for part in of for head in part.heads or ()])
        output, lse = (
            jnp.concatenate([result[n] for result in results], axis)[(slice(None),) * axis + (order,)]
            for n, axis in ((0, 2), (1, 1))
        )
        return output, lse
    forward = [_in_order(part, result) for part, result in zip(of, results, strict=True)]
    output, lse = forward[0]
    for more, more_lse in forward[1:]:
        output, lse = merged(output, lse, more, more_lse)
    return output.astype(of[0].query.dtype), lse


@jax.jit
def merged(output: Array, lse: Array, more: Array, more_lse: Array) -> Result:
    """The (output, lse) over the union of two disjoint sets of keys; differentiable, even if a query sees no keys."""
    top = jax.lax.stop_gradient(jnp.maximum(lse, more_lse))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lse - top), jnp.exp(more_lse - top)
    total = weights[0] + weights[1]
    nothing = total == 0
    total = jnp.where(nothing, 1.0, total)
    shares = [(weight / total).swapaxes(1, 2)[..., None] for weight in weights]
    return shares[0] * output + shares[1] * more, jnp.where(nothing, -jnp.inf, top + jnp.log(total))


def _of_heads(spec: Spec, query: Array, key: Array, value: Array, window: int) -> Part:
    """The heads with this window."""
    assert spec.head_windows is not None
    heads = [head for head, other in enumerate(spec.head_windows) if other == window]
    owners = sorted({head // spec.group for head in heads})
    if len(owners) * spec.group != len(heads):  # some query heads of a key head have other windows
        owners = [head // spec.group for head in heads]
    of_heads, of_owners = np.array(heads), np.array(owners)
    part = dataclasses.replace(
        spec,
        num_heads=len(heads),
        num_kv_heads=len(owners),
        slopes=spec.slopes[..., of_heads],
        right_slopes=None if spec.right_slopes is None else spec.right_slopes[..., of_heads],
        key_bias=None if spec.key_bias is None else spec.key_bias[:, of_heads],
        window=window,
        head_windows=None,
    )
    return Part(part, query[:, :, of_heads], key[:, :, of_owners], value[:, :, of_owners], heads=tuple(heads))


def _sinks_and_others(spec: Spec, query: Array, key: Array, value: Array) -> list[Part]:
    sinks = min(spec.sinks, spec.key_len)
    spec = dataclasses.replace(spec, sinks=0)
    of_sinks = _keys(dataclasses.replace(spec, window=None), key, value, 0, sinks)
    others = _keys(spec, key, value, sinks, spec.key_len)
    return [Part(part, query, keys, values) for part, keys, values in (others, of_sinks)]


def _keys(spec: Spec, key: Array, value: Array, start: int, stop: int) -> tuple[Spec, Array, Array]:
    """The call over keys [start, stop) only."""

    def cut(x: Array | None) -> Array | None:
        return None if x is None else x[..., start:stop]

    part = dataclasses.replace(
        spec,
        key_len=stop - start,
        query_offset=spec.query_offset - start,
        key_mask=cut(spec.key_mask),
        key_segments=cut(spec.key_segments),
        key_bias=cut(spec.key_bias),
        prefix_len=None if spec.prefix_len is None else spec.prefix_len - start,
    )
    return part, key[:, start:stop], value[:, start:stop]


def _reversed(spec: Spec, query: Array, key: Array, value: Array) -> Part:
    """The keys of the prefix after each query: key j becomes key S − 1 − j, and the queries are moved by one."""

    def turned(x: Array | None) -> Array | None:
        return None if x is None else jnp.flip(x, -1)

    assert spec.prefix_len is not None
    mask = jnp.arange(spec.key_len) < spec.prefix_len[:, None]
    part = dataclasses.replace(
        spec,
        prefix_len=None,
        window=None if spec.window is None else spec.window - 1,
        query_offset=spec.key_len - spec.query_len - 1 - spec.query_offset,
        key_mask=turned(mask if spec.key_mask is None else mask & spec.key_mask),
        query_segments=turned(spec.query_segments),
        key_segments=turned(spec.key_segments),
        key_bias=turned(spec.key_bias),
    )
    return Part(part, jnp.flip(query, 1), jnp.flip(key, 1), jnp.flip(value, 1), is_reversed=True)


def _in_order(part: Part, result: Result) -> Result:
    """The result of a part, for the queries in their order and with the true distances."""
    if not part.is_reversed:
        return result
    output, lse = jnp.flip(result[0], 1), jnp.flip(result[1], 2)
    blind = lse == -jnp.inf  # the incoming gradient of such a query has no effect
    return output, jnp.where(blind, lse, lse - part.spec.slopes[..., None])
