"""Context parallelism: splits a sequence over several processes, each of which sends only the keys that can matter elsewhere.

`context_parallel_attention` is the function; `context_parallel` switches a model to it. `plan_halo` and `static_halo` compute
which rows would be sent, without starting any process. Names are loaded lazily, because these functions disable torch's compiler
and importing the compiler costs as much as importing torch.
"""

from typing import TYPE_CHECKING

from alibi_attn.lazy import lazy_names

if TYPE_CHECKING:
    from alibi_attn.distributed.attention import context_parallel_attention, context_parallel_forgetting_attention
    from alibi_attn.distributed.exchange import Traffic
    from alibi_attn.distributed.halos import Halo, even_lengths, static_halo
    from alibi_attn.distributed.model import ContextParallel, context_parallel
    from alibi_attn.distributed.simulation import plan_halo

__all__ = [
    "ContextParallel",
    "Halo",
    "Traffic",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_forgetting_attention",
    "even_lengths",
    "plan_halo",
    "static_halo",
]

_HOMES = {
    "alibi_attn.distributed.attention": ("context_parallel_attention", "context_parallel_forgetting_attention"),
    "alibi_attn.distributed.exchange": ("Traffic",),
    "alibi_attn.distributed.halos": ("Halo", "even_lengths", "static_halo"),
    "alibi_attn.distributed.model": ("ContextParallel", "context_parallel"),
    "alibi_attn.distributed.simulation": ("plan_halo",),
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES, ("torch", "PyTorch", "torch"))
