"""Context parallelism: a sequence over several processes, of which each sends only the keys that can matter elsewhere.

`context_parallel_attention` is the function, and `context_parallel` makes it a model's attention. `halo` and `static_halo` say
what is sent, without any process.
"""

from alibi_attn.distributed.attention import context_parallel_attention, context_parallel_forgetting_attention
from alibi_attn.distributed.exchange import Traffic
from alibi_attn.distributed.halos import Halo, static_halo
from alibi_attn.distributed.model import ContextParallel, context_parallel
from alibi_attn.distributed.simulation import halo

__all__ = [
    "ContextParallel",
    "Halo",
    "Traffic",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_forgetting_attention",
    "halo",
    "static_halo",
]
