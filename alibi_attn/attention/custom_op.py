"""A forward and a backward on the CPU as one operator of torch's, so that autograd, torch.compile and autocast take it as it is.

A backend brings two functions over a description and clean tensors; what an operator can carry, what bad numbers do to a result
and what is saved for backward are the same for all of them and stand here.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import are_finite, first_positions, rows_that_see

Spec = AttentionSpec[Tensor]
Plan = tuple[Tensor, Tensor, Tensor]  # what forward visited, for backward to visit the same
Forward = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Plan]]
Backward = Callable[
    [Spec, Sequence[Tensor], Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor], Tensor, Tensor, bool],
    tuple[Tensor, Tensor, Tensor, Tensor],
]
Run = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def operator(name: str, forward: Forward, backward: Backward, empty_plan: Callable[[Tensor, Tensor], Plan]) -> Run:
    """The backend's `run`; registers `alibi_attn::{name}_forward` and `alibi_attn::{name}_backward`.

    Args:
        forward: (spec, query, key, value) -> (output, lse, plan), all tensors finite and with a last stride of 1; lse −inf
            where a query sees nothing. output and lse in fp32 or better.
        backward: (spec, plan, grad_output, grad_lse or None, (query, key, value), output, lse, slopes_wanted) -> gradients of
            query, key, value, and [2, B, H] fp64 of the slopes and right slopes, zeros if not wanted; lse is 0 for a query that
            sees nothing.
        empty_plan: (query, key) -> three tensors of a plan's shapes and dtypes, of which only those are read.
    """

    @torch.library.custom_op(f"alibi_attn::{name}_forward", mutates_args=())
    def forward_op(
        query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, right_slopes: Tensor | None, first: Tensor,
        key_mask: Tensor | None, query_segments: Tensor | None, key_segments: Tensor | None,
        causal: bool, window: int | None, scale: float, tolerance: float, return_lse: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        masks = key_mask, query_segments, key_segments
        spec = _spec(query, key, slopes, right_slopes, first, masks, causal, window, scale, tolerance)
        q, k, v, poison = clean(spec, query, key, value)
        output, lse, plan = forward(spec, q, k, v)
        if poison is not None:
            output += poison[..., None]
            lse += poison
        return output.to(query.dtype), lse, *plan

    @torch.library.custom_op(f"alibi_attn::{name}_backward", mutates_args=())
    def backward_op(
        grad_output: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        lse: Tensor, slopes: Tensor, right_slopes: Tensor | None, first: Tensor, key_mask: Tensor | None,
        query_segments: Tensor | None, key_segments: Tensor | None, plan: list[Tensor],
        causal: bool, window: int | None, scale: float, slopes_wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        masks = key_mask, query_segments, key_segments
        spec = _spec(query, key, slopes, right_slopes, first, masks, causal, window, scale, 0.0)
        q, k, v, _ = clean(spec, query, key, value)
        out, grad = output.to(q.dtype), _rows(grad_output.to(q.dtype))
        blind = lse == -math.inf
        if bool(blind.any()):
            # What comes for a query that sees nothing reaches no gradient, whatever it is; lse 0 makes its weights exp(−inf) = 0.
            lse, grad = lse.masked_fill(blind, 0.0), grad.masked_fill(blind[..., None], 0.0)
            grad_lse = None if grad_lse is None else grad_lse.masked_fill(blind, 0.0)
        *grads, dslope = backward(spec, plan, grad, grad_lse, (q, k, v), out, lse, slopes_wanted)
        dslopes = [
            dslope[side].clone() if s is not None and s.ndim == 2 else dslope[side].sum(0)
            for side, s in enumerate((slopes, right_slopes))
        ]
        dq, dk, dv = (gradient.to(query.dtype) for gradient in grads)
        return dq, dk, dv, dslopes[0].to(slopes.dtype), dslopes[1].to(slopes.dtype)

    def save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        *tensors, ctx.causal, ctx.window, ctx.scale, _tolerance, ctx.return_lse = inputs
        query, key, value, *description = tensors
        out, lse, *plan = output
        ctx.save_for_backward(query, key, value, out, lse, *description, *plan)
        ctx.mark_non_differentiable(*plan)

    def differentiate(ctx, grad_output, grad_lse, *_integers):  # type: ignore[no-untyped-def]
        slopes_wanted = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        saved, plan = ctx.saved_tensors[:-3], list(ctx.saved_tensors[-3:])
        if grad_output is None:
            grad_output = torch.zeros_like(saved[3])
        grad_lse = grad_lse if ctx.return_lse else None
        dq, dk, dv, dslopes, dright = backward_op(
            grad_output, grad_lse, *saved, plan, ctx.causal, ctx.window, ctx.scale, slopes_wanted
        )
        if not slopes_wanted:
            dslopes = dright = None
        return dq, dk, dv, dslopes, dright if saved[6] is not None else None, *[None] * 9

    @forward_op.register_fake
    def fake_forward(query, key, *_rest):  # type: ignore[no-untyped-def]
        work = torch.promote_types(query.dtype, torch.float32)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return output, query.new_empty(query.shape[:3], dtype=work), *empty_plan(query, key)

    backward_op.register_fake(_fake_backward)
    forward_op.register_autograd(differentiate, setup_context=save)

    def run(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, lse)"""
        output, lse, *_ = forward_op(
            query, key, value, spec.slopes, spec.right_slopes, first_positions(spec, query.device), spec.key_mask,
            spec.query_segments, spec.key_segments, spec.causal, spec.window, spec.scale, spec.tolerance,
            spec.return_lse,
        )  # fmt: skip
        return output, lse if spec.return_lse else None

    return run


