"""NaN, inf and huge numbers: inputs are made finite, and then NaN reaches the queries that see it.

`on_finite_numbers` does so for CPU kernels that support neither NaN nor fp16.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from alibi_attn.attention.call.visibility import keys_within_sight, per_query_head, rows_that_see
from alibi_attn.attention.operators.schema import Arguments, BackwardInputs, Gradients, Kernels, Saved, Spec, Tensors

Forward = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Saved]]
Backward = Callable[[Spec, Saved, BackwardInputs], Gradients]

MODERATE_SCALE = 256.0  # products of two moderate rows are finite even times this


def on_finite_numbers(
    name: str,
    forward: Forward,
    backward: Backward,
    empty_saved: Callable[[Arguments], Saved],
    *,
    infer: Forward | None = None,
) -> Kernels:
    """Builds CPU kernels from functions that support neither NaN nor fp16: they get finite tensors only.

    Args:
        forward: (spec, query, key, value) -> (output, lse, saved), all tensors finite and with a last stride of 1; lse without
            the query's bias, −inf if a query sees no key. output and lse in fp32 or better.
        backward: its inputs are finite too; a query that sees no key has lse 0, and its incoming gradients are 0.
        infer: as forward, for a call without gradients; None = forward.
    """

    def attend(
        spec: Spec, query: Tensor, key: Tensor, value: Tensor, compute: Forward = forward
    ) -> tuple[Tensor, Tensor, Tensors, bool]:
        q, k, v, poison, moderate = without_bad_numbers(spec, query, key, value)
        dtype = lse_dtype(spec, query.dtype)
        output, lse, saved = compute(spec, q, k, v)
        if poison is not None:
            output += poison[..., None]
            lse += poison
        if spec.query_bias is not None:
            lse = lse + spec.query_bias
        rounded = lse.to(dtype)
        if dtype != lse.dtype and not math.isfinite(rounded.sum()):
            # Overflowing numbers become the dtype's largest ones, because −inf means that a query sees no key.
            largest = torch.finfo(dtype).max
            rounded = lse.clamp(-largest, largest).to(dtype).masked_fill(lse == -math.inf, -math.inf)
        return output.to(query.dtype), rounded, saved, moderate

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
        name,
        attend,
        differentiate,
        lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        empty_saved,
        infer=lambda spec, query, key, value: attend(spec, query, key, value, infer or forward)[:2],
    )


def lse_dtype(spec: Spec, dtype: torch.dtype) -> torch.dtype:
    """fp64 if queries of this dtype or the key bias are, else fp32."""
    work = torch.promote_types(dtype, torch.float32)
    return work if spec.key_bias is None else torch.promote_types(work, spec.key_bias.dtype)


def without_bad_numbers(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """`guards.without_bad_keys` with memory linear in the length: (query, key, value, poison, moderate), see `in_rows`.

    NaN and inf in queries become zeros too. Large finite numbers stay, except in keys that no query sees. Moderate keys all
    stay: their norms may bound a reach, which must not depend on what else is in the batch.
    """
    query, key, value = in_rows(query, key, value)
    if are_moderate(query, key, value):
        return query, key, value, None, True
    unused = ~(keys_within_sight(spec, key.device) | (_moderate_rows(key) & _moderate_rows(value)))[..., None]
    key, value = key.masked_fill(unused, 0.0), value.masked_fill(unused, 0.0)
    if all(bool(x.isfinite().all()) for x in (query, key, value)):
        return query, key, value, None, False
    every = torch.ones(spec.batch, spec.num_heads, spec.key_len, dtype=torch.bool, device=key.device)
    sees_any = rows_that_see(spec, every)
    spoiled = ~query.isfinite().all(-1)
    query = query.masked_fill(spoiled[..., None], 0.0)
    bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    spoiled = (spoiled & sees_any) | rows_that_see(spec, per_query_head(spec, bad))
    poison = torch.zeros(spoiled.shape, device=key.device).masked_fill(spoiled, torch.nan)
    return query, key.masked_fill(bad[..., None], 0.0), value.masked_fill(bad[..., None], 0.0), poison, False


def in_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors with a last stride of 1, and fp16 as fp32, because torch's fp16 backward is ten times slower."""
    if query.dtype == torch.float16:
        query, key, value = query.float(), key.float(), value.float()
    return row_major(query), row_major(key), row_major(value)


def row_major(x: Tensor) -> Tensor:
    """The tensor with a last stride of 1. A row that is expanded with stride 0 is copied: torch's product of such a matrix sums
    in a single chain, which loses four digits over thousands of equal numbers.
    """
    return x if x.stride(-1) == 1 and x.stride(-2) != 0 else x.contiguous()


def are_moderate(*tensors: Tensor) -> bool:
    """True only if all numbers are finite, and so small that no inner product of two such rows overflows; reads the tensors."""
    return all(_is_moderate(x.detach()) for x in tensors)


def _is_moderate(x: Tensor) -> bool:
    """Uses torch's fastest reduction: the total norm, or extremes in half precision (norms are 30 times slower there).

    No number is larger than the norm, which is inf if a square overflows and NaN if a number is NaN.
    """
    if x.numel() == 0:
        return True
    if x.dtype in (torch.float16, torch.bfloat16):
        return all(abs(float(extreme)) * x.shape[-1] ** 0.5 <= _moderate_norm(x.dtype) for extreme in torch.aminmax(x))
    return float(torch.linalg.vector_norm(x)) <= _moderate_norm(x.dtype)


def _moderate_rows(x: Tensor) -> Tensor:
    """[...] bool: the rows [..., D] that are moderate, each by itself."""
    return x.abs().amax(-1) * x.shape[-1] ** 0.5 <= _moderate_norm(x.dtype)


@functools.cache
def _moderate_norm(dtype: torch.dtype) -> float:
    most: float = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    return (most / MODERATE_SCALE) ** 0.5
