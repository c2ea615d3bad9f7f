"""`context_parallel`: a model's attention goes over the shards of all ranks, explicitly and until it is undone."""

import functools
from typing import Any, Self

from torch import Tensor, nn
from torch import distributed as dist

from alibi_attn.attention.api import alibi_attention
from alibi_attn.distributed.attention import (
    TIMEOUT,
    context_parallel_attention,
    context_parallel_forgetting_attention,
    ranks_of,
)
from alibi_attn.distributed.exchange import Traffic
from alibi_attn.nn import ALiBiAttention

PATCHED = "alibi_dialect"  # what a layer has that `alibi_attn.hf.patch` has patched


class ContextParallel:
    """What `context_parallel` changed in one model. As a context manager it takes it back at the end of the block.

    Attributes:
        layers: the names of the attention layers.
    """

    layers: tuple[str, ...]

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        self.layers = tuple(layers)
        self._changed = list(layers.values())

    def undo(self) -> None:
        """Let every process attend to its own rows alone again.

        Raises:
            ValueError: it was undone before.
        """
        if not self._changed:
            raise ValueError("this is undone already; context_parallel(model) again gives a new handle")
        while self._changed:
            layer = self._changed.pop()
            for name in ("attend", "attend_gated"):
                vars(layer).pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._changed:
            self.undo()

    def __repr__(self) -> str:
        return f"ContextParallel(layers={len(self.layers)}, active={bool(self._changed)})"


def context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = TIMEOUT,
    traffic: Traffic | None = None,
) -> ContextParallel:
    """Let a model's attention layers attend over the rows of all ranks of a group, from now on.

    Every rank then calls its copy of the model with its shard of the sequence, in the order of the ranks, and gets the outputs
    of its shard. Gradients of parameters are those of the shard's outputs: their sum over the ranks is the whole, which is what
    DDP and FSDP average over. Layers with QK-norm, without masks and gates, know their halo from their weights. No caches.
    Dropout of attention weights follows from the first rank's generator. An encoder takes padding as a mask, and its pooled first
    token is the whole's on the first rank only. Whoever copies or pickles the whole model undoes it first; its state dict stays
    as it is.

    Args:
        model: it has `ALiBiAttention` layers, is an encoder of `alibi_attn.hf.bert`, or was patched by `alibi_attn.hf.patch`
            (with numerics="exact"); changed in place.
        group, timeout, traffic: as for `context_parallel_attention`.

    Returns:
        A handle with `.layers` and `.undo()`, which is also a context manager.

    Raises:
        ValueError: no such layers, one that is context parallel already, or no process group.

    Source: docs/context-parallel.md.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__} but must be an nn.Module")
    ranks_of(group, timeout)
    layers = {name: module for name, module in model.named_modules() if _is_ours(module)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention of ours; make it of ALiBiAttention layers, or patch it first with "
            "alibi_attn.hf.patch"
        )
    for name, layer in layers.items():
        if "attend" in vars(layer):
            raise ValueError(f"{name or 'the model'} is context parallel already; undo() that first")
        if getattr(vars(layer).get(PATCHED), "numerics", "exact") != "exact":
            raise ValueError(f'{name} reproduces a checkpoint\'s rounding; patch the model with numerics="exact"')
        if getattr(getattr(layer, "config", None), "scales_with_length", False):
            raise ValueError(
                f"{name} has slopes that depend on the length of the text, of which a rank has a shard only"
            )
    given: dict[str, Any] = {"group": group, "timeout": timeout, "traffic": traffic}
    for layer in layers.values():
        vars(layer)["attend"] = functools.partial(_attend, layer, given)
        if isinstance(layer, ALiBiAttention):
            vars(layer)["attend_gated"] = functools.partial(_attend_gated, given)
    return ContextParallel(layers)


def _is_ours(module: nn.Module) -> bool:
    return getattr(type(module), "attend", None) is alibi_attention or PATCHED in vars(module)


def _attend(
    layer: nn.Module, given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None = None, *,
    query_offset: int | Tensor | None = None, key_mask: Tensor | None = None, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """In the place of `alibi_attention`."""
    _check(query, key, query_offset)
    if isinstance(layer, ALiBiAttention) and layer.q_norm is not None and key_mask is None:
        options["score_bound"] = layer.score_bound()
    return context_parallel_attention(query, key, value, slopes, key_mask=key_mask, **options, **given)


def _attend_gated(
    given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, gates: Tensor, slopes: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """In the place of `forgetting_attention`."""
    _check(query, key, None)
    return context_parallel_forgetting_attention(query, key, value, gates, slopes, **options, **given)


def _check(query: Tensor, key: Tensor, query_offset: int | Tensor | None) -> None:
    cached = query_offset not in (None, 0) if not isinstance(query_offset, Tensor) else True
    if cached or key.shape[2] != query.shape[2]:
        raise ValueError("context parallelism has no cache: pass whole shards, and use_cache=False")
