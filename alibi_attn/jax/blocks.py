"""A call cut into blocks of queries and tiles of keys: what `loop.py` goes through, and how it finds each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_attn.jax import tiles
from alibi_attn.jax.tiles import Array, KeyBias, Keys, Plan, Queries, Rule


class Inputs(NamedTuple):
    """The arrays of one call, batch first; all that is not None is an array."""

    query: Array  # [B, H, T, D]
    key: Array  # [B, K, S, D], clean
    value: Array  # [B, K, S, D], clean
    veil: Array  # [B, K, S]
    hidden: Array  # [B, 1 or K, S] bool
    left: Array  # [B, H]
    right: Array  # [B, H]
    scale: Array  # scalar
    tolerance: Array  # scalar
    window: Array | None  # int32 scalar
    offset: Array  # [B] int32
    query_segments: Array | None  # [B, T] int32
    key_segments: Array | None  # [B, S] int32
    dropout_seed: Array | None  # [2] uint32
    bias: KeyBias | None = None  # [B, H, S], −inf where a key is hidden


class At(NamedTuple):
    """Which block of which head of which sequence."""

    number: Array
    sequence: Array
    head: Array
    key_head: Array
    block: Array
    row: Array  # the first query


def locate(number: Array, plan: Plan, inputs: Inputs) -> At:
    heads, query_len = inputs.query.shape[1:3]
    count = -(-query_len // plan.query_block)
    sequence, head, block = number // (heads * count), number // count % heads, number % count
    row = jnp.minimum(block * plan.query_block, query_len - plan.query_block)
    return At(number, sequence, head, head // (heads // inputs.key.shape[1]), block, row)


def count(plan: Plan, inputs: Inputs) -> int:
    batch, heads, query_len = inputs.query.shape[:3]
    return batch * heads * -(-query_len // plan.query_block)


class Parts(NamedTuple):
    """The inputs, the keys cut into tiles (hidden ones fill the last)."""

    query: Array  # [B, H, T, D]
    query_segments: Array | None  # [B, T]
    offset: Array  # [B]
    key: Array  # [B, K, tiles, s, D]
    value: Array
    veil: Array  # [B, K, tiles, s]
    hidden: Array  # [B, 1 or K, tiles, s]
    key_segments: Array | None  # [B, tiles, s]
    rule: Rule  # [B, H], and one scale
    bias: KeyBias | None  # [B, H, tiles, s]


def cut(plan: Plan, inputs: Inputs) -> Parts:
    size, segments, bias = plan.key_tile, inputs.key_segments, inputs.bias
    if bias is not None:
        low = None if bias.low is None else split(bias.low, size, 2, 0)
        bias = KeyBias(split(bias.high, size, 2, -jnp.inf), low)
    return Parts(
        query=inputs.query,
        query_segments=inputs.query_segments,
        offset=inputs.offset,
        key=split(inputs.key, size, 2, 0),
        value=split(inputs.value, size, 2, 0),
        veil=split(inputs.veil, size, 2, -jnp.inf),
        hidden=split(inputs.hidden, size, 2, True),
        key_segments=None if segments is None else split(segments, size, 1, 0),
        rule=tiles.head_rule(plan, inputs.left, inputs.right, inputs.scale, inputs.window),
        bias=bias,
    )


def split(x: Array, size: int, axis: int, fill: float) -> Array:
    """The axis cut into tiles of `size`, [..., tiles, size, ...], with `fill` behind the end."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    padded = jnp.pad(x, padding, constant_values=fill)
    return padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def joined(blocks: Array, plan: Plan, inputs: Inputs) -> Array:
    """[B·H·blocks, t, ...] -> [B, H, T, ...]; of rows that two blocks share, the first counts."""
    batch, heads, query_len = inputs.query.shape[:3]
    blocks = blocks.reshape(batch, heads, -1, *blocks.shape[1:])
    before, last = blocks[:, :, :-1], blocks[:, :, -1]
    before = before.reshape(batch, heads, -1, *blocks.shape[4:])
    return jnp.concatenate([before, last[:, :, before.shape[2] - query_len :]], axis=2)


def rows(plan: Plan, x: Array, *place: Array) -> Array:
    """The block's rows of [B, H, T, ...] or [B, T], at (sequence, head, first row) or (sequence, first row).

    One slice, and not one of a whole head first: that would be copied for every block.
    """
    rest = x.shape[len(place) :]
    begin = (*place, *(jnp.zeros_like(place[0]),) * len(rest))
    block = lax.dynamic_slice(x, begin, (*(1,) * (len(place) - 1), plan.query_block, *rest))
    return block.reshape(plan.query_block, *rest)


def queries_of(plan: Plan, parts: Parts, at: At) -> Queries:
    segments = parts.query_segments
    return Queries(
        query=rows(plan, parts.query, at.sequence, at.head, at.row),
        position=parts.offset[at.sequence] + at.row,
        segment=None if segments is None else rows(plan, segments, at.sequence, at.row),
    )


def keys_of(plan: Plan, parts: Parts, at: At, tile: Array, reference: Array | None) -> Keys:
    segments, veil = parts.key_segments, parts.veil[at.sequence, at.key_head, tile]
    if parts.bias is not None and reference is not None:
        bias = jax.tree.map(lambda x: x[at.sequence, at.head, tile], parts.bias).beyond(reference)
        veil = jnp.where(bias == -jnp.inf, -jnp.inf, veil + bias.astype(veil.dtype))
    return Keys(
        key=parts.key[at.sequence, at.key_head, tile],
        value=parts.value[at.sequence, at.key_head, tile],
        veil=veil,
        position=tile * plan.key_tile,
        segment=None if segments is None else segments[at.sequence, tile],
    )


def rule_of(parts: Parts, at: At) -> Rule:
    left, right, look_left, look_right = (x[at.sequence, at.head] for x in parts.rule[:4])
    return Rule(left, right, look_left, look_right, parts.rule.scale)
