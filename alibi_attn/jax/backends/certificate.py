"""The certificate in JAX: which tiles of keys cannot matter to a block of queries, by the math of `alibi_attn.reach`.

A block visits its own tiles first. After each tile it has a lower bound λ on every query's log-sum-exp, over the keys visited so
far. The remaining tiles weigh at most exp(U − λ − m·r)/(1 − e^(−m)), with U = |scale|·‖q‖·κ, κ the largest key norm among them
and r the distance to the nearest. When that is at most the tolerance, the loop ends.

With a bias b_j for every key there is no geometric series: the weights of the remaining tiles are added up, one number per tile.
That is valid for biases and slopes of any sign. Where a gradient is needed, the remaining keys obey `largest_share` too.

In floating point: without x64 JAX has no fp64, so norms are computed from scaled rows (squares neither overflow nor vanish) and
rounded up by more than their error; λ and U include the errors of their inputs. If numbers are not finite, nothing is skipped,
because a comparison with NaN is False.

`loop.py` runs `key_norms` once per call, `certificate` once per block, and `still_needed` after every tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alibi_attn.attention.certificate import constants
from alibi_attn.attention.certificate.constants import LOOP_OUTLIER_TILES
from alibi_attn.jax.backends.tiles import Softmax, finite
from alibi_attn.jax.call.plan import Array, Block, KeyBias, Limits, Parts, Plan, Rule, Visited, split


class KeyNorms(NamedTuple):
    """Largest norms among the keys that are not hidden, and among their values, by tile, for one key head."""

    before: Array  # [n] ‖k‖ over all tiles to the left, without the outliers
    after: Array  # [n] ‖k‖ over all tiles to the right, without the outliers
    so_far: Array  # [n] ‖k‖ over this tile and all to the left, with the outliers
    overall: Array  # scalar ‖k‖
    outlier: Array  # [LOOP_OUTLIER_TILES] numbers of the tiles with the largest ‖k‖, −1 for none
    of_outlier: Array  # [LOOP_OUTLIER_TILES] their ‖k‖
    value_before: Array  # as `before`, of ‖v‖
    value_after: Array
    value_of_outlier: Array


class BiasedTiles(NamedTuple):
    """Bounds on the weights of the keys of each tile, for one query head with key biases."""

    norm: Array  # [n] the largest ‖k‖
    shortest: Array  # scalar: no key that is not hidden is shorter
    bias: Array  # [n] the largest b; −inf where all keys are hidden
    left: Array  # [n] ln Σ exp(b_j − bias − m·(j_last − j)), rounded up: seen from the right
    right: Array  # [n] ln Σ exp(b_j − bias − m·(j − j_first)), rounded up: seen from the left
    outlier: Array  # [LOOP_OUTLIER_TILES] numbers of tiles that stay the running maximum the longest, −1 for none
    value_before: Array  # [n] ‖v‖ over all tiles to the left, without the outliers
    value_after: Array  # [n]
    value_of_outlier: Array  # [LOOP_OUTLIER_TILES]


class Certificate(NamedTuple):
    """The bounds of a block of queries, computed before its first tile."""

    rate: Array  # [t] |scale|·‖q‖, rounded up: times a key norm it bounds the score
    largest_score: Array  # [t] U over every key that the loop may visit
    tolerance: Array  # scalar
    norms: KeyNorms


class BiasedCertificate(NamedTuple):
    """The bounds of a block of queries with key biases, computed before its first tile."""

    rate: Array  # [t] |scale|·‖q‖, rounded up
    largest_score: Array  # [t] U over every key that the loop may visit
    tolerance: Array  # scalar
    left: Array  # [n] nats of each tile without its bias, for the largest rate and the nearest query; inf if not to the left
    right: Array  # [n] the same for tiles to the right
    bias: Array  # [n] the largest b of each tile, −inf where the block may see no key
    size: Array  # [n] a bound on the biases and distances of a tile's keys, which are rounded
    farthest: Array  # [n] the largest distance between a query and a key of each tile
    norms: BiasedTiles


def key_norms(plan: Plan, parts: Parts) -> KeyNorms | BiasedTiles:
    """Per key head, or per query head with key biases. Hidden keys weigh nothing; keys with NaN or inf are always needed."""
    inputs = parts.inputs
    of_keys = jnp.where(jnp.isnan(inputs.veil), jnp.inf, norm_bound(inputs.key))
    of_keys, of_values = (jnp.where(inputs.hidden, 0.0, x) for x in (of_keys, norm_bound(inputs.value)))
    of_tiles = [split(x, plan.key_tile, 2, 0.0).max(-1) for x in (of_keys, of_values)]
    if parts.bias is None:
        return plain_tiles(*of_tiles)
    shortest = jnp.where(inputs.hidden, jnp.inf, norm_below(inputs.key)).min(-1)
    shortest = jnp.where(jnp.isfinite(shortest), shortest, 0.0)
    group = inputs.query.shape[1] // inputs.key.shape[1]
    norm, value, shortest = (jnp.repeat(x, group, axis=1) for x in (*of_tiles, shortest))
    largest_rate = score_bounds(inputs.query, inputs.rest.scale).max(-1)
    return biased_tiles(plan, parts.rule, parts.bias, largest_rate, norm, shortest, value)


def certificate(
    plan: Plan, parts: Parts, norms: KeyNorms | BiasedTiles, block: Block, limits: Limits
) -> Certificate | BiasedCertificate:
    """The certificate of one block, which visits the tiles within its limits only."""
    rate, tolerance = score_bounds(block.queries.query, block.rule.scale), parts.inputs.rest.tolerance
    if isinstance(norms, KeyNorms):
        mine: KeyNorms = jax.tree.map(lambda x: x[block.sequence, block.key_head], norms)
        largest = mine.so_far[limits.highest] if plan.causal else mine.overall
        return Certificate(rate, rate * largest, tolerance, mine)
    tiles: BiasedTiles = jax.tree.map(lambda x: x[block.sequence, block.head], norms)
    rule, eps = block.rule, float(np.finfo(rate.dtype).eps)
    begin = jnp.arange(len(limits.useful), dtype=jnp.int32) * plan.key_tile
    end = begin + plan.key_tile - 1
    first, last = block.queries.position, block.queries.position + plan.query_block - 1
    bias = jnp.where(limits.useful, tiles.bias, -jnp.inf)
    scores = rate.max() * tiles.norm

    def nats(within: Array, slope: Array, distance: Array) -> Array:
        away = slope * distance.astype(rate.dtype)
        total = scores + within - away + 4 * eps * (scores + jnp.abs(within) + jnp.abs(away))
        return jnp.where(distance >= 1, total, jnp.inf)

    farthest = jnp.maximum(jnp.abs(last - begin), jnp.abs(end - first)).astype(rate.dtype)
    return BiasedCertificate(
        rate=rate,
        largest_score=rate * jnp.where(bias == -jnp.inf, 0.0, tiles.norm).max(),
        tolerance=tolerance,
        left=nats(tiles.left, rule.left, first - end),
        right=nats(tiles.right, rule.right, begin - last),
        bias=bias,
        # A bias is relative to a reference that is at least as large as b − m·|i − j|.
        size=2 * jnp.maximum(jnp.abs(rule.left), jnp.abs(rule.right)) * farthest,
        farthest=farthest,
        norms=tiles,
    )


def still_needed(
    plan: Plan, block: Block, known: Certificate | BiasedCertificate, so_far: Softmax, visited: Visited
) -> tuple[Array, Array, list[Array]]:
    """(left, right, each outlier): False where no query of the block needs the remaining tiles of that kind."""
    needed = _biased_needed if isinstance(known, BiasedCertificate) else _plain_needed
    return needed(plan, block, known, so_far, visited)  # type: ignore[arg-type]


def largest_share(distance: Array, tolerance: Array) -> Array:
    """The key rule (`attention/certificate/key_rule.py`): the share that a query may leave out at a key at this distance."""
    return tolerance / (2.0 * (distance + constants.KEY_RULE_TOKENS))


def room(known: Certificate | BiasedCertificate, so_far: Softmax) -> Array:
    """Scalar: the tolerance of the key rule for what backward leaves out, less if some values are long."""
    norms = known.norms
    kept = jnp.where(so_far.total == 0, jnp.inf, constants.VALUE_RATIO * _norm(so_far.mixed) / so_far.total).min()
    longest = jnp.concatenate([norms.value_before, norms.value_after, norms.value_of_outlier]).max()
    return 0.99 * known.tolerance * jnp.where(longest <= kept, 1.0, kept / longest)


def _plain_needed(
    plan: Plan, block: Block, known: Certificate, so_far: Softmax, visited: Visited
) -> tuple[Array, Array, list[Array]]:
    tile, norms, rule = plan.key_tile, known.norms, block.rule
    i = block.queries.position + jnp.arange(plan.query_block, dtype=jnp.int32)
    lse = so_far.top + jnp.log(so_far.total)
    error = _error(so_far.mixed.shape[-1], lse.dtype) * (known.largest_score + jnp.abs(lse)) + constants.LSE_NATS["jax"]
    # The output so far is a mean of the kept values: one of them is at least as long.
    kept = constants.VALUE_RATIO * _norm(so_far.mixed) / so_far.total
    share = (1.0 - LOOP_OUTLIER_TILES * constants.LOOP_OUTLIER_SHARE) / (1 if plan.causal else 2)

    def excess(slope: Array, distance: Array, norm: Array, value_norm: Array, share: float) -> Array:
        """[t] nats by which the keys of at most this norm, at this distance and beyond, may weigh more than their share."""
        numerator = known.rate * norm + error - lse
        numerator += jnp.where(value_norm <= kept, 0.0, jnp.log(value_norm) - jnp.log(kept))
        tail, away = -jnp.log(-jnp.expm1(-slope)), distance.astype(lse.dtype)
        nats = numerator + tail - slope * away - jnp.log(known.tolerance * share)
        if plan.for_gradients:  # beyond this distance a key's share falls faster than its limit
            away = jnp.maximum(away, 1.0 / slope - constants.KEY_RULE_TOKENS)
            nats = jnp.maximum(nats, numerator - slope * away - jnp.log(largest_share(away, known.tolerance)))
        return jnp.where(distance >= 1, nats, jnp.inf)

    low, high = visited.first, visited.last
    kinds = [excess(rule.left, i - (low * tile - 1), norms.before[low], norms.value_before[low], share)]
    if not plan.causal:
        kinds.append(excess(rule.right, (high + 1) * tile - i, norms.after[high], norms.value_after[high], share))
    for number in range(LOOP_OUTLIER_TILES):
        begin, of_tile = norms.outlier[number] * tile, (norms.of_outlier[number], norms.value_of_outlier[number])
        kind = excess(rule.left, i - (begin + tile - 1), *of_tile, constants.LOOP_OUTLIER_SHARE)
        if not plan.causal:
            kind = jnp.minimum(kind, excess(rule.right, begin - i, *of_tile, constants.LOOP_OUTLIER_SHARE))
        kinds.append(kind)
    needed = ~(jnp.stack(kinds).max(-1) <= 0)  # NaN certifies nothing
    outliers = [needed[number - LOOP_OUTLIER_TILES] for number in range(LOOP_OUTLIER_TILES)]
    return needed[0], needed[0] & False if plan.causal else needed[1], outliers


def _biased_needed(
    plan: Plan, block: Block, known: BiasedCertificate, so_far: Softmax, visited: Visited
) -> tuple[Array, Array, list[Array]]:
    """One sum over tiles serves all queries of the block.

    exp(ρ_i·‖k‖ + b − m·|i − j|) ≤ exp(P·‖k‖ + b − m·d)·exp(−(P − ρ_i)·min‖k‖ − m·δ_i), P the largest ρ of the block, d the
    distance from its nearest query, and δ_i how much farther query i is. Biases are relative to the smallest reference of the
    queries.
    """
    assert so_far.reference is not None
    norms, count, rule = known.norms, plan.query_block, block.rule
    number = jnp.arange(len(known.left), dtype=jnp.int32)
    is_visited = (number >= visited.first) & (number <= visited.last)
    for outlier in visited.outliers:
        is_visited |= number == outlier
    is_outlier = (number == norms.outlier[:, None]).any(0)
    smallest = jnp.where(so_far.reference == -jnp.inf, jnp.inf, so_far.reference).min()
    smallest = jnp.where(jnp.isfinite(smallest), smallest, 0.0)
    eps = float(np.finfo(so_far.top.dtype).eps)
    above = (finite(so_far.reference) - smallest).astype(so_far.top.dtype)
    lse = so_far.top + jnp.log(so_far.total) + above
    error = (
        _error(so_far.mixed.shape[-1], lse.dtype) * (known.largest_score + jnp.abs(lse)) + 2 * constants.LSE_NATS["jax"]
    )
    error += 4 * eps * jnp.abs(above)
    # For keys with weight, a negative bias is at most as large as the rest of the score.
    error += 8 * eps * jnp.where(is_visited, known.size, 0.0).max()
    kept = constants.VALUE_RATIO * _norm(so_far.mixed) / so_far.total
    share = (1.0 - LOOP_OUTLIER_TILES * constants.LOOP_OUTLIER_SHARE) / (1 if plan.causal else 2)
    lane = jnp.arange(count, dtype=lse.dtype)
    certain = lse - error + (known.rate.max() - known.rate) * norms.shortest
    beyond = (known.bias - smallest).astype(lse.dtype)

    def with_bias(nats: Array) -> Array:
        total = nats + beyond + 4 * eps * (jnp.abs(nats) + jnp.abs(beyond))
        return jnp.where(known.bias == -jnp.inf, -jnp.inf, jnp.where(jnp.isfinite(beyond), total, jnp.inf))

    def room(slope: Array, farther: Array, value_norm: Array, share: float) -> Array:
        """The nats that may be skipped, for the largest rate and the nearest query."""
        longer = jnp.where(value_norm <= kept, 0.0, jnp.log(value_norm) - jnp.log(kept))
        least = (certain - longer + slope * farther).min() + jnp.log(known.tolerance * share)
        return least - 4 * eps * (jnp.abs(least) + jnp.abs(slope) * count)

    def of_key(nats: Array, room: Array, share: float) -> Array:
        """The nats by which each tile exceeds the key rule; −inf if no gradient is needed."""
        rule = jnp.log(largest_share(known.farthest, jnp.full_like(room, 1.0 / share)))
        return nats - room - rule if plan.for_gradients else jnp.full_like(nats, -jnp.inf)

    def is_needed(nats: Array, left_out: Array, room: Array) -> Array:
        left_out &= nats != -jnp.inf
        weights = jnp.where(left_out, jnp.exp(nats - room), 0.0)
        return ~(weights.sum() <= 0.98) | (left_out & ~(of_key(nats, room, share) <= 0)).any()  # NaN certifies nothing

    def excess(nats: Array, tile: Array, room: Array) -> Array:
        return jnp.maximum(nats[tile] - room, of_key(nats, room, constants.LOOP_OUTLIER_SHARE)[tile])

    low, high = visited.first, visited.last
    of_left, from_left = with_bias(known.left), (rule.left, lane)
    left = is_needed(of_left, (number < low) & ~is_outlier, room(*from_left, norms.value_before[low], share))
    right, excesses = left & False, []
    for tile, value_norm in zip(norms.outlier, norms.value_of_outlier, strict=True):
        excesses.append(excess(of_left, tile, room(*from_left, value_norm, constants.LOOP_OUTLIER_SHARE)))
    if not plan.causal:
        of_right, from_right = with_bias(known.right), (rule.right, lane[::-1])
        right = is_needed(of_right, (number > high) & ~is_outlier, room(*from_right, norms.value_after[high], share))
        for at, (tile, value_norm) in enumerate(zip(norms.outlier, norms.value_of_outlier, strict=True)):
            to_right = excess(of_right, tile, room(*from_right, value_norm, constants.LOOP_OUTLIER_SHARE))
            excesses[at] = jnp.where(of_right[tile] < jnp.inf, to_right, excesses[at])
    return left, right, [~(excess <= 0) for excess in excesses]


def plain_tiles(of_keys: Array, of_values: Array) -> KeyNorms:
    """`KeyNorms` of the largest norms by tile, [..., n] each."""
    count = min(LOOP_OUTLIER_TILES, of_keys.shape[-1])
    largest, outlier = lax.top_k(of_keys, count)
    is_outlier = (jnp.arange(of_keys.shape[-1]) == outlier[..., None]).any(-2)
    keys, values = jnp.where(is_outlier, 0.0, of_keys), jnp.where(is_outlier, 0.0, of_values)
    missing = [(0, 0)] * (outlier.ndim - 1) + [(0, LOOP_OUTLIER_TILES - count)]
    axis = keys.ndim - 1
    return KeyNorms(
        before=_shifted(lax.cummax(keys, axis=axis), 1),
        after=_shifted(lax.cummax(keys, axis=axis, reverse=True), -1),
        so_far=lax.cummax(of_keys, axis=axis),
        overall=largest[..., 0],
        outlier=jnp.pad(outlier.astype(jnp.int32), missing, constant_values=-1),
        of_outlier=jnp.pad(largest, missing),
        value_before=_shifted(lax.cummax(values, axis=axis), 1),
        value_after=_shifted(lax.cummax(values, axis=axis, reverse=True), -1),
        value_of_outlier=jnp.pad(jnp.take_along_axis(of_values, outlier, -1), missing),
    )


def biased_tiles(
    plan: Plan, rule: Rule, bias: KeyBias, largest_rate: Array, norm: Array, shortest: Array, value: Array
) -> BiasedTiles:
    """`BiasedTiles` of all heads, [B, H, ...].

    Args:
        bias: [B, H, n, s].
        largest_rate: [B, H] the largest |scale|·‖q‖ of the head's queries.
        norm, value: [B, H, n] the largest ‖k‖ and ‖v‖ by tile, without hidden keys.
        shortest: [B, H].
    """
    work, count, size = norm.dtype, *bias.high.shape[2:]
    step = jnp.arange(size, dtype=work)
    largest = bias.high.max(-1)
    relative = bias.relative_to(jnp.where(largest > -jnp.inf, largest, 0.0)[..., None]).astype(work)

    def within(slope: Array, away: Array) -> Array:
        rounded = 4 * size * float(np.finfo(work).eps) * jnp.abs(slope[..., None]) + constants.LSE_NATS["jax"]
        return jax.nn.logsumexp(relative - slope[..., None, None] * away, axis=-1) + rounded

    # Any choice of outliers is sound: each of them is certified separately.
    nats = largest_rate[..., None] * norm + largest.astype(work)
    position = plan.key_tile * jnp.arange(count, dtype=work)
    sides = [nats + rule.left[..., None] * position]
    sides += [] if plan.causal else [nats - rule.right[..., None] * position]
    outlier = _longest_the_largest(sides)
    is_outlier = (jnp.arange(count) == outlier[..., None]).any(-2)
    values = jnp.where(is_outlier, 0.0, value)
    axis = values.ndim - 1
    return BiasedTiles(
        norm=norm,
        shortest=shortest,
        bias=largest,
        left=within(rule.left, step[::-1]),
        right=within(rule.right, step),
        outlier=outlier,
        value_before=_shifted(lax.cummax(values, axis=axis), 1),
        value_after=_shifted(lax.cummax(values, axis=axis, reverse=True), -1),
        value_of_outlier=jnp.take_along_axis(value, jnp.maximum(outlier, 0), -1),
    )


def _longest_the_largest(sides: list[Array]) -> Array:
    """[..., LOOP_OUTLIER_TILES] the tiles that stay the running maximum of nats [..., n] the longest, −1 for none.

    The first side is scanned to the right (for queries, it is the left side), the second to the left. If biases only rise towards
    the queries, no tile remains the largest, and none is worth leaving out.
    """
    chosen, number = [], jnp.arange(sides[0].shape[-1], dtype=jnp.int32)
    axis, count = sides[0].ndim - 1, sides[0].shape[-1]
    for _ in range(LOOP_OUTLIER_TILES):
        lengths = jnp.zeros_like(sides[0], dtype=jnp.int32)
        for nats, flipped in zip(sides, (False, True), strict=False):
            ordered = jnp.flip(nats, -1) if flipped else nats
            so_far = lax.cummax(ordered, axis=axis)
            before = jnp.concatenate([jnp.full_like(so_far[..., :1], -jnp.inf), so_far[..., :-1]], -1)
            is_record = ordered > before
            next_record = lax.cummin(jnp.where(is_record, number, count), axis=axis, reverse=True)
            next_record = jnp.concatenate([next_record[..., 1:], jnp.full_like(next_record[..., :1], count)], -1)
            length = jnp.where(is_record, next_record - number, 0)
            lengths = jnp.maximum(lengths, jnp.flip(length, -1) if flipped else length)
        best = jnp.argmax(lengths, -1).astype(jnp.int32)
        chosen.append(jnp.where(lengths.max(-1) >= constants.WORTH_LEAVING_OUT, best, -1))
        sides = [jnp.where(number == best[..., None], -jnp.inf, nats) for nats in sides]
    return jnp.stack(chosen, -1)


def norm_bound(x: Array) -> Array:
    """[...] an upper bound on ‖x‖ along the last axis [..., D], in fp32 or better; inf if x is not finite."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Numbers below `tiny` count as zero on many devices, which hides at most √D·tiny.
    tiny = x.shape[-1] ** 0.5 * float(np.finfo(x.dtype).tiny)
    bound = _norm(x) * (1.0 + _error(x.shape[-1], x.dtype)) + tiny
    return jnp.where(jnp.isfinite(bound), bound, jnp.inf)


