"""`alibi_attention` for JAX arrays: it checks the call, plans it, and runs one function with a custom gradient.

Press et al. 2022, sec. 3 (arXiv:2108.12409). The checks are in `attention/call/checks.py`. A call goes from here to `operands.py`
(its arrays) and then to `native.py` (the C++ kernels), `xla.py` (`loop.py` or `dense.py`) or `fused.py` (Triton kernels).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Unpack, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from alibi_attn.attention.call.explanation import refusal
from alibi_attn.attention.call.hints import shows
from alibi_attn.attention.call.options import AttentionOptions
from alibi_attn.attention.call.reads import arguments_of
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.run.invariant import invariant_spec
from alibi_attn.jax.backends import dense, fused, loop, native, xla
from alibi_attn.jax.call import merging
from alibi_attn.jax.call.dropout import WHOLE, Origin
from alibi_attn.jax.call.operands import Arrays, Rest, operands
from alibi_attn.jax.call.plan import Array, Plan
from alibi_attn.jax.call.validation import Slopes, checked_dropout_key, make_spec

Backend = Literal["auto", "native", "loop", "dense", "fused"]
Result = TypeVar("Result")

READS = {"native": native.READS, "loop": loop.READS, "dense": dense.READS, "fused": fused.READS}

QUERY_BLOCK = KEY_TILE = 128  # of the loop; on the CPU 64 to 256 are equally fast
# On a GPU a block of the loop costs 0.2 ms however small it is, so there are few: a step computes 16 MiB of scores in fp32.
GPU_QUERY_BLOCK, GPU_KEY_TILE = 1024, 4096
GPU_DENSE_SCORES = 2**29  # B·H·T·S; 2 GiB in fp32, of which forward holds two and backward four


@shows(AttentionOptions[Array])
def alibi_attention(
    query: Array,
    key: Array,
    value: Array,
    slopes: Slopes | None = None,
    *,
    dropout_key: Array | None = None,
    return_lse: bool = False,
    invariant: bool = False,
    backend: Backend = "auto",
    **options: Unpack[AttentionOptions[Array]],
) -> Array | tuple[Array, Array]:
    """Attention with linear biases, softmax(scale·q·kᵀ − m·|i − j| + b_j)·v, [B, T, H, D] in query's dtype.

    Exact up to rounding, in memory linear in T and S. Pure: works under `jit`, `grad`, `vmap`, `checkpoint` and `shard_map`
    (over sequences and heads; slopes, biases and masks sharded alike). Differentiable once, in reverse, in query, key, value,
    slopes, key_bias and sink_logits, and through lse. Under `jit` everything but arrays is static.

    Args:
        query: [B, T, H, D], JAX's layout; float16, bfloat16, float32, or float64 where x64 is enabled.
        key, value: [B, S, K, D], K divides H (grouped-query attention).
        slopes: m, one per head, [H] or [B, H], used in fp32 (fp64 for fp64 input); 0 = no position, negative = far keys are
            preferred. Default: the published slopes, `alibi_slopes(H)`.
        causal: hide the keys to the right of each query. False is symmetric, −m·|i − j| on both sides.
        right_slopes: separate slopes for keys to the right (causal=False only); inf = this head never attends to the right.
        window: how many keys a query may see, including its own (on either side when not causal), or [H] integers, one per head,
            which are not traced.
        scale: factor of q·k, 1/√D by default. The bias is not scaled.
        query_offset: position of query 0; S − T by default: the queries are the last T of the S positions. An int, or an
            integer array, 0-d or [B], which may be traced. It may lie before or after all keys.
        key_mask: [B, S] bool, True = visible.
        segment_ids: [B, S] integers; attention stays within a segment. Or a pair ([B, T], [B, S]) for queries and keys.
        key_bias: b, fp32 or fp64, [B, H, S] or broadcastable to it, added to the score of each key; −inf hides the key.
            However large the biases are, a score is off only by a rounding of their difference to the b of a key near the
            query; no fp64 is needed.
        sink_logits: [H] floating point, a learned logit of attending to nothing: exp(sink) joins the softmax denominator of the
            head, so output = o·σ(lse − sink). −inf = no sink. lse excludes it.
        dropout_p: share of the attention weights to drop, in [0, 1).
        dropout_key: from `jax.random.key`, required if dropout_p > 0. The dropped weights depend on the key, sequence, head and
            positions only: they are the same in every backend and chunk of queries, and in PyTorch.
        tolerance: the largest share of a query's softmax mass that may be skipped, in [0, 1). Default: eps / 32 of the dtype,
            far below its rounding. 0 skips masked keys only. Gradients leave out a key at distance d only if its share of the
            query is at most tolerance / (2·(d + 64)), so no key loses more than tolerance·(1 + ln(T / 64)) of one query's weight.
        return_lse: also return the natural log-sum-exp of the scores, [B, H, T] fp32 (fp64 if query or key_bias is fp64), −inf
            for a query that sees no key.
        sinks: how many of the first keys of each sequence the window does not hide.
        prefix_len: [B] integers, which may be traced: the first keys of each sequence, which all its queries see, −m·|i − j| on
            both sides; beyond it the call is causal. A window limits the prefix too.
        positions: p, [B, S] fp32 or fp64, not decreasing: the bias becomes −m·|p_i − p_j|, while causal and window go by index.
            No gradient. Of a numpy array in fp64 without x64, the distances to the last are what is rounded to fp32.
        query_positions: [B, T], those of the queries, not before the last T keys; with causal=False anywhere, without a window.
            Default: the last T.
            Or coordinates in the plane or in space, [B, S, 2 or 3] and [B, T, 2 or 3], in any order, with causal=False: the bias
            is −m·‖p_i − p_j‖, by "dense" only. Of numpy arrays the distances to the first key's are what is rounded.
        registers: the first n tokens, such as a class token, get no bias, as queries or as keys (causal=False only).
        invariant: output and lse of a query have the same bits in every call that shows it the same keys, its own among them:
            alone or in a batch, in a text that goes on, in a chunk or a single step. Causal, by `native`, which then skips
            nothing.
        backend: "native" = the C++ kernels that PyTorch uses too, on a CPU; "loop" visits tiles of keys outward from the
            diagonal, on any device; "dense" computes all scores; "fused" = PyTorch's Triton kernels, on CUDA, without masks,
            biases of keys and dropout; "auto" picks one of the others by shapes and device (see `explain`): on a GPU "dense"
            up to B·H·T·S = 2²⁹.

    Returns:
        The output, or (output, lse). A query that sees no key returns zeros. Hidden keys are never used.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or numbers, when the function is traced.

    >>> q = k = v = jnp.ones((1, 128, 8, 64))
    >>> alibi_attention(q, k, v).shape
    (1, 128, 8, 64)

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    spec = make_spec(query, key, value, slopes, return_lse=return_lse, **options)
    if invariant:
        spec, before = invariant_spec(
            spec, options.get("tolerance"), backend, lambda x, count: jnp.pad(x, ((0, 0), (count, 0)))
        )
        query = jnp.pad(query, ((0, 0), (before, 0), (0, 0), (0, 0)))
        output, lse = attend(spec, query, key, value, None, "native")
        output, lse = output[:, before:], lse[:, :, before:]
    else:
        output, lse = attend(spec, query, key, value, checked_dropout_key(spec.dropout_p, dropout_key), backend)
    return (output, lse) if return_lse else output


