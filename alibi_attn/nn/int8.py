"""Linear layers in int8 on a CPU, for inference: weights with one scale per output, activations with one scale per token.

    y = scale_x·scale_w·(q_x·q_wᵀ) + bias,   q_w = round(w/scale_w), scale_w = max|w|/127 per row;   q_x likewise per token

The product is exact in int32, computed by oneDNN (`torch.ops.onednn.qlinear_pointwise`) with the processor's VNNI or AMX
instructions. The only copy of the weights is the packed int8 one. Only linear layers change: attention, norms and embeddings keep
the model's dtype.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LARGEST = 127
_SHIFT = 128  # oneDNN's activations are unsigned: q + 128, with 128 as the zero point
_MOST_INPUTS = (2**31 - 1) // (255 * _LARGEST)  # more can overflow the sums in int32
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Int8Linear(nn.Module):
    """The int8 version of an `nn.Linear`. It stays on the CPU and has no gradients.

    Args:
        linear: its weights are copied.

    Attributes:
        blocks: the address of the packed codes if they are [outputs / 64, inputs / 4, 64, 4], for kernels of few rows; else 0.
        sums: [outputs] int32: 128 times the sum of each output's codes.

    Raises:
        ValueError: see `check_supported`; or weights that are not finite, or too large or too many for exact sums; or hooks.

    >>> layer = nn.Linear(64, 32)
    >>> x = torch.ones(5, 64)
    >>> bool((Int8Linear(layer)(x) - layer(x)).abs().max() < 0.02)
    True
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        check_supported()
        weight = _checked_weights(linear)
        self.out_features, self.in_features = weight.shape
        self.scales = (weight.abs().amax(1) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        self.bias = None if linear.bias is None else linear.bias.detach().to("cpu", torch.float32)
        self._pack((weight / self.scales[:, None]).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], in x's dtype. A token with inf or NaN gives NaN in all outputs."""
        if not x.is_floating_point() or x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"the input has shape {tuple(x.shape)} and dtype {x.dtype}, but an int8 linear layer takes real floating-point "
                f"numbers, [..., {self.in_features}]"
            )
        if x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
            raise ValueError(
                f"int8 linear layers run on a CPU without gradients, but the input is on {x.device}"
                f"{' and requires gradients' * x.requires_grad}; call the model under torch.no_grad(), or load it without int8"
            )
        rows = x.detach().reshape(-1, self.in_features).float()
        if not len(rows):
            return x.new_zeros((*x.shape[:-1], self.out_features))
        scale = (rows.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        scale = scale.masked_fill(scale.isinf(), torch.nan)  # inf has no code, so its product's sign is unknown
        codes = (rows / scale).round_().add_(_SHIFT).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, _SHIFT, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y = y.mul_(scale) if self.bias is None else y.mul_(scale).add_(self.bias)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def codes(self) -> Tensor:
        """The weights [outputs, inputs] in int8, unpacked."""
        dense: Tensor = self.packed.to_dense().t()
        return dense.contiguous()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in vars(self).items() if name not in ("packed", "zeros", "sums", "blocks")},
            "codes": self.codes(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = state.pop("codes")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack(codes)

    def _pack(self, codes: Tensor) -> None:
        self.packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self.zeros = torch.zeros(self.out_features, dtype=torch.int64, device=codes.device)
        self.sums = codes.sum(1, dtype=torch.int32) * _SHIFT
        self.blocks = _address_of_blocks(self.packed, codes)

    def _apply(self, fn: Any, recurse: bool = True) -> "Int8Linear":
        """Called by Module.to, .half and so on: changes nothing."""
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        tensors = {"codes": self.codes(), "scales": self.scales, "bias": self.bias}
        destination.update({prefix + name: tensor for name, tensor in tensors.items() if tensor is not None})


def check_supported() -> None:
    """Raises ValueError if torch has no exact int8 products here: 8-bit sums saturate on processors without VNNI."""
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    if not has_vnni or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_prepack"):
        raise ValueError(
            "int8 needs an x86 processor with VNNI instructions and a torch build with oneDNN; use bfloat16 or float32"
        )


def convert(model: nn.Module, kinds: tuple[type[nn.Linear], ...] = (nn.Linear,)) -> list[str]:
    """Replaces the linear layers inside a model in place, frees their weights, and returns their names.

    Layers of other classes, or whose forward was replaced, are not changed; none is, if one cannot be.
    """
    named = [
        (name, layer) for name, layer in model.named_modules() if type(layer) in kinds and "forward" not in vars(layer)
    ]
    check_supported()
    for _, layer in named:
        _checked_weights(layer)
    for name, layer in named:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Int8Linear(layer))
    return [name for name, _ in named]


def _checked_weights(linear: nn.Linear) -> Tensor:
    if not 1 <= linear.in_features <= _MOST_INPUTS:
        raise ValueError(
            f"a linear layer has {linear.in_features:,} inputs, but int8 takes 1 to {_MOST_INPUTS:,}; "
            "use bfloat16 or float32"
        )
    hooks = [name.strip("_") for name in _HOOKS if vars(linear)[name]]
    if hooks:
        raise ValueError(
            f"a linear layer has {' and '.join(hooks)}, which its int8 version would lose; remove them (or the tool that "
            "registered them), then convert"
        )
    bias = linear.bias
    if bias is not None and not bool(torch.isfinite(bias.detach().to("cpu", torch.float32)).all()):
        raise ValueError(
            "the bias of a linear layer is not finite in fp32, in which int8 adds it; check the checkpoint"
        )
    weight: Tensor = linear.weight.detach().to("cpu", torch.float32)
    if not bool(torch.isfinite(weight.abs().sum(1) * (2 * _SHIFT)).all()):  # rounding at most doubles a sum
        raise ValueError("the weights of a linear layer are not finite, or overflow fp32 in int8; check the checkpoint")
    return weight


def _address_of_blocks(packed: Tensor, codes: Tensor) -> int:
    """Where oneDNN keeps the codes, if it keeps them in blocks of 64 outputs and 4 inputs; else 0. Compares all of them."""
    outputs, inputs = codes.shape
    if outputs % 64 or inputs % 4 or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return 0
    address: int = torch.ops.mkldnn.data_ptr(packed)
    if torch.ops.mkldnn._nbytes(packed) < codes.numel():
        return 0
    stored = np.ctypeslib.as_array((ctypes.c_int8 * codes.numel()).from_address(address))
    expected = codes.unflatten(0, (-1, 64)).unflatten(2, (-1, 4)).transpose(1, 2).flatten()
    return address if np.array_equal(stored, expected.numpy()) else 0
