"""Context parallelism: a sequence over several processes, of which each sends only the keys that can matter elsewhere.

`context_parallel_attention` is the function; `halo` and `static_halo` say what it sends, without any process.
"""

from alibi_attn.distributed.halos import Halo, static_halo
from alibi_attn.distributed.simulation import halo

__all__ = ["Halo", "halo", "static_halo"]
