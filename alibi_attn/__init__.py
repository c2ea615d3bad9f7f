"""Attention with linear biases (ALiBi; Press, Smith, Lewis, ICLR 2022): exact, fast, trainable.

Names are loaded when they are first used: importing the package loads no framework.
"""

from typing import TYPE_CHECKING

from alibi_attn.lazy import lazy_names

if TYPE_CHECKING:
    from alibi_attn.attention.api import alibi_attention, certified_block_mask, explain, head_reach
    from alibi_attn.attention.call.bias import alibi_bias
    from alibi_attn.attention.forgetting import forgetting_attention
    from alibi_attn.attention.rows import attention_rows
    from alibi_attn.attention.toeplitz import toeplitz_attention
    from alibi_attn.attention.varlen import alibi_attention_varlen
    from alibi_attn.nn import ALiBiAttention, ALiBiPositionalBias, ALiBiTransformerBlock, KVCache
    from alibi_attn.slopes import alibi_slopes, interpolate_slopes

__version__ = "0.1.0"

__all__ = [
    "ALiBiAttention",
    "ALiBiPositionalBias",
    "ALiBiTransformerBlock",
    "KVCache",
    "alibi_attention",
    "alibi_attention_varlen",
    "alibi_bias",
    "alibi_slopes",
    "attention_rows",
    "certified_block_mask",
    "explain",
    "forgetting_attention",
    "head_reach",
    "interpolate_slopes",
    "toeplitz_attention",
]

_HOMES = {
    "alibi_attn.attention.api": ("alibi_attention", "certified_block_mask", "explain", "head_reach"),
    "alibi_attn.attention.call.bias": ("alibi_bias",),
    "alibi_attn.attention.forgetting": ("forgetting_attention",),
    "alibi_attn.attention.rows": ("attention_rows",),
    "alibi_attn.attention.toeplitz": ("toeplitz_attention",),
    "alibi_attn.attention.varlen": ("alibi_attention_varlen",),
    "alibi_attn.nn": ("ALiBiAttention", "ALiBiPositionalBias", "ALiBiTransformerBlock", "KVCache"),
    "alibi_attn.slopes": ("alibi_slopes", "interpolate_slopes"),
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES, ("torch", "PyTorch", "torch"))
