"""The Forgetting Transformer's additions to attention: forget gates and norms per head. Read next: `shift.py`."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from alibi_attn.attention.call.checks import default_tolerance
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.hf.attention.masks import Keys, keys_of
from alibi_attn.hf.attention.patched_attention import extended, merged, settings_of
from alibi_attn.hf.caches.cache import ALiBiCache
from alibi_attn.hf.caches.forgetting_cache import ForgettingCache
from alibi_attn.nn.gated_cache import GatedReachCache
from alibi_attn.reach import score_bound_of_norms


class HeadNorm(nn.Module):
    """RMS norm of each head, [B, T, H·D] -> [B, T, H·D], with a weight [H·D]."""

    def __init__(self, num_heads: int, size: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.eps = num_heads, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.num_heads, -1))
        return F.rms_norm(heads, heads.shape[-1:], eps=self.eps).flatten(-2) * self.weight


def log_gates(logits: Tensor) -> Tensor:
    """ln f [B, H, T] from logits [B, T, H], in fp32 or better, because gates are summed over the whole text."""
    return F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))).transpose(1, 2)


def attended(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_fgate: Tensor,
    *,
    cache: Cache | None,
    mask: Tensor,
    dropout_p: float,
) -> Tensor:
    """[B, T, H·D]: attention over the cached tokens and these, which are appended. A hidden token forgets nothing.

    Args:
        log_fgate: [B, H, T], of these tokens.
        mask: that of `masks.of_layers`.

    Raises:
        ValueError: a cache that stores no gates, `prefix_len` or `positions`, or attention that is replaced or recorded.
    """
    if "attend" in vars(layer):
        raise ValueError(
            "recording weights and context parallelism do not support forget gates; undo them for this model"
        )
    if isinstance(cache, ForgettingCache):
        keys = _checked(keys_of(mask, cache.get_seq_length(layer.layer_idx) + key.shape[2]))  # type: ignore[arg-type]
        return _attended_by_head(layer, query, key, value, log_fgate, cache=cache, keys=keys, dropout_p=dropout_p)
    first: int | Tensor = 0
    if isinstance(cache, ALiBiCache):
        key, value, first = extended(layer, cache, key, value, log_fgate=log_fgate)
        key, value = (x[:, : layer.heads[1]] for x in (key, value))  # type: ignore[index]  # the others are unshifted
        log_fgate = cache.log_fgate(layer.layer_idx)  # type: ignore[arg-type]
    elif cache is not None:
        raise ValueError(
            f"forget gates need an ALiBiCache, which stores them, but the cache is a {type(cache).__name__}"
        )
    keys = _checked(keys_of(mask, key.shape[2]))
    assert isinstance(first, int)
    if keys.seen is not None:
        log_fgate = log_fgate.masked_fill(~keys.seen[:, None], 0.0)
    segments = None if keys.segments is None else (keys.segments[:, first : first + query.shape[2]], keys.segments)
    settings = settings_of(layer)
    mixed = forgetting_attention(
        query,
        key,
        value,
        log_fgate,
        settings.slopes if any(settings.slopes) else None,
        scale=settings.scale,
        query_offset=first,
        key_mask=keys.seen,
        segment_ids=segments,
        dropout_p=dropout_p,
        backend=settings.backend,
    )
    return merged(mixed)


def _attended_by_head(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_fgate: Tensor,
    *,
    cache: ForgettingCache,
    keys: Keys,
    dropout_p: float,
) -> Tensor:
    """`attended` with one call per key head, because each keeps another number of keys."""
    if keys.segments is not None or torch.compiler.is_compiling():
        raise ValueError("a ForgettingCache holds one text per row and does not compile; use an ALiBiCache")
    settings, index = settings_of(layer), cast("int", layer.layer_idx)

    def make() -> GatedReachCache:
        return GatedReachCache(
            settings.slopes,
            score_bound=score_bound(layer, query.shape[3]),
            tolerance=default_tolerance(query.dtype) if cache.tolerance is None else cache.tolerance,
            num_kv_heads=key.shape[1],
        )

    held = cache.of_layer(index, make)
    held.check_bound(query, key, settings.scale, torch.tensor(settings.slopes))
    log_fgate = cache.cut(index, log_fgate, keys.seen)
    options: Any = {"scale": settings.scale, "dropout_p": dropout_p, "backend": settings.backend}
    mixed = []
    for heads, part in zip(held.query_heads, held.append(key, value, log_fgate, layer=layer), strict=True):
        slopes = [settings.slopes[head] for head in heads]
        mixed.append(forgetting_attention(query[:, heads], *part, slopes if any(slopes) else None, **options))
    return merged(torch.cat(mixed, dim=1))


def score_bound(layer: nn.Module, head_dim: int) -> float:
    """U, which no scaled score exceeds: a constant of the weights of the norms."""
    norms = [norm.weight for norm in (layer.q_norm, layer.k_norm) if isinstance(norm, HeadNorm)]
    if not norms:
        raise ValueError(
            "a ForgettingCache needs normalized queries and keys (qk_norm), which bound every later score; this model has "
            "none, so use an ALiBiCache"
        )
    of_query, of_key = (float(weight.detach().abs().max()) for weight in norms)
    bound = score_bound_of_norms(settings_of(layer).scale, head_dim, of_query, of_key)
    return bound + (head_dim + 16) * 2.0**-24 * bound  # scores and λ are computed in fp32


def _checked(keys: Keys) -> Keys:
    if keys.prefix_len is not None or keys.positions is not None:
        raise ValueError("prefix_len and positions do not exist for a model with forget gates; omit them")
    return keys
