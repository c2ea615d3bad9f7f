"""The Forgetting Transformer's additions to attention: forget gates, norms per head, and shifts of keys and values.

A shift mixes the key or value of each token with that of the token before:

    y'_t = α_t·y_{t−1} + (1 − α_t)·y_t,   α = sigmoid(W·x) per head and token

y_{t−1} is 0 at the start of a text and after a hidden token. A cache stores y' in its first K heads and y in K more, so that
cropping, reordering and copying keep both. Source: ShiftLinear of the authors' code; Lin et al. 2025 (arXiv:2503.02130).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from alibi_attn.attention.call.validation import slopes_beside
from alibi_attn.attention.kept import attend
from alibi_attn.hf.attention.masks import Keys, keys_of
from alibi_attn.hf.attention.patched_attention import appended, merged, settings_of
from alibi_attn.hf.caches.cache import ALiBiCache
from alibi_attn.hf.caches.layer import CacheLayer
from alibi_attn.nn.linear.fastest import mapped
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
    layer: Any, query: Tensor, key: Tensor, value: Tensor, log_fgate: Tensor, *, cache: Cache | None, mask: Tensor
) -> Tensor:
    """[B, T, H·D]: attention over the cached tokens and these, which are appended. A hidden token forgets nothing.

    Args:
        layer: an `Attention` of `layers.py`.
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
    forgets = isinstance(cache, ALiBiCache) and cache.forget
    if forgets and keys.segments is not None:
        raise ValueError("ALiBiCache(forget=True) holds one text per row; use ALiBiCache()")
    kept = appended(cache, layer, key, value, log_fgate, query=query, seen=keys.seen)
    options: dict[str, Any] = {"scale": settings.scale, "dropout_p": layer.dropout_p, "backend": settings.backend}
    if not forgets:
        options |= {"key_mask": keys.seen, "segment_ids": keys.segments}
        [whole] = kept
        heads: int = layer.heads[1]
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


class Shift(nn.Module):
    """The shift of keys or values, with the weight [K, E] of the gate in `proj`."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor, y: Tensor, last: Tensor | None, follows: Tensor | None) -> Tensor:
        """y' [B, T, K, D].

        Args:
            x: [B, T, E], the input of attention.
            y: [B, T, K, D], before the shift.
            last: y of the token before these, [B, K, D]; None = 0.
            follows: [B, T] bool, whether the token before counts; None = everywhere.
        """
        first = torch.zeros_like(y[:, :1]) if last is None else last[:, None]
        before = torch.cat((first, y[:, :-1]), dim=1)
        if follows is not None:
            before = before.masked_fill(~follows[..., None, None], 0.0)
        alpha = mapped(self.proj, x).to(torch.promote_types(x.dtype, torch.float32)).sigmoid()[..., None]
        return (alpha * before + (1 - alpha) * y).to(y.dtype)


def last_unshifted(cache: Cache | None, layer: int, heads: int) -> tuple[Tensor | None, Tensor | None]:
    """The key and the value of the last cached token before their shift, [B, K, D].

    Raises:
        ValueError: a cache that does not store them.
    """
    if isinstance(cache, ALiBiCache) and cache.forget:
        raise ValueError(
            "ALiBiCache(forget=True) does not store keys before their shift; use ALiBiCache() for this model"
        )
    if cache is None or not cache.get_seq_length(layer):
        return None, None
    held = cast("CacheLayer", cache.layers[layer])
    assert held.keys is not None
    assert held.values is not None
    return held.keys[:, heads:, -1], held.values[:, heads:, -1]


def follows(mask: Tensor, past: int, length: int) -> Tensor | None:
    """[B, T] bool: whether the token before is visible and of the same text; None = everywhere. `mask` is that of the layers."""

    def before(x: Tensor) -> Tensor:
        return F.pad(x, (1, 0))[:, past : past + length]

    keys, found = keys_of(mask, past + length), []
    if keys.seen is not None:
        found.append(before(keys.seen))
    if keys.segments is not None:
        found.append(before(keys.segments) == keys.segments[:, past:])
    return torch.stack(found).all(dim=0) if found else None