def attend(
    spec: AttentionSpec[Array],
    query: Array,
    key: Array,
    value: Array,
    dropout_key: Array | None,
    backend: Backend,
    *,
    key_bias_low: Array | None = None,
    query_bias_low: Array | None = None,
    query_start: Array | None = None,
) -> tuple[Array, Array]:
    """(output, lse) of a validated call.

    Args:
        key_bias_low, query_bias_low: [B, H, S] and [B, H, T], the low parts of the spec's biases, b = key_bias + key_bias_low;
            without gradients.
        query_start: [B, H, T] int32, the first key that each query may see; the masks still apply. Only if the keys before it
            have biases that are lower by 2²⁰.
    """
    if splits(spec, backend):
        query, key, value = (jnp.asarray(x) for x in (query, key, value))
        output, (lse, low) = _attend_in_parts(merging.Part(spec, query, key, value), dropout_key, backend)
        lse = (lse + low).astype(merging.lse_dtype(spec, query))
    else:
        arrays, rest = operands(spec, query, key, value, dropout_key)
        rest = rest._replace(key_bias_low=key_bias_low, query_bias_low=query_bias_low, query_start=query_start)
        output, lse, _ = _attend(make_plan(spec, query, backend), arrays, rest)
    return output if spec.sink_logits is None else _scaled_by_sinks(output, lse, spec.sink_logits), lse


