"""Attention that reproduces the originals' rounding of scores, biases and weights, a few rows at a time.

Memory is linear, time quadratic. The families' biases are m·j (Baichuan, at inference), m·(j + 1) (Refact) and m·|i − j| with
slopes in the model's dtype (BTLM, Jais). Sources: the modeling code named in `docs/decoders.md`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from alibi_attn.attention.kept import Kept
from alibi_attn.hf.attention import masks, patched_attention
from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.nn.linear.fastest import matmul


def attended(layer: Any, query: Tensor, kept: Kept, *, key_len: int, mask: Tensor) -> Tensor:
    """[B, T, H·D] of one layer.

    Args:
        layer: an `Attention` of `layers.py`.
        query: [B, H, T, D].
        kept: keys and values [B, K, S, D].
        key_len: the number of keys in use, for slopes that depend on it; 0 with a static cache.
        mask: from `masks.of_layers`.
    """
    config, lowest = layer.config, torch.finfo(query.dtype).min
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (kept.key, kept.value))
    segments, positions = masks.keys_of(mask).segments, torch.arange(kept.key.shape[2], device=query.device)
    if segments is not None:  # [B, 1, 1, S]: positions restart with each text, and count hidden tokens too
        every = masks.Keys(torch.ones_like(segments, dtype=torch.bool), segments)
        positions = patched_attention.counted_positions(every)[:, None, None]

    def attend(queries: Tensor, at: Tensor, hidden: Tensor) -> Tensor:
        bias = _bias(config, at, positions, config.stretch(key_len), query.dtype)
        scores = _scaled(config, layer.layer_idx, queries, keys) + bias
        weights = nn.functional.softmax(scores.masked_fill(hidden, lowest), dim=-1)
        return matmul(nn.functional.dropout(weights, layer.dropout_p), values)

    return patched_attention.by_rows(attend, query, kept, mask)


def _scaled(config: ALiBiCausalLMConfig, layer: int, query: Tensor, key: Tensor) -> Tensor:
    """[B, H, rows, S], computed by the originals' operations in the same order."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    if config.checkpoint_rounding == "counts":
        return matmul(query * scale, key.mT)
    scores = matmul(query, key.mT)
    if config.checkpoint_rounding == "positions":
        return scores / (1 / scale)
    scores = scores / torch.tensor(1 / scale, dtype=scores.dtype, device=scores.device)
    return scores / float(layer + 1) if config.scale_by_inverse_layer else scores


def _bias(config: ALiBiCausalLMConfig, at: Tensor, positions: Tensor, stretch: float, dtype: torch.dtype) -> Tensor:
    """[H, rows | 1, S], or [B, H, 1, S]; m·j and −m·(i − j) are equal within softmax."""
    slopes = torch.tensor(config.unstretched, dtype=torch.float32, device=at.device)[:, None, None]
    if config.checkpoint_rounding == "distances":
        keys = torch.arange(positions.shape[-1], device=at.device)
        return (slopes.to(dtype) / -stretch) * (keys - at[:, None]).abs()
    return (slopes * (positions + (config.checkpoint_rounding == "counts"))).to(dtype)
