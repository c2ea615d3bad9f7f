"""T5's attention in patched models: softmax(q·k + t[h, i − j])·v, with its bucketed bias as a table t by head and distance.

The original materializes the bias of every pair, [1, H, T, S], and hands it from layer to layer. The table has S columns (2·S − 1
in encoders), and its gradient flows back to `relative_attention_bias`. Cross-attention has no bias.
Read next: `families/t5.py`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers.cache_utils import Cache

from alibi_attn.attention.call.transforms import may_read
from alibi_attn.attention.kept import Kept
from alibi_attn.hf.attention import cached_pass, masks, packed_rows
from alibi_attn.hf.attention.patched_attention import appended, attention_of, by_head, merged

BACKENDS = ("auto", "native", "fused", "dense", "reference")  # those that support tables
_OUTPUTS = ("output_attentions", "output_hidden_states", "return_dict")


def settings(_: object, *, backend: str, numerics: str) -> str:
    """The settings of every T5, its backend; raises ValueError for options of `patch` that they do not support."""
    if numerics != "exact":
        raise ValueError(f'numerics is {numerics!r} but T5 models support only "exact"; omit it')
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r} but must be one of {', '.join(map(repr, BACKENDS))} for T5 models: the others do not "
            "support tables"
        )
    return backend


def attended(
    layer: Any, hidden_states: Tensor, memory: Tensor | None, mask: Tensor, bias: Tensor | None, cache: Cache | None
) -> tuple[Tensor, Tensor | None]:
    """(mixed values [B, T, H·D], the bias for the next layer).

    Args:
        layer: a T5Attention, or one of mT5 or UMT5.
        memory: [B, S, E], the encoder's output, for cross-attention; else None.
        mask: [B, 1, 1, S | 0] bool, from `stack_forward`.
        bias: the previous layer's result, None for the first: a table, or [1, H, T, S] in compiled code with a static cache.
    """
    query = by_head(layer.q(hidden_states), layer.n_heads)
    dropout_p = float(layer.dropout) if layer.training else 0.0
    options = {"scale": layer.scaling, "dropout_p": dropout_p, "backend": layer.table_settings}
    if memory is not None:
        kept = Kept(*_of_memory(layer, memory, cache))
        keys, none = masks.keys_of(mask, kept.key.shape[2]), query.new_zeros(layer.n_heads, dtype=torch.float32)
        mixed = attention_of(layer)(query, [kept], none, causal=False, key_mask=keys.seen, **options)
        return merged(mixed), None
    new = by_head(layer.k(hidden_states), layer.n_heads), by_head(layer.v(hidden_states), layer.n_heads)
    [kept] = appended(_of_self(cache), layer, *new)
    keys, first = masks.keys_of(mask, kept.key.shape[2]), kept.first
    if isinstance(first, Tensor) and may_read(first):
        first = int(first)
    kept = Kept(kept.key, kept.value, first=first)
    if isinstance(first, Tensor):
        return _dense(layer, query, kept, keys.seen, bias, dropout_p)
    table = _table(layer, kept.key.shape[2]) if bias is None else bias
    options |= {"table": table, "key_mask": keys.seen, "segment_ids": keys.segments}
    return merged(attention_of(layer)(query, [kept], causal=layer.is_decoder, **options)), table


def stack_forward(
    stack: Any, before: Callable[..., object] | None, names: tuple[str, ...], *args: object, **kwargs: object
) -> object:
    """Replaces the forward of an encoder or decoder stack: refuses what it cannot return, then runs it with masks of keys.

    Args:
        before: the forward that an instance had, such as accelerate's; None = its class's.
        names: the arguments of its class's forward.
    """
    given, packing, tokens = cached_pass.arguments(stack, (*names, *_OUTPUTS), args, kwargs)
    if refused := packing if stack.is_decoder else packing.keys() & set(packed_rows.OF_ROWS):
        raise ValueError(
            f"{type(stack).__name__} got {', '.join(refused)}, which {'decoders' if stack.is_decoder else 'encoders'} of T5 do "
            "not support; several texts per row are for an encoder alone, such as T5EncoderModel"
        )
    run = functools.partial(type(stack).forward, stack) if before is None else before
    if tokens is None:
        return run(**given)
    cache, memory = given.get("past_key_values"), given.get("encoder_hidden_states")
    cache = cache if stack.is_decoder else None
    if memory is not None:
        if cache is not None and not isinstance(cache, EncoderDecoderCache):
            raise ValueError(
                f"past_key_values is {type(cache).__name__} but must be an EncoderDecoderCache, one cache for self-attention and "
                "one for cross-attention: EncoderDecoderCache(DynamicCache(), DynamicCache())"
            )
        given["encoder_attention_mask"] = _symmetric(given.get("encoder_attention_mask"), memory)
    mask = given.get("attention_mask")
    if stack.is_decoder:
        _check_axes(mask)
        given["attention_mask"] = masks.of_layers(masks.INDEXED, stack.config, tokens, mask, _of_self(cache), {})
    else:
        given["attention_mask"] = _with_texts(_symmetric(mask, tokens), packing, tokens.shape[1])
    with cached_pass.whole(stack, cache, use_cache=given.get("use_cache"), new=tokens.shape[1]):
        return run(**given)


def _check_axes(mask: Tensor | None) -> None:
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"the attention mask has shape {list(mask.shape)} but must be [B, S] in a patched T5, 1 = visible; pass such a mask, "
            "or call undo() on the patch"
        )


def _symmetric(mask: Tensor | None, of: Tensor) -> Tensor:
    """[B, 1, 1, S | 0] bool from a mask [B, S] of these tokens [B, S, …]."""
    _check_axes(mask)
    if mask is not None:
        masks.check(mask, len(of))
        if mask.shape[1] != of.shape[1]:
            raise ValueError(f"the attention mask covers {mask.shape[1]} tokens but the encoder has {of.shape[1]}")
    return masks.visible(mask, of)[:, None, None]


def _with_texts(mask: Tensor, packing: Mapping[str, Any], length: int) -> Tensor:
    """[B, R, 1, S | 0] bool as in `masks.py`, with a row where texts begin if a row has several."""
    if not packing:
        return mask
    seen = mask[:, 0, 0] if mask.shape[3] else mask.new_ones(len(mask), length)
    begins = packed_rows.starts(packing, seen, query_len=length, past=0)
    return mask if begins is None else torch.stack([seen, begins], 1)[:, :, None]


def _of_self(cache: Cache | None) -> Cache | None:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _of_memory(layer: Any, memory: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
    """(key, value) of the encoder's output, which the cache keeps from the first pass on."""
    if isinstance(cache, EncoderDecoderCache):
        held, index = cache.cross_attention_cache, layer.layer_idx
        if cache.is_updated.get(index):
            return held.layers[index].keys, held.layers[index].values
        cache.is_updated[index] = True
        return held.update(by_head(layer.k(memory), layer.n_heads), by_head(layer.v(memory), layer.n_heads), index)
    return by_head(layer.k(memory), layer.n_heads), by_head(layer.v(memory), layer.n_heads)


