"""The loop: every block of queries visits tiles of keys outward from its diagonal until the certificate says enough.

Heads and blocks are looped, not mapped side by side: a batched `while_loop` runs until its slowest lane is done. Memory is
linear in the length; each block keeps which tiles it visited, and the backward pass visits exactly those.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_attn.attention.certificate.constants import LOOP_OUTLIER_TILES
from alibi_attn.jax import bounds, tiles
from alibi_attn.jax.bounds import Certificate, KeyNorms
from alibi_attn.jax.tiles import Array, Keys, Plan, Queries, Rule, Softmax


class Inputs(NamedTuple):
    """The arrays of one call, batch first; all that is not None is an array."""

    query: Array  # [B, H, T, D]
    key: Array  # [B, K, S, D], clean
    value: Array  # [B, K, S, D], clean
    veil: Array  # [B, K, S]
    hidden: Array  # [B, S] bool
    left: Array  # [B, H]
    right: Array  # [B, H]
    scale: Array  # scalar
    tolerance: Array  # scalar
    window: Array | None  # int32 scalar
    offset: Array  # [B] int32
    query_segments: Array | None  # [B, T] int32
    key_segments: Array | None  # [B, S] int32
    dropout_key: Array | None


class Visited(NamedTuple):
    """The tiles that each block of queries read: a band, and single tiles beside it. [B·H·blocks] each, in that order."""

    first: Array  # the band's first tile
    last: Array  # and last; first − 1 where the block read nothing
    outliers: tuple[Array, ...]  # LOOP_OUTLIER_TILES times one tile beside the band, or −1


class _Step(NamedTuple):
    """The state of the forward loop of one block."""

    tile: Array  # to be visited next; −1 ends the loop
    visited: Visited
    softmax: Softmax


class _Turn(NamedTuple):
    """The state of the backward loop of one block."""

    number: Array
    query: Array  # [t, D]
    left: Array  # scalar
    right: Array  # scalar
    keys: Array  # [B, K, tiles, s, D], of all blocks so far
    values: Array


def forward(plan: Plan, inputs: Inputs) -> tuple[Array, Array, Visited]:
    """(output [B, H, T, D], lse [B, H, T], which tiles were visited)."""
    parts = _parts(plan, inputs)
    norms = _norms(plan, inputs)

    def one(number: Array) -> tuple[Array, Array, Visited]:
        at = _at(number, plan, inputs)
        queries, rule = _queries(plan, parts, at), _rule(parts, at)
        mine = jax.tree.map(lambda x: x[at.sequence, at.key_head], norms)
        lowest, highest, nearest = _limits(plan, parts, queries, rule, at)
        known = bounds.certificate(plan, rule, queries, mine, inputs.tolerance, highest)
        begin = Visited(nearest, nearest, (jnp.full_like(nearest, -1),) * LOOP_OUTLIER_TILES)

        def body(step: _Step) -> _Step:
            keys, dropout_key = _keys(plan, parts, at, step.tile), _dropout_key(parts, at, step.tile)
            softmax = tiles.add(plan, rule, step.softmax, queries, keys, dropout_key)
            tile, visited = _next(plan, rule, known, queries, softmax, step.visited, lowest, highest)
            return _Step(tile, visited, softmax)

        any_tile = lowest <= highest
        first = jnp.where(any_tile, nearest, -1)
        done = lax.while_loop(lambda step: step.tile >= 0, body, _Step(first, begin, tiles.start(queries)))
        output, lse = tiles.finish(done.softmax, queries)
        last = jnp.where(any_tile, done.visited.last, done.visited.first - 1)
        return output, lse, done.visited._replace(last=last)

    output, lse, visited = lax.map(one, jnp.arange(_count(plan, inputs), dtype=jnp.int32))
    return _joined(output, plan, inputs), _joined(lse, plan, inputs), visited


def backward(
    plan: Plan, inputs: Inputs, lse: Array, visited: Visited, grad_output: Array, shift: Array, grad_lse: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Gradients of query, key, value [B, H or K, T or S, D] and of the slopes to the left and right [B, H].

    Args:
        lse: [B, H, T], inf where a query saw nothing.
        grad_output: [B, H, T, D].
        shift: [B, H, T], Σ do·o − dlse.
        grad_lse: [B, H, T], dlse; 0 where a query saw nothing.
    """
    parts = _parts(plan, inputs)

    def one(sums: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        at = _at(number, plan, inputs)
        queries, rule = _queries(plan, parts, at), _rule(parts, at)
        mine = jax.tree.map(lambda x: x[number], visited)
        lse_here, grad_here, shift_here, of_lse = (
            _rows(plan, x, at.sequence, at.head, at.row) for x in (lse, grad_output, shift, grad_lse)
        )
        # The last block begins early, so as to be full; what it shares with the one before is counted there.
        row = jnp.arange(plan.query_block)
        is_shared = row < at.block * plan.query_block - at.row
        lse_here, of_lse = jnp.where(is_shared, jnp.inf, lse_here), jnp.where(is_shared, 0.0, of_lse)
        least = tiles.least_distance(queries, inputs.key.shape[2])
        total = mine.last - mine.first + 1 + sum((tile >= 0).astype(jnp.int32) for tile in mine.outliers)

        def body(so_far: _Turn) -> _Turn:
            tile = _tile_of_turn(mine, so_far.number)
            keys, dropout_key = _keys(plan, parts, at, tile), _dropout_key(parts, at, tile)
            found = tiles.gradients(plan, rule, queries, keys, lse_here, grad_here, shift_here, least, dropout_key)
            where = (at.sequence, at.key_head, tile)
            return _Turn(
                so_far.number + 1,
                so_far.query + found.query,
                so_far.left + found.left,
                so_far.right + found.right,
                _added(so_far.keys, where, found.key),
                _added(so_far.values, where, found.value),
            )

        nothing = jnp.zeros_like(queries.query, dtype=lse.dtype)
        zero = jnp.zeros_like(rule.left)
        begin = _Turn(jnp.zeros_like(total), nothing, zero, zero, *sums)
        done = lax.while_loop(lambda so_far: so_far.number < total, body, begin)
        slopes = tiles.slope_gradients(done.left, done.right, least, of_lse)
        return (done.keys, done.values), (done.query, *slopes)

    nothing = jnp.zeros_like(parts.key, dtype=lse.dtype)
    sums, (of_query, of_left, of_right) = lax.scan(
        one, (nothing, nothing), jnp.arange(_count(plan, inputs), dtype=jnp.int32)
    )
    of_key, of_value = (x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, : inputs.key.shape[2]] for x in sums)
    of_left, of_right = (x.reshape(*inputs.left.shape, -1).sum(-1) for x in (of_left, of_right))
    return _joined(of_query, plan, inputs), of_key, of_value, of_left, of_right


