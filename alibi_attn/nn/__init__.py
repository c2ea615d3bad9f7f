"""PyTorch modules: the bias alone, one attention layer, one transformer block, and the caches for decoding.

Read `attention.py` first. Everything here is `alibi_attention` plus linear layers.
"""

from alibi_attn.lazy import missing

try:
    from alibi_attn.nn.attention import ALiBiAttention
    from alibi_attn.nn.block import ALiBiTransformerBlock
    from alibi_attn.nn.cache import KVCache
    from alibi_attn.nn.cache.retention import by_gates, within_reach
    from alibi_attn.nn.positional import ALiBiPositionalBias
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError('alibi_attn.nn needs PyTorch; install it with: pip install ".[torch]" in a clone') from error

__all__ = [
    "ALiBiAttention",
    "ALiBiPositionalBias",
    "ALiBiTransformerBlock",
    "KVCache",
    "by_gates",
    "within_reach",
]


def __getattr__(name: str) -> object:
    raise missing(__name__, name)
