"""`patch`: one line, and a BLOOM, MPT or Falcon-RW that stands in memory computes its attention with ours.

Only the given instance changes: its attention layers get a `forward` of their own, its config is exchanged for a copy that
names our mask, and one hook says what a patched model cannot answer. `undo` takes all of that back.
"""

import copy
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from alibi_attn.attention.dispatch import BACKENDS
from alibi_attn.hf import bloom, falcon, mpt
from alibi_attn.hf.dialect import Numerics, checked_mask

FAMILIES: dict[str, ModuleType] = {"BLOOM": bloom, "MPT": mpt, "Falcon with alibi=True": falcon}

_MARK = "alibi_dialect"  # what a patched layer has and no other


class Patch:
    """What `patch` changed in one model. As a context manager it takes it back at the end of the block.

    Attributes:
        layers: the names of the attention layers that are patched.
    """

    layers: tuple[str, ...]

    def __init__(self, layers: tuple[str, ...], changes: list[Callable[[], None]]) -> None:
        self.layers = layers
        self._changes = changes

    def undo(self) -> None:
        """Give the model its own attention back, bit for bit.

        Raises:
            ValueError: it was undone before.
        """
        if not self._changes:
            raise ValueError("this patch is undone already; patch(model) again gives a new one")
        while self._changes:
            self._changes.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._changes:
            self.undo()

    def __repr__(self) -> str:
        return f"Patch(layers={len(self.layers)}, active={bool(self._changes)})"


def patch(model: nn.Module, backend: str = "auto", *, numerics: Numerics = "exact") -> Patch:
    """Let an ALiBi model of transformers compute its attention with `alibi_attention`, from now on.

    Nothing n×n is built any more, neither scores nor masks. Works with padding on either side, `generate` in all its
    ways, dynamic and static caches, gradients and `torch.compile`. Weights, caches and saved files stay as they are. Logits at
    padding positions, and of rows that are all padding, mean nothing, as before (no query sees a key there: its attention is 0).

    Args:
        model: a loaded BLOOM, MPT, or Falcon with alibi=True, or a module around one; it is changed in place.
        backend: of `alibi_attention`.
        numerics: "exact" has distances in fp32 whatever the model's dtype. "checkpoint" rounds the biases as the model was
            trained with (BLOOM's m·j in its dtype, Falcon's bf16 product), a few rows of scores at a time: linear memory,
            quadratic time.

    Returns:
        A handle with `.layers` and `.undo()`, which is also a context manager.

    Raises:
        ValueError: no supported layers inside, a config that transformers does not build rightly, or patched already.

    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50))
    >>> with patch(model) as handle:
    ...     print(handle.layers)
    ('transformer.h.0.self_attention',)

    Source: `docs/hf.md`; Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__} but must be a loaded model, an nn.Module")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r} but must be 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    if numerics not in ("exact", "checkpoint"):
        raise ValueError(f'numerics is {numerics!r} but must be "exact" or "checkpoint"')
    found = list(_bodies(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has nothing to patch; supported are the whole models of {', '.join(FAMILIES)}. "
            "For other models with ALiBi see docs/hf.md"
        )
    for prefix, body, family in found:
        _check(prefix, body, family)
    changes: list[Callable[[], None]] = []
    layers: list[str] = []
    for prefix, body, family in found:
        dialect = family.described(body.config, backend=backend, numerics=numerics)
        for name, layer in _layers(body, family):
            changes.append(_replace_forward(layer, family.forward, dialect))
            layers.append(f"{prefix}.{name}" if prefix else name)
        changes.append(_replace_config(model, body.config, family.mask_name(numerics)))
        changes.append(_remover(body.register_forward_pre_hook(_refuse, with_kwargs=True)))
    return Patch(tuple(layers), changes)


def _bodies(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel, ModuleType]]:
    """(name, model without head, family)"""
    for name, module in model.named_modules():
        for family in FAMILIES.values():
            if isinstance(module, PreTrainedModel) and isinstance(module, family.MODEL):
                yield name, module, family


def _layers(body: nn.Module, family: ModuleType) -> Iterator[tuple[str, nn.Module]]:
    yield from ((name, layer) for name, layer in body.named_modules() if isinstance(layer, family.LAYER))


def _check(prefix: str, body: PreTrainedModel, family: ModuleType) -> None:
    name = f"{prefix or 'the model'} ({type(body).__name__})"
    if reason := family.why_not(body.config):
        raise ValueError(f"{name} cannot be patched: {reason}; supported are {', '.join(FAMILIES)}")
    layers = dict(_layers(body, family))
    if any(_MARK in vars(layer) for layer in layers.values()):
        raise ValueError(f"{name} is patched already; undo() that patch first")
    for at, layer in layers.items():
        if type(layer) is not family.LAYER or ("forward" in vars(layer) and not _is_hook(layer)):
            raise ValueError(
                f"{name} has a {type(layer).__name__} with another forward at {at} already; patch the model as it was "
                "loaded, without flash attention"
            )


def _is_hook(layer: nn.Module) -> bool:
    """accelerate (device_map=...) keeps the layer's own forward in `_old_forward` and calls it from a wrapper."""
    return "_hf_hook" in vars(layer) and "_old_forward" in vars(layer)


def _replace_forward(layer: nn.Module, forward: Callable[..., object], dialect: object) -> Callable[[], None]:
    """A bound method, not a closure: a deep copy of the model then calls the copy's own layers."""
    name = "_old_forward" if _is_hook(layer) else "forward"
    before = vars(layer).get(name)
    setattr(layer, name, types.MethodType(forward, layer))
    setattr(layer, _MARK, dialect)

    def undo() -> None:
        delattr(layer, _MARK)
        if before is None:
            delattr(layer, name)
        else:
            setattr(layer, name, before)

    return undo


def _replace_config(model: nn.Module, config: PreTrainedConfig, mask_name: str) -> Callable[[], None]:
    """Every module of the model that holds this config gets a copy: other models may hold the original too."""
    ours = copy.copy(config)
    ours._attn_implementation_internal = mask_name
    holders = [module for module in model.modules() if vars(module).get("config") is config]
    for module in holders:
        module.config = ours  # type: ignore[assignment]
    given = dict(vars(ours))

    def undo() -> None:
        changed = {key: value for key, value in vars(ours).items() if key not in given or given[key] is not value}
        vars(config).update({key: value for key, value in changed.items() if key != "_attn_implementation_internal"})
        for module in holders:
            module.config = config  # type: ignore[assignment]

    return undo


def _remover(handle: RemovableHandle) -> Callable[[], None]:
    return lambda: handle.remove()


def _refuse(body: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """What a patched model cannot answer, before it computes anything."""
    wanted = kwargs.get("output_attentions")
    if wanted or (wanted is None and body.config.output_attentions):
        raise ValueError(
            "output_attentions asks for the T×S weights, which a patched model never builds; "
            "undo() the patch for that, or patch in a `with` block around everything else"
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor):
        checked_mask(mask)
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if isinstance(tokens, Tensor) and (tokens.ndim < 2 or tokens.shape[1] == 0):
        raise ValueError(f"the input has shape {list(tokens.shape)} but must be [B, T] with T ≥ 1 tokens")
