"""A forward and a backward as an autograd.Function, for ordinary tensors: it costs less beside the kernels than an operator does.

`custom_op.py` has the operator, for whatever traces or maps a call or looks at its operators, and what is done to numbers in
either case. Inside of torch.func or of torch.compile nothing here is reached.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alibi_attn.attention.spec import DIFFERENTIABLE, AttentionSpec
from alibi_attn.attention.transforms import may_read
from alibi_attn.attention.visibility import plain_offset

Spec = AttentionSpec[Tensor]

# The fields of a description that may be tensors.
TENSORS = (*DIFFERENTIABLE, "query_offset", "key_mask", "query_segments", "key_segments", "dropout_seed")


class Kernels(NamedTuple):
    """What is computed, with no thought of autograd.

    Args:
        attended: (spec, query, key, value) -> (output, lse, saved, moderate), the first two as a user gets them.
        derived: (spec, saved, grad_output or None, grad_lse or None, (query, key, value), output, lse, slopes wanted, biases
            wanted, moderate) -> gradients of query, key, value, slopes, right slopes, key bias, query bias and table.
        derived_by_operator: the same, for tensors without values: compiled autograd traces the backward of what ran eagerly.
    """

    attended: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, Tensor], bool]]
    derived: Callable[..., tuple[Tensor | None, ...]]
    derived_by_operator: Callable[..., tuple[Tensor | None, ...]]


def is_eager(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all that comes in are ordinary tensors, and nobody traces, transforms or looks at operators."""
    if not may_read(query, key, value, *(x for x in _tensors(spec) if isinstance(x, Tensor))):
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and not torch._C._are_functorch_transforms_active()


def attend(kernels: Kernels, spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """(output, lse, or None where it is not asked for)."""
    if isinstance(spec.query_offset, Tensor):
        spec = dataclasses.replace(spec, query_offset=plain_offset(spec.query_offset.reshape(-1)))
    inputs = query, key, value, *(getattr(spec, name) for name in DIFFERENTIABLE)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        output, lse = _Attention.apply(kernels, spec, *inputs)  # type: ignore[no-untyped-call]
    else:
        output, lse, *_ = kernels.attended(spec, query, key, value)
    return output, lse if spec.return_lse else None


def _tensors(spec: Spec) -> list[Any]:
    return [getattr(spec, name) for name in TENSORS]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, spec: Spec, query: Tensor, key: Tensor, value: Tensor, *biases: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        output, lse, saved, ctx.moderate = kernels.attended(spec, query, key, value)
        # Tensors are kept by autograd alone, which sees to it that they are neither changed nor kept for too long.
        tensors = {name: x for name, x in zip(TENSORS, _tensors(spec), strict=True) if isinstance(x, Tensor)}
        ctx.kernels, ctx.names = kernels, list(tensors)
        without: dict[str, Any] = dict.fromkeys(tensors)
        ctx.spec = dataclasses.replace(spec, tolerance=0.0, **without)  # what is visited has been decided
        ctx.save_for_backward(query, key, value, output, lse, *saved, *tensors.values())
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, visited, rows, *tensors = ctx.saved_tensors  # once: hooks may make them anew
        spec = dataclasses.replace(ctx.spec, **dict(zip(ctx.names, tensors, strict=True)))
        *_, slopes, right_slopes, key_bias, query_bias, table = ctx.needs_input_grad
        derived = ctx.kernels.derived if may_read(output, visited) else ctx.kernels.derived_by_operator
        gradients = derived(
            spec, (visited, rows), grad_output, grad_lse, (query, key, value), output, lse, slopes or right_slopes,
            key_bias or query_bias or table, ctx.moderate,
        )  # fmt: skip
        return None, None, *gradients