def _table(layer: nn.Module, key_len: int) -> Tensor:
    """[H, S] for the distances 0 … S − 1 of a decoder, else [H, 2·S − 1]: the layer's own bias of one query."""
    columns = key_len if layer.is_decoder else 2 * key_len - 1
    bias: Tensor = layer.compute_bias(1, columns, past_seen_tokens=key_len - 1)  # type: ignore[operator]
    return bias[0, :, 0].flip(1)  # it has the keys in their order, and so the largest distance first


def _dense(
    layer: Any, query: Tensor, kept: Kept, seen: Tensor | None, bias: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """The original arithmetic, for a static cache whose length cannot be read: in compiled code and on a GPU."""
    if "attend" in vars(layer):
        raise ValueError("record_attention cannot read the length of a static cache here; pass a cache that grows")
    if bias is None:
        bias = layer.compute_bias(query.shape[2], kept.key.shape[2], past_seen_tokens=kept.first)
    at = torch.arange(query.shape[2], device=query.device)[:, None] + kept.first
    visible = torch.arange(kept.key.shape[2], device=query.device) <= at
    if seen is not None:
        visible = visible & seen[:, None, None]
    scores = query @ kept.key.mT * layer.scaling + bias
    weights = torch.softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min).float(), dim=-1).to(
        kept.value.dtype
    )
    mixed = nn.functional.dropout(weights, dropout_p) @ kept.value
    return merged(mixed), bias
