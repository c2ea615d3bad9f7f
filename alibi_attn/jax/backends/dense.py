"""All scores at once, for short input and single queries: the input is one tile, mapped over sequences and heads."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from alibi_attn.attention.call.reads import MASKS, NUMBERED_DROPOUT, SPACE
from alibi_attn.jax.backends import tiles
from alibi_attn.jax.backends.tiles import Finished, Gradients
from alibi_attn.jax.call.dropout import HeadDropout, head_dropout
from alibi_attn.jax.call.plan import (
    Array,
    Inputs,
    KeyBias,
    Keys,
    Plan,
    Queries,
    Rule,
    head_rule,
    least_distance,
    with_bias,
)

Result = TypeVar("Result")

READS = MASKS | SPACE | NUMBERED_DROPOUT | {"key_bias", "query_bias"}


class _Head(NamedTuple):
    """One query head, without the arrays of its queries."""

    rule: Rule
    number: Array  # b·H + h
    bias: KeyBias | None  # [S]


def forward(plan: Plan, inputs: Inputs) -> tuple[Array, Array, Array | None]:
    """(output [B, H, T, D], lse [B, H, T], with key biases the references [B, H, T] that lse is relative to)."""

    def one(queries: Queries, keys: Keys, head: _Head, _: None) -> tuple[Array, Array, Array | None]:
        nothing = tiles.start(queries, None if head.bias is None else head.bias.high.dtype)
        softmax = tiles.add(
            plan, head.rule, nothing, queries, with_bias(keys, head.bias), _dropout(plan, inputs, head)
        )[0]
        return tiles.finish(softmax, queries)

    results = _over_heads(one, plan, inputs, None)
    output, lse, reference = jax.tree.map(lambda x: _joined(x, inputs), results)
    return output, lse, reference


def backward(plan: Plan, inputs: Inputs, known: Finished) -> Gradients:
    def one(queries: Queries, keys: Keys, head: _Head, known: Finished) -> Gradients:
        keys = with_bias(keys, head.bias)
        gradients = tiles.gradients(plan, head.rule, queries, keys, known, _dropout(plan, inputs, head))
        left, right = tiles.slope_gradients(gradients.left, gradients.right, queries.least, known.grad_lse)
        return gradients._replace(left=left, right=right)

    gradients = _over_heads(one, plan, inputs, jax.tree.map(lambda x: _grouped(x, inputs), known))
    of_key, of_value = gradients.key.sum(2), gradients.value.sum(2)
    of_heads: Gradients = jax.tree.map(lambda x: _joined(x, inputs), gradients)
    return of_heads._replace(key=of_key, value=of_value)


def _over_heads(one: Callable[..., Result], plan: Plan, inputs: Inputs, known: Finished | None) -> Result:
    """`one(queries, keys, head, known)` for all heads: results are [B, K, group, ...]."""
    batch, heads = inputs.query.shape[:2]
    rest, start = inputs.rest, jax.tree.map(lambda x: _grouped(x, inputs), inputs.rest.query_start)
    queries = Queries(
        _grouped(inputs.query, inputs),
        rest.offset,
        least_distance(rest.offset, inputs.query.shape[2], inputs.key.shape[2]),
        rest.query_segments,
        start=start,
        points=rest.query_points,
        number=rest.query_numbers,
    )
    first, points, numbers = jnp.zeros_like(rest.offset), rest.key_points, rest.key_numbers
    keys = Keys(inputs.key, inputs.value, inputs.veil, first, rest.key_segments, points=points, number=numbers)
    number = _grouped(jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads), inputs)
    slopes = (_grouped(inputs.left, inputs), _grouped(inputs.right, inputs))
    bias = jax.tree.map(lambda x: _grouped(x, inputs), inputs.bias)
    head = _Head(head_rule(plan, *slopes, rest.scale, rest.window), number, bias)

    # The axis of each array, in the order of the fields: for sequences, key heads, and query heads of a key head.
    by_head = _Head._make((Rule._make((0, 0, 0, 0, None, None, None)), 0, 0))
    one_query, all_queries = Queries(0, None, None, None, start=0), Queries(0, 0, 0, 0, start=0, points=0, number=0)  # type: ignore[arg-type]
    one_key, all_keys = Keys(0, 0, 0, None, None), Keys(0, 0, 0, 0, 0, points=0, number=0)  # type: ignore[arg-type]
    a_query_head = jax.vmap(one, (one_query, None, by_head, 0))
    a_key_head = jax.vmap(a_query_head, (one_query, one_key, by_head, 0))
    a_sequence = jax.vmap(a_key_head, (all_queries, all_keys, by_head, 0))
    return a_sequence(queries, keys, head, known)


def _grouped(x: Array, inputs: Inputs) -> Array:
    """[B, H, ...] -> [B, K, group, ...]."""
    key_heads = inputs.key.shape[1]
    return x.reshape(x.shape[0], key_heads, x.shape[1] // key_heads, *x.shape[2:])


def _joined(x: Array, inputs: Inputs) -> Array:
    """[B, K, group, ...] -> [B, H, ...]."""
    return x.reshape(x.shape[0], inputs.query.shape[1], *x.shape[3:])


def _dropout(plan: Plan, inputs: Inputs, head: _Head) -> HeadDropout | None:
    heads = inputs.query.shape[1]
    return head_dropout(inputs.rest.dropout_seed, head.number // heads, head.number % heads + plan.dropout_origin.head)
