"""The Forgetting Transformer's additions to attention: forget gates and norms per head. Read next: `shift.py`."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from alibi_attn.attention.call.validation import slopes_beside
from alibi_attn.attention.kept import attend
from alibi_attn.hf.attention.masks import Keys, keys_of
from alibi_attn.hf.attention.patched_attention import appended, merged, settings_of
from alibi_attn.hf.caches.cache import ALiBiCache
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
    settings, keys = settings_of(layer), checked(keys_of(mask), "forget gates")
    make = functools.partial(layer.reach_cache, query.dtype)  # type: ignore[arg-type, operator, misc]
    forgets = isinstance(cache, ALiBiCache) and cache.forget
    if forgets and keys.segments is not None:
        raise ValueError("ALiBiCache(forget=True) holds one text per row; use ALiBiCache()")
    more: dict[str, Any] = {"query": query, "scale": settings.scale, "seen": keys.seen, "make": make}
    kept = appended(cache, layer, key, value, log_fgate, **more)
    options: dict[str, Any] = {"scale": settings.scale, "dropout_p": dropout_p, "backend": settings.backend}
    if not forgets:
        options |= {"key_mask": keys.seen, "segment_ids": keys.segments}
        [whole] = kept
        heads: int = layer.heads[1]  # type: ignore[index, assignment]
        if whole.key.shape[1] > heads:  # the others are unshifted
            whole = whole._replace(key=whole.key[:, :heads], value=whole.value[:, :heads], norms=None)
        if keys.seen is not None and whole.log_fgate is not None:  # a hidden token forgets nothing
            whole = whole._replace(log_fgate=whole.log_fgate.masked_fill(~keys.seen[:, None], 0.0))
        kept = [whole]
    slopes = slopes_beside(settings.slopes, torch.float32, query) if any(settings.slopes) else None
    return merged(attend(query, kept, slopes, **options))


def score_bound(layer: nn.Module, head_dim: int) -> float:
    """U, which no scaled score exceeds: a constant of the weights of the norms."""
    norms = [norm.weight for norm in (layer.q_norm, layer.k_norm) if isinstance(norm, HeadNorm)]
    if not norms:
        raise ValueError(
            "ALiBiCache(forget=True) needs normalized queries and keys (qk_norm), which bound every later score; this model has "
            "none, so use ALiBiCache()"
        )
    of_query, of_key = (float(weight.detach().abs().max()) for weight in norms)
    bound = score_bound_of_norms(settings_of(layer).scale, head_dim, of_query, of_key)
    return bound + (head_dim + 16) * 2.0**-24 * bound  # scores and λ are computed in fp32


def checked(keys: Keys, bias: str) -> Keys:
    """The keys of a model with another bias than ALiBi's; raises ValueError for `prefix_len` and `positions`."""
    if keys.prefix_len is not None or keys.positions is not None:
        raise ValueError(f"prefix_len and positions do not exist for a model with {bias}; omit them")
    return keys
