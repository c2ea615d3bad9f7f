"""PyTorch modules: the bias alone, one attention layer, one transformer block, and the caches for decoding.

Read `attention.py` first. Everything here is `alibi_attention` plus linear layers.
"""

from alibi_attn.nn.attention import ALiBiAttention
from alibi_attn.nn.block import ALiBiTransformerBlock
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.positional import ALiBiPositionalBias
from alibi_attn.nn.reach_cache import ReachCache

__all__ = ["ALiBiAttention", "ALiBiPositionalBias", "ALiBiTransformerBlock", "KVCache", "ReachCache"]
