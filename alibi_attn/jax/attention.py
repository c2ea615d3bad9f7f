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
from alibi_attn.jax.loop import Inputs, Visited
from alibi_attn.jax.tiles import NO_LIMIT, Array, Plan
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
    dropout_p: float = 0.0,
    dropout_key: Array | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Array | tuple[Array, Array]:
    """Attention with linear biases, softmax(scale·q·kᵀ − m·|i − j|)·v, [B, T, H, D] in query's dtype.

    Exact to rounding, in memory linear in T and S. Pure: works under `jit`, `grad`, `vmap`, `checkpoint` and `shard_map`
    (over sequences and heads; slopes and masks sharded alike). Differentiable once, in reverse, in query, key, value and
    slopes, and through lse. Under `jit` everything but arrays is static.

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
        dropout_p: share of the attention weights that are dropped, in [0, 1).
        dropout_key: from `jax.random.key`, needed where dropout_p > 0.
        tolerance: the largest share of a query's softmax mass that may be skipped, in [0, 1); default eps / 32 of the dtype,
            far below its rounding; 0 skips only what is forbidden.
        return_lse: also return the natural log-sum-exp of the scores, [B, H, T] fp32 (fp64 for fp64), −inf where nothing is
            seen.
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
        query_offset=query_offset, key_mask=key_mask, segment_ids=segment_ids, dropout_p=dropout_p,
        tolerance=tolerance, return_lse=return_lse,
    )  # fmt: skip
    plan = make_plan(spec, backend)
    output, lse = _attend(plan, *_call(spec, query, key, value, checked_dropout_key(dropout_p, dropout_key)))
    return (output, lse) if return_lse else output


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
    )


class _Arrays(NamedTuple):
    """What has a gradient."""

    query: Array  # [B, T, H, D]
    key: Array  # [B, S, K, D]
    value: Array  # [B, S, K, D]
    left: Array  # [B, H]
    right: Array  # [B, H]


class _Rest(NamedTuple):
    """What has none."""

    scale: Array  # scalar
    tolerance: Array  # scalar
    window: Array | None  # int32 scalar
    offset: Array  # [B] int32
    hidden: Array  # [B, S] bool
    query_segments: Array | None  # [B, T] int32
    key_segments: Array | None  # [B, S] int32
    dropout_key: Array | None


class _Kept(NamedTuple):
    """What forward leaves for backward."""

    arrays: _Arrays
    rest: _Rest
    output: Array  # [B, T, H, D]
    lse: Array  # [B, H, T]
    visited: Visited | None


def _call(
    spec: AttentionSpec[Array], query: Array, key: Array, value: Array, dropout_key: Array | None
) -> tuple[_Arrays, _Rest]:
    heads = (spec.batch, spec.num_heads)
    left = jnp.broadcast_to(spec.slopes, heads)
    right = left if spec.right_slopes is None else jnp.broadcast_to(spec.right_slopes, heads)
    arrays = _Arrays(jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), left, right)
    mask = spec.key_mask
    rest = _Rest(
        scale=jnp.asarray(spec.scale, left.dtype),
        tolerance=jnp.asarray(spec.tolerance, left.dtype),
        window=None if spec.window is None else jnp.asarray(min(spec.window, NO_LIMIT), jnp.int32),
        offset=jnp.broadcast_to(jnp.asarray(spec.query_offset, jnp.int32), spec.batch),
        hidden=jnp.zeros((spec.batch, spec.key_len), bool) if mask is None else ~jnp.asarray(mask),
        query_segments=spec.query_segments,
        key_segments=spec.key_segments,
        dropout_key=dropout_key,
    )
    return _varying_alike(arrays, rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, arrays: _Arrays, rest: _Rest) -> tuple[Array, Array]:
    output, lse, _ = _forward(plan, arrays, rest)
    return output, lse


def _attend_forward(plan: Plan, arrays: _Arrays, rest: _Rest) -> tuple[tuple[Array, Array], _Kept]:
    output, lse, visited = _forward(plan, arrays, rest)
    return (output, lse), _Kept(arrays, rest, output, lse, visited)


def _attend_backward(plan: Plan, kept: _Kept, grads: tuple[Array, Array]) -> tuple[_Arrays, None]:
    return _backward(plan, kept, *grads), None


_attend.defvjp(_attend_forward, _attend_backward)


@partial(jax.jit, static_argnums=0)
def _forward(plan: Plan, arrays: _Arrays, rest: _Rest) -> tuple[Array, Array, Visited | None]:
    """(output [B, T, H, D], lse [B, H, T], the tiles that were visited)."""
    inputs, spoiled = _inputs(arrays, rest)
    visited = None
    if plan.dense:
        output, lse = dense.forward(plan, inputs)
    else:
        output, lse, visited = loop.forward(plan, inputs)
    spoiled &= lse > -jnp.inf
    output = jnp.where(spoiled[..., None], jnp.nan, output)
    return output.swapaxes(1, 2), jnp.where(spoiled, jnp.nan, lse), visited


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
    grad_lse = jnp.where(blind, 0.0, grad_lse)
    shift = (grad_output.astype(lse.dtype) * output.astype(lse.dtype)).sum(-1) - grad_lse
    inputs, _ = _inputs(kept.arrays, kept.rest)
    if kept.visited is None:
        query, key, value, left, right = dense.backward(plan, inputs, lse, grad_output, shift, grad_lse)
    else:
        query, key, value, left, right = loop.backward(plan, inputs, lse, kept.visited, grad_output, shift, grad_lse)
    query, key, value = (x.swapaxes(1, 2).astype(output.dtype) for x in (query, key, value))
    return _Arrays(query, key, value, left, right)


def _inputs(arrays: _Arrays, rest: _Rest) -> tuple[Inputs, Array]:
    """(the arrays by heads, keys that must not be used and queries with NaN or inf as zeros; [B, H, T] where those are)."""
    query, key, value = (x.swapaxes(1, 2) for x in arrays[:3])
    spoiled = ~jnp.isfinite(query).all(-1)
    query = jnp.where(spoiled[..., None], 0, query)
    key, value, veil = tiles.clean_keys(key, value, rest.hidden[:, None])
    inputs = Inputs(
        query, key, value, veil, rest.hidden, arrays.left, arrays.right, rest.scale, rest.tolerance, rest.window,
        rest.offset, rest.query_segments, rest.key_segments, rest.dropout_key,
    )  # fmt: skip
    return inputs, spoiled


def _varying_alike(arrays: _Arrays, rest: _Rest) -> tuple[_Arrays, _Rest]:
    """Inside `shard_map` all arrays vary over the mesh axes that any of them varies over: loops need equal types.

    A zero that is made like an array varies as it does, and what it is added to does too (and sums its gradient).
    """
    both = (arrays, rest._replace(dropout_key=None))
    leaves = jax.tree.leaves(both)
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return arrays, rest
    zeros = [jnp.zeros_like(x, dtype=jnp.int32, shape=()) for x in leaves]
    zero = sum(zeros[1:], zeros[0])
    arrays, varying = jax.tree.map(
        lambda x: x ^ zero.astype(bool) if x.dtype == bool else x + zero.astype(x.dtype), both
    )
    return arrays, varying._replace(dropout_key=rest.dropout_key)
