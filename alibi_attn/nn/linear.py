"""Linear maps without gradients on a CPU, by what is quickest there: the same weights and sums in fp32, in another order.

torch multiplies fp32 by MKL, which is at half of the matrix rate on processors of other makers, and one row by one thread.
oneDNN, which torch brings along, is not; and a few rows, as in decoding, take as long as it takes to read the weights once.
"""

import torch
from torch import Tensor, nn

from alibi_attn.attention.backends.native import decoding as native
from alibi_attn.attention.transforms import may_read


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x·weightᵀ + bias, [..., outputs], or None where `torch.nn.functional.linear` is to be taken.

    That is with gradients, autocast, transforms or torch.compile, on other devices, and for other dtypes than fp32 and bf16.

    Args:
        x: [..., inputs].
        weight, bias: [outputs, inputs] and [outputs], of x's dtype.
    """
    if torch.is_grad_enabled() or not may_read(x, weight) or torch.is_autocast_enabled("cpu"):
        return None
    if x.dtype not in native.DTYPES or x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    if bias is not None and (bias.dtype != x.dtype or not may_read(bias) or not bias.is_contiguous()):
        return None
    if torch._C._len_torch_dispatch_stack():
        return None  # somebody counts or traces what torch computes
    if x.numel() == 0 or x.shape[-1] != weight.shape[-1]:
        return None  # which torch answers, or refuses
    if x.numel() <= native.MAX_ROWS * x.shape[-1] and native.takes(x, weight):
        return native.linear(x.contiguous(), weight, bias)
    if x.dtype == torch.float32 and torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return None


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """In the place of an `nn.Linear`'s own forward."""
    product = linear(input, self.weight, self.bias)
    return type(self).forward(self, input) if product is None else product
