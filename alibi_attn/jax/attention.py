"""`alibi_attention` for JAX arrays: the checks, and one function with a gradient of its own behind them.

Press et al. 2022, sec. 3 (arXiv:2108.12409). The checks are those of `attention/spec.py`. Next: `loop.py`, the loop,
`bounds.py`, the certificate that ends it, and `tiles.py`, the arithmetic.
"""

from functools import partial
from typing import Literal, NamedTuple, NoReturn, get_args

import jax
import jax.numpy as jnp

from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.jax import dense, loop, tiles
from alibi_attn.jax.blocks import Inputs
from alibi_attn.jax.dropout import seed_words
from alibi_attn.jax.loop import Visited
from alibi_attn.jax.tiles import NO_LIMIT, Array, KeyBias, Plan
from alibi_attn.jax.validation import SegmentIds, Slopes, checked_dropout_key, make_spec

Backend = Literal["auto", "dense", "loop"]

QUERY_BLOCK = KEY_TILE = 128  # on the CPU 64 to 256 are alike


def alibi_attention(
    query: Array,
    key: Array,
    value: Array,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    window: int | None = None,
    scale: float | None = None,
    query_offset: int | Array | None = None,
    key_mask: Array | None = None,
    segment_ids: SegmentIds | None = None,
    key_bias: Array | None = None,
    dropout_p: float = 0.0,
    dropout_key: Array | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Array | tuple[Array, Array]:
    """Attention with linear biases, softmax(scale·q·kᵀ − m·|i − j|)·v, [B, T, H, D] in query's dtype.

    Exact to rounding, in memory linear in T and S. Pure: works under `jit`, `grad`, `vmap`, `checkpoint` and `shard_map`
    (over sequences and heads; slopes, biases and masks sharded alike). Differentiable once, in reverse, in query, key, value,
    slopes and key_bias, and through lse. Under `jit` everything but arrays is static.

    Args:
        query: [B, T, H, D], JAX's layout; float16, bfloat16, float32, or float64 where x64 is enabled.
        key, value: [B, S, K, D], K divides H (grouped-query attention).
        slopes: m, one a head [H] or [B, H], used in fp32 (fp64 for fp64 input); 0 = no position, negative = far keys are
            preferred. Default `alibi_slopes(H)`, the published ones.
        causal: keys to the right are not seen. False is symmetric, −m·|i − j| on both sides.
        right_slopes: own slopes for keys to the right (causal=False only); inf = this head never looks right.
        window: how many keys a query may see, itself included (to either side when not causal).
        scale: factor of q·k, 1/√D by default. The bias is not scaled.
        query_offset: position of query 0; S − T by default: the queries are the last T of the S positions. An int, or an
            integer array, 0-d or [B], which may be traced. It may lie before or after all the keys.
        key_mask: [B, S] bool, True = may be seen.
        segment_ids: [B, S] integers, attention within a segment only; or a pair ([B, T], [B, S]) for queries and keys.
        key_bias: b, fp32 or fp64, [B, H, S] or what broadcasts to it: a number for every key, added to its scaled scores; −inf =
            may not be seen. Scores count from a number near those that matter: large ones cost the rounding of their
            differences, and no fp64 is needed.
        dropout_p: share of the attention weights that are dropped, in [0, 1).
        dropout_key: from `jax.random.key`, needed where dropout_p > 0. What a key drops depends on sequence, head and positions
            only: it is the same in every backend and chunk of queries, and in PyTorch.
        tolerance: the largest share of a query's softmax mass that may be skipped, in [0, 1); default eps / 32 of the dtype,
            far below its rounding; 0 skips only what is forbidden.
        return_lse: also return the natural log-sum-exp of the scores, [B, H, T] fp32 (fp64 where query or key_bias is), −inf
            where nothing is seen.
        backend: "loop" visits tiles of keys outward from the diagonal, "dense" computes all scores, "auto" picks by shapes.

    Returns:
        The output, or (output, lse). A query that may see nothing gives zeros. A key that may not be seen is never used.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or numbers, when the function is traced.

    >>> q = k = v = jnp.ones((1, 128, 8, 64))
    >>> alibi_attention(q, k, v).shape
    (1, 128, 8, 64)

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    spec = make_spec(
        query, key, value, slopes, causal=causal, right_slopes=right_slopes, window=window, scale=scale,
        query_offset=query_offset, key_mask=key_mask, segment_ids=segment_ids, key_bias=key_bias,
        dropout_p=dropout_p, tolerance=tolerance, return_lse=return_lse,
    )  # fmt: skip
    output, lse = attend(spec, query, key, value, checked_dropout_key(dropout_p, dropout_key), backend)
    return (output, lse) if return_lse else output


def attend(
    spec: AttentionSpec[Array],
    query: Array,
    key: Array,
    value: Array,
    dropout_key: Array | None,
    backend: Backend,
    *,
    key_bias_low: Array | None = None,
    query_bias_low: Array | None = None,
) -> tuple[Array, Array]:
    """(output, lse) of a call that was checked.

    Args:
        key_bias_low, query_bias_low: [B, H, S] and [B, H, T] what is left of the spec's biases, b = key_bias + key_bias_low;
            without gradients.
    """
    arrays, rest = _call(spec, query, key, value, dropout_key)
    return _attend(
        make_plan(spec, backend), arrays, rest._replace(key_bias_low=key_bias_low, query_bias_low=query_bias_low)
    )


def make_plan(spec: AttentionSpec[Array], backend: Backend) -> Plan:
    """How it is computed, decided from shapes alone."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r} but must be one of {', '.join(map(repr, get_args(Backend)))}")
    empty = 0 in (spec.batch, spec.query_len, spec.key_len)
    if backend == "loop" and empty:
        raise ValueError(
            "backend 'loop' cannot run this: there is no query or no key; backend='auto' picks one that can"
        )
    # A few queries cost one pass over the keys either way; a few tiles are not worth a loop.
    short = spec.query_len <= 16 or spec.query_len * spec.key_len < 256 * 256
    return Plan(
        causal=spec.causal,
        dropout_p=spec.dropout_p,
        dense=backend == "dense" or empty or (backend == "auto" and short),
        query_block=min(QUERY_BLOCK, spec.query_len),
        key_tile=KEY_TILE,
        key_bias=spec.key_bias is not None,
        query_bias=spec.query_bias is not None,
    )


