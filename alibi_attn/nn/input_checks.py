"""Checks of the inputs of `ALiBiAttention.forward`: `alibi_attention` would check them too, but after the cache has grown."""

import torch
from torch import Tensor, nn

from alibi_attn.attention.call.checks import check_key_mask, check_positions, check_prefix_len, check_segments
from alibi_attn.attention.call.part_options import check_prefix_values, check_sorted
from alibi_attn.attention.call.transforms import autocasts
from alibi_attn.nn.attention_layer import AttentionLayer
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.gated_cache import GatedReachCache
from alibi_attn.nn.reach_cache import ReachCache
from alibi_attn.nn.static_attention import check_static
from alibi_attn.nn.static_cache import StaticKVCache, StaticReachCache

Cache = KVCache | ReachCache | GatedReachCache | StaticKVCache | StaticReachCache


def check_embeddings(x: Tensor, width: int) -> None:
    """Raises a TypeError or ValueError unless x is [B, T, width] and floating point."""
    if isinstance(x, Tensor) and not x.is_floating_point():
        raise TypeError(f"x is {x.dtype} but must be floating point: pass embeddings, not token numbers")
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__} but must be a tensor [B, T, {width}]")
    if x.ndim != 3 or x.shape[-1] != width or x.shape[1] == 0:
        raise ValueError(f"x has shape {list(x.shape)} but must be [B, T, {width}] with T ≥ 1")


def check_memory(
    layer: AttentionLayer, x: Tensor, memory: Tensor | None, memory_mask: Tensor | None, *, others: tuple[object, ...]
) -> None:
    """Cross-attention layers, and only they, get a memory, and nothing else."""
    if layer.kv_dim is None:
        if memory is None and memory_mask is None:
            return
        raise ValueError(
            f"{'memory_mask' if memory is None else 'memory'} is given but this is a self-attention layer; "
            "create the layer with kv_dim=... for cross-attention"
        )
    if memory is None:
        raise ValueError("memory is missing but this is a cross-attention layer; pass memory=..., or omit kv_dim")
    if any(other is not None for other in others) or "attend" in vars(layer):
        raise ValueError(
            "cross-attention supports no cache, key_mask, segment_ids, prefix_len, positions or context parallelism; pass "
            "memory_mask to hide keys"
        )
    wanted = [x.shape[0], layer.kv_dim]
    if memory.ndim != 3 or [memory.shape[0], memory.shape[2]] != wanted or memory.shape[1] == 0:
        raise ValueError(
            f"memory has shape {list(memory.shape)} but must be [B, S, kv_dim] = [{wanted[0]}, S, {wanted[1]}]"
        )
    if memory.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"memory is {memory.dtype} but x is {x.dtype}; pass memory.to({x.dtype})")
    if memory_mask is not None:
        check_key_mask(memory_mask, batch=x.shape[0], key_len=memory.shape[1])


def check_inputs(
    layer: AttentionLayer,
    x: Tensor,
    cache: Cache | None,
    *,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    prefix_len: Tensor | None,
    positions: Tensor | None,
) -> None:
    """The inputs fit the layer, its cache, and one another."""
    check_embeddings(x, layer.embed_dim)
    dtype = layer.q_proj.weight.dtype if type(layer.q_proj) is nn.Linear else x.dtype
    if dtype != x.dtype and dtype.is_floating_point and not autocasts(x.device.type):
        raise TypeError(f"x is {x.dtype} but the layer's weights are {dtype}; pass x.to({dtype}) or convert the layer")
    _check_cache(layer, cache)
    if isinstance(cache, StaticKVCache | StaticReachCache):
        others = prefix_len is not None or positions is not None
        check_static(layer, cache, batch=len(x), key_mask=key_mask, segment_ids=segment_ids, others=others)
        return
    if _forgets(cache) and any(given is not None for given in (key_mask, segment_ids, prefix_len, positions)):
        raise ValueError(
            "a cache that forgets supports no key_mask, segment_ids, prefix_len or positions; use KVCache(), which keeps all"
        )
    if layer.gate_proj is not None and not (prefix_len is None and positions is None):
        raise ValueError(
            "a layer with forget gates supports no prefix_len and no positions; its gates are its positions"
        )
    batch, length, cached = x.shape[0], x.shape[1], 0 if cache is None else len(cache)
    for name, mask in (("key_mask", key_mask), ("segment_ids", segment_ids), ("positions", positions)):
        if mask is not None and list(mask.shape) != [batch, cached + length]:
            raise ValueError(
                f"{name} has shape {list(mask.shape)} but must be [B, S] = [{batch}, {cached + length}]: "
                f"it covers the {cached} cached keys and the {length} new ones"
            )
    if key_mask is not None:
        check_key_mask(key_mask, batch=batch, key_len=cached + length)
    if segment_ids is not None:
        check_segments("segment_ids", segment_ids, batch=batch, length=cached + length, axis="S")
    if positions is not None:
        check_positions("positions", positions, batch=batch, length=cached + length, axis="S")
        check_sorted("positions", positions)
    if prefix_len is not None and layer.kv_dim is None:
        check_prefix_len(prefix_len, batch=batch, causal=layer.causal)
        most, of = (cached, "the cached tokens, which must hold the prefix") if cached else (length, "S")
        check_prefix_values(prefix_len, most, of)


def _forgets(cache: Cache | None) -> bool:
    return isinstance(cache, ReachCache | GatedReachCache) or (
        isinstance(cache, KVCache) and cache.max_tokens is not None
    )


def _check_cache(layer: AttentionLayer, cache: Cache | None) -> None:
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__} but must be a KVCache() of this layer, or None")
    if cache is not None and "attend" in vars(layer):
        raise ValueError(
            "the layer's attention is context parallel, which does not support a cache; call undo(), or pass no cache"
        )
    if cache is not None and not layer.causal:
        raise ValueError("cache needs causal=True: without it later keys would change outputs already returned")
    if isinstance(cache, StaticKVCache | StaticReachCache):
        return
    by_gates, gated, forgets = isinstance(cache, GatedReachCache), layer.gate_proj is not None, _forgets(cache)
    if forgets and by_gates != gated:
        raise ValueError(
            f"the layer has {'forget' if gated else 'no'} gates and the cache is a {type(cache).__name__} that forgets "
            f"{'by gates' if by_gates else 'without them'}; create it with the layer's reach_cache(), or use KVCache()"
        )
    kept = None if not isinstance(cache, KVCache | ReachCache) or not forgets else cache.sinks
    if kept is not None and kept < layer.sinks_of_window:
        raise ValueError(
            f"the layer has {layer.sinks_of_window} sinks but this cache keeps {kept} first keys; create it with the layer's "
            "reach_cache(), or KVCache(max_tokens=..., sinks=...)"
        )