class _At(NamedTuple):
    """Which block of which head of which sequence."""

    number: Array
    sequence: Array
    head: Array
    key_head: Array
    block: Array
    row: Array  # the first query


def _at(number: Array, plan: Plan, inputs: Inputs) -> _At:
    heads, query_len = inputs.query.shape[1:3]
    count = -(-query_len // plan.query_block)
    sequence, head, block = number // (heads * count), number // count % heads, number % count
    row = jnp.minimum(block * plan.query_block, query_len - plan.query_block)
    return _At(number, sequence, head, head // (heads // inputs.key.shape[1]), block, row)


def _count(plan: Plan, inputs: Inputs) -> int:
    batch, heads, query_len = inputs.query.shape[:3]
    return batch * heads * -(-query_len // plan.query_block)


class _Parts(NamedTuple):
    """The inputs, the keys cut into tiles (hidden ones fill the last)."""

    query: Array  # [B, H, T, D]
    query_segments: Array | None  # [B, T]
    offset: Array  # [B]
    key: Array  # [B, K, tiles, s, D]
    value: Array
    veil: Array  # [B, K, tiles, s]
    hidden: Array  # [B, tiles, s]
    key_segments: Array | None  # [B, tiles, s]
    dropout_key: Array | None
    rule: Rule  # [B, H], and one scale


def _parts(plan: Plan, inputs: Inputs) -> _Parts:
    size, segments = plan.key_tile, inputs.key_segments
    return _Parts(
        query=inputs.query,
        query_segments=inputs.query_segments,
        offset=inputs.offset,
        key=_split(inputs.key, size, 2, 0),
        value=_split(inputs.value, size, 2, 0),
        veil=_split(inputs.veil, size, 2, -jnp.inf),
        hidden=_split(inputs.hidden, size, 1, True),
        key_segments=None if segments is None else _split(segments, size, 1, 0),
        dropout_key=inputs.dropout_key,
        rule=tiles.head_rule(plan, inputs.left, inputs.right, inputs.scale, inputs.window),
    )


def _split(x: Array, size: int, axis: int, fill: float) -> Array:
    """The axis cut into tiles of `size`, [..., tiles, size, ...], with `fill` behind the end."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    padded = jnp.pad(x, padding, constant_values=fill)
    return padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _joined(blocks: Array, plan: Plan, inputs: Inputs) -> Array:
    """[B·H·blocks, t, ...] -> [B, H, T, ...]; of rows that two blocks share, the first counts."""
    batch, heads, query_len = inputs.query.shape[:3]
    blocks = blocks.reshape(batch, heads, -1, *blocks.shape[1:])
    before, last = blocks[:, :, :-1], blocks[:, :, -1]
    before = before.reshape(batch, heads, -1, *blocks.shape[4:])
    return jnp.concatenate([before, last[:, :, before.shape[2] - query_len :]], axis=2)


def _rows(plan: Plan, x: Array, *place: Array) -> Array:
    """The block's rows of [B, H, T, ...] or [B, T], at (sequence, head, first row) or (sequence, first row).

    One slice, and not one of a whole head first: that would be copied for every block.
    """
    rest = x.shape[len(place) :]
    begin = (*place, *(jnp.zeros_like(place[0]),) * len(rest))
    block = lax.dynamic_slice(x, begin, (*(1,) * (len(place) - 1), plan.query_block, *rest))
    return block.reshape(plan.query_block, *rest)


def _queries(plan: Plan, parts: _Parts, at: _At) -> Queries:
    segments = parts.query_segments
    return Queries(
        query=_rows(plan, parts.query, at.sequence, at.head, at.row),
        position=parts.offset[at.sequence] + at.row,
        segment=None if segments is None else _rows(plan, segments, at.sequence, at.row),
    )


def _keys(plan: Plan, parts: _Parts, at: _At, tile: Array) -> Keys:
    segments = parts.key_segments
    return Keys(
        key=parts.key[at.sequence, at.key_head, tile],
        value=parts.value[at.sequence, at.key_head, tile],
        veil=parts.veil[at.sequence, at.key_head, tile],
        position=tile * plan.key_tile,
        segment=None if segments is None else segments[at.sequence, tile],
    )


def _rule(parts: _Parts, at: _At) -> Rule:
    left, right, look_left, look_right = (x[at.sequence, at.head] for x in parts.rule[:4])
    return Rule(left, right, look_left, look_right, parts.rule.scale)


def _norms(plan: Plan, inputs: Inputs) -> KeyNorms:
    """Of every key head, [B, K, ...]; hidden keys weigh nothing, those that spoil a query can never be skipped."""
    of_keys = jnp.where(jnp.isnan(inputs.veil), jnp.inf, bounds.norm_bound(inputs.key))
    of_keys, of_values = (jnp.where(inputs.hidden[:, None], 0.0, x) for x in (of_keys, bounds.norm_bound(inputs.value)))
    return bounds.key_norms(*(_split(x, plan.key_tile, 2, 0.0).max(-1) for x in (of_keys, of_values)))


def _limits(plan: Plan, parts: _Parts, queries: Queries, rule: Rule, at: _At) -> tuple[Array, Array, Array]:
    """(lowest, highest, nearest): the range of tiles that masks allow the block, and where it begins; lowest > highest = none."""
    hidden = parts.hidden[at.sequence]
    begin = jnp.arange(hidden.shape[0], dtype=jnp.int32) * plan.key_tile
    end = begin + plan.key_tile - 1
    first, last = queries.position, queries.position + plan.query_block - 1
    useful = ~hidden.all(-1) & (end > first - rule.look_left) & (begin < last + rule.look_right)
    if queries.segment is not None and parts.key_segments is not None:
        useful &= _segments_meet(queries.segment, parts.key_segments[at.sequence], hidden)
    found = useful.any()
    lowest = jnp.where(found, jnp.argmax(useful).astype(jnp.int32), 0)
    highest = jnp.where(found, (len(useful) - 1 - jnp.argmax(useful[::-1])).astype(jnp.int32), -1)
    middle = last if plan.causal else first + plan.query_block // 2
    nearest = jnp.clip(middle // plan.key_tile, lowest, jnp.maximum(highest, lowest))
    return lowest, highest, nearest


def _segments_meet(of_queries: Array, of_keys: Array, hidden: Array) -> Array:
    """[tiles]: whether the segments of a tile's keys and of the block's queries overlap as ranges."""
    smallest = jnp.where(hidden, 2**31 - 1, of_keys).min(-1)
    largest = jnp.where(hidden, -(2**31), of_keys).max(-1)
    return (smallest <= of_queries.max()) & (largest >= of_queries.min())


def _next(
    plan: Plan,
    rule: Rule,
    known: Certificate,
    queries: Queries,
    softmax: Softmax,
    visited: Visited,
    lowest: Array,
    highest: Array,
) -> tuple[Array, Visited]:
    """The tile to visit next (−1 = enough), and what has been visited when that is done."""
    first, last, outliers = visited
    size = plan.key_tile
    need_left, need_right, need_outlier = bounds.still_needed(
        plan, rule, known, queries, softmax, first * size, last * size + size - 1
    )
    in_band = outliers[0] + outliers[1] == -2  # the band is not taken up again: it would read an outlier twice
    go_left = in_band & (first > lowest) & need_left
    go_right = in_band & ~go_left & (last < highest) & need_right
    first, last = first - go_left, last + go_right
    moved = go_left | go_right
    tile = jnp.where(go_left, first, jnp.where(go_right, last, -1))
    after = []
    for number, before in enumerate(outliers):
        candidate = known.norms.outlier[number]
        beside = (candidate >= lowest) & (candidate <= highest) & ((candidate < first) | (candidate > last))
        go = ~moved & (tile < 0) & (before < 0) & beside & need_outlier[number]
        tile = jnp.where(go, candidate, tile)
        after.append(jnp.where(go, candidate, before))
    return tile, Visited(first, last, tuple(after))


def _tile_of_turn(visited: Visited, turn: Array) -> Array:
    """The tile that comes at this turn of the backward loop: the band, then the outliers that were visited."""
    first, last, (one, other) = visited
    beyond = turn - (last - first + 1)
    return jnp.where(beyond < 0, first + turn, jnp.where((beyond == 0) & (one >= 0), one, other))


def _added(sums: Array, where: tuple[Array, ...], x: Array) -> Array:
    """`sums` with x added at `where`, in place inside a loop (a scatter would be slow)."""
    begin = (*where, *(jnp.zeros_like(where[0]),) * x.ndim)
    old = lax.dynamic_slice(sums, begin, (1,) * len(where) + x.shape)
    return lax.dynamic_update_slice(sums, old + x, begin)


def _dropout_key(parts: _Parts, at: _At, tile: Array) -> Array | None:
    """A key of its own for every tile, the same forward and backward."""
    if parts.dropout_key is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(parts.dropout_key, at.number), tile)
