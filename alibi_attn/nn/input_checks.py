"""Checks of the inputs of `ALiBiAttention.forward`: `alibi_attention` would check them too, but after the cache has grown."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alibi_attn.attention.call.checks import check_key_mask, check_positions, check_prefix_len, check_segments
from alibi_attn.attention.call.options import DEFAULTS
from alibi_attn.attention.call.part_options import check_prefix_values, check_sorted
from alibi_attn.attention.call.query_positions import check_coordinates
from alibi_attn.attention.call.transforms import autocasts
from alibi_attn.nn.cache import KVCache

if TYPE_CHECKING:
    from alibi_attn.nn.attention import ALiBiAttention


def check_call(
    layer: "ALiBiAttention",
    x: Tensor,
    cache: KVCache | None,
    given: Mapping[str, Tensor | None],
    memory: Tensor | None,
    memory_mask: Tensor | None,
) -> None:
    """Raises a TypeError or ValueError unless the inputs fit the layer, its cache, and one another."""
    check_embeddings(x, layer.embed_dim)
    dtype = layer.q_proj.weight.dtype if type(layer.q_proj) is nn.Linear else x.dtype
    if dtype != x.dtype and dtype.is_floating_point and not autocasts(x.device.type):
        raise TypeError(f"x is {x.dtype} but the layer's weights are {dtype}; pass x.to({dtype}) or convert the layer")
    names, is_replaced = [name for name, option in given.items() if option is not None], "attend" in vars(layer)
    if cache is not None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache is a {type(cache).__name__} but must be a KVCache() of this layer, or None")
        if is_replaced:
            raise ValueError(
                "the layer's attention is context parallel, which does not support a cache; call undo(), or pass no cache"
            )
        if not layer.causal:
            raise ValueError("cache needs causal=True: without it later keys would change outputs already returned")
        of_window = ["sinks"] * bool(layer.sinks_of_window) + ["a window per head"] * isinstance(layer.window, tuple)
        cache.check([*names, *of_window], sinks=layer.sinks_of_window)
    others = cache is not None or bool(names) or is_replaced
    _check_memory(x, memory, memory_mask, kv_dim=layer.kv_dim, others=others)
    if names and layer.kv_dim is None:
        _check_options(layer, x, cache, given)


def check_embeddings(x: Tensor, width: int) -> None:
    """Raises a TypeError or ValueError unless x is [B, T, width] and floating point."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__} but must be a tensor [B, T, {width}]")
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype} but must be floating point: pass embeddings, not token numbers")
    if x.ndim != 3 or x.shape[-1] != width or x.shape[1] == 0:
        raise ValueError(f"x has shape {list(x.shape)} but must be [B, T, {width}] with T ≥ 1")


def _check_memory(
    x: Tensor, memory: Tensor | None, memory_mask: Tensor | None, *, kv_dim: int | None, others: bool
) -> None:
    """Cross-attention layers, and only they, get a memory, and nothing else; `others`: other arguments are given."""
    if kv_dim is None:
        if memory is None and memory_mask is None:
            return
        raise ValueError(
            f"{'memory_mask' if memory is None else 'memory'} is given but this is a self-attention layer; "
            "create the layer with kv_dim=... for cross-attention"
        )
    if memory is None:
        raise ValueError("memory is missing but this is a cross-attention layer; pass memory=..., or omit kv_dim")
    if others:
        raise ValueError(
            "cross-attention supports no cache, key_mask, segment_ids, prefix_len, positions or context parallelism; pass "
            "memory_mask to hide keys"
        )
    wanted = [x.shape[0], kv_dim]
    if memory.ndim != 3 or [memory.shape[0], memory.shape[2]] != wanted or memory.shape[1] == 0:
        raise ValueError(
            f"memory has shape {list(memory.shape)} but must be [B, S, kv_dim] = [{wanted[0]}, S, {wanted[1]}]"
        )
    if memory.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"memory is {memory.dtype} but x is {x.dtype}; pass memory.to({x.dtype})")
    if memory_mask is not None:
        check_key_mask(memory_mask, batch=x.shape[0], key_len=memory.shape[1])


def _check_options(
    layer: "ALiBiAttention", x: Tensor, cache: KVCache | None, given: Mapping[str, Tensor | None]
) -> None:
    """The options of a self-attention layer, by name, fit the layer, its input, its cache, and one another."""
    batch, length = x.shape[0], x.shape[1]
    if cache is not None and cache.capacity is not None:
        key_len, covered = cache.capacity, "the capacity of the cache"
    else:
        key_len, covered = length + (0 if cache is None else len(cache)), "the {} cached keys and the {} new ones"
    cached = key_len - length
    key_mask, segment_ids, prefix_len, positions = (
        given[name] for name in ("key_mask", "segment_ids", "prefix_len", "positions")
    )
    if layer.gate_proj is not None and not (prefix_len is None and positions is None):
        raise ValueError(
            "a layer with forget gates supports no prefix_len and no positions; its gates are its positions"
        )
    if positions is not None and positions.ndim == 3:
        of_call = {**DEFAULTS, "positions": positions, "prefix_len": prefix_len, "causal": layer.causal}
        check_coordinates(of_call, batch=batch, query_len=length, key_len=key_len)
        positions = None
    for name, mask in (("key_mask", key_mask), ("segment_ids", segment_ids), ("positions", positions)):
        if mask is not None and list(mask.shape) != [batch, key_len]:
            covers = "it covers " + covered.format(cached, length)
            raise ValueError(f"{name} has shape {list(mask.shape)} but must be [B, S] = [{batch}, {key_len}]: {covers}")
    if key_mask is not None:
        check_key_mask(key_mask, batch=batch, key_len=key_len)
    if segment_ids is not None:
        check_segments("segment_ids", segment_ids, batch=batch, length=key_len, axis="S")
    if positions is not None:
        check_positions("positions", positions, batch=batch, length=key_len, axis="S")
        check_sorted("positions", positions)
    if prefix_len is not None:
        check_prefix_len(prefix_len, batch=batch, causal=layer.causal)
        most, of = (cached, "the cached tokens, which must hold the prefix") if cached else (length, "S")
        check_prefix_values(prefix_len, most, of)
