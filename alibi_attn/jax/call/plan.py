"""The plan of a call in JAX: its static arguments, and how queries and keys are divided into blocks and tiles.

`tiles.py` computes one block against one tile, `certificate.py` decides which tiles a block needs, and `loop.py` visits them;
`dense.py` treats the whole input as one tile. Each of them imports only the ones before it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alibi_attn.jax.call.dropout import WHOLE, HeadDropout, Origin, head_dropout
from alibi_attn.jax.call.operands import NO_LIMIT, Rest

Array = jax.Array
Pair = tuple[Array, Array]  # x = high + low, low no larger than half a unit of high


class Numbers(NamedTuple):
    """The numbers of a call of the Triton kernels, which are compiled in.

    Args:
        window: None = all keys.
        first: the position of query 0.
        both: keys to the right have slopes of their own.
        capability: the device's, 90 for 9.0.
    """

    scale: float
    tolerance: float
    window: int | None
    first: int
    both: bool
    capability: int

    @property
    def large(self) -> bool:
        return self.capability // 10 in (9, 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static arguments of a traced call; everything else is an array."""

    causal: bool
    dropout_p: float
    dense: bool  # compute all scores at once, unless the native kernels run
    query_block: int  # queries per block
    key_tile: int  # keys per tile
    query_bias: bool = False
    native: bool = False  # the C++ kernels, on a CPU
    elsewhere: bool = False  # the call may later be compiled for another device
    dropout_origin: Origin = WHOLE
    fused: Numbers | None = None  # the Triton kernels, on a GPU
    for_backward: bool = True  # a backward pass may follow: the native kernels measure what it must visit
    lse_in_two: bool = False  # lse is a `Pair`, because it is as large as key biases and will be merged
    for_gradients: bool = False  # what the loop skips obeys the key rule too, so that every key keeps its gradient


class KeyBias(NamedTuple):
    """A number for every key, b = high + low, in fp32 or better: two parts keep the digits of long sums of gates."""

    high: Array  # [..., S], −inf for a hidden key
    low: Array | None  # [..., S] finite

    def relative_to(self, reference: Array) -> Array:
        """b − reference, rounded once however large b is. It is never +inf, so that gradients of hidden scores stay finite."""
        difference = self.high - reference
        difference = difference if self.low is None else difference + self.low
        return jnp.minimum(difference, np.finfo(difference.dtype).max)


class Inputs(NamedTuple):
    """The differentiable arrays of one call with heads first and clean rows, and the others as they are."""

    query: Array  # [B, H, T, D]
    key: Array  # [B, K, S, D], clean
    value: Array  # [B, K, S, D], clean
    veil: Array  # [B, K, S]
    hidden: Array  # [B, 1 or K, S] bool
    left: Array  # [B, H]
    right: Array  # [B, H]
    bias: KeyBias | None  # [B, H, S], −inf for a hidden key
    rest: Rest


class Queries(NamedTuple):
    """A block of t consecutive queries of one head."""

    query: Array  # [t, D]
    position: Array  # int32 scalar, of the first
    least: Array  # int32 scalar from `least_distance`
    segment: Array | None  # [t] int32
    reference: Array | None = None  # [t] that key biases are relative to; None without them
    start: Array | None = None  # [t] int32: the first key that each query may see
    points: Array | None = None  # [t, 2 or 3]: coordinates
    number: Array | None = None  # [t] int32, for dropout


class Keys(NamedTuple):
    """A tile of s consecutive keys and their values. Entries that must not be used are zero (see `xla.clean_keys`)."""

    key: Array  # [s, D]
    value: Array  # [s, D]
    veil: Array  # [s] added to the scores: 0, −inf for a hidden key, NaN for a key that spoils every query that sees it
    position: Array  # int32 scalar, of the first
    segment: Array | None  # [s] int32
    bias: KeyBias | None = None  # [s]
    points: Array | None = None  # [s, 2 or 3]: coordinates
    number: Array | None = None  # [s] int32, for dropout


class Rule(NamedTuple):
    """The slopes of one head, and the distances that its queries may see: −look_right < i − j < look_left."""

    left: Array  # scalar: slope of keys to the left
    right: Array  # scalar: slope of keys to the right, finite
    look_left: Array  # int32 scalar
    look_right: Array  # int32 scalar
    scale: Array  # scalar
    scale_before: (
        Array  # scalar: a power of two, at most 1, that multiplies queries: q·k overflows only if the score does
    )
    scale_after: Array  # scalar: scale / scale_before multiplies q·k


