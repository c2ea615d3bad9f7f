"""PyTorch modules: the bias alone, one attention layer, one transformer block, and the caches for decoding.

Read `attention.py` first. Everything here is `alibi_attention` plus linear layers.
"""

from alibi_attn.lazy import missing

try:
    from alibi_attn.nn.attention import ALiBiAttention
    from alibi_attn.nn.block import ALiBiTransformerBlock
    from alibi_attn.nn.cache import KVCache
    from alibi_attn.nn.gated_cache import GatedReachCache
    from alibi_attn.nn.positional import ALiBiPositionalBias
    from alibi_attn.nn.reach_cache import ReachCache
    from alibi_attn.nn.static_cache import StaticKVCache, StaticReachCache
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError('alibi_attn.nn needs PyTorch; install it with: pip install "alibi-attn[torch]"') from error

__all__ = [
    "ALiBiAttention",
    "ALiBiPositionalBias",
    "ALiBiTransformerBlock",
    "GatedReachCache",
    "KVCache",
    "ReachCache",
    "StaticKVCache",
    "StaticReachCache",
]


def __getattr__(name: str) -> object:
    raise missing(__name__, name)
