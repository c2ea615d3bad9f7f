"""One block of queries against one tile of keys: the scores, the online softmax, and the gradients.

Everything here is two-dimensional, one head of one sequence; `dense.py` maps it over all of them at once, `loop.py`
loops. The formulas are Press et al. 2022, sec. 3 (arXiv:2108.12409), and Dao 2023 (arXiv:2307.08691) for the tiles.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_attn.jax.dropout import HeadDropout, factors

Array = jax.Array

FARTHEST = 2**28  # positions lie within ± this, so that int32 holds every sum and difference of two limits
NO_LIMIT = 2**29


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is settled when the call is traced; everything else is an array."""

    causal: bool
    dropout_p: float
    dense: bool  # all scores at once, where it is not the kernels
    query_block: int  # queries in a block
    key_tile: int  # keys in a tile
    key_bias: bool = False
    query_bias: bool = False
    native: bool = False  # the kernels, on a CPU
    elsewhere: bool = False  # the device may turn out to be another, which is known when it is compiled


class KeyBias(NamedTuple):
    """A number for every key, b = high + low, in fp32 or better: two parts keep the digits of long sums of gates."""

    high: Array  # [..., S], −inf where a key may not be seen
    low: Array | None  # [..., S] finite

    def beyond(self, reference: Array) -> Array:
        """b − reference: off by a rounding of that difference, however large b is."""
        difference = self.high - reference
        return difference if self.low is None else difference + self.low


class Queries(NamedTuple):
    """A block of t queries of one head, side by side."""

    query: Array  # [t, D]
    position: Array  # int32 scalar, of the first
    segment: Array | None  # [t] int32
    reference: Array | None = None  # [t] the number from which the biases of keys count, where `Keys.bias` has them


class Keys(NamedTuple):
    """A tile of s keys and their values, side by side. What must not be used is zero here (see `clean_keys`)."""

    key: Array  # [s, D]
    value: Array  # [s, D]
    veil: Array  # [s] added to the scores: 0 or b − reference, −inf where a key is hidden, NaN where seeing it spoils a query
    position: Array  # int32 scalar, of the first
    segment: Array | None  # [s] int32
    bias: KeyBias | None = None  # [s] where the reference is not one number for all queries


class Rule(NamedTuple):
    """How one head scores, and how far it may look at all: −look_right < i − j < look_left."""

    left: Array  # scalar: slope of keys to the left
    right: Array  # scalar: slope of keys to the right, finite
    look_left: Array  # int32 scalar
    look_right: Array  # int32 scalar
    scale: Array  # scalar


class Softmax(NamedTuple):
    """A softmax in progress over the keys seen so far, for t queries."""

    top: Array  # [t] the largest score
    total: Array  # [t] Σ exp(score − top)
    mixed: Array  # [t, D] Σ exp(score − top)·value


class Gradients(NamedTuple):
    """What one tile adds to each gradient."""

    query: Array  # [t, D]
    key: Array  # [s, D]
    value: Array  # [s, D]
    left: Array  # scalar
    right: Array  # scalar
    key_bias: Array | None  # [s] Σ ds over the queries
    query_bias: Array | None  # [t] Σ ds over the keys


def clean_keys(key: Array, value: Array, hidden: Array) -> tuple[Array, Array, Array]:
    """(key, value, veil [...]): zeros in place of keys [..., D] that are hidden, or with NaN or inf in them or their value.

    Matrix products touch every key, and 0·NaN is NaN: without this a key that nobody may see would spoil everybody.
    """
    bad = ~(jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1))
    veil = jnp.where(hidden, -jnp.inf, jnp.where(bad, jnp.nan, 0.0))
    unused = (bad | hidden)[..., None]
    veil = veil.astype(jnp.promote_types(key.dtype, jnp.float32))
    return jnp.where(unused, 0, key), jnp.where(unused, 0, value), veil


