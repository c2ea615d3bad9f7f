"""Which backend runs a call: a literal table of backends per device, and the reason why each of the others does not.

"auto" decides from shapes, dtypes and the device only, never from tensor values, so it compiles and never synchronizes.
"""

from torch import Tensor

from alibi_attn.attention.backends import dense, flex, reference
from alibi_attn.attention.backends.banded import backend as banded
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.protocol import Backend, Visits
from alibi_attn.attention.call.explanation import verdict_on
from alibi_attn.attention.call.spec import AttentionSpec

_ALL: tuple[Backend, ...] = (reference, dense, banded, native, fused, flex)
BACKENDS = {backend.name: backend for backend in _ALL}
# Their `run` comes from `operator.py`, which refuses second derivatives itself.
WITH_OPERATOR = frozenset({banded.name, native.name, fused.name})
# They read every field of a spec; for the others `merging.py` splits some calls.
WITH_ALL_MASKS = frozenset({reference.name, dense.name})

# In order of preference. `dense` runs on every device of torch, and other devices always get it.
PREFERRED: dict[str, tuple[Backend, ...]] = {"cpu": (native, banded, dense), "cuda": (fused, flex, dense)}


def visits(name: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor | None) -> Visits | None:
    """What the call reads; None = everything."""
    if 0 in (spec.batch, spec.query_len, spec.key_len):
        return None
    return BACKENDS[name].visits(spec, query, key, value)


def choose(backend: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> str:
    """The name of the backend that runs: the named one, or for "auto" the device's first that can; `dense` for small calls.

    Raises:
        ValueError: an unknown name, or a named backend that cannot run this call (with its reason).
    """
    if backend == "auto":
        for preferred in PREFERRED.get(query.device.type, ()):
            if preferred.why_not(spec, query, key, value) is None:
                return preferred.name if preferred.too_small(spec) is None else dense.name
        return dense.name
    check_name(backend)
    reason = BACKENDS[backend].why_not(spec, query, key, value)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run this: {reason}; backend='auto' picks one that can")
    return backend


def check_name(backend: str) -> None:
    """Raises a ValueError unless a backend has this name, or it is "auto"."""
    if backend != "auto" and not (isinstance(backend, str) and backend in BACKENDS):
        raise ValueError(f"backend is {backend!r} but must be 'auto' or one of {', '.join(map(repr, BACKENDS))}")


def verdicts(
    spec: AttentionSpec[Tensor], runs: str, backend: str, query: Tensor, key: Tensor, value: Tensor
) -> dict[str, str]:
    """The verdict on each backend, for `explain`; `runs` runs, and `backend` is the caller's argument."""
    preferred = PREFERRED.get(query.device.type, (dense,))
    words = {}
    for name, candidate in BACKENDS.items():
        too_small = candidate.too_small(spec)
        otherwise = "can run" if too_small is None else f"can run; auto takes dense instead: {too_small}"
        if candidate not in preferred:
            otherwise = "can run; auto does not pick it on this device"
        reason = candidate.why_not(spec, query, key, value)
        words[name] = verdict_on(name, runs, backend, reason, otherwise)
    if runs == native.name:
        words[runs] += f": {build.instructions()}"
    return words
