"""Linear maps on a CPU, by what is quickest there: the same weights and sums, in another order.

* Without gradients, a few rows, as in decoding, take as long as it takes to read the weights once: a kernel of ours.
* Without gradients, fp32: torch multiplies by MKL, which takes its code for AVX2, at half of the matrix rate, on processors
  with AVX-512 that are not Intel's. oneDNN, which torch brings along, does not.
* bf16 and fp16 where the processor has no products of them: torch's are 8 to 80 times slower than fp32's there, and slowest in
  backward. A product of two such numbers is exact in fp32, so they are widened, multiplied in fp32 and rounded once, which is
  what a processor with such products does.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_attn import processor
from alibi_attn.attention.backends.native import decoding as native
from alibi_attn.attention.transforms import is_traced, may_read

_SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_WIDENED_AT_ONCE = 1 << 20  # weights: in fp32 they stay in the cache, and in memory that is used again
_MAX_ROWS = native.MAX_ROWS


class Linear(nn.Linear):
    """An `nn.Linear` that on a CPU computes by what is quickest there; elsewhere, and where torch is to be asked, as its own."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RoundedLinear(nn.Linear):
    """An `nn.Linear` with torch's products, and in half precision with those of a processor that has them, on every CPU."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, rounded=True)


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """In the place of an `nn.Linear`'s own forward."""
    product = quicker(input, self.weight, self.bias)
    return type(self).forward(self, input) if product is None else product


def mapped(module: nn.Module, x: Tensor) -> Tensor:
    """What `module(x)` gives; of a plain `nn.Linear` on a CPU by what is quickest there.

    So models have the linear layers that torch has, by whose class others quantize them, adapt them or watch them. What has
    another class, a forward of its own or hooks is called.
    """
    if is_traced() or type(module) is not nn.Linear or "forward" in vars(module) or _is_hooked(module):
        product: Tensor = module(x)
        return product
    return linear(x, module.weight, module.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rounded: bool = False) -> Tensor:
    """`torch.nn.functional.linear`: x·weightᵀ + bias, [..., outputs], on a CPU by what is quickest there.

    Args:
        x: [..., inputs].
        weight, bias: [outputs, inputs] and [outputs], of x's dtype, or as autocast takes them.
        rounded: by torch, but for products in half precision that the processor does not have: these are widened.
    """
    product = quicker(x, weight, bias, rounded=rounded)
    return F.linear(x, weight, bias) if product is None else product


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """`torch.matmul`; on a CPU without products of their half precision in fp32, rounded once."""
    if left.device.type != "cpu" or left.dtype != right.dtype or not is_slow(left.dtype):
        return left @ right
    return (left.float() @ right.float()).to(left.dtype)


def quicker(x: Tensor, weight: Tensor, bias: Tensor | None, *, rounded: bool = False) -> Tensor | None:
    """As `linear`, or None where `torch.nn.functional.linear` is to be taken: where it is as quick, or has to answer or refuse.

    That is under transforms and torch.compile, on other devices, for other dtypes than fp32, bf16 and fp16, and with gradients
    or autocast for all but products in half precision that the processor does not have.
    """
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not may_read(*tensors) or torch._C._len_torch_dispatch_stack():
        return None  # the latter counts or traces what torch computes
    if x.numel() == 0 or x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[-1]:
        return None  # which torch answers, or refuses
    work = _dtype(*tensors)
    if work is None:
        return None
    rows = x.numel() // x.shape[-1]
    if rounded:
        return _differentiable(work, *tensors) if is_slow(work) else None
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return _differentiable(work, *tensors) if is_slow(work) and rows > _MAX_ROWS else None
    if rows > _MAX_ROWS and is_slow(work):
        return _widened(x, weight, bias)
    if not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        return None
    if rows <= _MAX_ROWS and native.takes(x, weight):
        return native.linear(x.contiguous(), weight, bias)
    if work == torch.float32 and mkl_is_slow() and torch._C._get_mkldnn_enabled():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return None


@functools.cache
def is_slow(dtype: torch.dtype) -> bool:
    """Whether torch's products of this dtype are many times slower than fp32's on this machine's processor."""
    if dtype not in _SUPPORTED:
        return False
    supported = getattr(torch.ops.mkldnn, _SUPPORTED[dtype], None)
    return supported is None or not supported()


@functools.cache
def mkl_is_slow() -> bool:
    """Whether torch multiplies fp32 by MKL's code for AVX2 on a processor with AVX-512, and has oneDNN to take instead."""
    ours = torch.backends.cpu.get_cpu_capability() == "AVX512" and not processor.is_intel()
    return ours and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def _is_hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or torch.nn.modules.module._has_any_global_hook()


def _dtype(*tensors: Tensor) -> torch.dtype | None:
    """What is multiplied: the one dtype that all have, or autocast's if that narrows them; None for torch to answer."""
    found = {tensor.dtype for tensor in tensors}
    if not found <= native.DTYPES.keys() | _SUPPORTED.keys():
        return None
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return found.pop() if len(found) == 1 else None


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rounded once, to the dtype of all three."""
    wide, outputs = x.float(), len(weight)
    at_once = max(1, _WIDENED_AT_ONCE // weight.shape[1])
    if outputs <= at_once:
        return F.linear(wide, weight.float(), None if bias is None else bias.float()).to(weight.dtype)
    product = weight.new_empty((*x.shape[:-1], outputs))
    for first in range(0, outputs, at_once):
        some = slice(first, first + at_once)
        product[..., some] = F.linear(wide, weight[some].float(), None if bias is None else bias[some].float())
    return product


def _differentiable(work: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`_widened` with gradients in the same dtype, which autocast widens again where weights are wider."""
    with torch.autocast("cpu", enabled=False):
        narrow = (x.to(work), weight.to(work), None if bias is None else bias.to(work))
        product: Tensor = _Widened.apply(*narrow)  # type: ignore[no-untyped-call]
        return product


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _widened(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.float().flatten(0, -2)
        return (
            (rows @ weight.float()).to(x.dtype).view(x.shape) if of_x else None,
            (rows.T @ x.float().flatten(0, -2)).to(weight.dtype) if of_weight else None,
            rows.sum(0).to(weight.dtype) if of_bias else None,
        )
