"""A decoding step of a patched model in one call: all layers for a few new tokens (`native/decoder_layers.cpp`).

Run module by module, a step costs more in Python and in torch's operators than reading the weights of a small model. The step
computes what the modules compute and rounds where they round. It supports a model whose modules are those it was loaded with,
unchanged except by `patch`; hooks, adapters, foreign quantized layers, gradients, autocast and so on run module by module. All
conditions are checked in every step, because models change.
"""

import ctypes
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from alibi_attn.attention.backends.native import decoder_layers as native
from alibi_attn.attention.backends.native.backend import WIDTH
from alibi_attn.attention.backends.native.build import Rows
from alibi_attn.attention.call.checks import default_tolerance
from alibi_attn.attention.call.transforms import is_traced, may_read, transforms
from alibi_attn.attention.call.validation import slopes_beside
from alibi_attn.attention.run.near_keys import Runs, visible_runs
from alibi_attn.hf.attention import patched_attention
from alibi_attn.hf.caches.cache import ALiBiCache
from alibi_attn.hf.readers.families.family import PatchedFamily
from alibi_attn.nn.linear import fastest
from alibi_attn.nn.linear.quantized import QuantizedLinear

_T = TypeVar("_T")
_GIVEN = ("input_ids", "past_key_values", "attention_mask", "use_cache", "return_dict")


class _NotSupported(Exception):
    """The modules must compute this step."""


def step(body: nn.Module, family: PatchedFamily, given: Mapping[str, Any]) -> Tensor | None:
    """The last hidden states [B, T, E] of new tokens, which are appended to the cache; None if the modules must run.

    Args:
        body: a patched model without its head.
        family: its family; without `step`, modules run.
        given: the arguments of its forward function by name.
    """
    ids, cache = given.get("input_ids"), given.get("past_key_values")
    if family.step is None or type(cache) is not ALiBiCache or type(ids) is not Tensor or ids.ndim != 2:
        return None
    if not 0 < ids.numel() <= native.MAX_ROWS:
        return None
    if torch.is_grad_enabled() or is_traced() or transforms() or torch._C._len_torch_dispatch_stack():
        return None
    if any(value is not None for name, value in given.items() if name not in _GIVEN and value is not False):
        return None
    if torch.is_autocast_enabled("cpu") or torch.nn.modules.module._has_any_global_hook():
        return None
    try:
        return _Step(body, family, given).run()
    except _NotSupported:
        return None


