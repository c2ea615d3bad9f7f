"""Linear layers in int8, or on a GPU also in float8 (e4m3), for inference: one scale per output, and one per token.

    y = scale_x·scale_w·(q_x·q_wᵀ) + bias,   q_w = round(w/scale_w), scale_w = max|w|/L per row;   q_x likewise per token

L is the largest code, 127 or 448. `_PRODUCTS` lists what computes q_x·q_wᵀ on which device: torch's own products, in int32
exactly, of float8 in fp32 and rounded to bf16. The only copy of the weights is the packed one. Only linear layers change:
attention, norms and embeddings keep the model's dtype.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["int8", "float8"]
_LARGEST: Mapping[Kind, int] = {"int8": 127, "float8": 448}
_DTYPES: Mapping[Kind, torch.dtype] = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
_SHIFT = 128  # oneDNN's activations are unsigned: q + 128, with 128 as the zero point
_MOST_INPUTS = (2**31 - 1) // (255 * 127)  # more can overflow the sums in int32
_MULTIPLE, _LEAST_ROWS = 16, 32  # of inputs, outputs and tokens, and the fewest tokens, of torch's products on CUDA
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class QuantizedLinear(nn.Module):
    """The version of an `nn.Linear` in int8 or float8, on the same device. It has no gradients.

    Args:
        linear: its weights are copied.

    Attributes:
        blocks: the address of the packed codes if they are [outputs / 64, inputs / 4, 64, 4], for kernels of few rows; else 0.
        sums: [outputs] int32: 128 times the sum of each output's codes; empty on a GPU.

    Raises:
        ValueError: see `check_supported`; or weights that are not finite, or too large or too many for exact sums; or hooks.

    >>> layer = nn.Linear(64, 32)
    >>> x = torch.ones(5, 64)
    >>> bool((QuantizedLinear(layer)(x) - layer(x)).abs().max() < 0.02)
    True
    """

    packed: Tensor
    zeros: Tensor
    weight = None  # T5's feed-forward casts to the dtype of its weights if there are any

    def __init__(self, linear: nn.Linear, kind: Kind = "int8") -> None:
        super().__init__()
        check_supported(kind, linear.weight.device)
        weight = _checked_weights(linear, kind)
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        self.scales = _scales(weight.abs().amax(1), kind)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self._place(_codes(weight, self.scales[:, None], kind), linear.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], in x's dtype. A token with inf or NaN gives NaN in all outputs."""
        if not x.is_floating_point() or x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"the input has shape {tuple(x.shape)} and dtype {x.dtype}, but a linear layer in {self.kind} takes real "
                f"floating-point numbers, [..., {self.in_features}]"
            )
        if x.device != self.scales.device or (x.requires_grad and torch.is_grad_enabled()):
            raise ValueError(
                f"a linear layer in {self.kind} runs on its device, {self.scales.device}, without gradients, but the input is on "
                f"{x.device}{' and requires gradients' * x.requires_grad}; call the model under torch.no_grad(), with inputs on "
                f"its device, or load it without {self.kind}"
            )
        rows = x.detach().reshape(-1, self.in_features)
        if not len(rows):
            return x.new_zeros((*x.shape[:-1], self.out_features))
        y = _PRODUCTS[self.kind, x.device.type].multiply(self, rows)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"kind={self.kind!r}"
        )

    def codes(self) -> Tensor:
        """The weights [outputs, inputs] in int8 or float8, unpacked."""
        if self.packed.is_mkldnn:
            dense: Tensor = self.packed.to_dense().t()
            return dense.contiguous()
        return self.packed[: self.out_features, : self.in_features].contiguous()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in vars(self).items() if name not in ("packed", "zeros", "sums", "blocks")},
            "codes": self.codes(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = state.pop("codes")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._place(codes, codes.device)

    def _place(self, codes: Tensor, device: torch.device) -> None:
        """Moves the layer to a device."""
        self.scales = self.scales.to(device)
        self.bias = None if self.bias is None else self.bias.to(device)
        self.blocks, self.sums = 0, torch.empty(0, dtype=torch.int32)
        _PRODUCTS[self.kind, device.type].pack(self, codes.to(device))

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        """Called by Module.to, .half and so on: moves to the device, and keeps every dtype."""
        device = fn(self.scales.new_empty(0)).device
        if device != self.scales.device:
            check_supported(self.kind, device)
            self._place(self.codes(), device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        tensors = {"codes": self.codes(), "scales": self.scales, "bias": self.bias}
        destination.update({prefix + name: tensor for name, tensor in tensors.items() if tensor is not None})


def check_supported(kind: Kind = "int8", device: torch.device | str = "cpu") -> None:
    """Raises ValueError if torch has no such products on a device. On processors without VNNI, sums of 8 bits saturate."""
    device = torch.device(device)
    product = _PRODUCTS.get((kind, device.type))
    known = " or ".join(each.needs for (of, _), each in _PRODUCTS.items() if of == kind)
    use = "use " + "int8, " * (kind == "float8") + "bfloat16 or float32"
    if product is None:
        raise ValueError(f"{kind} needs {known}, but the device is {str(device)!r}; {use}")
    if device.type == "cpu":
        has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
        if not has_vnni or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_prepack"):
            raise ValueError(f"{kind} needs {known}, but this processor or this build of torch is another; {use}")
        return
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or found < product.capability:
        what = "AMD's" if torch.version.hip is not None else "of {}.{}".format(*found)
        raise ValueError(f"{kind} needs {known}, but {str(device)!r} is {what}; {use}")


def convert(model: nn.Module, kinds: tuple[type[nn.Linear], ...] = (nn.Linear,), *, kind: Kind = "int8") -> list[str]:
    """Replaces the linear layers inside a model in place, frees their weights, and returns their names.

    Layers of other classes, or whose forward was replaced, are not changed; none is, if one cannot be.
    """
    named = [
        (name, layer) for name, layer in model.named_modules() if type(layer) in kinds and "forward" not in vars(layer)
    ]
    for device in {layer.weight.device for _, layer in named} or {"cpu"}:
        check_supported(kind, device)
    for _, layer in named:
        _checked_weights(layer, kind)
    for name, layer in named:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, QuantizedLinear(layer, kind))
    return [name for name, _ in named]


def _checked_weights(linear: nn.Linear, kind: Kind) -> Tensor:
    """The weights in fp32. A GPU divides as a CPU does, so codes do not depend on the device."""
    if not 1 <= linear.in_features <= _MOST_INPUTS:
        raise ValueError(
            f"a linear layer has {linear.in_features:,} inputs, but {kind} takes 1 to {_MOST_INPUTS:,}; "
            "use bfloat16 or float32"
        )
    hooks = [name.strip("_") for name in _HOOKS if vars(linear)[name]]
    if hooks:
        raise ValueError(
            f"a linear layer has {' and '.join(hooks)}, which its {kind} version would lose; remove them (or the tool that "
            "registered them), then convert"
        )
    bias = linear.bias
    if bias is not None and not bool(torch.isfinite(bias.detach().float()).all()):
        raise ValueError(
            f"the bias of a linear layer is not finite in fp32, in which {kind} adds it; check the checkpoint"
        )
    weight: Tensor = linear.weight.detach().float()
    if not bool(torch.isfinite(weight.abs().sum(1) * (2 * _SHIFT)).all()):  # rounding at most doubles a sum
        raise ValueError(
            f"the weights of a linear layer are not finite, or overflow fp32 in {kind}; check the checkpoint"
        )
    return weight


def _scales(largest: Tensor, kind: Kind) -> Tensor:
    """From the largest absolute number of each row in fp32. NaN for inf, which has no code, so its product's sign is unknown."""
    most = torch.full_like(
        largest, _LARGEST[kind]
    )  # CUDA multiplies by the reciprocal of a number, and divides by a tensor
    scales = (largest / most).clamp(min=torch.finfo(torch.float32).tiny)
    return scales.masked_fill(scales.isinf(), torch.nan)


def _codes(rows: Tensor, scales: Tensor, kind: Kind) -> Tensor:
    quotient = rows / scales
    return (quotient.round_() if kind == "int8" else quotient).to(_DTYPES[kind])


def _pack_for_onednn(layer: QuantizedLinear, codes: Tensor) -> None:
    layer.packed = torch.ops.onednn.qlinear_prepack(codes, None)
    layer.zeros = torch.zeros(layer.out_features, dtype=torch.int64)
    layer.sums = codes.sum(1, dtype=torch.int32) * _SHIFT
    layer.blocks = _address_of_blocks(layer.packed, codes)


def _by_onednn(layer: QuantizedLinear, rows: Tensor) -> Tensor:
    rows = rows.float()
    scales = _scales(rows.abs().amax(1, keepdim=True), "int8")
    codes = (rows / scales).round_().add_(_SHIFT).to(torch.uint8)
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, _SHIFT, layer.packed, layer.scales, layer.zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y.mul_(scales) if layer.bias is None else y.mul_(scales).add_(layer.bias)


def _pack_for_cuda(layer: QuantizedLinear, codes: Tensor) -> None:
    layer.packed = _padded(codes, rows=-len(codes) % _MULTIPLE)


def _by_int_mm(layer: QuantizedLinear, rows: Tensor) -> Tensor:
    codes, scales = _of_tokens(rows, "int8")
    sums = torch._int_mm(codes, layer.packed.t())[: len(rows), : layer.out_features]
    return _biased(layer, (sums * layer.scales).mul_(scales[: len(rows)]), rows)


def _by_scaled_mm(layer: QuantizedLinear, rows: Tensor) -> Tensor:
    codes, scales = _of_tokens(rows, "float8")
    y = torch._scaled_mm(
        codes,
        layer.packed.t(),
        scale_a=scales,
        scale_b=_padded(layer.scales[None]),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )[: len(rows), : layer.out_features]
    return _biased(layer, y, rows)


def _biased(layer: QuantizedLinear, y: Tensor, rows: Tensor) -> Tensor:
    """Adds the bias in fp32, and rounds to the dtype of the tokens in the same pass over memory."""
    return y if layer.bias is None else torch.add(y, layer.bias, out=rows.new_empty(y.shape))


def _of_tokens(rows: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """(codes, scales [..., 1]) of tokens [..., inputs], in shapes that torch's products on CUDA support."""
    rows = rows.float() if rows.dtype == torch.float64 else rows
    low, high = rows.aminmax(dim=1, keepdim=True)  # in one pass, with NaN
    scales = _scales(torch.maximum(high, -low).float(), kind)
    more = max(_LEAST_ROWS - len(rows), -len(rows) % _MULTIPLE)
    return _padded(_codes(rows, scales, kind).contiguous(), rows=more), _padded(scales, rows=more, columns=0)


def _padded(x: Tensor, *, rows: int = 0, columns: int | None = None) -> Tensor:
    """Zeros below, and on the right up to a multiple."""
    columns = -x.shape[1] % _MULTIPLE if columns is None else columns
    if not rows and not columns:
        return x
    if x.dtype == torch.float8_e4m3fn:  # zero is zero in both
        return F.pad(x.view(torch.int8), (0, columns, 0, rows)).view(x.dtype)
    return F.pad(x, (0, columns, 0, rows))


class _Product(NamedTuple):
    """What computes on a device, what it needs, and how.

    Args:
        pack: (layer, codes [outputs, inputs]) stores the weights.
        multiply: (layer, tokens [rows, inputs]) -> [rows, outputs].
        capability: of a GPU, the lowest.
    """

    needs: str
    pack: Callable[[QuantizedLinear, Tensor], None]
    multiply: Callable[[QuantizedLinear, Tensor], Tensor]
    capability: tuple[int, int] = (0, 0)


_PRODUCTS: dict[tuple[Kind, str], _Product] = {
    ("int8", "cpu"): _Product(
        "an x86 processor with VNNI instructions and a torch build with oneDNN", _pack_for_onednn, _by_onednn
    ),
    ("int8", "cuda"): _Product(
        "an NVIDIA GPU of compute capability 8.0 or later (torch._int_mm)", _pack_for_cuda, _by_int_mm, (8, 0)
    ),
    ("float8", "cuda"): _Product(
        "an NVIDIA GPU of compute capability 8.9 or later (torch._scaled_mm)", _pack_for_cuda, _by_scaled_mm, (8, 9)
    ),
}


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
