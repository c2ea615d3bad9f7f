"""Calls whose keys split into disjoint sets, each an ordinary call that every backend computes; the results merge by their lse.

    registers             the queries and keys that are registers, without a bias, and all others
    windows per head      the heads that share a window
    sinks                 the first n keys, without the window, and all others, within it
    prefix_len, positions  the keys to the left of each query (and itself), and those to its right

Explicit positions are biases of queries and keys, pairs of numbers, so that they need no fp64. Queries that are not at the
positions of keys are first sorted in among them.
The same as `attention/run/merging.py`, which says why it is exact and how tolerances add up. `attention.attend` runs the parts.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from alibi_attn.attention.call.reads import MASKS, NUMBERED_DROPOUT, SPACE
from alibi_attn.attention.call.spec import AttentionSpec, heads_by_window, key_heads
from alibi_attn.attention.run import splitting
from alibi_attn.attention.run.splitting import Split
from alibi_attn.jax.call.dropout import WHOLE, Origin
from alibi_attn.jax.call.plan import Array, Pair, sum_of_two

Spec = AttentionSpec[Array]

SPLITS = frozenset(
    {"sink_logits", "registers", "head_windows", "sinks", "prefix_len", "positions", "query_positions", "by_position"}
)
READS = MASKS | NUMBERED_DROPOUT | SPACE | SPLITS | {"key_bias"}
Result = tuple[Array, Pair]  # output and lse: with large key biases its low part decides how results merge


class Part(NamedTuple):
    """Some keys of a call, or some of its heads.

    Args:
        heads: the query heads of the call; None = all.
        is_reversed: the sequences run backward, and distances are one too small.
        places: [B, T], where the queries of the call are among those of the part; None = they are the same.
        queries: the part has all keys and the queries after those of the part before it.
        origin: where dropout counts from.
        key_bias_low, query_bias_low: the low parts of the spec's biases, see `attention.attend`.
    """

    spec: Spec
    query: Array
    key: Array
    value: Array
    heads: tuple[int, ...] | None = None
    is_reversed: bool = False
    places: Array | None = None
    queries: bool = False
    origin: Origin = WHOLE
    key_bias_low: Array | None = None
    query_bias_low: Array | None = None

    def as_a_whole(self) -> "Part":
        """The same call, whose results need no reordering."""
        return Part(*self[:4], origin=self.origin)


def split(spec: Spec, reads: frozenset[str]) -> Split:
    """How a call runs where these fields are read."""
    return splitting.split(spec.used(), reads, SPLITS, READS)


def parts(whole: Part) -> list[Part]:
    """The parts of a call, itself given as a part of all; those of several heads, of sinks or of a side may have parts again."""
    spec = whole.spec
    by = splitting.first_split(spec)
    if by == "registers":
        return _registers_and_others(whole)
    if by == "heads":
        windows = heads_by_window(spec.head_windows or (), runs=spec.dropout_p > 0)
        return [_of_heads(whole, heads, window) for heads, window in windows]
    if by == "sinks":
        return _sinks_and_others(whole)
    if by == "one axis":
        return [_on_one_axis(whole)]
    if by == "positions":
        return [_with_positions(whole)]
    left = whole._replace(spec=dataclasses.replace(spec, causal=True, right_slopes=None, prefix_len=None))
    # The first key after query 0; a traced offset may be anywhere.
    after = max(spec.query_offset + 1, 0) if isinstance(spec.query_offset, int) else 0
    if spec.window == 1 or after >= spec.key_len:
        return [left]
    return [left, _reversed(_keys(whole, after, spec.key_len))]


def joined(spec: Spec, of: Sequence[Part], results: Sequence[Result]) -> Result:
    """(output in query's dtype, lse) of the call whose parts gave these results."""
    if of[0].heads is not None:
        order = np.argsort([head for part in of for head in part.heads or ()])
        output = jnp.concatenate([output for output, _ in results], 2)[:, :, order]
        high, low = (jnp.concatenate([lse[n] for _, lse in results], 1)[:, order] for n in (0, 1))
        return output, (high, low)
    if of[0].places is not None:
        output, (high, low) = results[0]
        at = of[0].places
        high, low = (jnp.take_along_axis(x, at[:, None], 2) for x in (high, low))
        return jnp.take_along_axis(output, at[..., None, None], 1), (high, low)
    if of[0].queries:
        outputs, lses = zip(*results, strict=True)
        high, low = (jnp.concatenate(x, 2) for x in zip(*lses, strict=True))
        return jnp.concatenate(outputs, 1), (high, low)
    forward = [_in_order(part, result) for part, result in zip(of, results, strict=True)]
    output, lse = forward[0]
    for more, more_lse in forward[1:]:
        output, lse = merged(output, lse, more, more_lse)
    return output.astype(of[0].query.dtype), lse


def lse_dtype(spec: Spec, query: Array) -> jnp.dtype:
    """fp64 if query or the key bias is, else fp32."""
    wide = jnp.float64 in (query.dtype, None if spec.key_bias is None else spec.key_bias.dtype)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


@jax.jit
def merged(output: Array, lse: Pair, more: Array, more_lse: Pair) -> Result:
    """The (output, lse) over the union of two disjoint sets of keys; differentiable, even if a query sees no keys."""
    either = jnp.maximum(lse[0], more_lse[0])
    is_first = lse[0] == either
    top, low = (lax.stop_gradient(jnp.where(is_first, x, y)) for x, y in zip(lse, more_lse, strict=True))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp((x - top) + (y - low)) for x, y in (lse, more_lse)]
    total = weights[0] + weights[1]
    nothing = total == 0
    total = jnp.where(nothing, 1.0, total)
    shares = [(weight / total).swapaxes(1, 2)[..., None] for weight in weights]
    high, rest = _added((top, low), jnp.log(total))
    return shares[0] * output + shares[1] * more, (jnp.where(nothing, -jnp.inf, high), jnp.where(nothing, 0.0, rest))