def described(spec: Spec, query: Tensor, key: Tensor) -> Spec:
    """The description as it arrives inside of an operator: an offset that is one number is an int."""
    masks = spec.key_mask, spec.query_segments, spec.key_segments
    first = first_positions(spec, query.device)
    numbers = spec.causal, spec.window, spec.scale, spec.tolerance
    return _spec(query, key, spec.slopes, spec.right_slopes, first, masks, *numbers)


def clean(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(query, key, value, poison): finite, with a last stride of 1, and fp16 as fp32; see `visibility.without_bad_keys`."""
    if query.dtype == torch.float16:  # torch's fp16 backward is ten times slower than fp32
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = (_rows(x) for x in (query, key, value))
    if are_finite(query, key, value):
        return query, key, value, None
    sees_any = rows_that_see(spec, torch.ones(spec.batch, spec.num_heads, spec.key_len, dtype=torch.bool))
    query = query.masked_fill(~sees_any[..., None], 0.0)
    bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    sees_bad = rows_that_see(spec, bad.repeat_interleave(spec.group, 1))
    poison = torch.zeros(sees_bad.shape).masked_fill(sees_bad, math.nan)
    return query, key.masked_fill(bad[..., None], 0.0), value.masked_fill(bad[..., None], 0.0), poison


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _spec(
    query: Tensor, key: Tensor, slopes: Tensor, right_slopes: Tensor | None, first: Tensor,
    masks: tuple[Tensor | None, Tensor | None, Tensor | None], causal: bool, window: int | None, scale: float,
    tolerance: float,
) -> Spec:  # fmt: skip
    """The description, back from what an operator can carry."""
    b, h, t, d = query.shape
    key_mask, query_segments, key_segments = masks
    return AttentionSpec(
        batch=b, num_heads=h, num_kv_heads=key.shape[1], query_len=t, key_len=key.shape[2], head_dim=d,
        slopes=slopes, right_slopes=right_slopes, causal=causal, window=window, scale=scale,
        query_offset=int(first) if first.numel() == 1 else first, key_mask=key_mask, query_segments=query_segments,
        key_segments=key_segments, tolerance=tolerance,
    )  # fmt: skip


def _fake_backward(grad_output, grad_lse, query, key, value, output, lse, slopes, right_slopes, *_rest):  # type: ignore[no-untyped-def]
    right = slopes.shape if right_slopes is None or right_slopes.ndim == slopes.ndim else right_slopes.shape
    return (
        *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)),
        slopes.new_empty(slopes.shape),
        slopes.new_empty(right if right_slopes is not None else slopes.shape[-1:]),
    )
