"""`forgetting_attention` for JAX arrays: each token's gate scales the weights of all earlier tokens.

Sums of gates reach 10⁵ in long texts, and JAX has no fp64 by default. So each sum is a pair of numbers, also in the gates'
gradients.
"""

import dataclasses
import math
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from alibi_attn.attention.call.checks import GATES_RULE, check_log_fgate
from alibi_attn.attention.call.hints import unknown_argument
from alibi_attn.attention.call.options import GatedOptions
from alibi_attn.attention.call.reads import FORGETTING
from alibi_attn.attention.call.spec import GATE_FLOOR, GATE_STEP, AttentionSpec
from alibi_attn.jax.attention import Backend, attend
from alibi_attn.jax.call.merging import lse_dtype
from alibi_attn.jax.call.plan import Array, KeyBias, Pair, sum_of_two
from alibi_attn.jax.call.validation import Slopes, check_array, checked_dropout_key, make_spec, readable_values


def forgetting_attention(
    query: Array,
    key: Array,
    value: Array,
    log_fgate: Array,
    slopes: Slopes | None = None,
    *,
    query_offset: int | None = None,
    dropout_key: Array | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    **options: Unpack[GatedOptions[Array]],
) -> Array | tuple[Array, Array]:
    """Causal attention with forget gates, softmax(scale·q·kᵀ + Σ_{l=j+1..i} ln f_l − m·|i − j| + b_j)·v, [B, T, H, D].

    The gate of position l lies between the keys before l and the queries from l on, so the first is never used, and a constant
    gate f is ALiBi with the slope −ln f. Exact up to rounding without fp64: each sum of gates is a pair of numbers. Pure, like
    `alibi_attention`, and differentiable once in all arrays, and through lse. Keys whose gates prove that they hold less than
    the tolerance are skipped.

    Args:
        log_fgate: ln f, the natural logarithm, at most 0, fp32 or fp64, [B, H, S] (or [B, K, S], shared by the heads of a
            group). −inf is a cut: from its position on, all keys before it are hidden, and its gradient is 0. (In `native`,
            finite scores and biases beyond 2¹⁹ can pass a cut.) A gate below −2²⁰ counts as −2²⁰ in sums, and so does a cut:
            after n of them, sums in fp32 are off by up to n·2⁻²⁸. Hidden keys and other segments have gates too: a sum within a
            segment includes only that segment's.
            Values are checked if that is free: numpy arrays, and arrays on the CPU that are not traced.
        slopes: m, for ALiBi times gates; None = no ALiBi.
        query_offset: position of query 0, an int; S − T by default. All queries must be among the S positions.
        query, key, value, dropout_key, return_lse, backend: as for `alibi_attention`. lse belongs to the scores above.
        options: window, scale, key_mask, segment_ids, key_bias, sink_logits, dropout_p and tolerance, as for
            `alibi_attention`.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or numbers, when the function is traced.

    >>> q = k = v = jnp.ones((1, 128, 8, 64))
    >>> gates = jax.nn.log_sigmoid(jnp.ones((1, 8, 128)))
    >>> forgetting_attention(q, k, v, gates).shape
    (1, 128, 8, 64)

    Source: Lin et al. 2025, Forgetting Transformer (arXiv:2503.02130), eq. 9 to 12.
    """
    unknown = [name for name in options if name not in GatedOptions.__optional_keys__]
    if unknown:
        raise unknown_argument("forgetting_attention", unknown)
    heads = query.shape[2] if getattr(query, "ndim", 0) == 4 else 0
    slopes = [0.0] * heads if slopes is None else slopes
    spec = make_spec(query, key, value, slopes, query_offset=query_offset, return_lse=return_lse, **options)
    FORGETTING.check(spec)
    check_array("log_fgate", log_fgate)
    first = check_log_fgate(log_fgate, spec, query_offset)
    values = readable_values(log_fgate)
    if values is not None and not (values <= 0).all():
        raise ValueError(GATES_RULE)
    output, lse = attend_gated(
        spec, query, key, value, log_fgate, first, checked_dropout_key(spec.dropout_p, dropout_key), backend
    )
    if not return_lse:
        return output
    return output, lse.astype(lse_dtype(spec, output))


def attend_gated(
    spec: AttentionSpec[Array],
    query: Array,
    key: Array,
    value: Array,
    log_fgate: Array,
    first: int | Array,
    dropout_key: Array | None,
    backend: Backend = "auto",
) -> tuple[Array, Array]:
    """(output, lse) of a validated call.

    Args:
        spec: without the gates; its `query_offset` is `first`.
        log_fgate: [B, H, S] or [B, K, S].
        first: position of query 0; it may be traced, so that a decoding step is compiled once. All queries are among the keys.
    """
    gates = jnp.asarray(log_fgate)
    if gates.shape[1] != spec.num_heads:
        gates = jnp.repeat(gates, spec.group, axis=1)
    of_key, of_query = _biases(spec.query_len, jnp.asarray(first, jnp.int32), gates, spec.key_bias)
    start = _first_keys(spec.query_len, jnp.asarray(first, jnp.int32), gates)
    return attend(
        dataclasses.replace(spec, key_bias=of_key.high, query_bias=of_query.high),
        query,
        key,
        value,
        dropout_key,
        backend,
        key_bias_low=of_key.low,
        query_bias_low=of_query.low,
        query_start=start,
    )


