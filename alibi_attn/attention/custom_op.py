"""A forward and a backward on the CPU as one operator, that autograd, torch.func, torch.compile and autocast take as it is.

A backend brings two functions over a description and clean tensors; what an operator can carry, what bad numbers do to a result
and what is saved for backward are the same for all of them and stand here.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.eager import Kernels, attend, is_eager
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.transforms import Mapped, transformable
from alibi_attn.attention.visibility import (
    are_moderate,
    first_positions,
    keys_within_sight,
    lse_dtype,
    plain_offset,
    rows_that_see,
)

Spec = AttentionSpec[Tensor]


class Saved(NamedTuple):
    """What forward leaves for backward; both begin with the batch, for vmap, and may be of any width.

    Args:
        visited: [B, …] integers: which keys, for backward to visit the same.
        rows: [B, …] in fp32 or better: what else backward wants to know of the rows of the softmax.
    """

    visited: Tensor
    rows: Tensor


class Gradients(NamedTuple):
    """What backward gives.

    Args:
        query, key, value: as they came, in fp32 or better.
        slopes: [2, B, H] fp64, of the slopes to the left and to the right; zeros where they are not wanted.
        key_bias, query_bias: [B, H, S] and [B, H, T] fp64, sums of the same ds over queries and over keys; or None.
        table: [H, N] fp64, sums of ds over pairs of one distance; or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor
    key_bias: Tensor | None = None
    query_bias: Tensor | None = None
    table: Tensor | None = None


