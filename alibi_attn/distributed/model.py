"""`context_parallel`: makes a model's attention layers context parallel until `undo()`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self, cast

from torch import Tensor, nn
from torch import distributed as dist

from alibi_attn.attention.kept import Kept, attend
from alibi_attn.distributed.attention import (
    TIMEOUT,
    context_parallel_attention,
    context_parallel_forgetting_attention,
    ranks_of,
)
from alibi_attn.distributed.exchange import Traffic
from alibi_attn.nn import ALiBiAttention
from alibi_attn.nn.replacement import Replacement, replaced, restore

SETTINGS_ATTRIBUTE = "alibi_settings"  # the attribute that `alibi_attn.hf.patch` sets on a layer


@dataclasses.dataclass(eq=False, repr=False)
class ContextParallel:
    """The handle of a context-parallel model. As a context manager it calls `undo()` at the end of the block.

    Attributes:
        layers: the names of the attention layers.
    """

    layers: tuple[str, ...]
    _changes: list[Replacement]

    def undo(self) -> None:
        """Restores the layers: every process attends to its own rows only.

        Raises:
            ValueError: it was undone before, or the attention of a layer was replaced since. Then nothing changes.
        """
        if not self._changes:
            raise ValueError("context parallelism is already undone; call context_parallel(model) for a new handle")
        restore(self._changes, "context_parallel(model)")
        self._changes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._changes:
            self.undo()

    def __repr__(self) -> str:
        return f"ContextParallel(layers={len(self.layers)}, active={bool(self._changes)})"


def context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = TIMEOUT,
    traffic: Traffic | None = None,
) -> ContextParallel:
    """Makes a model's attention layers attend over the rows of all ranks of a group, until `undo()`.

    Every rank calls its copy of the model with its shard of the sequence, in rank order, and gets the outputs of its shard.
    Each rank computes the parameter gradients of its own outputs; their sum over the ranks is the full gradient, and DDP and
    FSDP average them. Layers with QK-norm, without masks or gates, derive their halo from their weights; with QK-norm, all
    ranks or none must pass a mask. Caches are not supported. Attention dropout uses the first rank's generator. Pass an
    encoder's padding as a mask; its pooled first token is that of the whole sequence on the first rank only. Undo before
    copying or pickling the whole model; its state dict is unaffected.

    Args:
        model: a model with `ALiBiAttention` layers, an encoder of `alibi_attn.hf.readers.encoder`, or a model patched by
            `alibi_attn.hf.patch` with numerics="exact"; changed in place.
        group, timeout, traffic: as for `context_parallel_attention`.

    Returns:
        A handle with `.layers`, the layers' names, and `.undo()`; also a context manager.

    Raises:
        TypeError: model is not an nn.Module, or timeout is not a number.
        ValueError: the model has no such layers, one of them is already context parallel, rounds as its checkpoint did or has
            slopes that depend on the length; or there is no process group.

    Source: docs/context-parallel.md.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__} but must be an nn.Module")
    ranks_of(group, timeout)
    layers = {name: module for name, module in model.named_modules() if _is_ours(module)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layers from alibi_attn; build it from ALiBiAttention layers, or patch it "
            "first with alibi_attn.hf.patch"
        )
    for name, layer in layers.items():
        if "attend" in vars(layer):
            raise ValueError(f"{name or 'the model'} is already context parallel; call undo() first")
        if getattr(vars(layer).get(SETTINGS_ATTRIBUTE), "numerics", "exact") != "exact":
            raise ValueError(f'{name} reproduces a checkpoint\'s rounding; patch the model with numerics="exact"')
        if getattr(getattr(layer, "config", None), "needs_length", False):
            raise ValueError(f"{name} has a bias that needs the length of the text, but each rank sees only its shard")
    given: dict[str, Any] = {"group": group, "timeout": timeout, "traffic": traffic}
    changes = [
        replaced(layer, name, "attend", functools.partial(_attend, layer, given)) for name, layer in layers.items()
    ]
    return ContextParallel(tuple(layers), changes)


def _is_ours(module: nn.Module) -> bool:
    return getattr(type(module), "attend", None) is attend or SETTINGS_ATTRIBUTE in vars(module)


def _attend(
    layer: nn.Module,
    given: dict[str, Any],
    query: Tensor,
    kept: Sequence[Kept],
    slopes: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Replaces `kept.attend`."""
    [whole] = kept
    key, value, options = whole.key, whole.value, {name: x for name, x in options.items() if x is not None}
    if whole.first != 0 or key.shape[2] != query.shape[2]:
        raise ValueError("context parallelism has no cache; pass whole shards and use_cache=False")
    if whole.log_fgate is not None:
        options = {name: x for name, x in options.items() if name not in ("causal", "sinks", "registers")}
        gates = whole.log_fgate
        return cast(
            "Tensor", context_parallel_forgetting_attention(query, key, value, gates, slopes, **options, **given)
        )
    if SETTINGS_ATTRIBUTE in vars(layer) and not options.keys().isdisjoint(("segment_ids", "key_bias")):
        raise ValueError(
            "context parallelism supports one text per row and no holes in the mask of this model; call undo() on its handle"
        )
    if isinstance(layer, ALiBiAttention) and layer.q_norm is not None and "key_mask" not in options:
        options["score_bound"] = layer.score_bound()
    return cast("Tensor", context_parallel_attention(query, key, value, slopes, **options, **given))