def _added(x: Pair, y: Array) -> Pair:
    """x + y; the gradient is that of the high part."""
    high, rest = sum_of_two(x[0], y)
    return high, lax.stop_gradient(jnp.where(jnp.isfinite(rest), rest, 0.0) + x[1])


def _of_heads(whole: Part, heads: tuple[int, ...], window: int) -> Part:
    """These heads, which have the same window."""
    spec = whole.spec
    of_heads, owners = np.array(heads), np.array(key_heads(list(heads), spec.group))
    part = spec.of_heads(heads, lambda x, axis: jnp.take(x, of_heads, axis), window=window)
    rows = whole.query[:, :, of_heads], whole.key[:, :, owners], whole.value[:, :, owners]
    return Part(part, *rows, heads=heads, origin=whole.origin._replace(head=whole.origin.head + heads[0]))


def _registers_and_others(whole: Part) -> list[Part]:
    """The queries that are registers and all others; then the keys that are registers, which have no bias, and all others."""
    spec = whole.spec
    count = splitting.register_queries(spec)
    if count > 0:
        first, rest = _queries(whole, 0, count), _queries(whole, count, spec.query_len)
        return [first._replace(spec=first.spec.without_bias(_flat)), rest]
    others = whole._replace(spec=dataclasses.replace(spec, registers=0))
    registers, without = min(spec.registers, spec.key_len), whole._replace(spec=spec.without_bias(_flat))
    return [_keys(others, registers, spec.key_len), _keys(without, 0, registers)]


def _queries(whole: Part, start: int, stop: int) -> Part:
    """The call of queries [start, stop) only."""
    return whole._replace(spec=whole.spec.on_queries(start, stop), query=whole.query[:, start:stop], queries=True)


def _flat(slopes: Array) -> Array:
    return lax.stop_gradient(jnp.where(jnp.isinf(slopes), slopes, 0.0))


