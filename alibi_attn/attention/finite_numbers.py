"""CPU kernels that support neither NaN nor fp16: their inputs are made finite, then NaN reaches the queries that see it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from alibi_attn.attention.schema import Arguments, BackwardInputs, Gradients, Kernels, Saved, Spec, Tensors
from alibi_attn.attention.visibility import in_rows, rounded_lse, row_major, without_bad_numbers

Forward = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Saved]]
Backward = Callable[[Spec, Saved, BackwardInputs], Gradients]


def on_finite_numbers(
    name: str, forward: Forward, backward: Backward, empty_saved: Callable[[Arguments], Saved]
) -> Kernels:
    """Builds CPU kernels from two functions that support neither NaN nor fp16: they get finite tensors only.

    Args:
        forward: (spec, query, key, value) -> (output, lse, saved), all tensors finite and with a last stride of 1; lse without
            the query's bias, −inf if a query sees no key. output and lse in fp32 or better.
        backward: its inputs are finite too; a query that sees no key has lse 0, and its incoming gradients are 0.
    """

    def attend(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensors, bool]:
        q, k, v, poison, moderate = without_bad_numbers(spec, query, key, value)
        output, lse, saved = forward(spec, q, k, v)
        if poison is not None:
            output += poison[..., None]
            lse += poison
        if spec.query_bias is not None:
            lse = lse + spec.query_bias
        return output.to(query.dtype), rounded_lse(spec, query, lse), saved, moderate

    def differentiate(spec: Spec, saved: Tensors, inputs: BackwardInputs) -> Gradients:
        query, key, value = inputs[:3]
        if inputs.moderate:
            q, k, v = in_rows(query, key, value)
        else:
            q, k, v, *_ = without_bad_numbers(spec, query, key, value)
        grad, lse, grad_lse = row_major(inputs.grad_output.to(q.dtype)), inputs.lse, inputs.grad_lse
        if inputs.may_see_nothing and bool((blind := lse == -math.inf).any()):
            # The incoming gradient of a query that sees no key has no effect; with lse 0 its weights are exp(−inf) = 0.
            lse, grad = lse.masked_fill(blind, 0.0), grad.masked_fill(blind[..., None], 0.0)
            grad_lse = None if grad_lse is None else grad_lse.masked_fill(blind, 0.0)
        return backward(
            spec,
            Saved(*saved),
            inputs._replace(
                query=q, key=k, value=v, output=inputs.output.to(q.dtype), lse=lse, grad_output=grad, grad_lse=grad_lse
            ),
        )

    return Kernels(
        name, attend, differentiate, lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device), empty_saved
    )