class _Arrays(NamedTuple):
    """What has a gradient."""

    query: Array  # [B, T, H, D]
    key: Array  # [B, S, K, D]
    value: Array  # [B, S, K, D]
    left: Array  # [B, H]
    right: Array  # [B, H]
    key_bias: Array | None  # [B, H, S]
    query_bias: Array | None  # [B, H, T]


class _Rest(NamedTuple):
    """What has none."""

    scale: Array  # scalar
    tolerance: Array  # scalar
    window: Array | None  # int32 scalar
    offset: Array  # [B] int32
    hidden: Array  # [B, S] bool
    query_segments: Array | None  # [B, T] int32
    key_segments: Array | None  # [B, S] int32
    dropout_seed: Array | None  # [2] uint32
    key_bias_low: Array | None = None  # [B, H, S]
    query_bias_low: Array | None = None  # [B, H, T]


class _Kept(NamedTuple):
    """What forward leaves for backward."""

    arrays: _Arrays
    rest: _Rest
    output: Array  # [B, T, H, D]
    lse: Array  # [B, H, T], counted from `reference`
    reference: Array | None  # [B, H, T] where keys have biases
    visited: Visited | None


def _call(
    spec: AttentionSpec[Array], query: Array, key: Array, value: Array, dropout_key: Array | None
) -> tuple[_Arrays, _Rest]:
    heads = (spec.batch, spec.num_heads)
    left = jnp.broadcast_to(spec.slopes, heads)
    right = left if spec.right_slopes is None else jnp.broadcast_to(spec.right_slopes, heads)
    arrays = _Arrays(
        jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), left, right, spec.key_bias, spec.query_bias
    )
    mask = spec.key_mask
    rest = _Rest(
        scale=jnp.asarray(spec.scale, left.dtype),
        tolerance=jnp.asarray(spec.tolerance, left.dtype),
        window=None if spec.window is None else jnp.asarray(min(spec.window, NO_LIMIT), jnp.int32),
        offset=jnp.broadcast_to(jnp.asarray(spec.query_offset, jnp.int32), spec.batch),
        hidden=jnp.zeros((spec.batch, spec.key_len), bool) if mask is None else ~jnp.asarray(mask),
        query_segments=spec.query_segments,
        key_segments=spec.key_segments,
        dropout_seed=None if dropout_key is None else seed_words(dropout_key),
    )
    return _varying_alike(arrays, rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, arrays: _Arrays, rest: _Rest) -> tuple[Array, Array]:
    kept = _forward(plan, arrays, rest)
    return kept.output, _unshifted(kept)


def _attend_forward(plan: Plan, arrays: _Arrays, rest: _Rest) -> tuple[tuple[Array, Array], _Kept]:
    kept = _forward(plan, arrays, rest)
    return (kept.output, _unshifted(kept)), kept


def _attend_backward(plan: Plan, kept: _Kept, grads: tuple[Array, Array]) -> tuple[_Arrays, None]:
    return _backward(plan, kept, *grads), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(plan: Plan, arrays: _Arrays, rest: _Rest) -> _Kept:
    return _Kept(arrays, rest, *_forward_arrays(plan, arrays, rest))