def splits(spec: AttentionSpec[Array], backend: Backend) -> bool:
    """Whether the parts of `merging.py` are computed; raises a ValueError for a backend that does not compute this call."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r} but must be one of {', '.join(map(repr, get_args(Backend)))}")
    off, unread = merging.split(spec, READS[_reader(spec) if backend == "auto" else backend])
    if unread:
        raise refusal(backend, f"it does not compute {arguments_of(unread)}")
    return off != frozenset() and off != {"sink_logits"} and 0 not in (spec.batch, spec.query_len, spec.key_len)


def _reader(spec: AttentionSpec[Array]) -> str:
    """The backend whose fields "auto" reads: what the others do not compute is left to `dense`."""
    return "dense" if merging.split(spec, READS["native"]).unread else "native"


def why_not(name: str, spec: AttentionSpec[Array], query: Array) -> str | None:
    """Why a backend cannot run a call; None = it runs."""
    unread = merging.split(spec, READS[name]).unread
    if unread:
        return f"it does not compute {arguments_of(unread)}"
    if name == "native":
        return native.why_not(platforms(query), spec.slopes.dtype if query.dtype != jnp.bfloat16 else query.dtype)
    return fused.why_not(spec, query, platforms(query)) if name == "fused" else None


def _attend_in_parts(part: merging.Part, dropout_key: Array | None, backend: Backend) -> merging.Result:
    """(output, lse as a pair) of a call that is a part, of itself or of a larger one."""
    if splits(part.spec, backend):
        parts = merging.parts(part.as_a_whole())
        return merging.joined(part.spec, parts, [_attend_in_parts(one, dropout_key, backend) for one in parts])
    arrays, rest = operands(part.spec, part.query, part.key, part.value, dropout_key)
    rest = rest._replace(key_bias_low=part.key_bias_low, query_bias_low=part.query_bias_low)
    output, lse, low = _attend(make_plan(part.spec, part.query, backend, part.origin, is_part=True), arrays, rest)
    return output, (lse, jnp.zeros_like(lse) if low is None else lax.stop_gradient(low))


@jax.jit
def _scaled_by_sinks(output: Array, lse: Array, sink_logits: Array) -> Array:
    """The output [B, T, H, D] over the given keys and one sink per head: output·σ(lse − sink)."""
    blind = lse == -jnp.inf  # the output of such a query is 0, and its incoming gradient has no effect
    share = jax.nn.sigmoid(jnp.where(blind, 0.0, lse) - _once(sink_logits).astype(lse.dtype)[:, None])
    share = jnp.where(blind, 0.0, share)
    return (output * share.swapaxes(1, 2)[..., None]).astype(output.dtype)


def make_plan(
    spec: AttentionSpec[Array],
    query: Array,
    backend: Backend,
    dropout_origin: Origin = WHOLE,
    *,
    is_part: bool = False,
) -> Plan:
    """Decides how to compute the call, from shapes and from the device of query, or JAX's default device."""
    splits(spec, backend)
    empty = 0 in (spec.batch, spec.query_len, spec.key_len)
    reason = why_not("native" if backend == "auto" else backend, spec, query)
    if backend != "auto" and reason is not None:
        raise refusal(backend, reason)
    kernels = backend in ("auto", "native") and reason is None and not empty
    on_gpu = platforms(query) == {"gpu"}
    return Plan(
        causal=spec.causal,
        dropout_p=spec.dropout_p,
        dropout_origin=dropout_origin,
        native=kernels,
        # A traced call may later be compiled for another device.
        elsewhere=kernels and backend == "auto" and isinstance(query, jax.core.Tracer),
        dense=backend == "dense"
        or empty
        or (backend == "auto" and (_reader(spec) == "dense" or _is_short(spec, on_gpu=on_gpu))),
        query_block=_parted(spec.query_len, GPU_QUERY_BLOCK) if on_gpu else min(QUERY_BLOCK, spec.query_len),
        key_tile=KEY_TILE * _parted(-(-spec.key_len // KEY_TILE), GPU_KEY_TILE // KEY_TILE) if on_gpu else KEY_TILE,
        query_bias=spec.query_bias is not None,
        fused=fused.numbers(spec) if backend == "fused" else None,
        lse_in_two=is_part and spec.key_bias is not None,
    )


def _parted(count: int, most: int) -> int:
    """The size of equal parts of at most `most`."""
    return -(-count // max(1, -(-count // most)))


def _is_short(spec: AttentionSpec[Array], *, on_gpu: bool) -> bool:
    """Whether computing all scores is faster than the loop, and small enough."""
    scores = spec.query_len * spec.key_len
    if on_gpu:
        return spec.batch * spec.num_heads * scores <= GPU_DENSE_SCORES
    # With few queries either way is one pass over the keys; few tiles are not worth a loop.
    return spec.query_len <= 16 or scores < 256 * 256


def platforms(query: Array) -> set[str]:
    """The platforms of the devices that hold, or will hold, an array: "cpu", "gpu", "tpu"."""
    if isinstance(query, jax.Array) and not isinstance(query, jax.core.Tracer):
        return {device.platform for device in query.devices()}
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return {jax.default_backend() if default is None else getattr(default, "platform", default)}


class _Kept(NamedTuple):
    """The arrays that forward saves for backward."""

    arrays: Arrays
    rest: Rest
    output: Array  # [B, T, H, D]
    of_xla: xla.Saved | fused.Saved | None
    of_native: native.Saved | None


_Results = tuple[Array, Array, Array | None]  # output, lse, and its low part if the plan asks for it
_Everything = tuple[Array, Array, Array | None, xla.Saved | fused.Saved | None, native.Saved | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, arrays: Arrays, rest: Rest) -> _Results:
    return _forward(dataclasses.replace(plan, for_backward=False), arrays, rest)[:3]


def _attend_forward(plan: Plan, arrays: Arrays, rest: Rest) -> tuple[_Results, tuple[native.Wanted, _Kept]]:
    """Every leaf is a `CustomVJPPrimal`, which shows whether its gradient is requested."""
    slopes, biases = (any(x.perturbed for x in jax.tree.leaves(part)) for part in (arrays[3:5], arrays[5:]))
    arrays, rest = jax.tree.map(lambda x: x.value, (arrays, rest))
    output, lse, low, *saved = _forward(dataclasses.replace(plan, for_gradients=True), arrays, rest)
    return (output, lse, low), (native.Wanted(slopes, biases), _Kept(arrays, rest, output, *saved))


def _attend_backward(
    plan: Plan, kept: tuple[native.Wanted, _Kept], grads: tuple[Array | SymbolicZero, ...]
) -> tuple[Arrays, None]:
    def filled(gradient: Array | SymbolicZero) -> Array:
        if isinstance(gradient, SymbolicZero):
            return jnp.zeros_like(kept[1].output, gradient.dtype, shape=gradient.shape)
        return gradient

    no_lse = plan.fused is not None and isinstance(grads[1], SymbolicZero)
    return _backward(plan, *kept, filled(grads[0]), None if no_lse else filled(grads[1])), None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def _forward(plan: Plan, arrays: Arrays, rest: Rest) -> _Everything:
    """(output, lse, its low part, saved arrays of both paths); zeros for the other path if only compilation knows the device."""
    if plan.fused is not None:
        output, lse, kept = fused.forward(plan.causal, plan.fused, arrays)
        return output, lse, None, kept, None

    def nothing_saved(forward: Callable[..., Any]) -> Any:
        """Zeros in the shapes that the other path saves; they vary over devices like the arrays."""
        saved = jax.eval_shape(partial(forward, plan), arrays, rest)[3]
        return jax.tree.map(lambda x: jnp.zeros_like(arrays.left, x.dtype, shape=x.shape), saved)

    def on_cpu(arrays: Arrays, rest: Rest) -> _Everything:
        output, lse, low, saved = native.forward(plan, arrays, rest)
        return output, lse, low, nothing_saved(xla.forward) if plan.elsewhere else None, saved

    def anywhere(arrays: Arrays, rest: Rest) -> _Everything:
        return *xla.forward(plan, arrays, rest), nothing_saved(native.forward) if plan.elsewhere else None

    return _on_platform(plan, on_cpu, anywhere, arrays, rest)


def _on_platform(plan: Plan, on_cpu: Callable[..., Result], anywhere: Callable[..., Result], *arrays: object) -> Result:
    """Picks one of two paths to the same result: immediately if the device is known, else when the call is compiled."""
    if plan.elsewhere:
        return lax.platform_dependent(*arrays, cpu=on_cpu, default=anywhere)
    return on_cpu(*arrays) if plan.native else anywhere(*arrays)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@partial(jax.jit, static_argnums=(0, 1))
def _backward(plan: Plan, wanted: native.Wanted, kept: _Kept, grad_output: Array, grad_lse: Array | None) -> Arrays:
    if plan.fused is not None:
        assert isinstance(kept.of_xla, fused.Saved)
        grads = kept.output, grad_output, grad_lse
        return fused.backward(plan.causal, plan.fused, kept.arrays, kept.of_xla, *grads, slopes_wanted=wanted.slopes)

    def on_cpu(kept: _Kept, grad_output: Array, grad_lse: Array) -> Arrays:
        assert kept.of_native is not None
        return native.backward(plan, wanted, *kept[:2], kept.of_native, kept.output, grad_output, grad_lse)

    def anywhere(kept: _Kept, grad_output: Array, grad_lse: Array) -> Arrays:
        assert isinstance(kept.of_xla, xla.Saved)
        return xla.backward(plan, *kept[:2], kept.of_xla, kept.output, grad_output, grad_lse)

    return _on_platform(plan, on_cpu, anywhere, kept, grad_output, grad_lse)


def _no_second_derivative(*given: object) -> NoReturn:
    raise NotImplementedError(
        "alibi_attention can be differentiated once, but a second derivative was requested; "
        "for those write out the attention with jax.numpy"
    )


@jax.custom_jvp
def _last_gradient(gradient: Array) -> Array:
    return gradient


@jax.custom_vjp
def _once(x: Array) -> Array:
    """x, whose gradient cannot be differentiated again."""
    return x


_once.defvjp(lambda x: (x, None), lambda _, gradient: (_last_gradient(gradient),))
for _function in (_forward, _backward, _last_gradient):
    _function.defjvp(_no_second_derivative)
