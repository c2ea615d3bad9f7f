"""Attention of patched layers: their settings, and the one function that every family calls.

Families differ in slopes, scale, how they count positions, and how they round. Shapes are those of `attention/call/spec.py`.
Read next: `families/bloom.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from alibi_attn.attention.call.validation import slopes_beside
from alibi_attn.attention.kept import Kept, attend
from alibi_attn.hf.attention.masks import Keys, keys_of
from alibi_attn.hf.caches.cache import ALiBiCache

Numerics = Literal["exact", "checkpoint"]

ROWS = 256  # queries whose scores are in memory at once when a checkpoint's rounding is reproduced


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Attention settings of one layer.

    Args:
        slopes: m, one per head: the number that a score actually loses per token of distance.
        scale: the factor of q·k.
        backend, numerics: those of `patch`.
    """

    slopes: tuple[float, ...]
    scale: float
    backend: str
    numerics: Numerics


def settings_of(layer: nn.Module) -> AttentionSettings:
    """The settings that `patch` attached to the layer."""
    settings: AttentionSettings = layer.alibi_settings  # type: ignore[assignment]
    return settings


def attention_of(layer: nn.Module) -> Callable[..., Tensor]:
    """How a layer attends: `kept.attend`, unless `context_parallel` or `record_attention` have replaced it."""
    return vars(layer).get("attend", attend)


def appended(
    cache: Cache | None, layer: nn.Module, key: Tensor, value: Tensor, log_fgate: Tensor | None = None, **more: Any
) -> list[Kept]:
    """The keys that new queries of a layer need: those kept by the cache, if there is one, and the new ones, which it keeps.

    Args:
        more: of `ALiBiCache.append`.

    Raises:
        ValueError: gates, which only an ALiBiCache stores.
    """
    if cache is None:
        return [Kept(key, value, log_fgate=log_fgate)]
    if isinstance(cache, ALiBiCache):
        return cache.append(layer, key, value, log_fgate, **more)
    if log_fgate is not None:
        raise ValueError(
            f"forget gates need an ALiBiCache, which stores them, but the cache is a {type(cache).__name__}"
        )
    past: int | Tensor = cache.get_seq_length(layer.layer_idx)  # type: ignore[arg-type]
    if isinstance(past, Tensor):
        past = past.clone()  # a static cache changes it in place
    key, value = cache.update(key, value, layer.layer_idx)  # type: ignore[arg-type]
    return [Kept(key, value, first=past)]


def cached_and_attended(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cache: Cache | None,
    mask: Tensor,
    dropout_p: float,
    rounded: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Appends, then `attended`; with numerics="checkpoint" `rounded(query, kept, mask, dropout_p)` instead."""
    dropout_p = float(dropout_p) if layer.training else 0.0
    kept = appended(cache, layer, key, value)
    if rounded is not None and settings_of(layer).numerics == "checkpoint":
        return rounded(query, kept[0], mask, dropout_p)
    return attended(layer, query, kept, mask=mask, dropout_p=dropout_p)


def attended(
    layer: nn.Module,
    query: Tensor,
    kept: list[Kept],
    *,
    mask: Tensor,
    dropout_p: float,
    slopes: tuple[float, ...] | None = None,
) -> Tensor:
    """[B, T, H·D]: exact attention with distances in fp32, heads concatenated.

    Args:
        kept: the result of `appended`.
        mask: that of `masks.of_layers`.
        slopes: None = those of the layer's settings.
    """
    settings, first = settings_of(layer), kept[0].first
    m = slopes_beside(settings.slopes if slopes is None else slopes, torch.float32, query)
    keys = keys_of(mask, kept[0].key.shape[2])
    # With one query, other texts are hidden keys, so that it may read near keys only.
    if keys.segments is not None and query.shape[2] <= 1:
        at = first.reshape(1) if isinstance(first, Tensor) else slice(first, first + 1)
        same = keys.segments == keys.segments[:, at]
        keys = keys._replace(seen=same if keys.seen is None else same & keys.seen, segments=None)
    bias = None
    if keys.shift is not None:
        # −m·(distance over the visible keys) = −m·|i − j| + m·(p_j − j), up to a number per query
        bias = m[:, None] * keys.shift[:, None]
    mixed = attention_of(layer)(
        query,
        kept,
        m,
        scale=settings.scale,
        key_mask=keys.seen,
        segment_ids=keys.segments,
        prefix_len=keys.prefix_len,
        positions=keys.positions,
        key_bias=bias,
        dropout_p=dropout_p,
        backend=settings.backend,
    )
    return merged(mixed)


def by_head(x: Tensor, heads: int) -> Tensor:
    """[B, T, H·D] -> [B, H, T, D]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(heads: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H·D]"""
    return heads.transpose(1, 2).flatten(2)


def by_rows(attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, kept: Kept, mask: Tensor) -> Tensor:
    """[B, T, H·D], from a few queries at a time, so that memory stays linear in the length.

    Args:
        attend: returns [B, H, rows, D] for (queries [B, H, rows, D], their positions [rows], hidden keys [B|1, 1, rows, S]).
    """
    key_len, first = kept.key.shape[2], kept.first
    seen, segments, _, *others = keys_of(mask, key_len)
    if any(given is not None for given in others):
        raise ValueError(
            'prefix_len and positions need numerics="exact": "checkpoint" reproduces biases as the model builds them'
        )
    keys = torch.arange(key_len, device=query.device)
    outputs = []
    for queries in query.split(ROWS, dim=2):
        at = torch.arange(queries.shape[2], device=query.device) + first
        first = first + queries.shape[2]
        hidden = (keys > at[:, None])[None, None]
        if segments is not None:
            hidden = hidden | (segments[:, at, None] != segments[:, None])[:, None]
        outputs.append(attend(queries, at, hidden if seen is None else hidden | ~seen[:, None, None, :]))
    return merged(torch.cat(outputs, dim=2))


def rounded_bias(build: Callable[..., Tensor], mask: Tensor, heads: int, key: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, 1, S]: m·position as the model builds and rounds it, counted over the visible tokens.

    Args:
        build: the family's `build_alibi_tensor`; it is a table by position, so that positions restart with each text.
        key: [B, K, S, D], with the whole capacity of a static cache.
        dtype: of the hidden states.
    """
    batch, _, key_len, _ = key.shape
    of_text = build(torch.ones(1, key_len, dtype=torch.long, device=key.device), heads, dtype=dtype)
    of_text = of_text.view(1, heads, 1, key_len).expand(batch, -1, -1, -1)
    keys = keys_of(mask, key_len)
    if keys.seen is None:
        return of_text
    return of_text.gather(3, counted_positions(keys)[:, None, None].expand(-1, heads, -1, -1))


def counted_positions(keys: Keys) -> Tensor:
    """[B, S]: the position of each visible key, counted over those of its text; `keys.seen` is not None."""
    assert keys.seen is not None
    count = keys.seen.cumsum(1)
    if keys.segments is not None:
        begins = torch.nn.functional.pad(keys.segments[:, 1:] != keys.segments[:, :-1], (1, 0))
        count = count - torch.where(begins, count - keys.seen.long(), 0).cummax(1).values
    return (count - 1).clamp(min=0)