class Parts(NamedTuple):
    """The inputs with their keys cut into tiles; hidden keys fill the last tile."""

    inputs: Inputs
    rule: Rule  # [B, H], and scalars
    key: Array  # [B, K, tiles, s, D]
    value: Array
    veil: Array  # [B, K, tiles, s]
    hidden: Array  # [B, 1 or K, tiles, s]
    segments: Array | None  # [B, tiles, s]
    bias: KeyBias | None  # [B, H, tiles, s]
    numbers: Array | None  # [B, tiles, s]


class Block(NamedTuple):
    """One block of queries of one head of one sequence."""

    sequence: Array
    head: Array
    key_head: Array
    row: Array  # its first query
    is_repeated: Array  # [t] rows that the previous block has too: the last block begins early, so that it is full
    queries: Queries
    rule: Rule
    dropout: HeadDropout | None


class Limits(NamedTuple):
    """The tiles that the masks let a block of queries see; lowest > highest if there are none."""

    lowest: Array
    highest: Array
    nearest: Array  # the tile that the block visits first
    useful: Array  # [tiles] bool


class Visited(NamedTuple):
    """The tiles that a block of queries has read: a band, and single tiles outside it. In results [B·H·blocks] each."""

    first: Array  # the band's first tile
    last: Array  # the band's last tile; first − 1 if the block read nothing
    outliers: tuple[Array, ...]  # LOOP_OUTLIER_TILES times one tile outside the band, or −1


def cut(plan: Plan, inputs: Inputs) -> Parts:
    size, rest, bias = plan.key_tile, inputs.rest, inputs.bias
    segments, numbers = rest.key_segments, rest.key_numbers
    if bias is not None:
        low = None if bias.low is None else split(bias.low, size, 2, 0)
        bias = KeyBias(split(bias.high, size, 2, -jnp.inf), low)
    return Parts(
        inputs=inputs,
        rule=head_rule(plan, inputs.left, inputs.right, rest.scale, rest.window),
        key=split(inputs.key, size, 2, 0),
        value=split(inputs.value, size, 2, 0),
        veil=split(inputs.veil, size, 2, -jnp.inf),
        hidden=split(inputs.hidden, size, 2, True),
        segments=None if segments is None else split(segments, size, 1, 0),
        bias=bias,
        numbers=None if numbers is None else split(numbers, size, 1, 0),
    )


def head_rule(plan: Plan, left: Array, right: Array, scale: Array, window: Array | None) -> Rule:
    """The `Rule` of slopes of any shape, and of a window. With a right slope of inf, the head never attends to the right."""
    look = jnp.full_like(left, NO_LIMIT, jnp.int32) if window is None else jnp.broadcast_to(window, left.shape)
    look_right = jnp.ones_like(look) if plan.causal else jnp.where(jnp.isinf(right), 1, look)
    before = jnp.ldexp(jnp.ones_like(scale), jnp.clip(jnp.frexp(scale)[1] - 1, -100, 0))  # then |scale_after| ≥ 1
    return Rule(left, jnp.where(jnp.isinf(right), 0.0, right), look, look_right, scale, before, scale / before)


