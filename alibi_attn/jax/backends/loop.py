"""The loop: every block of queries visits tiles of keys outward from its diagonal until the certificate ends it.

Heads and blocks are looped over, not vmapped: a batched `while_loop` runs until its slowest lane is done. Memory is linear in the
length. Each block saves the tiles that it visited and found to matter (docs/certificate.md, step 11), and backward visits those.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_attn.attention.call.reads import MASKS, NUMBERED_DROPOUT
from alibi_attn.attention.certificate.constants import LOOP_OUTLIER_TILES
from alibi_attn.jax.backends import tiles
from alibi_attn.jax.backends.certificate import (
    BiasedCertificate,
    Certificate,
    certificate,
    key_norms,
    largest_share,
    room,
    still_needed,
)
from alibi_attn.jax.backends.tiles import Finished, Gradients, Softmax
from alibi_attn.jax.call.plan import (
    Array,
    Block,
    Inputs,
    Limits,
    Plan,
    Visited,
    block_at,
    block_numbers,
    cut,
    joined,
    limits,
    rows,
    tile_at,
)

READS = MASKS | NUMBERED_DROPOUT | {"key_bias", "query_bias"}
_Sums = tuple[
    Array, Array, Array | None
]  # gradients of key, value and key_bias from all blocks so far, in tiles as in `Parts`


class _Step(NamedTuple):
    """The state of the forward loop of one block."""

    tile: Array  # the next tile; −1 ends the loop
    visited: Visited
    softmax: Softmax
    shares: Array  # [tiles] the largest share of a query's softmax over the keys up to then, of each visited tile


def forward(plan: Plan, inputs: Inputs) -> tuple[Array, Array, Array | None, Visited, Visited]:
    """(output [B, H, T, D], lse [B, H, T], its references [B, H, T] with key biases, visited, what backward needs of it)."""
    parts = cut(plan, inputs)
    norms = key_norms(plan, parts)
    bias_dtype = None if parts.bias is None else parts.bias.high.dtype

    def one(number: Array) -> tuple[Array, Array, Array | None, Visited, Visited]:
        block = block_at(plan, parts, number)
        allowed = limits(plan, parts, block)
        known = certificate(plan, parts, norms, block, allowed)

        def body(step: _Step) -> _Step:
            keys = tile_at(plan, parts, block, step.tile)
            softmax, share = tiles.add(plan, block.rule, step.softmax, block.queries, keys, block.dropout)
            tile, visited = _next(plan, block, allowed, known, softmax, step.visited)
            return _Step(tile, visited, softmax, lax.dynamic_update_index_in_dim(step.shares, share, step.tile, 0))

        nearest, any_tile = allowed.nearest, allowed.lowest <= allowed.highest
        begin = Visited(nearest, nearest, (jnp.full_like(nearest, -1),) * LOOP_OUTLIER_TILES)
        nothing = tiles.start(block.queries, bias_dtype)
        shares = jnp.zeros_like(nothing.total, shape=parts.key.shape[2])
        first = _Step(jnp.where(any_tile, nearest, -1), begin, nothing, shares)
        done = lax.while_loop(lambda step: step.tile >= 0, body, first)
        last = jnp.where(any_tile, done.visited.last, done.visited.first - 1)
        visited = done.visited._replace(last=last)
        needed = _needed(plan, block, visited, nearest, done.shares, room(known, done.softmax))
        return *tiles.finish(done.softmax, block.queries), visited, needed

    *results, visited, needed = lax.map(one, block_numbers(plan, inputs))
    output, lse, reference = jax.tree.map(lambda x: joined(x, inputs), results)
    return output, lse, reference, visited, needed


def backward(plan: Plan, inputs: Inputs, known: Finished, visited: Visited) -> Gradients:
    parts = cut(plan, inputs)

    def one(sums: _Sums, number: Array) -> tuple[_Sums, tuple[Array, Array, Array, Array | None]]:
        block = block_at(plan, parts, number)
        mine = jax.tree.map(lambda x: x[number], visited)
        here: Finished = jax.tree.map(lambda x: rows(plan, x, block.sequence, block.head, block.row), known)
        # Repeated rows belong to the previous block.
        here = here._replace(
            lse=jnp.where(block.is_repeated, jnp.inf, here.lse),
            grad_lse=jnp.where(block.is_repeated, 0.0, here.grad_lse),
        )
        total = mine.last - mine.first + 1 + sum((tile >= 0).astype(jnp.int32) for tile in mine.outliers)

        def body(turn: tuple[Array, Gradients]) -> tuple[Array, Gradients]:
            number, so_far = turn
            tile = _tile_of_turn(mine, number)
            keys = tile_at(plan, parts, block, tile)
            of_tile = tiles.gradients(plan, block.rule, block.queries, keys, here, block.dropout)
            where = (block.sequence, block.key_head, tile)
            of_head = partial(_added, where=(block.sequence, block.head, tile))
            return number + 1, Gradients(
                query=so_far.query + of_tile.query,
                key=_added(so_far.key, of_tile.key, where),
                value=_added(so_far.value, of_tile.value, where),
                left=so_far.left + of_tile.left,
                right=so_far.right + of_tile.right,
                key_bias=jax.tree.map(of_head, so_far.key_bias, of_tile.key_bias),
                query_bias=jax.tree.map(jnp.add, so_far.query_bias, of_tile.query_bias),
            )

        nothing = jnp.zeros_like(block.queries.query, dtype=known.lse.dtype)
        zero = jnp.zeros_like(block.rule.left)
        no_row = jnp.zeros_like(here.lse) if plan.query_bias else None
        begin = Gradients(nothing, *sums[:2], zero, zero, sums[2], no_row)
        done = lax.while_loop(lambda turn: turn[0] < total, body, (jnp.zeros_like(total), begin))[1]
        slopes = tiles.slope_gradients(done.left, done.right, block.queries.least, here.grad_lse)
        return (done.key, done.value, done.key_bias), (done.query, *slopes, done.query_bias)

    nothing = jnp.zeros_like(parts.key, dtype=known.lse.dtype)
    biases = None if parts.bias is None else jnp.zeros_like(parts.bias.high, dtype=known.lse.dtype)
    sums, (of_query, of_left, of_right, of_row) = lax.scan(one, (nothing, nothing, biases), block_numbers(plan, inputs))
    key_len = inputs.key.shape[2]
    of_key, of_value = (x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :key_len] for x in sums[:2])
    of_left, of_right = (x.reshape(*inputs.left.shape, -1).sum(-1) for x in (of_left, of_right))
    return Gradients(
        query=joined(of_query, inputs),
        key=of_key,
        value=of_value,
        left=of_left,
        right=of_right,
        key_bias=jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1)[:, :, :key_len], sums[2]),
        query_bias=jax.tree.map(lambda x: joined(x, inputs), of_row),
    )


def _next(
    plan: Plan,
    block: Block,
    allowed: Limits,
    known: Certificate | BiasedCertificate,
    softmax: Softmax,
    visited: Visited,
) -> tuple[Array, Visited]:
    """The next tile (−1 = done), and the tiles that are visited after it."""
    need_left, need_right, need_outlier = still_needed(plan, block, known, softmax, visited)
    first, last, outliers = visited
    in_band = outliers[0] + outliers[1] == -2  # after an outlier the band stops, or it would read that tile twice
    go_left = in_band & (first > allowed.lowest) & need_left
    go_right = in_band & ~go_left & (last < allowed.highest) & need_right
    first, last = first - go_left, last + go_right
    moved = go_left | go_right
    tile = jnp.where(go_left, first, jnp.where(go_right, last, -1))
    after = []
    for number, before in enumerate(outliers):
        candidate = known.norms.outlier[number]
        outside = (candidate < first) | (candidate > last)
        reachable = (candidate >= allowed.lowest) & (candidate <= allowed.highest) & outside
        go = ~moved & (tile < 0) & (before < 0) & reachable & need_outlier[number]
        tile = jnp.where(go, candidate, tile)
        after.append(jnp.where(go, candidate, before))
    return tile, Visited(first, last, tuple(after))


def _needed(plan: Plan, block: Block, visited: Visited, nearest: Array, shares: Array, tolerance: Array) -> Visited:
    """The tiles that backward visits: without those at both ends, and outliers, whose shares obey the key rule."""
    number = jnp.arange(len(shares), dtype=jnp.int32)
    begin, first = number * plan.key_tile, block.queries.position
    # The largest distance of a query and a key counts.
    farthest = jnp.maximum(first + plan.query_block - 1 - begin, begin + plan.key_tile - 1 - first)
    # NaN weighs more than any tolerance, and 0 leaves out nothing.
    light = (shares <= largest_share(farthest.astype(shares.dtype), tolerance)) & (tolerance > 0)
    to_left = (number >= visited.first) & (number < nearest)
    to_right = (number > nearest) & (number <= visited.last)
    left, right = (
        (side & jnp.cumprod(of_side).astype(bool)[::step]).sum(dtype=jnp.int32)
        for side, step, of_side in ((to_left, 1, light | ~to_left), (to_right, -1, (light | ~to_right)[::-1]))
    )
    outliers = (jnp.where(light[x], -1, x) for x in visited.outliers)
    return Visited(visited.first + left, visited.last - right, tuple(outliers))


def _tile_of_turn(visited: Visited, turn: Array) -> Array:
    """The tile in this iteration of the backward loop: first the band, then the visited outliers."""
    first, last, (one, other) = visited
    beyond = turn - (last - first + 1)
    return jnp.where(beyond < 0, first + turn, jnp.where((beyond == 0) & (one >= 0), one, other))


def _added(sums: Array, x: Array, where: tuple[Array, ...]) -> Array:
    """Adds x to `sums` at `where`, in place inside a loop (a scatter would be slow)."""
    begin = (*where, *(jnp.zeros_like(where[0]),) * x.ndim)
    old = lax.dynamic_slice(sums, begin, (1,) * len(where) + x.shape)
    return lax.dynamic_update_slice(sums, old + x, begin)