class _Step:
    def __init__(self, body: nn.Module, family: PatchedFamily, given: Mapping[str, Any]) -> None:
        _require(not body.training and not body.config.output_hidden_states)  # type: ignore[union-attr]
        names, ids, cache = _found(family.step), given["input_ids"], given["past_key_values"]
        self.family, self.names = family, names
        blocks, embedding = body._modules[names.blocks], body._modules[names.embedding]
        assert isinstance(blocks, nn.ModuleList)
        self.blocks = list(blocks._modules.values())
        self.batch, self.count = ids.shape
        self.storages = _found(cache.appendable([_part(block, names.attention) for block in self.blocks]))
        self.past = self.storages[0].length
        self.runs = self._visible(given.get("attention_mask"))
        _require(_is_unchanged(embedding, nn.Embedding))
        table = _found(embedding._parameters["weight"])  # type: ignore[union-attr]
        _require(native.supports(table.dtype) and may_read(ids, table))
        self.dtype, self.width = table.dtype, table.shape[1]
        self.x = embedding(ids).contiguous()  # type: ignore[misc]
        self.body = body
        self.settings = patched_attention.settings_of(_part(self.blocks[0], names.attention))
        self.residual_after_norm = self._has_residual_after_norm(self.blocks[0])

    def run(self) -> Tensor | None:
        names, first = self.names, self.names.first_norm
        # Of the keys before this step; they stay alive until it ends.
        norms = [storage.norms() for storage in self.storages]
        layers = (native.Layer * len(self.blocks))()
        for layer, block, known in zip(layers, self.blocks, norms, strict=True):
            self._fill(layer, block)
            keys, values = known.keys, known.values
            if keys.shape[2] and keys.stride() == values.stride() and keys.stride(2) == 1:  # else all keys are read
                layer.N, layer.norms_of_sequence, layer.norms_of_head = keys.shape[2], keys.stride(0), keys.stride(1)
                layer.key_norms, layer.value_norms = keys.data_ptr(), values.data_ptr()
        settings = self.settings
        heads = len(settings.slopes)
        slopes = slopes_beside(settings.slopes, torch.float32, self.x).expand(self.batch, heads).contiguous()
        output = torch.empty_like(self.x)
        of_rows = ctypes.c_int64 * self.batch
        call = native.LayersCall(
            B=self.batch,
            H=heads,
            T=self.count,
            S=self.past + self.count,
            D=self.width // heads,
            E=self.width,
            layers=len(layers),
            x=self.x.data_ptr(),
            y=output.data_ptr(),
            first_norm=self._norm(self.body._modules[first]) if first else native.Norm(),
            last_norm=self._norm(self.body._modules[names.last_norm]),
            layer=layers,
            by_head=names.by_head,
            slopes=slopes.data_ptr(),
            start=of_rows(*(start for start, _ in self.runs)),
            stop=of_rows(*(stop for _, stop in self.runs)),
            scale=settings.scale,
            tolerance=default_tolerance(self.dtype),
            erf_gelu=names.activation_kind not in self.family.activations,
            residual_after_norm=self.residual_after_norm,
            threads=torch.get_num_threads(),
        )
        return output if self._run(call, layers) else None

    def _run(self, call: native.LayersCall, layers: "ctypes.Array[native.Layer]") -> bool:
        """Runs the layers, which write the new keys and values. If they fail, the cache is as before."""
        done = False
        try:
            for layer, storage in zip(layers, self.storages, strict=True):
                pair = storage.extend(self.count)
                layer.key, layer.value = (self._rows(x, (call.B, call.H, call.S, call.D)) for x in pair)
            done = native.run(self.dtype, call)
            if done:
                for storage in self.storages:
                    storage.commit()
        finally:
            if not done:
                for storage in self.storages:
                    storage.take_back(storage.length - self.past)
        return done

    def _rows(self, x: Tensor, shape: tuple[int, ...]) -> Rows:
        """The keys or values of a cache, which may be those of a model with other heads or another dtype."""
        _require(x.shape == shape and x.dtype == self.dtype and x.is_cpu)
        return Rows(x.data_ptr(), *x.stride()[:3])

    def _visible(self, mask: Tensor | None) -> Runs:
        """The visible keys of each sequence. Masks with holes, and invalid masks, are left to the modules."""
        length = self.past + self.count
        if mask is None:
            return [(0, length)] * self.batch
        _require(type(mask) is Tensor and mask.device.type == "cpu" and not mask.is_floating_point())
        _require(mask.shape == (self.batch, length))
        seen = mask if mask.dtype == torch.bool else mask != 0
        return [(0, length)] * self.batch if bool(seen.all()) else _found(visible_runs(seen))

    def _fill(self, layer: native.Layer, block: nn.Module | None) -> None:
        names = self.names
        _require(_is_unchanged(block, names.block))
        assert block is not None
        attention, ffn = _part(block, names.attention), _part(block, names.ffn)
        own = vars(attention)
        settings = own["alibi_settings"]
        _require(getattr(own["forward"], "func", None) is self.family.forward and "attend" not in own)
        _require(_has_no_hooks(attention) and _is_unchanged(ffn, names.ffn_kind))
        # In training there is dropout.
        _require(not block.training and not any(part.training for part in block.children()))
        _require(settings.numerics == "exact" and settings.backend == "auto")
        # One call has the same slopes and residuals in all layers.
        _require(settings == self.settings and self._has_residual_after_norm(block) == self.residual_after_norm)
        _require(not getattr(attention if names.unsupported[0] == "attention" else ffn, names.unsupported[1]))
        activation = ffn._modules[names.activation]
        gelu = self.family.activations.get(names.activation_kind)
        _require(_is_unchanged(activation, names.activation_kind, gelu))
        _require(gelu is not None or getattr(activation, "approximate", "") == "none")
        _require(self.width % (len(settings.slopes) * WIDTH) == 0)
        layer.attention_norm, layer.ffn_norm = (self._norm(block._modules[name]) for name in names.norms)
        layer.qkv = self._linear(attention._modules[names.qkv], self.width, 3 * self.width)
        layer.out = self._linear(attention._modules[names.out], self.width, self.width)
        layer.up = self._linear(ffn._modules[names.up], self.width, None)
        layer.down = self._linear(ffn._modules[names.down], layer.up.outputs, self.width)

    def _has_residual_after_norm(self, block: nn.Module | None) -> bool:
        option = self.names.residual_after_norm
        return bool(option) and bool(getattr(block, option))

    def _norm(self, norm: nn.Module | None) -> native.Norm:
        _require(_is_unchanged(norm, nn.LayerNorm))
        assert isinstance(norm, nn.LayerNorm)
        weight, bias = norm._parameters["weight"], norm._parameters["bias"]
        return native.Norm(self._address(_found(weight), (self.width,)), self._address(bias, (self.width,)), norm.eps)

    def _linear(self, layer: nn.Module | None, inputs: int, outputs: int | None) -> native.Linear:
        """The linear map of a layer, with this number of inputs and outputs; None = any."""
        if type(layer) is QuantizedLinear:
            _require(_is_unchanged(layer, QuantizedLinear) and layer.blocks != 0 and layer.in_features == inputs)
            _require(outputs in (None, layer.out_features))
            address = None if layer.bias is None else layer.bias.data_ptr()
            return native.Linear(
                layer.blocks, address, layer.scales.data_ptr(), layer.sums.data_ptr(), inputs, layer.out_features
            )
        _require(_is_unchanged(layer, nn.Linear, fastest.forward))
        assert layer is not None
        weight, bias = _found(layer._parameters["weight"]), layer._parameters["bias"]
        _require(weight.dim() == 2)
        outputs = len(weight) if outputs is None else outputs
        addresses = self._address(weight, (outputs, inputs)), self._address(bias, (outputs,))
        return native.Linear(*addresses, None, None, inputs, outputs)

    def _address(self, tensor: Tensor | None, shape: tuple[int, ...]) -> int | None:
        if tensor is None:
            return None
        _require(tensor.shape == shape and tensor.dtype == self.dtype and tensor.is_cpu)
        _require(type(tensor) in (nn.Parameter, Tensor) and tensor.is_contiguous() and not tensor.is_neg())
        return tensor.data_ptr()


def _part(module: nn.Module | None, name: str) -> nn.Module:
    return _found(None if module is None else module._modules.get(name))


def _found(value: _T | None) -> _T:
    if value is None:
        raise _NotSupported
    return value


def _require(condition: bool) -> None:
    if not condition:
        raise _NotSupported


def _is_unchanged(module: nn.Module | None, kind: type[nn.Module], replacement: object = None) -> bool:
    """Whether it is of this class, without hooks, with its own forward or this replacement."""
    if module is None or type(module) is not kind or not _has_no_hooks(module):
        return False
    own = vars(module).get("forward")
    return own is None or (replacement is not None and getattr(own, "func", None) is replacement)


def _has_no_hooks(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)