def head_rule(plan: Plan, left: Array, right: Array, scale: Array, window: Array | None) -> Rule:
    """The `Rule` of slopes, which may be arrays of any shape, and of a window. A right slope of inf = never looks right."""
    look = jnp.full_like(left, NO_LIMIT, jnp.int32) if window is None else jnp.broadcast_to(window, left.shape)
    look_right = jnp.ones_like(look) if plan.causal else jnp.where(jnp.isinf(right), 1, look)
    return Rule(left, jnp.where(jnp.isinf(right), 0.0, right), look, look_right, scale)


def scores(plan: Plan, rule: Rule, queries: Queries, keys: Keys) -> tuple[Array, Array]:
    """(scale·q·kᵀ − m·|i − j|, i − j), [t, s] each; −inf where the query may not look.

    Positions are counted here, not read from arrays: XLA's CPU code for this line is vectorised only while it reads few
    arrays, and takes as long as both matrix products otherwise.
    """
    seen, distance, slope = _sight(plan, rule, queries, keys)
    dots = _matmul(queries.query, keys.key.T)
    score = dots * rule.scale - slope * distance.astype(dots.dtype) + keys.veil[None, :]
    if keys.bias is not None and queries.reference is not None:
        score += keys.bias.beyond(queries.reference[:, None]).astype(score.dtype)
    return jnp.where(seen, score, -jnp.inf), distance


def references(plan: Plan, rule: Rule, queries: Queries, keys: Keys, bias: KeyBias) -> Array:
    """[t] the largest b_j − m·|i − j| that each query sees, 0 where it sees nothing.

    Biases that count from there are at most as large as m·|i − j| for keys that matter, and round no more than that does.
    """
    seen, distance, slope = _sight(plan, rule, queries, keys)
    nearby = bias.high - (slope * distance.astype(rule.left.dtype)).astype(bias.high.dtype)
    largest = jnp.where(seen, nearby, -jnp.inf).max(-1, initial=-jnp.inf)
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


def _sight(plan: Plan, rule: Rule, queries: Queries, keys: Keys) -> tuple[Array, Array, Array]:
    """(whether the query may look, i − j, the slope by which that counts), [t, s] or a scalar."""
    shape = (len(queries.query), len(keys.key))
    apart = lax.broadcasted_iota(jnp.int32, shape, 0) - lax.broadcasted_iota(jnp.int32, shape, 1)
    distance = queries.position - keys.position + apart
    seen = (distance < rule.look_left) & (distance > -rule.look_right)
    if queries.segment is not None and keys.segment is not None:
        seen &= queries.segment[:, None] == keys.segment[None, :]
    if plan.key_bias:  # only some heads may hide a key, and products with its numbers may overflow
        seen &= (keys.veil != -jnp.inf)[None, :]
    slope = rule.left if plan.causal else jnp.where(distance < 0, -rule.right, rule.left)
    return seen, distance, slope


def start(queries: Queries) -> Softmax:
    """The softmax over no key at all."""
    mixed = jnp.zeros_like(queries.query, dtype=jnp.promote_types(queries.query.dtype, jnp.float32))
    return Softmax(jnp.full_like(mixed[:, 0], -jnp.inf), mixed[:, 0], mixed)


def add(plan: Plan, rule: Rule, so_far: Softmax, queries: Queries, keys: Keys, dropout: HeadDropout | None) -> Softmax:
    """The softmax over one tile more."""
    score, _ = scores(plan, rule, queries, keys)
    top = jnp.maximum(so_far.top, score.max(-1, initial=-jnp.inf))
    reference = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(score - reference[:, None])
    shrink = jnp.exp(so_far.top - reference)
    total = so_far.total * shrink + weight.sum(-1)
    kept = weight if dropout is None else weight * _kept(plan, dropout, queries, keys, weight)
    mixed = so_far.mixed * shrink[:, None] + _matmul(kept.astype(_operand(keys.value.dtype)), keys.value)
    return Softmax(top, total, mixed)


def finish(result: Softmax, queries: Queries) -> tuple[Array, Array]:
    """(output [t, D] in query's dtype, lse [t]): zeros and −inf where nothing was seen."""
    blind = result.total == 0
    output = result.mixed / jnp.where(blind, 1.0, result.total)[:, None]
    lse = jnp.where(blind, -jnp.inf, result.top + jnp.log(jnp.where(blind, 1.0, result.total)))
    return output.astype(queries.query.dtype), lse