@partial(jax.jit, static_argnums=0)
def _forward_arrays(plan: Plan, arrays: _Arrays, rest: _Rest) -> tuple[Array, Array, Array | None, Visited | None]:
    """output, lse, reference and visited of `_Kept`."""
    inputs, spoiled = _inputs(arrays, rest)
    visited = None
    if plan.dense:
        output, lse, reference = dense.forward(plan, inputs)
    else:
        output, lse, reference, visited = loop.forward(plan, inputs)
    spoiled &= lse > -jnp.inf
    output = jnp.where(spoiled[..., None], jnp.nan, output)
    return output.swapaxes(1, 2), jnp.where(spoiled, jnp.nan, lse), reference, visited


def _unshifted(kept: _Kept) -> Array:
    """lse with what its scores left out, b's reference and the query's bias; small differences of large numbers first."""
    if kept.reference is None:
        return kept.lse
    shift, of_query, low = kept.reference, kept.arrays.query_bias, kept.rest.query_bias_low
    if of_query is not None:
        shift = shift + of_query.astype(shift.dtype)
    if low is not None:
        shift = shift + low.astype(shift.dtype)
    return kept.lse.astype(shift.dtype) + shift


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(plan: Plan, kept: _Kept, grad_output: Array, grad_lse: Array) -> _Arrays:
    return _backward_once(plan, kept, grad_output, grad_lse)


@_backward.defjvp
def _no_second_derivative(plan: Plan, primals: object, tangents: object) -> NoReturn:
    raise NotImplementedError(
        "alibi_attention can be differentiated once, but a second derivative was asked for; "
        "write the attention out with jax.numpy where you need one"
    )


@partial(jax.jit, static_argnums=0)
def _backward_once(plan: Plan, kept: _Kept, grad_output: Array, grad_lse: Array) -> _Arrays:
    """Gradients in the shapes and dtypes of what they are gradients of."""
    blind = kept.lse == -jnp.inf
    grad_output, output = grad_output.swapaxes(1, 2), kept.output.swapaxes(1, 2)
    # What comes for a query that saw nothing must reach no gradient, whatever it is.
    grad_output = jnp.where(blind[..., None], 0, grad_output)
    lse = jnp.where(blind, jnp.inf, kept.lse)
    grad_lse = jnp.where(blind, 0.0, grad_lse).astype(lse.dtype)
    shift = (grad_output.astype(lse.dtype) * output.astype(lse.dtype)).sum(-1) - grad_lse
    inputs, _ = _inputs(kept.arrays, kept.rest)
    if kept.visited is None:
        found = dense.backward(plan, inputs, lse, kept.reference, grad_output, shift, grad_lse)
    else:
        found = loop.backward(plan, inputs, lse, kept.reference, kept.visited, grad_output, shift, grad_lse)
    query, key, value = (x.swapaxes(1, 2).astype(output.dtype) for x in found[:3])
    biases = jax.tree.map(lambda x, like: x.astype(like.dtype), found[5:], tuple(kept.arrays[5:]))
    return _Arrays(query, key, value, found.left, found.right, *biases)


def _inputs(arrays: _Arrays, rest: _Rest) -> tuple[Inputs, Array]:
    """(the arrays by heads, keys that must not be used and queries with NaN or inf as zeros; [B, H, T] where those are)."""
    query, key, value = (x.swapaxes(1, 2) for x in arrays[:3])
    spoiled = ~jnp.isfinite(query).all(-1)
    query = jnp.where(spoiled[..., None], 0, query)
    hidden, bias = rest.hidden[:, None], None
    if arrays.key_bias is not None:
        work = jnp.promote_types(arrays.key_bias.dtype, arrays.left.dtype)
        high = jnp.where(hidden, -jnp.inf, arrays.key_bias.astype(work))
        low = None if rest.key_bias_low is None else rest.key_bias_low.astype(work)
        bias = KeyBias(high, low)
        hidden = (high == -jnp.inf).reshape(len(high), key.shape[1], -1, key.shape[2]).all(2)
    key, value, veil = tiles.clean_keys(key, value, hidden)
    inputs = Inputs(
        query, key, value, veil, hidden, arrays.left, arrays.right, rest.scale, rest.tolerance, rest.window,
        rest.offset, rest.query_segments, rest.key_segments, rest.dropout_seed, bias,
    )  # fmt: skip
    return inputs, spoiled


def _varying_alike(arrays: _Arrays, rest: _Rest) -> tuple[_Arrays, _Rest]:
    """Inside `shard_map` all arrays vary over the mesh axes that any of them varies over: loops need equal types.

    A zero that is made like an array varies as it does, and what it is added to does too (and sums its gradient).
    """
    both = (arrays, rest._replace(dropout_seed=None))
    leaves = jax.tree.leaves(both)
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return arrays, rest
    zeros = [jnp.zeros_like(x, dtype=jnp.int32, shape=()) for x in leaves]
    zero = sum(zeros[1:], zeros[0])
    arrays, varying = jax.tree.map(
        lambda x: x ^ zero.astype(bool) if x.dtype == bool else x + zero.astype(x.dtype), both
    )
    return arrays, varying._replace(dropout_seed=rest.dropout_seed)