def _sinks_and_others(whole: Part) -> list[Part]:
    spec, sinks = dataclasses.replace(whole.spec, sinks=0), min(whole.spec.sinks, whole.spec.key_len)
    others = _keys(whole._replace(spec=spec), sinks, spec.key_len)
    return [others, _keys(whole._replace(spec=dataclasses.replace(spec, window=None)), 0, sinks)]


def _keys(whole: Part, start: int, stop: int) -> Part:
    """The call over keys [start, stop) only."""
    origin, spec = whole.origin, whole.spec.on_keys(start, stop)
    if spec.key_numbers is None:
        origin = origin._replace(key=origin.key + start)
    return Part(spec, whole.query, whole.key[:, start:stop], whole.value[:, start:stop], origin=origin)


def _on_one_axis(whole: Part) -> Part:
    """Queries and keys sorted by position into one sequence of S + T; places without a key are hidden."""
    spec = _numbered(whole.spec)
    assert spec.positions is not None
    assert spec.query_positions is not None
    dtype = jnp.promote_types(spec.positions.dtype, spec.query_positions.dtype)
    positions, own = spec.positions.astype(dtype), spec.query_positions.astype(dtype)
    of_keys = jnp.arange(spec.key_len) + jax.vmap(jnp.searchsorted)(own, positions)
    of_queries = jnp.arange(spec.query_len) + jax.vmap(partial(jnp.searchsorted, side="right"))(positions, own)

    def placed(x: Array, at: Array) -> Array:
        """[B, N, …] on the axis of both, zeros elsewhere."""
        nothing = jnp.zeros_like(x, shape=(spec.batch, spec.key_len + spec.query_len, *x.shape[2:]))
        return jax.vmap(lambda to, at, x: to.at[at].set(x, unique_indices=True))(nothing, at, x)

    def along(x: Array, at: Array, axis: int) -> Array:
        """The same for another axis than the second, counted from the end."""
        return jnp.moveaxis(placed(jnp.moveaxis(x, axis, 1), at), 1, axis)

    mask = jnp.ones_like(positions, bool) if spec.key_mask is None else jnp.asarray(spec.key_mask)
    together = placed(positions, of_keys) + placed(own, of_queries)
    part = spec.on_one_axis(
        together, mask, lambda x, axis: along(x, of_keys, axis), lambda x, axis: along(x, of_queries, axis)
    )
    rows = placed(whole.query, of_queries), placed(whole.key, of_keys), placed(whole.value, of_keys)
    return Part(part, *rows, places=of_queries, origin=whole.origin)


def _reversed(whole: Part) -> Part:
    """The keys after each query."""
    spec, mask = whole.spec, whole.spec.key_mask
    if spec.prefix_len is not None:
        inside = jnp.arange(spec.key_len) < spec.prefix_len[:, None]
        mask = inside if mask is None else inside & mask
    part = _numbered(spec).reversed(jnp.flip, mask)
    query, key, value = (jnp.flip(x, 1) for x in (whole.query, whole.key, whole.value))
    return Part(part, query, key, value, is_reversed=True, origin=whole.origin)


def _numbered(spec: Spec) -> Spec:
    """The same call, whose queries and keys keep their numbers in dropout when they are moved."""
    if spec.dropout_p == 0 or spec.key_numbers is not None:
        return spec
    i = jnp.asarray(spec.query_offset, jnp.int32).reshape(-1, 1) + jnp.arange(spec.query_len, dtype=jnp.int32)
    j = jnp.arange(spec.key_len, dtype=jnp.int32)
    i, j = (jnp.broadcast_to(x, (spec.batch, x.shape[-1])) for x in (i, j))
    return dataclasses.replace(spec, query_numbers=i, key_numbers=j)


def _in_order(part: Part, result: Result) -> Result:
    """The result of a part, for the queries in their order and with the true distances."""
    if not part.is_reversed:
        return result
    output, high, low = jnp.flip(result[0], 1), *(jnp.flip(x, 2) for x in result[1])
    if part.spec.positions is not None:
        return output, (high, low)
    blind = high == -jnp.inf  # the incoming gradient of such a query has no effect
    nearer, low = _added((high, low), -part.spec.slopes[..., None])
    return output, (jnp.where(blind, high, nearer), low)


