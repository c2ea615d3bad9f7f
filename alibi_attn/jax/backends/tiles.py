"""One block of queries against one tile of keys: the scores, the online softmax, and the gradients.

Everything here is two-dimensional, for one head of one sequence; `dense.py` maps it over all heads at once, `loop.py` loops.
The formulas are Press et al. 2022, sec. 3 (arXiv:2108.12409), and Dao 2023 (arXiv:2307.08691) for the tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alibi_attn.jax.call.dropout import HeadDropout, factors, factors_of_numbers
from alibi_attn.jax.call.plan import Array, KeyBias, Keys, Pair, Plan, Queries, Rule, sum_of_two

PART = 128  # keys whose weighted values are added in one product
EDGE = 1 - 2**-11  # of the largest number: above it, floats are left for 2¹² distances


class Softmax(NamedTuple):
    """A softmax in progress over the keys seen so far, for t queries."""

    reference: Array | None  # [t] that key biases are relative to; None without them
    top: Array  # [t] the largest score
    total: Array  # [t] Σ exp(score − top)
    mixed: Array  # [t, D] Σ exp(score − top)·value
    total_low: (
        Array  # [t] the rounding error of the sum over tiles, which would drop many small weights next to a large one
    )
    mixed_low: Array  # [t, D]


class Finished(NamedTuple):
    """The results of forward that backward needs, [B, H, ...] in a whole call; lse is relative to the reference."""

    lse: Array  # [t], inf for a query that adds nothing; its query and grad_output are finite
    reference: Array | None  # [t]
    grad_output: Array  # [t, D]
    shift: Array  # [t] Σ do·o − dlse
    grad_lse: Array  # [t] dlse; 0 for a query that sees no key


class Gradients(NamedTuple):
    """The contribution of one tile to each gradient, or the gradients of a whole call: [B, H or K, T or S, D], slopes [B, H]."""

    query: Array  # [t, D]
    key: Array  # [s, D]
    value: Array  # [s, D]
    left: Array  # scalar
    right: Array  # scalar
    key_bias: Array | None  # [s] Σ ds over the queries
    query_bias: Array | None  # [t] Σ ds over the keys


def scores(plan: Plan, rule: Rule, queries: Queries, keys: Keys) -> tuple[Array, Array]:
    """(scale·q·kᵀ − m·|i − j|, i − j), [t, s] each; −inf for hidden keys only.

    Positions are computed here, not read from arrays: XLA's CPU code for this line is vectorized only if it reads few arrays,
    and otherwise costs as much as both matrix products.
    """
    seen, distance, slope = _sight(plan, rule, queries, keys)
    operand = _operand(queries.query.dtype)
    dots = _matmul(queries.query.astype(operand) * rule.scale_before.astype(operand), keys.key.T)
    score = dots * rule.scale_after - _nats_of(plan, queries, slope, distance)
    if keys.bias is not None and queries.reference is not None:
        score += keys.bias.relative_to(queries.reference[:, None]).astype(score.dtype)
    score = jnp.maximum(score, float(np.finfo(score.dtype).min)) + keys.veil[None, :]
    return jnp.where(seen, score, -jnp.inf), distance


def _nats_of(plan: Plan, queries: Queries, slope: Array, distance: Array) -> Array:
    """m·|i − j|. Products that overflow are large numbers that grow with the distance: the nearest key keeps all the weight."""
    most, eps = float(np.finfo(slope.dtype).max), float(np.finfo(slope.dtype).eps)
    beyond = (distance - queries.least).astype(slope.dtype)
    beyond = beyond if plan.causal else jnp.abs(beyond)
    return jnp.minimum(slope * distance.astype(slope.dtype), EDGE * most + beyond * (most * eps))


def _sight(plan: Plan, rule: Rule, queries: Queries, keys: Keys) -> tuple[Array, Array, Array]:
    """(whether the query may see the key, i − j or ‖p_i − p_j‖, the slope for that side), [t, s] or a scalar."""
    shape = (len(queries.query), len(keys.key))
    apart = lax.broadcasted_iota(jnp.int32, shape, 0) - lax.broadcasted_iota(jnp.int32, shape, 1)
    distance = queries.position - keys.position + apart
    seen = (distance < rule.look_left) & (distance > -rule.look_right)
    if queries.segment is not None and keys.segment is not None:
        seen &= queries.segment[:, None] == keys.segment[None, :]
    if queries.start is not None:
        seen &= keys.position + lax.broadcasted_iota(jnp.int32, shape, 1) >= queries.start[:, None]
    if keys.bias is not None:  # a key may be hidden from some heads only, and products with it may overflow
        seen &= (keys.veil != -jnp.inf)[None, :]
    if queries.points is not None and keys.points is not None:
        axes = zip(queries.points.T, keys.points.T, strict=True)
        squares = [jnp.square(of_query[:, None] - of_key) for of_query, of_key in axes]
        return seen, jnp.sqrt(sum(squares[1:], squares[0])), rule.left
    slope = rule.left if plan.causal else jnp.where(distance < 0, -rule.right, rule.left)
    return seen, distance, slope


def start(queries: Queries, bias_dtype: jnp.dtype | None) -> Softmax:
    """The softmax over no keys; `bias_dtype` is that of the key biases, None without them."""
    mixed = jnp.zeros_like(queries.query, dtype=jnp.promote_types(queries.query.dtype, jnp.float32))
    nothing = jnp.full_like(mixed[:, 0], -jnp.inf)
    reference = None if bias_dtype is None else nothing.astype(bias_dtype)
    return Softmax(reference, nothing, mixed[:, 0], mixed, mixed[:, 0], mixed)


def add(
    plan: Plan, rule: Rule, so_far: Softmax, queries: Queries, keys: Keys, dropout: HeadDropout | None
) -> tuple[Softmax, Array]:
    """(the softmax over one more tile, the largest share of the tile in it)."""
    if so_far.reference is not None and keys.bias is not None:
        largest = jnp.maximum(so_far.reference, _largest_bias(plan, rule, queries, keys, keys.bias))
        moved = jnp.where(so_far.reference == -jnp.inf, 0.0, so_far.reference - largest)
        so_far = so_far._replace(reference=largest, top=so_far.top + moved.astype(so_far.top.dtype))
        queries = queries._replace(reference=finite(largest))
    score, _ = scores(plan, rule, queries, keys)
    top = jnp.maximum(so_far.top, score.max(-1, initial=-jnp.inf))
    reference = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(score - reference[:, None])
    shrink = jnp.exp(so_far.top - reference)
    of_tile = weight.sum(-1)
    total, total_low = _added(so_far.total, so_far.total_low, shrink, of_tile)
    share = jnp.where(total == 0, 0.0, of_tile / total).max(initial=0.0)
    kept = weight if dropout is None else weight * _kept(plan, dropout, queries, keys, weight)
    values = _weighted(kept.astype(_operand(keys.value.dtype)), keys.value)
    mixed, mixed_low = _added(so_far.mixed, so_far.mixed_low, shrink[:, None], values)
    return Softmax(so_far.reference, top, total, mixed, total_low, mixed_low), share


def _weighted(weights: Array, value: Array) -> Array:
    """weights·value, adding at most `PART` keys at a time: a sum in fp32 that has reached 1 drops weights below 6e-8."""
    keys = len(value)
    if keys <= PART:
        return _matmul(weights, value)
    more = ((0, -keys % PART), (0, 0))
    of_parts = jnp.pad(weights.T, more).reshape(-1, PART, len(weights)).swapaxes(1, 2)
    return jax.vmap(_matmul)(of_parts, jnp.pad(value, more).reshape(-1, PART, value.shape[1])).sum(0)


def _added(high: Array, low: Array, shrink: Array, more: Array) -> Pair:
    """(high + low)·shrink + more, as a sum and its rounding error."""
    total, rest = sum_of_two(high * shrink, more)
    return total, low * shrink + jnp.where(jnp.isfinite(rest), rest, 0.0)


def _largest_bias(plan: Plan, rule: Rule, queries: Queries, keys: Keys, bias: KeyBias) -> Array:
    """[t] the largest b_j − m·|i − j| that each query sees in this tile, −inf if it sees no key.

    Relative to it, the biases of keys that matter are at most as large as m·|i − j|, and are rounded no more. Every
    query has its own reference, so that a large bias costs no digits in queries that do not see it.
    """
    seen, distance, slope = _sight(plan, rule, queries, keys)
    nearby = bias.high - _nats_of(plan, queries, slope, distance).astype(bias.high.dtype)
    largest = jnp.where(seen, nearby, -jnp.inf).max(-1, initial=-jnp.inf)
    return jnp.where(jnp.isfinite(largest), largest, -jnp.inf)


def finite(reference: Array) -> Array:
    """The reference to compute with: 0 for a query that has seen no key."""
    return jnp.where(reference == -jnp.inf, 0.0, reference)


def finish(result: Softmax, queries: Queries) -> tuple[Array, Array, Array | None]:
    """(output [t, D] in query's dtype, lse [t], the reference [t] of lse): zeros and −inf for a query that sees no key."""
    blind = result.total == 0
    total = jnp.where(blind, 1.0, result.total + result.total_low)
    output = (result.mixed + result.mixed_low) / total[:, None]
    lse = jnp.where(blind, -jnp.inf, result.top + jnp.log(total))
    reference = None if result.reference is None else finite(result.reference)
    return output.astype(queries.query.dtype), lse, reference


def gradients(
    plan: Plan, rule: Rule, queries: Queries, keys: Keys, known: Finished, dropout: HeadDropout | None
) -> Gradients:
    """Gradients of one tile, given the finished lse.

    With p = exp(score − lse):  dv = pᵀ·do,  ds = p·(do·vᵀ − shift),  shift = Σ do·o − dlse,
    dq = scale·ds·k,  dk = scale·dsᵀ·q,  dm = −Σ ds·|i − j|,  db_j = Σ_i ds.
    """
    score, distance = scores(plan, rule, queries._replace(reference=known.reference), keys)
    # Hidden keys have weight 0 even if lse is NaN. No weight is above 1, but forward may have rounded a large score
    # differently.
    weight = jnp.where(score == -jnp.inf, 0.0, jnp.exp(jnp.minimum(score - known.lse[:, None], 0.0)))
    grad_weight = _matmul(known.grad_output, keys.value.T)
    kept = weight
    if dropout is not None:
        keep = _kept(plan, dropout, queries, keys, weight)
        kept, grad_weight = weight * keep, grad_weight * keep
    # 0·inf is NaN: the product of a gradient with a hidden value can be inf.
    grad_score = jnp.where(weight == 0, 0.0, weight * (grad_weight - known.shift[:, None]))
    pull = grad_score * (distance - queries.least).astype(weight.dtype)
    operand = _operand(keys.key.dtype)
    narrow = (grad_score * rule.scale).astype(operand)  # scaled before the products, which may overflow otherwise
    return Gradients(
        query=_matmul(narrow, keys.key),
        key=_matmul(narrow.T, queries.query),
        value=_matmul(kept.astype(operand).T, known.grad_output),
        left=-(pull if plan.causal else jnp.where(distance > 0, pull, 0.0)).sum(),
        right=jnp.zeros_like(rule.right) if plan.causal else jnp.where(distance < 0, pull, 0.0).sum(),
        key_bias=None if keys.bias is None else grad_score.sum(0),
        query_bias=grad_score.sum(1) if plan.query_bias else None,
    )


def slope_gradients(left: Array, right: Array, least: Array, grad_lse: Array) -> tuple[Array, Array]:
    """The slopes' gradients of one block, from the sums of `gradients` over its tiles; grad_lse is 0 for blind queries."""
    due = least.astype(left.dtype) * grad_lse.sum(-1)
    return left - jnp.where(least > 0, due, 0.0), right + jnp.where(least < 0, due, 0.0)


def _operand(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of the factors of matrix products: fp16 is widened, because gradients of scores may leave its range."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)


def _matmul(a: Array, b: Array) -> Array:
    """a·b, accumulated in fp32 or better; exact products for bf16, full precision for fp32 on every device."""
    a, b = a.astype(_operand(a.dtype)), b.astype(_operand(b.dtype))
    wide = jnp.promote_types(a.dtype, jnp.float32)
    precision = lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return jnp.matmul(a, b, precision=precision, preferred_element_type=wide)


def _kept(plan: Plan, dropout: HeadDropout, queries: Queries, keys: Keys, weight: Array) -> Array:
    """[t, s] 1/(1 − p) for kept weights, 0 for dropped ones; tiles begin at even keys."""
    shape = (weight.shape[0], weight.shape[1])
    first_key = plan.dropout_origin.key
    if queries.number is not None and keys.number is not None:
        numbers = queries.number, keys.number
        return factors_of_numbers(dropout, plan.dropout_p, *numbers, weight.dtype, first_key)
    return factors(dropout, plan.dropout_p, queries.position, keys.position, shape, weight.dtype, first_key)