Forward = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Saved]]
Backward = Callable[
    [Spec, Saved, Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor], Tensor, Tensor, bool, bool],
    Gradients,
]
Run = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def operator(name: str, forward: Forward, backward: Backward, empty_saved: Callable[[Tensor, Tensor], Saved]) -> Run:
    """The backend's `run`; registers `alibi_attn::{name}_forward` and `alibi_attn::{name}_backward`.

    Args:
        forward: (spec, query, key, value) -> (output, lse, saved), all tensors finite and with a last stride of 1; lse without
            the query's bias, −inf where a query sees nothing. output and lse in fp32 or better.
        backward: (spec, saved, grad_output, grad_lse or None, (query, key, value), output, lse, slopes_wanted, biases_wanted) ->
            gradients; lse is 0 for a query that sees nothing.
        empty_saved: (query, key) -> tensors of the shapes and dtypes of `Saved`, of which only those are read.
    """

    def attended(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Saved, bool]:
        """(output, lse, saved, whether all numbers were moderate)."""
        q, k, v = in_rows(query, key, value)
        moderate, poison = are_moderate(q, k, v), None
        if not moderate:
            q, k, v, poison = without_bad_numbers(spec, q, k, v)
        output, lse, saved = forward(spec, q, k, v)
        if poison is not None:
            output += poison[..., None]
            lse += poison
        if spec.query_bias is not None:
            lse = lse + spec.query_bias
        return output.to(query.dtype), lse.to(lse_dtype(spec, query)), saved, moderate

    def derived(
        spec: Spec, saved: tuple[Tensor, Tensor], grad_output: Tensor | None, grad_lse: Tensor | None,
        inputs: tuple[Tensor, Tensor, Tensor], output: Tensor, lse: Tensor, slopes_wanted: bool, biases_wanted: bool,
        moderate: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Gradients of query, key, value, slopes, right slopes, key bias, query bias, table; of biases what is wanted."""
        query, (q, k, v) = inputs[0], in_rows(*inputs) if moderate else clean(spec, *inputs)[:3]
        grad = torch.zeros_like(output) if grad_output is None else grad_output
        out, grad = output.to(q.dtype), _rows(grad.to(q.dtype))
        blind = lse == -math.inf
        if bool(blind.any()):
            # What comes for a query that sees nothing reaches no gradient, whatever it is; lse 0 makes its weights exp(−inf) = 0.
            lse, grad = lse.masked_fill(blind, 0.0), grad.masked_fill(blind[..., None], 0.0)
            grad_lse = None if grad_lse is None else grad_lse.masked_fill(blind, 0.0)
        found = backward(spec, Saved(*saved), grad, grad_lse, (q, k, v), out, lse, slopes_wanted, biases_wanted)
        left, right = None, None
        if slopes_wanted:
            left, right = slope_gradients(found.slopes, spec.slopes, spec.right_slopes)
        biases = [
            None if b is None or of_b is None else of_b.to(b.dtype)
            for b, of_b in zip((spec.key_bias, spec.query_bias, spec.table), found[4:], strict=True)
        ]
        right = None if spec.right_slopes is None else right
        return *(x.to(query.dtype) for x in found[:3]), left, right, *biases

    @torch.library.custom_op(f"alibi_attn::{name}_forward", mutates_args=())
    def forward_op(
        query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, right_slopes: Tensor | None, first: Tensor, scale: Tensor,
        key_mask: Tensor | None, query_segments: Tensor | None, key_segments: Tensor | None,
        key_bias: Tensor | None, query_bias: Tensor | None, dropout_seed: Tensor | None,
        causal: bool, window: int | None, tolerance: float, dropout_p: float, return_lse: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        masks = key_mask, query_segments, key_segments, key_bias, query_bias
        numbers = causal, window, float(scale), tolerance, dropout_p
        spec = spec_of(query, key, slopes, right_slopes, first, masks, dropout_seed, *numbers)
        output, lse, saved, _ = attended(spec, query, key, value)
        return output, lse, *saved

    @torch.library.custom_op(f"alibi_attn::{name}_backward", mutates_args=())
    def backward_op(
        grad_output: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        lse: Tensor, slopes: Tensor, right_slopes: Tensor | None, first: Tensor, scale: Tensor, key_mask: Tensor | None,
        query_segments: Tensor | None, key_segments: Tensor | None, key_bias: Tensor | None, query_bias: Tensor | None,
        dropout_seed: Tensor | None, visited: Tensor, rows: Tensor, causal: bool, window: int | None, dropout_p: float,
        slopes_wanted: bool, biases_wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        masks = key_mask, query_segments, key_segments, key_bias, query_bias
        numbers = causal, window, float(scale), 0.0, dropout_p
        spec = spec_of(query, key, slopes, right_slopes, first, masks, dropout_seed, *numbers)
        dq, dk, dv, *rest, _ = derived(
            spec, (visited, rows), grad_output, grad_lse, (query, key, value), output, lse, slopes_wanted, biases_wanted, False
        )  # fmt: skip
        # An operator returns tensors only: what is not wanted is zeros, and what is not there is empty.
        given = slopes, right_slopes, key_bias, query_bias
        nothing = slopes.shape[-1:], slopes.shape[-1:], (spec.batch, 0), (spec.batch, 0)
        left, right, of_key_bias, of_query_bias = (
            of_x if of_x is not None else query.new_zeros(shape) if x is None else torch.zeros_like(x)
            for x, of_x, shape in zip(given, rest, nothing, strict=True)
        )
        return dq, dk, dv, left, right.to(slopes.dtype), of_key_bias, of_query_bias

    gradients = transformable(backward_op)

    def save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        *tensors, ctx.causal, ctx.window, _tolerance, ctx.dropout_p, ctx.return_lse = inputs
        query, key, value, *description = tensors
        out, lse, *saved = output
        ctx.save_for_backward(query, key, value, out, lse, *description, *saved)
        ctx.mark_non_differentiable(*saved)

    def differentiate(ctx, grad_output, grad_lse, *_saved):  # type: ignore[no-untyped-def]
        slopes_wanted = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        saved = ctx.saved_tensors  # once: what recomputes them or brings them back does so at every look
        if grad_output is None:
            grad_output = torch.zeros_like(saved[3])
        grad_lse = grad_lse if ctx.return_lse else None
        wanted = slopes_wanted, ctx.needs_input_grad[10] or ctx.needs_input_grad[11]
        numbers = ctx.causal, ctx.window, ctx.dropout_p, *wanted
        dq, dk, dv, dslopes, dright, of_key_bias, of_query_bias = gradients(grad_output, grad_lse, *saved, *numbers)
        if not slopes_wanted:
            dslopes = dright = None
        key_bias, query_bias = saved[12:14]
        biases = None if key_bias is None else of_key_bias, None if query_bias is None else of_query_bias
        return dq, dk, dv, dslopes, dright if saved[6] is not None else None, *[None] * 5, *biases, *[None] * 6

    @forward_op.register_fake
    def fake_forward(query, key, *rest):  # type: ignore[no-untyped-def]
        work, key_bias = torch.promote_types(query.dtype, torch.float32), rest[8]
        if key_bias is not None:
            work = torch.promote_types(work, key_bias.dtype)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return output, query.new_empty(query.shape[:3], dtype=work), *empty_saved(query, key)

    backward_op.register_fake(_fake_backward)
    forward_op.register_autograd(differentiate, setup_context=save)
    register_maps(forward_op, backward_op)
    attention = transformable(forward_op, save, differentiate)

    def derived_by_operator(
        spec: Spec, saved: tuple[Tensor, Tensor], grad_output: Tensor | None, grad_lse: Tensor | None,
        inputs: tuple[Tensor, Tensor, Tensor], output: Tensor, lse: Tensor, slopes_wanted: bool, biases_wanted: bool,
        moderate: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if spec.table is not None:
            raise RuntimeError(
                "the gradient of a table of distances cannot be traced by compiled autograd; compile forward too, or pass "
                "backend='dense'"
            )
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        found = gradients(
            grad_output, grad_lse, *inputs, output, lse, *carried(spec, output.device), *saved, spec.causal, spec.window,
            spec.dropout_p, slopes_wanted, biases_wanted,
        )  # fmt: skip
        given = spec.slopes, spec.right_slopes, spec.key_bias, spec.query_bias
        return *found[:3], *(None if x is None else of_x for x, of_x in zip(given, found[3:], strict=True)), None

    kernels = Kernels(attended, derived, derived_by_operator)

    def run(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, lse)"""
        if is_eager(spec, query, key, value):
            return attend(kernels, spec, query, key, value)
        output, lse, *_ = attention(
            query, key, value, *carried(spec, query.device), spec.causal, spec.window, spec.tolerance, spec.dropout_p,
            spec.return_lse,
        )  # fmt: skip
        return output, lse if spec.return_lse else None

    return run


def register_maps(forward_op: Any, backward_op: Any) -> None:
    """torch.func.vmap of an operator and of its backward: the mapped axis goes into the batch, and its seeds for dropout with it.

    Args:
        forward_op: (query, key, value, slopes, right_slopes, first, masks …, numbers …) -> tensors [B, …]
        backward_op: (grad_output, grad_lse, query, key, value, output, lse, slopes, right_slopes, first, masks and plan …,
            numbers …) -> gradients of query, key, value, slopes and right slopes, and more [B, …]
    """

    @forward_op.register_vmap  # type: ignore[untyped-decorator]
    def map_forward(info: Any, axes: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        mapped = Mapped.of(info.batch_size, inputs[0], axes[0])
        outputs = mapped.out_of_batch(forward_op(*_mapped_inputs(mapped, inputs, axes, slopes=3)))
        return outputs, (0,) * len(outputs)

    @backward_op.register_vmap  # type: ignore[untyped-decorator]
    def map_backward(info: Any, axes: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        mapped = Mapped.of(info.batch_size, inputs[2], axes[2])
        dq, dk, dv, left, right, *rest = backward_op(*_mapped_inputs(mapped, inputs, axes, slopes=7))
        sides = [left, right]
        slopes, at = list(inputs[7:9]), list(axes[7:9])
        if slopes[1] is None:  # nobody asks for its gradient
            sides[1], slopes[1], at[1] = torch.zeros_like(sides[0]), slopes[0], at[0]
        dslopes = [
            side if m.ndim - (axis is not None) == 2 else side.sum(1, dtype=torch.float64).to(side.dtype)
            for side, m, axis in zip(mapped.out_of_batch(sides), slopes, at, strict=True)
        ]
        found = (*mapped.out_of_batch((dq, dk, dv)), *dslopes, *mapped.out_of_batch(rest))
        return found, (0,) * len(found)


def _mapped_inputs(mapped: Mapped, inputs: tuple[Any, ...], axes: tuple[Any, ...], *, slopes: int) -> Iterator[Any]:
    """An operator's inputs with a mapped axis in the batch; `slopes` is where slopes are, before right slopes and first."""
    for at, (value, axis) in enumerate(zip(inputs, axes, strict=True)):
        if at in (slopes, slopes + 1):
            yield mapped.slopes(value, axis)
        elif at == slopes + 2:
            yield mapped.first(value, axis)
        else:
            yield mapped.into_batch(value, axis) if isinstance(value, Tensor) and value.ndim > 0 else value


def carried(spec: Spec, device: torch.device) -> tuple[Tensor | None, ...]:
    """The description's tensors, in the order in which an operator takes them."""
    # As a product of tensors it may change without a new graph of torch.compile, which has no other way for a float.
    scale = torch.ones((), dtype=torch.float64) * spec.scale
    return (
        spec.slopes, spec.right_slopes, first_positions(spec, device), scale, spec.key_mask, spec.query_segments,
        spec.key_segments, spec.key_bias, spec.query_bias, spec.dropout_seed,
    )  # fmt: skip


def described(spec: Spec, query: Tensor, key: Tensor) -> Spec:
    """The description as it arrives inside of an operator: an offset that is one number is an int."""
    masks = spec.key_mask, spec.query_segments, spec.key_segments, spec.key_bias, spec.query_bias
    first = first_positions(spec, query.device)
    numbers = spec.causal, spec.window, spec.scale, spec.tolerance, spec.dropout_p
    return spec_of(query, key, spec.slopes, spec.right_slopes, first, masks, spec.dropout_seed, *numbers)


def spec_of(
    query: Tensor, key: Tensor, slopes: Tensor, right_slopes: Tensor | None, first: Tensor,
    masks: tuple[Tensor | None, ...], dropout_seed: Tensor | None, causal: bool, window: int | None, scale: float,
    tolerance: float, dropout_p: float, *, on_host: bool = True,
) -> Spec:  # fmt: skip
    """The description, back from what an operator can carry.

    Args:
        masks: key_mask, query_segments, key_segments, key_bias, query_bias.
        on_host: an offset that is one number is read, and becomes an int.
    """
    b, h, t, d = query.shape
    key_mask, query_segments, key_segments, key_bias, query_bias = masks
    return AttentionSpec(
        batch=b, num_heads=h, num_kv_heads=key.shape[1], query_len=t, key_len=key.shape[2], head_dim=d,
        slopes=slopes, right_slopes=right_slopes, causal=causal, window=window, scale=scale,
        query_offset=plain_offset(first) if on_host else first, key_mask=key_mask, query_segments=query_segments,
        key_segments=key_segments, key_bias=key_bias, query_bias=query_bias, dropout_p=dropout_p, dropout_seed=dropout_seed,
        tolerance=tolerance,
    )  # fmt: skip


def slope_gradients(sides: Tensor, slopes: Tensor, right_slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of slopes and of right slopes, [H] or [B, H] as these are, from those of both sides, [2, B, H]; zeros of none."""
    if right_slopes is None:  # one slope for both sides
        sides = torch.stack([sides.sum(0), torch.zeros_like(sides[0])])
    left, right = (
        (side.clone() if s is not None and s.ndim == 2 else side.sum(0)).to(slopes.dtype)
        for side, s in zip(sides, (slopes, right_slopes), strict=True)
    )
    return left, right


def clean(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(query, key, value, poison): finite, with a last stride of 1, and fp16 as fp32; see `visibility.without_bad_keys`.

    Of keys that only some may see, and of queries, numbers may be as large as they come.
    """
    query, key, value = in_rows(query, key, value)
    if are_moderate(query, key, value):
        return query, key, value, None
    return without_bad_numbers(spec, query, key, value)


def in_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a last stride of 1, and fp16 as fp32, since torch's fp16 backward is ten times slower."""
    if query.dtype == torch.float16:
        query, key, value = query.float(), key.float(), value.float()
    return _rows(query), _rows(key), _rows(value)


def without_bad_numbers(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `clean` does where numbers are not moderate."""
    unused = ~keys_within_sight(spec, key.device)[..., None]
    key, value = key.masked_fill(unused, 0.0), value.masked_fill(unused, 0.0)
    if all(bool(x.isfinite().all()) for x in (query, key, value)):
        return query, key, value, None
    sees_any = rows_that_see(spec, torch.ones(spec.batch, spec.num_heads, spec.key_len, dtype=torch.bool))
    spoiled = ~query.isfinite().all(-1)
    query = query.masked_fill(spoiled[..., None], 0.0)
    bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    spoiled = (spoiled & sees_any) | rows_that_see(spec, bad.repeat_interleave(spec.group, 1))
    poison = torch.zeros(spoiled.shape).masked_fill(spoiled, math.nan)
    return query, key.masked_fill(bad[..., None], 0.0), value.masked_fill(bad[..., None], 0.0), poison


def _rows(x: Tensor) -> Tensor:
    """With a last stride of 1. Rows that are one row, of stride 0, are written out: torch's product of such a matrix adds up in
    one chain, and of thousands of equal numbers loses four digits.
    """
    return x if x.stride(-1) == 1 and x.stride(-2) != 0 else x.contiguous()


def _fake_backward(grad_output, grad_lse, query, key, value, output, lse, slopes, right_slopes, *rest):  # type: ignore[no-untyped-def]
    right = slopes.shape if right_slopes is None or right_slopes.ndim == slopes.ndim else right_slopes.shape
    return (
        *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)),
        slopes.new_empty(slopes.shape),
        slopes.new_empty(right if right_slopes is not None else slopes.shape[-1:]),
        *(
            query.new_empty((query.shape[0], 0)) if b is None else torch.empty(b.shape, dtype=b.dtype, device=b.device)
            for b in rest[5:7]
        ),
    )
