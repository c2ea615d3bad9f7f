"""ALiBi modules for Flax NNX: an attention layer, a transformer block and a cache, like those of `alibi_attn.nn`.

Parameters have the names of PyTorch's: `converted_weights` turns a state dict into parameters, and back.
Press et al. 2022, sec. 3 (arXiv:2108.12409).
"""

from alibi_attn.jax.flax.layers import ALiBiAttention, ALiBiTransformerBlock, KVCache
from alibi_attn.jax.flax.weights import converted_weights

__all__ = ["ALiBiAttention", "ALiBiTransformerBlock", "KVCache", "converted_weights"]