def _with_positions(whole: Part) -> Part:
    """The causal call with its positions as biases."""
    spec = whole.spec
    heads = spec.batch, spec.num_heads
    assert spec.positions is not None
    assert spec.query_positions is not None
    of_keys, of_queries = _biases(jnp.broadcast_to(spec.slopes, heads), spec.positions, spec.query_positions)
    high, low = of_keys
    if spec.key_bias is not None:
        hidden = (spec.key_bias == -jnp.inf) | (high == -jnp.inf)
        total, rest = sum_of_two(jnp.where(hidden, 0.0, spec.key_bias), jnp.where(hidden, 0.0, high))
        high, low = jnp.where(hidden, -jnp.inf, total), rest + low
    part = dataclasses.replace(
        spec,
        slopes=jnp.zeros_like(spec.slopes),
        key_bias=high,
        query_bias=of_queries[0].astype(high.dtype),
        positions=None,
        query_positions=None,
    )
    low, of_queries_low = (lax.stop_gradient(x) for x in (low, of_queries[1]))
    return whole._replace(spec=part, key_bias_low=low, query_bias_low=of_queries_low)


@jax.custom_vjp
@jax.jit
def _biases(slopes: Array, positions: Array, own: Array) -> tuple[Pair, Pair]:
    """m·(p_j − p) [B, H, S] and −m·(p_i − p) [B, H, T], p the last position of a key, each as high + low; −inf, 0 if m is inf."""
    never = jnp.isinf(slopes)[..., None]  # right slopes: such a head sees no key to the right
    m = jnp.where(never, 0.0, slopes[..., None])
    of_keys, of_queries = _relative(positions, own)
    high, low = _scaled(m, of_keys)
    return (jnp.where(never, -jnp.inf, high), low), _scaled(-m, of_queries)


_Kept = tuple[Array, Array, Array]


def _biases_forward(
    slopes: CustomVJPPrimal, positions: CustomVJPPrimal, own: CustomVJPPrimal
) -> tuple[tuple[Pair, Pair], _Kept]:
    if positions.perturbed or own.perturbed:
        raise ValueError("positions receive no gradient; pass jax.lax.stop_gradient(positions)")
    kept = slopes.value, positions.value, own.value
    return _biases(*kept), kept


def _biases_backward(kept: _Kept, grads: tuple[tuple[Array | SymbolicZero, ...], ...]) -> tuple[Array, None, None]:
    slopes, positions, own = kept
    total = jnp.zeros_like(slopes)
    for (grad, _), distance, sign in zip(grads, _relative(positions, own), (1, -1), strict=True):
        if not isinstance(grad, SymbolicZero):
            total = total + sign * (grad * distance[0][:, None]).sum(-1).astype(total.dtype)
    return jnp.where(jnp.isinf(slopes), 0.0, total), None, None


_biases.defvjp(_biases_forward, _biases_backward, symbolic_zeros=True)


def _relative(positions: Array, own: Array) -> tuple[Pair, Pair]:
    last = positions[:, -1:]
    return sum_of_two(positions, -last), sum_of_two(own, -last)


def _scaled(m: Array, x: Pair) -> Pair:
    """m·x, the digits of a pair; m [B, H, 1], x [B, N]."""
    high, rest = _product(m, x[0][:, None])
    rest = rest + m * x[1][:, None]
    total = high + rest
    return total, rest - (total - high)


def _product(a: Array, b: Array) -> Pair:
    """a·b as the rounded product and its rounding error, by products of halves that need no rounding (Dekker 1971)."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    product = a * b
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(x: Array) -> Pair:
    """x as a number with the first half of its digits, and the rest; by bits, because XLA may fuse products and sums."""
    bits, low = (jnp.uint64, 27) if x.dtype == jnp.float64 else (jnp.uint32, 12)
    mask = np.array(-1 << low, np.int64).astype(bits)
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) & mask, x.dtype)
    return high, x - high
