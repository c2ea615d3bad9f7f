"""Shifts of keys and values in the Forgetting Transformer: those of each token are mixed with those of the token before.

    y'_t = α_t·y_{t−1} + (1 − α_t)·y_t,   α = sigmoid(W·x) per head and token

y_{t−1} is 0 at the start of a text and after a hidden token. A cache stores y' in its first K heads and y in K more, so that
cropping, reordering and copying keep both. Source: ShiftLinear of the authors' code; Lin et al. 2025 (arXiv:2503.02130).
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from alibi_attn.hf.attention.masks import keys_of
from alibi_attn.hf.caches.cache import ALiBiCache
from alibi_attn.hf.caches.layer import CacheLayer
from alibi_attn.nn.linear.fastest import mapped


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
