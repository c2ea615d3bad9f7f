"""Linear layers on a CPU, with the fastest kernel available on this processor: the same weights and sums, in another order.

* Without gradients and with few rows, as in decoding, the cost is reading the weights once: our own kernel does that.
* Without gradients, in fp32: torch uses MKL, which runs its AVX2 code, at half the matrix rate, on non-Intel processors
  with AVX-512. oneDNN, which ships with torch, does not have this problem.
* bf16 and fp16 on processors without such products: torch's products are 8 to 80 times slower than fp32 there, and
  slowest in backward. The product of two such numbers is exact in fp32, so they are widened, multiplied in fp32 and
  rounded once, as on a processor with such products.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_attn import processor
from alibi_attn.attention.backends.native import decoding as native
from alibi_attn.attention.call.transforms import is_traced, may_read

_SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_WIDENED_AT_ONCE = 1 << 20  # weights: in fp32 they fit the cache, and their memory is reused
_MAX_ROWS = native.MAX_ROWS


class Linear(nn.Linear):
    """An `nn.Linear` that uses the fastest kernel on a CPU, and torch's own everywhere else."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RoundedLinear(nn.Linear):
    """An `nn.Linear` that gives the bits of a processor with half-precision products on every CPU; otherwise torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, rounded=True)


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Replaces the forward of an `nn.Linear` instance."""
    product = quicker(input, self.weight, self.bias)
    return type(self).forward(self, input) if product is None else product


def mapped(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, with the fastest kernel if `module` is a plain `nn.Linear` on a CPU.

    Models keep torch's own linear layers this way, so that they can be quantized, adapted or hooked by class. A module of
    another class, with its own forward or with hooks is called directly.
    """
    if is_traced() or type(module) is not nn.Linear or "forward" in vars(module) or _is_hooked(module):
        return module(x)
    return linear(x, module.weight, module.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rounded: bool = False) -> Tensor:
    """`torch.nn.functional.linear`: x·weightᵀ + bias, [..., outputs], with the fastest kernel on a CPU.

    Args:
        x: [..., inputs].
        weight, bias: [outputs, inputs] and [outputs], in x's dtype, or any dtype that autocast casts.
        rounded: use torch, except for half-precision products that the processor does not have, which are widened.
    """
    product = quicker(x, weight, bias, rounded=rounded)
    return F.linear(x, weight, bias) if product is None else product


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """`torch.matmul`; half precision on a CPU without such products is computed in fp32 and rounded once."""
    if left.device.type != "cpu" or left.dtype != right.dtype or not is_slow(left.dtype):
        return left @ right
    return (left.float() @ right.float()).to(left.dtype)


def quicker(x: Tensor, weight: Tensor, bias: Tensor | None, *, rounded: bool = False) -> Tensor | None:
    """`linear`, or None if `torch.nn.functional.linear` should run because it is as fast or must raise the error.

    None under transforms and torch.compile, on other devices, for dtypes other than fp32, bf16 and fp16, and with gradients
    or autocast, except for half-precision products that the processor does not have.
    """
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not may_read(*tensors) or torch._C._len_torch_dispatch_stack():
        return None  # a dispatch mode counts or traces torch's operations
    if x.numel() == 0 or x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[-1]:
        return None  # torch handles these, or raises an error
    if bias is not None and bias.shape != weight.shape[:1]:
        return None  # likewise
    work = _dtype(*tensors)
    if work is None:
        return None
    rows = x.numel() // x.shape[-1]
    if rounded or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        widens = is_slow(work) and (rounded or rows > _MAX_ROWS)
        return _differentiable(work, *tensors) if widens else None
    if rows > _MAX_ROWS and is_slow(work):
        return _widened(x, weight, bias)
    if not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        return None
    if rows <= _MAX_ROWS and native.takes(*tensors):
        return native.linear(x.contiguous(), weight, bias)
    if work == torch.float32 and mkl_is_slow() and torch._C._get_mkldnn_enabled():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
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
    """Whether torch uses MKL's AVX2 code for fp32 on a processor with AVX-512, and has oneDNN as an alternative."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or processor.is_intel():
        return False
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def _is_hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or torch.nn.modules.module._has_any_global_hook()


def _dtype(*tensors: Tensor) -> torch.dtype | None:
    """The dtype of the product: the common dtype, or autocast's; None if torch should handle the call."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes <= native.DTYPES.keys():
        return None
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return dtypes.pop() if len(dtypes) == 1 else None


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in fp32, rounded once to the common dtype."""
    wide, at_once = x.float(), max(1, _WIDENED_AT_ONCE // weight.shape[1])
    product = weight.new_empty((*x.shape[:-1], len(weight)))
    for first in range(0, len(weight), at_once):
        some = slice(first, first + at_once)
        product[..., some] = F.linear(wide, weight[some].float(), None if bias is None else bias[some].float())
    return product


def _differentiable(work: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`_widened` with gradients in the same dtype; autocast widens them again for wider weights."""
    with torch.autocast("cpu", enabled=False):
        narrow = (x.to(work), weight.to(work), None if bias is None else bias.to(work))
        return _Widened.apply(*narrow)  # type: ignore[no-untyped-call]


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
