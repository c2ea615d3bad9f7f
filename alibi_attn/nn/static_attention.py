"""The attention of a layer whose cache has a fixed capacity; no tensor is read on the host."""

import torch
from torch import Tensor

from alibi_attn.attention.call.checks import check_key_mask, check_segments
from alibi_attn.attention.decoding import attend_at, attend_groups, reads_groups, reads_near_at
from alibi_attn.nn.attention_layer import AttentionLayer
from alibi_attn.nn.static_cache import StaticCache, StaticKVCache


def attend_static(
    layer: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: StaticCache,
    *,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
) -> Tensor:
    """Appends to the cache; the attention of the new tokens, [B, H, T, D]."""
    slopes, dropout_p = layer.slopes.values, layer.dropout_p if layer.training else 0.0
    window = layer.window
    assert not isinstance(window, tuple), "check_static refuses it"
    if isinstance(cache, StaticKVCache):
        keys, values, first = cache.append(key, value, layer=layer)
        is_whole = key_mask is None and segment_ids is None and dropout_p == 0.0
        if cache.norms is not None and is_whole and reads_near_at(query):
            return attend_at(query, keys, values, slopes, cache.norms, first, window=window)
        return layer._attended(query, keys, values, key_mask=key_mask, segment_ids=segment_ids, query_offset=first)
    if query.shape[2] == 1 and dropout_p == 0.0 and reads_groups(query) and cache.appends_one(key, value):
        held, rows = cache.append_one(key, value, layer=layer)
        return attend_groups(query, held, slopes, cache.runs, windows=cache.windows(window), offsets=rows)
    parts = cache.append(key, value, layer=layer)
    mixed = [
        layer.attend(query[:, heads], keys, values, slopes[heads], window=window, key_mask=exists, dropout_p=dropout_p)
        for heads, (keys, values, exists) in zip(cache.queries, parts, strict=True)
    ]
    return torch.cat(mixed, dim=1)[:, cache.order]


def check_static(
    layer: AttentionLayer,
    cache: StaticCache,
    *,
    batch: int,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    others: bool,
) -> None:
    """Raises a ValueError or TypeError unless a layer can be called with this cache; `others`: with other options than masks."""
    if layer.gate_proj is not None:
        raise ValueError(
            "the layer has forget gates, whose sums need the number of tokens on the host; use KVCache() or reach_cache()"
        )
    if others or isinstance(layer.window, tuple) or layer.sinks_of_window:
        raise ValueError(
            "a static cache supports no prefix_len, positions, sinks and windows per head; use KVCache(), which does"
        )
    if isinstance(cache, StaticKVCache):
        if key_mask is not None:
            check_key_mask(key_mask, batch=batch, key_len=cache.capacity)
        if segment_ids is not None:
            check_segments("segment_ids", segment_ids, batch=batch, length=cache.capacity, axis="S")
    elif key_mask is not None or segment_ids is not None:
        raise ValueError(
            "a StaticReachCache supports no key_mask and no segment_ids; use StaticKVCache, which keeps all"
        )
