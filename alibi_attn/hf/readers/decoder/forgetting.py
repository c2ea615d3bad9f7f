"""The Forgetting Transformer's additions to attention: forget gates, norms per head, an output gate. Read before: `layers.py`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.hf.attention.masks import keys_of
from alibi_attn.hf.attention.patched_attention import extended, merged, settings_of
from alibi_attn.hf.caches.cache import ALiBiCache


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
    first: int | Tensor = 0
    if isinstance(cache, ALiBiCache):
        key, value, first = extended(layer, cache, key, value, log_fgate=log_fgate)
        log_fgate = cache.log_fgate(layer.layer_idx)  # type: ignore[arg-type]
    elif cache is not None:
        raise ValueError(
            f"forget gates need an ALiBiCache, which stores them, but the cache is a {type(cache).__name__}"
        )
    keys = keys_of(mask, key.shape[2])
    if keys.prefix_len is not None or keys.positions is not None:
        raise ValueError("prefix_len and positions do not exist for a model with forget gates; omit them")
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
