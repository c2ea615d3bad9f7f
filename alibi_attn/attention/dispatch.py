"""Who computes it: a literal table of backends per device, and who cannot run a given call, and why.

"auto" decides from shapes, dtypes and the device only, never from values: so it compiles and never synchronises.
"""

from types import ModuleType

from torch import Tensor

from alibi_attn.attention.backends import dense, reference
from alibi_attn.attention.spec import AttentionSpec

BACKENDS: dict[str, ModuleType] = {"reference": reference, "dense": dense}

# In order of preference; a device that is not listed gets `dense`, which runs on everything torch has.
PREFERRED: dict[str, tuple[str, ...]] = {"cpu": ("dense",), "cuda": ("dense",)}


def why_not(name: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """What this backend cannot do about this call; None = it runs."""
    reason: str | None = BACKENDS[name].why_not(spec, query, key, value)
    return reason


def choose(backend: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> ModuleType:
    """The backend that runs: the named one, or for "auto" the first of the device's that can.

    Raises:
        ValueError: an unknown name, or a named backend that cannot run this call (with its reason).
    """
    if backend == "auto":
        for name in PREFERRED.get(query.device.type, ("dense",)):
            if why_not(name, spec, query, key, value) is None:
                return BACKENDS[name]
        return dense
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r} but must be 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    reason = why_not(backend, spec, query, key, value)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run this: {reason}; backend='auto' picks one that can")
    return BACKENDS[backend]
