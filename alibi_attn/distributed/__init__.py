"""Context parallelism: a sequence over several processes, of which each sends only the keys that can matter elsewhere.

`context_parallel_attention` is the function, and `context_parallel` makes it a model's attention. `halo` and `static_halo` say
what is sent, without any process. Names are loaded when they are first used: the functions load torch's compiler, to stay out
of it, and that takes as long as torch itself.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOMES = {
    "ContextParallel": "alibi_attn.distributed.model",
    "Halo": "alibi_attn.distributed.halos",
    "Traffic": "alibi_attn.distributed.exchange",
    "context_parallel": "alibi_attn.distributed.model",
    "context_parallel_attention": "alibi_attn.distributed.attention",
    "context_parallel_forgetting_attention": "alibi_attn.distributed.attention",
    "halo": "alibi_attn.distributed.simulation",
    "static_halo": "alibi_attn.distributed.halos",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
