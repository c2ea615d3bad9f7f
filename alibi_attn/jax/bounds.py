"""The certificate in JAX: which tiles of keys cannot matter to a block of queries (the maths is that of `alibi_attn.reach`).

A block visits its own tiles first and knows, after each, a lower bound λ of every query's log-sum-exp: that of the keys it
has seen. The tiles it has not seen weigh at most exp(U − λ − m·r)/(1 − e^(−m)), with U = |scale|·‖q‖·κ, κ the largest key
norm among them and r the distance to the nearest. When that is at most the tolerance, the loop ends.

In floating point: without x64 JAX has no fp64, so norms are taken of scaled rows (squares neither overflow nor vanish) and
rounded up by more than their error; λ and U get the error of what they were computed from; anything that is
not finite certifies nothing, because a comparison with NaN is False.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alibi_attn.attention.certificate.constants import LOOP_OUTLIER_SHARE, LOOP_OUTLIER_TILES, LSE_NATS, VALUE_RATIO
from alibi_attn.jax.tiles import Plan, Queries, Rule, Softmax

Array = jax.Array


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


def norm_bound(x: Array) -> Array:
    """[...] an upper bound of ‖x‖ along the last axis [..., D], in fp32 or better; inf where x is not finite."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Numbers below `tiny` count as zero on many devices: √D·tiny is what that can hide.
    tiny = x.shape[-1] ** 0.5 * float(np.finfo(x.dtype).tiny)
    bound = _norm(x) * (1.0 + _error(x.shape[-1], x.dtype)) + tiny
    return jnp.where(jnp.isfinite(bound), bound, jnp.inf)


def key_norms(of_keys: Array, of_values: Array) -> KeyNorms:
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


class Certificate(NamedTuple):
    """What is known of a block of queries before its first tile."""

    reach_of_scores: Array  # [t] |scale|·‖q‖, rounded up: times a key norm it bounds the score
    largest_score: Array  # [t] U over every key that the loop may visit
    tolerance: Array  # scalar
    norms: KeyNorms


def still_needed(
    plan: Plan, rule: Rule, known: Certificate, queries: Queries, so_far: Softmax, first: Array, last: Array
) -> tuple[Array, Array, list[Array]]:
    """(left, right, each outlier): False where no query of the block needs what is left of that kind.

    Args:
        first, last: positions of the first and last key of the band of tiles that has been visited.
    """
    tile, norms = plan.key_tile, known.norms
    i = queries.position + jnp.arange(len(queries.query), dtype=jnp.int32)
    lse = so_far.top + jnp.log(so_far.total)
    error = _error(queries.query.shape[-1], lse.dtype) * (known.largest_score + jnp.abs(lse)) + LSE_NATS["jax"]
    # The output so far is a mean of the values that were kept: one of them is at least as long.
    kept = VALUE_RATIO * _norm(so_far.mixed) / so_far.total
    share = (1.0 - LOOP_OUTLIER_TILES * LOOP_OUTLIER_SHARE) / (1 if plan.causal else 2)

    def excess(slope: Array, distance: Array, norm: Array, value_norm: Array, share: float) -> Array:
        """[t] nats by which the keys of at most this norm, at this distance and beyond, may weigh more than their share."""
        numerator = known.reach_of_scores * norm + error - lse - jnp.log(known.tolerance * share)
        numerator += jnp.where(value_norm <= kept, 0.0, jnp.log(value_norm) - jnp.log(kept))
        tail = -jnp.log(-jnp.expm1(-slope))
        return jnp.where(distance >= 1, numerator + tail - slope * distance.astype(lse.dtype), jnp.inf)

    at = first // tile
    kinds = [excess(rule.left, i - (first - 1), norms.before[at], norms.value_before[at], share)]
    if not plan.causal:
        at = last // tile
        kinds.append(excess(rule.right, last + 1 - i, norms.after[at], norms.value_after[at], share))
    for number in range(LOOP_OUTLIER_TILES):
        begin, of_tile = norms.outlier[number] * tile, (norms.of_outlier[number], norms.value_of_outlier[number])
        kind = excess(rule.left, i - (begin + tile - 1), *of_tile, LOOP_OUTLIER_SHARE)
        if not plan.causal:
            kind = jnp.minimum(kind, excess(rule.right, begin - i, *of_tile, LOOP_OUTLIER_SHARE))
        kinds.append(kind)
    needed = ~(jnp.stack(kinds).max(-1) <= 0)  # NaN certifies nothing
    outliers = [needed[number - LOOP_OUTLIER_TILES] for number in range(LOOP_OUTLIER_TILES)]
    return needed[0], needed[0] & False if plan.causal else needed[1], outliers


def certificate(
    plan: Plan, rule: Rule, queries: Queries, norms: KeyNorms, tolerance: Array, last_tile: Array
) -> Certificate:
    """The certificate of one block, which visits no tile to the right of `last_tile`."""
    query_norm = norm_bound(queries.query)
    limits = np.finfo(query_norm.dtype)
    scale = jnp.maximum(jnp.abs(rule.scale), float(limits.tiny))
    of_scores = query_norm * scale * (1.0 + 4.0 * float(limits.eps)) + float(limits.tiny)
    largest = norms.so_far[last_tile] if plan.causal else norms.overall
    return Certificate(of_scores, of_scores * largest, tolerance, norms)


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
    """[..., n] moved right or left by one; what is nobody's maximum is 0."""
    empty = jnp.zeros_like(x[..., :1])
    return jnp.concatenate([empty, x[..., :-1]] if by > 0 else [x[..., 1:], empty], axis=-1)