def norm_below(x: Array) -> Array:
    """[...] a lower bound on ‖x‖ along the last axis [..., D], for finite x."""
    error, tiny = _error(x.shape[-1], jnp.promote_types(x.dtype, jnp.float32)), x.shape[-1] ** 0.5 * 2.0**-120
    return jnp.maximum(norm_bound(x) * (1.0 - 3.0 * error) - tiny, 0.0)


def score_bounds(query: Array, scale: Array) -> Array:
    """[...] |scale|·‖q‖ of queries [..., D], rounded up: times a key norm it bounds the score."""
    query_norm = norm_bound(query)
    limits = np.finfo(query_norm.dtype)
    scale = jnp.maximum(jnp.abs(scale), float(limits.tiny))
    return query_norm * scale * (1.0 + 4.0 * float(limits.eps)) + float(limits.tiny)


def _norm(x: Array) -> Array:
    """‖x‖ along the last axis; squares neither overflow nor vanish.

    Rows of very large or small numbers are scaled by a power of two first. (Not by their largest entry: XLA divides by
    multiplying with the reciprocal, and the reciprocal of 1e38 is below what a device that flushes to zero can hold.)
    """
    far = 2.0 ** (np.finfo(x.dtype).maxexp * 5 // 16)
    largest = jnp.abs(x).max(-1)
    down, up = largest > far, largest < 1 / far
    factor = jnp.where(down, far**-2, jnp.where(up, far**2, 1.0)).astype(x.dtype)
    back = jnp.where(down, far**2, jnp.where(up, far**-2, 1.0)).astype(x.dtype)
    return jnp.sqrt(jnp.square(x * factor[..., None]).sum(-1)) * back


def _error(head_dim: int, dtype: jnp.dtype) -> float:
    """Relative error of a dot product or a norm of D terms, of a slope times a distance, and of their sum, with room to spare."""
    return float(2 * (head_dim + 16) * np.finfo(dtype).eps / 2)


def _shifted(x: Array, by: int) -> Array:
    """[..., n] shifted right or left by one, with 0 in the gap."""
    empty = jnp.zeros_like(x[..., :1])
    return jnp.concatenate([empty, x[..., :-1]] if by > 0 else [x[..., 1:], empty], axis=-1)
