"""Who computes it: a literal table of backends per device, and who cannot run a given call, and why.

"auto" decides from shapes, dtypes and the device only, never from values: so it compiles and never synchronises.
"""

from torch import Tensor

from alibi_attn.attention.backends import dense, flex, reference
from alibi_attn.attention.backends.banded import backend as banded
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.protocol import Backend
from alibi_attn.attention.spec import AttentionSpec

_ALL: tuple[Backend, ...] = (reference, dense, banded, native, fused, flex)
BACKENDS = {backend.name: backend for backend in _ALL}

# In order of preference; `dense` runs on everything torch has, and is what every other device gets.
PREFERRED: dict[str, tuple[Backend, ...]] = {"cpu": (native, banded, dense), "cuda": (fused, flex, dense)}


def visits(
    name: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is read, and the scores computed; None = all of them."""
    if spec.query_len == 0 or spec.key_len == 0:
        return None
    return BACKENDS[name].visits(spec, query, key, value)


def choose(backend: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> str:
    """The name of the backend that runs: the named one, or for "auto" the device's first that can; `dense` for what is too small.

    Raises:
        ValueError: an unknown name, or a named backend that cannot run this call (with its reason).
    """
    if backend == "auto":
        for preferred in PREFERRED.get(query.device.type, ()):
            if preferred.why_not(spec, query, key, value) is None:
                return preferred.name if preferred.too_small(spec) is None else dense.name
        return dense.name
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r} but must be 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    reason = BACKENDS[backend].why_not(spec, query, key, value)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run this: {reason}; backend='auto' picks one that can")
    return backend
