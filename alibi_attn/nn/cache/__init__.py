"""Keys and values kept for decoding: a storage times a retention. Read `cache.py` first."""

from alibi_attn.nn.cache.cache import KVCache

__all__ = ["KVCache"]