def block_numbers(plan: Plan, inputs: Inputs) -> Array:
    """[B·H·blocks] int32, one number per block."""
    batch, heads, query_len = inputs.query.shape[:3]
    return jnp.arange(batch * heads * -(-query_len // plan.query_block), dtype=jnp.int32)


def block_at(plan: Plan, parts: Parts, number: Array) -> Block:
    inputs, rest = parts.inputs, parts.inputs.rest
    heads, query_len = inputs.query.shape[1:3]
    count = -(-query_len // plan.query_block)
    sequence, head, block = number // (heads * count), number // count % heads, number % count
    row = jnp.minimum(block * plan.query_block, query_len - plan.query_block)
    segments, numbers, position = rest.query_segments, rest.query_numbers, rest.offset[sequence] + row
    left, right, look_left, look_right = (x[sequence, head] for x in parts.rule[:4])
    return Block(
        sequence,
        head,
        key_head=head // (heads // inputs.key.shape[1]),
        row=row,
        is_repeated=jnp.arange(plan.query_block) < block * plan.query_block - row,
        queries=Queries(
            query=rows(plan, inputs.query, sequence, head, row),
            position=position,
            least=least_distance(position, plan.query_block, inputs.key.shape[2]),
            segment=None if segments is None else rows(plan, segments, sequence, row),
            start=None if rest.query_start is None else rows(plan, rest.query_start, sequence, head, row),
            number=None if numbers is None else rows(plan, numbers, sequence, row),
        ),
        rule=Rule(left, right, look_left, look_right, *parts.rule[4:]),
        dropout=head_dropout(rest.dropout_seed, sequence, head + plan.dropout_origin.head),
    )


def tile_at(plan: Plan, parts: Parts, block: Block, tile: Array) -> Keys:
    """The keys of a tile, as the head of the block sees them."""
    key, value, veil = (x[block.sequence, block.key_head, tile] for x in (parts.key, parts.value, parts.veil))
    segment, number = (None if x is None else x[block.sequence, tile] for x in (parts.segments, parts.numbers))
    bias = jax.tree.map(lambda x: x[block.sequence, block.head, tile], parts.bias)
    return with_bias(Keys(key, value, veil, tile * plan.key_tile, segment, number=number), bias)


def with_bias(keys: Keys, bias: KeyBias | None) -> Keys:
    """The keys with a head's biases, if any; keys with −inf are hidden."""
    if bias is None:
        return keys
    return keys._replace(bias=bias, veil=jnp.where(bias.high == -jnp.inf, -jnp.inf, keys.veil))


def limits(plan: Plan, parts: Parts, block: Block) -> Limits:
    """The tiles with a key that some query of the block may see."""
    queries, rule, bias = block.queries, block.rule, parts.bias
    hidden = parts.hidden[block.sequence, 0] if bias is None else bias.high[block.sequence, block.head] == -jnp.inf
    begin = jnp.arange(len(hidden), dtype=jnp.int32) * plan.key_tile
    end = begin + plan.key_tile - 1
    first, last = queries.position, queries.position + plan.query_block - 1
    useful = ~hidden.all(-1) & (end > first - rule.look_left) & (begin < last + rule.look_right)
    if queries.segment is not None and parts.segments is not None:
        # Segments are compared as ranges.
        segments = parts.segments[block.sequence]
        smallest = jnp.where(hidden, 2**31 - 1, segments).min(-1)
        largest = jnp.where(hidden, -(2**31), segments).max(-1)
        useful &= (smallest <= queries.segment.max()) & (largest >= queries.segment.min())
    any_useful = useful.any()
    lowest = jnp.where(any_useful, jnp.argmax(useful).astype(jnp.int32), 0)
    highest = jnp.where(any_useful, (len(useful) - 1 - jnp.argmax(useful[::-1])).astype(jnp.int32), -1)
    middle = last if plan.causal else first + plan.query_block // 2
    nearest = jnp.clip(middle // plan.key_tile, lowest, jnp.maximum(highest, lowest))
    return Limits(lowest, highest, nearest, useful)


def split(x: Array, size: int, axis: int, fill: float) -> Array:
    """The axis divided into tiles of `size`, [..., tiles, size, ...], padded with `fill`."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    padded = jnp.pad(x, padding, constant_values=fill)
    return padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def joined(blocks: Array, inputs: Inputs) -> Array:
    """[B·H·blocks, t, ...] -> [B, H, T, ...]; rows that two blocks share come from the first."""
    batch, heads, query_len = inputs.query.shape[:3]
    blocks = blocks.reshape(batch, heads, -1, *blocks.shape[1:])
    before, last = blocks[:, :, :-1], blocks[:, :, -1]
    before = before.reshape(batch, heads, -1, *blocks.shape[4:])
    return jnp.concatenate([before, last[:, :, before.shape[2] - query_len :]], axis=2)


def least_distance(position: Array, query_len: int, key_len: int) -> Array:
    """int32, the i − j nearest to 0 if all queries of a block, the first at `position`, lie beyond the keys on one side; else 0.

    A row of ds adds up to dlse, so a constant can be subtracted from its distances: Σ ds·d = Σ ds·(d − c) + c·dlse.
    Otherwise the rounding of products with distances of 10⁶ would exceed their sum.
    """
    return jnp.maximum(position - (key_len - 1), 0) + jnp.minimum(position + query_len - 1, 0)


def rows(plan: Plan, x: Array, *place: Array) -> Array:
    """A block's rows of [B, H, T, ...] or [B, T], at (sequence, head, first row) or (sequence, first row).

    A single slice: slicing out a head first would copy it for every block.
    """
    rest = x.shape[len(place) :]
    begin = (*place, *(jnp.zeros_like(place[0]),) * len(rest))
    block = lax.dynamic_slice(x, begin, (*(1,) * (len(place) - 1), plan.query_block, *rest))
    return block.reshape(plan.query_block, *rest)


def sum_of_two(a: Array, b: Array) -> Pair:
    """a + b exactly, as the rounded sum and its rounding error (Knuth; Møller 1965)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)