@partial(jax.jit, static_argnums=0)
def _first_keys(query_len: int, first: Array, gates: Array) -> Array:
    """[B, H, T] int32, the first key that each query may see: that of the last cut before it."""
    cuts = jnp.where(gates == -jnp.inf, jnp.arange(gates.shape[2], dtype=jnp.int32), 0)
    return lax.dynamic_slice_in_dim(lax.cummax(cuts, axis=2), first, query_len, axis=2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def _biases(query_len: int, first: Array, gates: Array, key_bias: Array | None) -> tuple[KeyBias, KeyBias]:
    """(b_j − c_j [B, H, S], c_i [B, H, T]) with c the running sums of gates [B, H, S]; queries begin at position `first`.

    The gradient of gate l is Σ_{i ≥ l} (row sum i − column sum i) of the gradient of the scores. The gradients of the two biases
    are these sums, of the same numbers, so the rounding errors of rows do not accumulate.
    """
    work = gates.dtype if key_bias is None else jnp.promote_types(gates.dtype, key_bias.dtype)
    high, low = _gate_sums(gates.astype(work))
    of_query = KeyBias(*(lax.dynamic_slice_in_dim(part, first, query_len, axis=2) for part in (high, low)))
    if key_bias is None:
        return KeyBias(-high, -low), of_query
    hidden = key_bias == -jnp.inf
    total, rest = sum_of_two(jnp.where(hidden, 0.0, key_bias.astype(work)), -high)
    return KeyBias(jnp.where(hidden, -jnp.inf, total), rest - low), of_query


# first; the gates above the floor; gates and key_bias without values, for their dtypes
_Kept = tuple[Array, Array, Array, Array | None]


def _biases_forward(
    query_len: int, first: Array, gates: Array, key_bias: Array | None
) -> tuple[tuple[KeyBias, KeyBias], _Kept]:
    kept = first, gates >= GATE_FLOOR, gates[:0], None if key_bias is None else key_bias[:0]
    return _biases(query_len, first, gates, key_bias), kept


@partial(jax.jit, static_argnums=0)
def _biases_backward(query_len: int, kept: _Kept, grads: tuple[KeyBias, KeyBias]) -> tuple[None, Array, Array | None]:
    of_key, of_query = (x.high for x in grads)
    first, is_open, gates, key_bias = kept
    rows = lax.dynamic_update_slice_in_dim(jnp.zeros_like(of_key), of_query, first, axis=2)
    high, low = _running_sums(sum_of_two(rows, -of_key), reverse=True)
    of_gates = jnp.where(is_open, high + low, 0.0).at[:, :, :1].set(0.0)  # no key lies before the first
    return None, of_gates.astype(gates.dtype), None if key_bias is None else of_key.astype(key_bias.dtype)


_biases.defvjp(_biases_forward, _biases_backward)


def _gate_sums(gates: Array) -> Pair:
    """c_j = Σ_{l ≤ j} max(ln f_l, GATE_FLOOR) along the last axis. Whole multiples of GATE_STEP are counted in integers, exactly.
    Their total has the digits of a pair: with n cuts, fp32 is off by up to n·2⁻²⁸.
    """
    gates = jnp.maximum(gates, GATE_FLOOR)
    steps = jnp.trunc(gates / GATE_STEP)
    fine = gates - steps * GATE_STEP
    counts = jnp.cumsum(steps.astype(jnp.int32), axis=-1)
    high = counts.astype(gates.dtype)
    low = (counts - high.astype(jnp.int32)).astype(gates.dtype)
    return _added((high * GATE_STEP, low * GATE_STEP), _running_sums((fine, jnp.zeros_like(fine))))


def _running_sums(x: Pair, *, reverse: bool = False) -> Pair:
    """Σ over all positions up to each along the last axis [..., S], or from each on; off by 2⁻⁴⁰ of the largest sum in fp32.

    Rows of √S positions are summed in parallel, then the rows: two short loops, quick to compile at any length.
    """
    *lead, length = x[0].shape
    if 0 in x[0].shape:
        return x
    row = math.isqrt(length)
    padding = [(0, 0)] * len(lead) + [(0, -length % row)]

    def cut(part: Array) -> Array:
        return jnp.moveaxis(jnp.pad(part, padding).reshape(*lead, -1, row), -1, 0)  # [row, ..., rows]

    def joined(part: Array) -> Array:
        return jnp.moveaxis(part, 0, -1).reshape(*lead, -1)[..., :length]

    def step(so_far: Pair, one: Pair) -> tuple[Pair, tuple[Pair, Pair]]:
        total = _added(so_far, one)
        return total, (total, so_far)

    def sums(parts: Pair) -> tuple[Pair, Pair]:
        """(with each, before each) along the first axis."""
        nothing = jnp.zeros_like(parts[0][0]), jnp.zeros_like(parts[1][0])
        scanned: tuple[Pair, Pair] = lax.scan(step, nothing, parts, reverse=reverse)[1]
        return scanned

    within, _ = sums((cut(x[0]), cut(x[1])))
    end = 0 if reverse else -1
    _, before = sums((jnp.moveaxis(within[0][end], -1, 0), jnp.moveaxis(within[1][end], -1, 0)))
    high, low = _added(within, (jnp.moveaxis(before[0], 0, -1), jnp.moveaxis(before[1], 0, -1)))
    return joined(high), joined(low)


def _added(a: Pair, b: Pair) -> Pair:
    total, rest = sum_of_two(a[0], b[0])
    rest = rest + (a[1] + b[1])
    high = total + rest
    return high, rest - (high - total)
