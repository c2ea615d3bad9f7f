"""Paths that XLA compiles for any device: a loop over tiles, or all scores at once. Next: `plan.py`, `loop.py`, `dense.py`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_attn.jax.backends import dense, loop
from alibi_attn.jax.backends.tiles import Finished
from alibi_attn.jax.call.operands import Arrays, Rest
from alibi_attn.jax.call.plan import Array, Inputs, KeyBias, Pair, Plan, Visited, sum_of_two


class Saved(NamedTuple):
    """The arrays that forward saves for backward."""

    lse: Array  # [B, H, T], relative to `reference`
    reference: Array | None  # [B, H, T] if keys have biases
    visited: Visited | None  # None = all keys
    needed: Visited | None  # the same, of backward


def forward(plan: Plan, arrays: Arrays, rest: Rest) -> tuple[Array, Array, Array | None, Saved]:
    """(output [B, T, H, D] in query's dtype, lse [B, H, T] with the biases of queries, its low part, arrays for backward)."""
    inputs, spoiled = _inputs(arrays, rest)
    visited = needed = None
    if plan.dense:
        output, lse, reference = dense.forward(plan, inputs)
    else:
        output, lse, reference, visited, needed = loop.forward(plan, inputs)
    spoiled &= lse > -jnp.inf
    output = jnp.where(spoiled[..., None], jnp.nan, output)
    saved = Saved(jnp.where(spoiled, jnp.nan, lse), reference, visited, needed)
    lse, low = _unshifted(saved, arrays, rest)
    return output.swapaxes(1, 2), lse, low if plan.lse_in_two else None, saved


def _unshifted(saved: Saved, arrays: Arrays, rest: Rest) -> Pair:
    """lse plus the terms that its scores exclude: the reference of biases and the query's bias. Large numbers are added first."""
    if saved.reference is None:
        return saved.lse, jnp.zeros_like(saved.lse)
    total, low = saved.reference, jnp.zeros_like(saved.reference)
    for term in (arrays.query_bias, rest.query_bias_low, saved.lse):
        if term is not None:
            total, rounding = sum_of_two(total, term.astype(total.dtype))
            low = low + rounding
    return total, jnp.where(jnp.isfinite(low), low, 0.0)


def backward(
    plan: Plan, arrays: Arrays, rest: Rest, saved: Saved, output: Array, grad_output: Array, grad_lse: Array
) -> Arrays:
    """Gradients in the shapes and dtypes of their inputs.

    Args:
        output: [B, T, H, D] from forward; grad_output [B, T, H, D] and grad_lse [B, H, T] are the gradients of the loss.
    """
    blind = saved.lse == -jnp.inf
    grad_output, output = grad_output.swapaxes(1, 2), output.swapaxes(1, 2)
    # The incoming gradient of a query that saw no key is ignored, even NaN.
    grad_output = jnp.where(blind[..., None], 0, grad_output)
    lse = jnp.where(blind, jnp.inf, saved.lse)
    grad_lse = jnp.where(blind, 0.0, grad_lse).astype(lse.dtype)
    shift = (grad_output.astype(lse.dtype) * output.astype(lse.dtype)).sum(-1) - grad_lse
    inputs, _ = _inputs(arrays, rest)
    known = Finished(lse, saved.reference, grad_output, shift, grad_lse)
    if saved.needed is None:
        gradients = dense.backward(plan, inputs, known)
    else:
        gradients = loop.backward(plan, inputs, known, saved.needed)
    query, key, value = (x.swapaxes(1, 2).astype(output.dtype) for x in gradients[:3])
    biases = jax.tree.map(lambda x, like: x.astype(like.dtype), gradients[5:], tuple(arrays[5:]))
    return Arrays(query, key, value, gradients.left, gradients.right, *biases)


def _inputs(arrays: Arrays, rest: Rest) -> tuple[Inputs, Array]:
    """(arrays with heads first, hidden keys and non-finite queries zeroed; [B, H, T]: which queries are not finite)."""
    query, key, value = (x.swapaxes(1, 2) for x in arrays[:3])
    spoiled = ~jnp.isfinite(query).all(-1)
    query = jnp.where(spoiled[..., None], 0, query)
    shape = key.shape[0], key.shape[2]
    hidden = jnp.zeros_like(arrays.left, bool, shape=shape) if rest.key_mask is None else ~rest.key_mask
    hidden, bias = hidden[:, None], None
    if arrays.key_bias is not None:
        work = jnp.promote_types(arrays.key_bias.dtype, arrays.left.dtype)
        high = jnp.where(hidden, -jnp.inf, arrays.key_bias.astype(work))
        low = None if rest.key_bias_low is None else rest.key_bias_low.astype(work)
        bias = KeyBias(high, low)
        group = high.shape[1] // key.shape[1]
        hidden = (high == -jnp.inf).reshape(*key.shape[:2], group, key.shape[2]).all(2)
    key, value, veil = clean_keys(key, value, hidden)
    return Inputs(query, key, value, veil, hidden, arrays.left, arrays.right, bias, rest), spoiled


def clean_keys(key: Array, value: Array, hidden: Array) -> tuple[Array, Array, Array]:
    """(key, value, veil [...]): keys [..., D] that are hidden, or not finite in key or value, are replaced by zeros.

    Matrix products touch every key, and 0·NaN is NaN: otherwise one hidden key would spoil all queries.
    """
    bad = ~(jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1))
    veil = jnp.where(hidden, -jnp.inf, jnp.where(bad, jnp.nan, 0.0))
    unused = (bad | hidden)[..., None]
    veil = veil.astype(jnp.promote_types(key.dtype, jnp.float32))
    return jnp.where(unused, 0, key), jnp.where(unused, 0, value), veil
