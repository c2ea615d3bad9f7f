"""The loop: every block of queries visits tiles of keys outward from its diagonal until the certificate says enough.

Heads and blocks are looped, not mapped side by side: a batched `while_loop` runs until its slowest lane is done. Memory is
linear in the length; each block keeps which tiles it visited, and the backward pass visits exactly those.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_attn.attention.certificate.constants import LOOP_OUTLIER_TILES
from alibi_attn.jax import blocks, bounds, tiles
from alibi_attn.jax.blocks import At, Inputs, Parts
from alibi_attn.jax.bounds import BiasedCertificate, BiasedTiles, Certificate, KeyNorms
from alibi_attn.jax.dropout import head_dropout
from alibi_attn.jax.tiles import Array, Gradients, Plan, Queries, Rule, Softmax


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
    query_bias: Array | None  # [t]
    sums: "_Sums"


class _Sums(NamedTuple):
    """Gradients of keys, from all blocks so far."""

    key: Array  # [B, K, tiles, s, D]
    value: Array
    key_bias: Array | None  # [B, H, tiles, s]


def forward(plan: Plan, inputs: Inputs) -> tuple[Array, Array, Array | None, Visited]:
    """(output [B, H, T, D], lse [B, H, T], the references [B, H, T] that it counts from where keys have biases, visited)."""
    parts = blocks.cut(plan, inputs)
    norms = _norms(plan, inputs, parts)

    def one(number: Array) -> tuple[Array, Array, Array | None, Visited]:
        at = blocks.locate(number, plan, inputs)
        queries, rule = blocks.queries_of(plan, parts, at), blocks.rule_of(parts, at)
        dropout = head_dropout(inputs.dropout_seed, at.sequence, at.head)
        known: Certificate | BiasedCertificate
        if isinstance(norms, BiasedTiles):
            mine = jax.tree.map(lambda x: x[at.sequence, at.head], norms)
            lowest, highest, nearest, useful = _limits(plan, parts, queries, rule, at, mine.bias == -jnp.inf)
            reference = _reference(plan, mine, queries, rule, useful)
            known = bounds.biased_certificate(plan, rule, queries, mine, inputs.tolerance, useful, reference)
        else:
            mine, reference = jax.tree.map(lambda x: x[at.sequence, at.key_head], norms), None
            hidden = parts.hidden[at.sequence, 0].all(-1)
            lowest, highest, nearest, _ = _limits(plan, parts, queries, rule, at, hidden)
            known = bounds.certificate(plan, rule, queries, mine, inputs.tolerance, highest)
        begin = Visited(nearest, nearest, (jnp.full_like(nearest, -1),) * LOOP_OUTLIER_TILES)

        def body(step: _Step) -> _Step:
            keys = blocks.keys_of(plan, parts, at, step.tile, reference)
            softmax = tiles.add(plan, rule, step.softmax, queries, keys, dropout)
            tile, visited = _next(plan, rule, known, queries, softmax, step.visited, lowest, highest)
            return _Step(tile, visited, softmax)

        any_tile = lowest <= highest
        first = jnp.where(any_tile, nearest, -1)
        done = lax.while_loop(lambda step: step.tile >= 0, body, _Step(first, begin, tiles.start(queries)))
        output, lse = tiles.finish(done.softmax, queries)
        last = jnp.where(any_tile, done.visited.last, done.visited.first - 1)
        references = None if reference is None else jnp.broadcast_to(reference, lse.shape)
        return output, lse, references, done.visited._replace(last=last)

    *found, visited = lax.map(one, jnp.arange(blocks.count(plan, inputs), dtype=jnp.int32))
    output, lse, reference = jax.tree.map(lambda x: blocks.joined(x, plan, inputs), found)
    return output, lse, reference, visited


def backward(
    plan: Plan,
    inputs: Inputs,
    lse: Array,
    reference: Array | None,
    visited: Visited,
    grad_output: Array,
    shift: Array,
    grad_lse: Array,
) -> Gradients:
    """Gradients of query, key, value [B, H or K, T or S, D], slopes [B, H], and biases [B, H, S or T] where there are any.

    Args:
        lse: [B, H, T], inf where a query saw nothing.
        reference: [B, H, T] of forward.
        grad_output: [B, H, T, D].
        shift: [B, H, T], Σ do·o − dlse.
        grad_lse: [B, H, T], dlse; 0 where a query saw nothing.
    """
    parts = blocks.cut(plan, inputs)

    def one(sums: _Sums, number: Array) -> tuple[_Sums, tuple[Array, Array, Array, Array | None]]:
        at = blocks.locate(number, plan, inputs)
        queries, rule = blocks.queries_of(plan, parts, at), blocks.rule_of(parts, at)
        dropout = head_dropout(inputs.dropout_seed, at.sequence, at.head)
        mine = jax.tree.map(lambda x: x[number], visited)
        lse_here, grad_here, shift_here, of_lse = (
            blocks.rows(plan, x, at.sequence, at.head, at.row) for x in (lse, grad_output, shift, grad_lse)
        )
        # The last block begins early, so as to be full; what it shares with the one before is counted there.
        row = jnp.arange(plan.query_block)
        is_shared = row < at.block * plan.query_block - at.row
        lse_here, of_lse = jnp.where(is_shared, jnp.inf, lse_here), jnp.where(is_shared, 0.0, of_lse)
        # That of the last row is always of this block.
        mine_of = None if reference is None else blocks.rows(plan, reference, at.sequence, at.head, at.row)[-1]
        least = tiles.least_distance(queries, inputs.key.shape[2])
        total = mine.last - mine.first + 1 + sum((tile >= 0).astype(jnp.int32) for tile in mine.outliers)

        def body(so_far: _Turn) -> _Turn:
            tile = _tile_of_turn(mine, so_far.number)
            keys = blocks.keys_of(plan, parts, at, tile, mine_of)
            found = tiles.gradients(plan, rule, queries, keys, lse_here, grad_here, shift_here, least, dropout)
            where, sums = (at.sequence, at.key_head, tile), so_far.sums
            return _Turn(
                so_far.number + 1,
                so_far.query + found.query,
                so_far.left + found.left,
                so_far.right + found.right,
                jax.tree.map(jnp.add, so_far.query_bias, found.query_bias),
                _Sums(
                    _added(sums.key, found.key, where),
                    _added(sums.value, found.value, where),
                    jax.tree.map(partial(_added, where=(at.sequence, at.head, tile)), sums.key_bias, found.key_bias),
                ),
            )

        nothing = jnp.zeros_like(queries.query, dtype=lse.dtype)
        zero = jnp.zeros_like(rule.left)
        no_row = jnp.zeros_like(lse_here) if plan.query_bias else None
        begin = _Turn(jnp.zeros_like(total), nothing, zero, zero, no_row, sums)
        done = lax.while_loop(lambda so_far: so_far.number < total, body, begin)
        slopes = tiles.slope_gradients(done.left, done.right, least, of_lse)
        return done.sums, (done.query, *slopes, done.query_bias)

    nothing = jnp.zeros_like(parts.key, dtype=lse.dtype)
    biases = None if parts.bias is None else jnp.zeros_like(parts.bias.high, dtype=lse.dtype)
    sums, (of_query, of_left, of_right, of_row) = lax.scan(
        one, _Sums(nothing, nothing, biases), jnp.arange(blocks.count(plan, inputs), dtype=jnp.int32)
    )
    key_len = inputs.key.shape[2]
    of_key, of_value = (x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :key_len] for x in sums[:2])
    of_left, of_right = (x.reshape(*inputs.left.shape, -1).sum(-1) for x in (of_left, of_right))
    return Gradients(
        query=blocks.joined(of_query, plan, inputs),
        key=of_key,
        value=of_value,
        left=of_left,
        right=of_right,
        key_bias=jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1)[:, :, :key_len], sums.key_bias),
        query_bias=jax.tree.map(lambda x: blocks.joined(x, plan, inputs), of_row),
    )


def _norms(plan: Plan, inputs: Inputs, parts: Parts) -> KeyNorms | BiasedTiles:
    """Of every key head, or query head where keys have biases; hidden keys weigh nothing, those that spoil a query are needed."""
    of_keys = jnp.where(jnp.isnan(inputs.veil), jnp.inf, bounds.norm_bound(inputs.key))
    of_keys, of_values = (jnp.where(inputs.hidden, 0.0, x) for x in (of_keys, bounds.norm_bound(inputs.value)))
    of_tiles = [blocks.split(x, plan.key_tile, 2, 0.0).max(-1) for x in (of_keys, of_values)]
    if parts.bias is None:
        return bounds.key_norms(*of_tiles)
    shortest = jnp.where(inputs.hidden, jnp.inf, bounds.norm_below(inputs.key)).min(-1)
    shortest = jnp.where(jnp.isfinite(shortest), shortest, 0.0)
    group = inputs.query.shape[1] // inputs.key.shape[1]
    norm, value, shortest = (jnp.repeat(x, group, axis=1) for x in (*of_tiles, shortest))
    largest_rate = bounds.score_bounds(inputs.query, inputs.scale).max(-1)
    return bounds.biased_tiles(plan, parts.rule, parts.bias, largest_rate, norm, shortest, value)


def _limits(
    plan: Plan, parts: Parts, queries: Queries, rule: Rule, at: At, hidden: Array
) -> tuple[Array, Array, Array, Array]:
    """(lowest, highest, nearest, useful): the range of tiles that masks allow the block, and where it begins; [tiles] which are.

    lowest > highest where none is; `hidden` [tiles] says where all keys are.
    """
    begin = jnp.arange(len(hidden), dtype=jnp.int32) * plan.key_tile
    end = begin + plan.key_tile - 1
    first, last = queries.position, queries.position + plan.query_block - 1
    useful = ~hidden & (end > first - rule.look_left) & (begin < last + rule.look_right)
    if queries.segment is not None and parts.key_segments is not None:
        useful &= _segments_meet(queries.segment, parts.key_segments[at.sequence], _hidden(parts, at))
    found = useful.any()
    lowest = jnp.where(found, jnp.argmax(useful).astype(jnp.int32), 0)
    highest = jnp.where(found, (len(useful) - 1 - jnp.argmax(useful[::-1])).astype(jnp.int32), -1)
    middle = last if plan.causal else first + plan.query_block // 2
    nearest = jnp.clip(middle // plan.key_tile, lowest, jnp.maximum(highest, lowest))
    return lowest, highest, nearest, useful


def _reference(plan: Plan, mine: BiasedTiles, queries: Queries, rule: Rule, useful: Array) -> Array:
    """The number from which biases count in this block: the largest b − m·|i − j|, tile by tile (see `tiles.references`)."""
    begin = jnp.arange(len(useful), dtype=jnp.int32) * plan.key_tile
    to_left = jnp.maximum(queries.position - (begin + plan.key_tile - 1), 0)
    to_right = jnp.maximum(begin - (queries.position + plan.query_block - 1), 0)
    away = rule.left * to_left.astype(rule.left.dtype) + rule.right * to_right.astype(rule.left.dtype)
    largest = jnp.where(useful, mine.bias - away.astype(mine.bias.dtype), -jnp.inf).max()
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


def _hidden(parts: Parts, at: At) -> Array:
    """[tiles, s]"""
    return parts.hidden[at.sequence, 0] if parts.bias is None else parts.bias.high[at.sequence, at.head] == -jnp.inf


def _segments_meet(of_queries: Array, of_keys: Array, hidden: Array) -> Array:
    """[tiles]: whether the segments of a tile's keys and of the block's queries overlap as ranges."""
    smallest = jnp.where(hidden, 2**31 - 1, of_keys).min(-1)
    largest = jnp.where(hidden, -(2**31), of_keys).max(-1)
    return (smallest <= of_queries.max()) & (largest >= of_queries.min())


def _next(
    plan: Plan,
    rule: Rule,
    known: Certificate | BiasedCertificate,
    queries: Queries,
    softmax: Softmax,
    visited: Visited,
    lowest: Array,
    highest: Array,
) -> tuple[Array, Visited]:
    """The tile to visit next (−1 = enough), and what has been visited when that is done."""
    first, last, outliers = visited
    size = plan.key_tile
    if isinstance(known, BiasedCertificate):
        need_left, need_right, need_outlier = bounds.still_needed_biased(
            plan, rule, known, queries, softmax, (first, last), outliers
        )
    else:
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


def _added(sums: Array, x: Array, where: tuple[Array, ...]) -> Array:
    """`sums` with x added at `where`, in place inside a loop (a scatter would be slow)."""
    begin = (*where, *(jnp.zeros_like(where[0]),) * x.ndim)
    old = lax.dynamic_slice(sums, begin, (1,) * len(where) + x.shape)
    return lax.dynamic_update_slice(sums, old + x, begin)
