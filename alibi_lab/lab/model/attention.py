"""The attention of the lab's models: one function for every position method and kind of bias.

`alibi_attention` computes biases that are linear in the distance, windows and documents; `toeplitz_attention` any other
function of the distance. Without a bias torch computes it, except on a CPU with our kernels, which are faster even with slopes
of 0. Shapes as in `attention/call/spec.py`. Next: `language_model.py`.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_attn import alibi_attention, distributed, forgetting_attention, toeplitz_attention
from alibi_attn.inspect import compiled_kernels
from alibi_attn.nn import KVCache
from alibi_lab.lab.config import ConfigError
from alibi_lab.lab.model.position_method import Bias, ByDistance, ContentBias, ForgetGates, Pass, Windowed


@dataclasses.dataclass
class LayerCache:
    """The cache of one layer: keys, values and gates, and the numbers of a `ContentBias`.

    Args:
        key_bias: [B, H, S]; None before the first token, and for methods without such numbers.
        dropped: the number of tokens that `last` dropped before the cached ones; positions count them.
    """

    keys: KVCache = dataclasses.field(default_factory=KVCache)
    key_bias: Tensor | None = None
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def last(self, count: int) -> "LayerCache":
        """A cache of the last `count` tokens, without gradients, for the same layer."""
        dropped = self.dropped + max(len(self) - count, 0)
        if not count or not len(self):
            return LayerCache(dropped=dropped)
        keys, gates = KVCache(), self.keys.log_fgate
        gates = None if gates is None else gates[..., -count:].detach()
        keys.append(self.keys.key[:, :, -count:].detach(), self.keys.value[:, :, -count:].detach(), gates)
        return LayerCache(keys, None if self.key_bias is None else self.key_bias[..., -count:].detach(), dropped)

    def append(self, k: Tensor, v: Tensor, bias: Bias, *, layer: nn.Module) -> tuple[Tensor, Tensor, Bias]:
        """Append keys, values and biases of new tokens, [B, H, T, D]; returns those of all S, and the bias for `attend`."""
        gates = bias.log_fgate if isinstance(bias, ForgetGates) else None
        [kept] = self.keys.append(k, v, gates, layer=layer)
        k, v = kept.key, kept.value
        if isinstance(bias, ForgetGates) and kept.log_fgate is not None:
            bias = dataclasses.replace(bias, log_fgate=kept.log_fgate)
        if isinstance(bias, ContentBias):
            new, old = bias.key_bias, self.key_bias
            self.key_bias = new if old is None else torch.cat([old, new], dim=-1)
            bias = dataclasses.replace(bias, key_bias=self.key_bias)
        return k, v, bias


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Bias, at: Pass | None = None, *, dropout_p: float = 0.0) -> Tensor:
    """Causal attention, [B, H, T, D], with the result of a position method's `bias`; the queries are the last T of the S keys.

    Args:
        bias: `ContentBias` and `ForgetGates` with the numbers of all S keys (`LayerCache.append`).
        at: its window, documents and context hide keys; None = a query sees all keys before it.
        dropout_p: the share of attention weights that is dropped.
    """
    query_len, key_len = q.shape[-2], k.shape[-2]
    at = at or Pass(query_len, key_len)
    window, context = at.window, at.context
    if isinstance(bias, Windowed):
        window, bias = min(bias.window, window or bias.window), None
    pairwise = isinstance(bias, ByDistance) or (isinstance(bias, Tensor) and bias.ndim != 1)
    if context is not None:
        if pairwise:
            raise ConfigError(
                "the model's position method has a bias per pair of tokens, which train.context_parallel does not support: pass "
                "a method whose bias is linear in the distance, or train.context_parallel=1"
            )
        over = distributed.context_parallel_attention, distributed.context_parallel_forgetting_attention
        others = {"group": context.group, "timeout": context.timeout}
        return _linear_attention(q, k, v, bias, over, window=window, segment_ids=at.segment_ids, **others)
    window = None if window is not None and window >= key_len else window
    masked = window is not None or at.segment_ids is not None
    given: Any = {"window": window, "segment_ids": at.segment_ids, "dropout_p": dropout_p}
    if isinstance(bias, ByDistance) and (query_len > 1 or masked):
        return toeplitz_attention(q, k, v, bias.table, **given)
    if not pairwise and (bias is not None or masked or _has_kernels(q)):
        return _linear_attention(q, k, v, bias, (alibi_attention, forgetting_attention), **given)
    if bias is None and query_len == key_len:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
    scores = bias.table.flip(1)[:, None] if isinstance(bias, ByDistance) else bias  # one new token sees all keys
    mask = scores[None].to(q.dtype) if isinstance(scores, Tensor) else None
    if mask is None or masked:
        visible = Pass(query_len, key_len, window=window, segment_ids=at.segment_ids).visible(q.device)
        mask = visible if mask is None else mask.masked_fill(~visible, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)


def _has_kernels(q: Tensor) -> bool:
    """Whether the C++ kernels run for these queries; for a single query they gain nothing."""
    return q.device.type == "cpu" and q.shape[-2] > 1 and compiled_kernels()


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, bias: Bias, functions: Any, **given: Any) -> Tensor:
    """Attention whose bias is linear in the distance, with numbers or gates per key.

    Args:
        functions: `alibi_attention` and `forgetting_attention`, for one process or several.
    """
    attention, forgetting = functions
    slopes = bias.slopes if isinstance(bias, ContentBias | ForgetGates) else bias
    slopes = q.new_zeros(q.shape[1], dtype=torch.float32) if slopes is None else slopes  # slopes of 0: no bias
    if isinstance(bias, ForgetGates):
        return forgetting(q, k, v, bias.log_fgate, slopes, **given)
    return attention(q, k, v, slopes, key_bias=bias.key_bias if isinstance(bias, ContentBias) else None, **given)
