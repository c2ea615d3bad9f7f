"""Eager calls of ordinary tensors skip torch's operator: an autograd.Function calls the same kernels with less overhead."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from alibi_attn.attention.call.spec import ARRAYS, DIFFERENTIABLE
from alibi_attn.attention.call.transforms import are_ordinary
from alibi_attn.attention.call.visibility import may_see_nothing, with_plain_offset
from alibi_attn.attention.operators.derivatives import last_gradients
from alibi_attn.attention.operators.schema import BackwardInputs, InputGradients, Kernels, Spec, Tensors

TracedGradients = Callable[[Spec, Tensors, BackwardInputs], InputGradients]


def is_eager(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all inputs are ordinary tensors without tangents, and the call is not being traced, transformed or profiled."""
    tensors = query, key, value, *_tensors(spec).values()
    if not are_ordinary(*tensors):
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return all(unpack_dual(x).tangent is None for x in tensors)


def attend_eagerly(
    kernels: Kernels, traced_gradients: TracedGradients, spec: Spec, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """(output, lse) of a call that `is_eager`.

    Args:
        traced_gradients: computes the gradients if compiled autograd traces them.
    """
    if query.is_cpu:
        spec = with_plain_offset(spec)
    if torch.is_grad_enabled() and requires_gradient(spec, query, key, value):
        return _apply(kernels, traced_gradients, spec, query, key, value, *(getattr(spec, x) for x in DIFFERENTIABLE))
    if kernels.infer is not None:
        return kernels.infer(spec, query, key, value)
    return kernels.forward(spec, query, key, value)[:2]


def requires_gradient(spec: Spec, *tensors: Tensor | None) -> bool:
    """Whether one of these tensors or of the spec's requires a gradient."""
    return any(x is not None and x.requires_grad for x in (*tensors, *(getattr(spec, x) for x in DIFFERENTIABLE)))


def _tensors(spec: Spec) -> dict[str, Tensor]:
    fields = vars(spec)
    return {name: x for name in ARRAYS if (x := fields[name]) is not None and isinstance(x, Tensor)}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        traced_gradients: TracedGradients,
        spec: Spec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *biases: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        output, lse, saved, ctx.moderate = kernels.forward(spec, query, key, value)
        # Only autograd holds tensors: it detects in-place changes and frees them in time.
        tensors = _tensors(spec)
        ctx.kernels, ctx.traced_gradients, ctx.names = kernels, traced_gradients, list(tensors)
        ctx.spec = spec.changed(**dict.fromkeys(tensors))
        ctx.save_for_backward(query, key, value, output, lse, *tensors.values(), *saved)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # only once: every access may run hooks
        if not torch.is_grad_enabled():
            return None, None, None, *_gradients(ctx, saved, grad_output, grad_lse)
        with torch.no_grad():
            gradients = _gradients(ctx, saved, grad_output, grad_lse)
        return None, None, None, *last_gradients(gradients, (grad_output, grad_lse, *saved[: 5 + len(ctx.names)]))


def _gradients(ctx: Any, saved: Tensors, grad_output: Tensor | None, grad_lse: Tensor | None) -> InputGradients:
    query, key, value, output, lse, *rest = saved
    spec = ctx.spec.changed(**dict(zip(ctx.names, rest, strict=False)))
    visited = tuple(rest[len(ctx.names) :])
    *_, slopes, right_slopes, key_bias, query_bias, table = ctx.needs_input_grad
    inputs = BackwardInputs(
        query,
        key,
        value,
        output,
        lse,
        torch.zeros_like(output) if grad_output is None else grad_output,
        grad_lse,
        slopes or right_slopes,
        key_bias or query_bias or table,
        may_see_nothing(spec),
        ctx.moderate,
    )
    if are_ordinary(output, visited[0]):
        return InputGradients.of(spec, inputs, ctx.kernels.backward(spec, visited, inputs))
    return ctx.traced_gradients(spec, visited, inputs)


_apply: Callable[..., tuple[Tensor, Tensor]] = _Attention.apply
