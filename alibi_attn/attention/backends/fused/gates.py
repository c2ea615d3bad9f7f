"""Forget gates on a GPU: two kernels in place of some forty torch operations in fp64."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alibi_attn.attention.backends.fused.configs import width_for
from alibi_attn.attention.backends.fused.launch import NONE, constants, launch, number, pointer, rows_of
from alibi_attn.attention.call.spec import GATE_FLOOR, GATE_STEP
from alibi_attn.attention.call.transforms import in_memory


def gate_biases(
    log_fgate: Tensor, key_bias: Tensor | None, *, num_heads: int, first: int, query_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(key_bias [B, H, S] and query_bias [B, H, T] in fp64, query_start [B, H, T]) of gates [B, H or K, S].

    Args:
        key_bias: [B, H, S], the keys' own biases.
        first: the position of query 0.
    """
    biases: tuple[Tensor, Tensor, Tensor] = _GateBiases.apply(log_fgate, key_bias, num_heads, first, query_len)  # type: ignore[no-untyped-call]
    return biases


class _GateBiases(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_fgate: Tensor, key_bias: Tensor | None, num_heads: int, first: int, query_len: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from alibi_attn.attention.backends.fused.kernels.gates import scan_kernel

        log_fgate, key_bias = in_memory(log_fgate), None if key_bias is None else in_memory(key_bias)
        (b, rows, s), device = log_fgate.shape, log_fgate.device
        bias = torch.empty((b, num_heads, s), dtype=torch.float64, device=device)
        query_bias = torch.empty((b, num_heads, query_len), dtype=torch.float64, device=device)
        start = torch.empty((b, num_heads, query_len), dtype=torch.int64, device=device)
        if bias.numel() > 0:
            of_kernel = constants(WIDTH=width_for(s, most=1024), FLOOR=GATE_FLOOR, STEP=GATE_STEP)
            own = NONE if key_bias is None else rows_of(key_bias)
            arguments = *map(pointer, (bias, query_bias, start)), *map(number, (first, rows, num_heads, query_len, s))
            launch(device, scan_kernel, (b * rows, 1, 1), of_kernel, rows_of(log_fgate), own, *arguments)
        ctx.save_for_backward(log_fgate)
        ctx.first, ctx.own_dtype = first, None if key_bias is None else key_bias.dtype
        ctx.mark_non_differentiable(start)
        ctx.set_materialize_grads(False)
        return bias, query_bias, start

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkey: Tensor | None, dquery: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        from alibi_attn.attention.backends.fused.kernels.gates import suffix_kernel

        (log_fgate,) = ctx.saved_tensors
        of_own = None if dkey is None or ctx.own_dtype is None else dkey.to(ctx.own_dtype)
        given = dkey if dkey is not None else dquery
        if given is None or not ctx.needs_input_grad[0]:
            return None, of_own, None, None, None
        b, rows, s = log_fgate.shape
        dgates = torch.empty((b, rows, s), dtype=log_fgate.dtype, device=log_fgate.device)
        dkey, dquery = (None if x is None else in_memory(x).contiguous() for x in (dkey, dquery))
        query_len = 0 if dquery is None else dquery.shape[2]
        if dgates.numel() > 0:
            of_kernel, device = constants(WIDTH=width_for(s, most=1024), FLOOR=GATE_FLOOR), log_fgate.device
            numbers = ctx.first, rows, given.shape[1], query_len, s
            arguments = *map(pointer, (dkey, dquery, dgates)), *map(number, numbers)
            launch(device, suffix_kernel, (b * rows, 1, 1), of_kernel, rows_of(log_fgate), *arguments)
        return dgates, of_own, None, None, None