def gradients(
    plan: Plan,
    rule: Rule,
    queries: Queries,
    keys: Keys,
    lse: Array,
    grad_output: Array,
    shift: Array,
    least: Array,
    dropout: HeadDropout | None,
) -> Gradients:
    """Gradients of one tile, given the finished lse.

    With p = exp(score − lse):  dv = pᵀ·do,  ds = p·(do·vᵀ − shift),  shift = Σ do·o − dlse,
    dq = scale·ds·k,  dk = scale·dsᵀ·q,  dm = −Σ ds·|i − j|,  db_j = Σ_i ds.

    Args:
        lse: [t], inf for a query that shall add nothing; its query and grad_output are finite.
        shift: [t].
        least: scalar of `least_distance`, left out of i − j here; `slope_gradients` puts it back.
    """
    score, distance = scores(plan, rule, queries, keys)
    weight = jnp.exp(score - lse[:, None])
    grad_weight = _matmul(grad_output, keys.value.T)
    kept = weight
    if dropout is not None:
        keep = _kept(plan, dropout, queries, keys, weight)
        kept, grad_weight = weight * keep, grad_weight * keep
    # 0·inf is NaN: the product of a gradient with a value that may not be seen can be inf.
    grad_score = jnp.where(weight == 0, 0.0, weight * (grad_weight - shift[:, None]))
    pull = grad_score * (distance - least).astype(weight.dtype)
    operand = _operand(keys.key.dtype)
    narrow = grad_score.astype(operand)
    return Gradients(
        query=_matmul(narrow, keys.key) * rule.scale,
        key=_matmul(narrow.T, queries.query) * rule.scale,
        value=_matmul(kept.astype(operand).T, grad_output),
        left=-(pull if plan.causal else jnp.where(distance > 0, pull, 0.0)).sum(),
        right=jnp.zeros_like(rule.right) if plan.causal else jnp.where(distance < 0, pull, 0.0).sum(),
        key_bias=grad_score.sum(0) if plan.key_bias else None,
        query_bias=grad_score.sum(1) if plan.query_bias else None,
    )


def least_distance(queries: Queries, key_len: int) -> Array:
    """int32 scalar: the i − j nearest to 0 of a block of queries that all stand beyond the keys, on one side; 0 for all others.

    A row of ds adds up to dlse, so a constant may be left out of its distances: Σ ds·d = Σ ds·(d − c) + c·dlse. Products with
    distances of 10⁶ would round by more than what is left of their sum.
    """
    first, last = queries.position, queries.position + len(queries.query) - 1
    return jnp.maximum(first - (key_len - 1), 0) + jnp.minimum(last, 0)


def slope_gradients(left: Array, right: Array, least: Array, grad_lse: Array) -> tuple[Array, Array]:
    """The slopes' gradients of one block, from the sums of `gradients` over its tiles; grad_lse is 0 where nothing is seen."""
    due = least.astype(left.dtype) * grad_lse.sum(-1)
    return left - jnp.where(least > 0, due, 0.0), right + jnp.where(least < 0, due, 0.0)


def _operand(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that goes into matrix products: fp16 is widened, because gradients of scores may leave its range."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)


def _matmul(a: Array, b: Array) -> Array:
    """a·b, accumulated in fp32 or better; exact products for bf16, full precision for fp32 on every device."""
    a, b = a.astype(_operand(a.dtype)), b.astype(_operand(b.dtype))
    wide = jnp.promote_types(a.dtype, jnp.float32)
    precision = lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return jnp.matmul(a, b, precision=precision, preferred_element_type=wide)


def _kept(plan: Plan, dropout: HeadDropout, queries: Queries, keys: Keys, weight: Array) -> Array:
    """[t, s] 1/(1 − p) where a weight is kept, 0 where it is dropped; tiles begin at even keys."""
    shape = (weight.shape[0], weight.shape[1])
    return factors(dropout, plan.dropout_p, queries.position, keys.position, shape, weight.dtype)
