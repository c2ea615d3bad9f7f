"""Who computes it: a literal table of backends per device, and who cannot run a given call, and why.

"auto" decides from shapes, dtypes and the device only, never from values: so it compiles and never synchronises.
"""

from types import ModuleType

from torch import Tensor

from alibi_attn.attention.backends import dense, flex, reference
from alibi_attn.attention.backends.banded import backend as banded
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.transforms import surely

BACKENDS: dict[str, ModuleType] = {
    "reference": reference, "dense": dense, "banded": banded, "native": native, "fused": fused, "flex": flex
}  # fmt: skip

# In order of preference; `dense` runs on everything torch has, and is what every other device gets.
PREFERRED: dict[str, tuple[str, ...]] = {"cpu": ("native", "banded", "dense"), "cuda": ("fused", "flex", "dense")}

# With fewer scores of all heads together a call of the C++ kernels costs more than it saves (see docs/backends.md).
FEWEST_SCORES = 2**19
# The same for `banded`: with fewer keys and fewer scores a head than these, its certificate costs more than it saves.
SHORT_KEYS, SHORT_SCORES = 4096, 768 * 768
FEW_SCORES = 2**16  # however many the keys: a few queries are answered before the certificate has read them


def why_not(name: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """What this backend cannot do about this call; None = it runs."""
    reason: str | None = BACKENDS[name].why_not(spec, query, key, value)
    return reason


def steps_aside(name: str, spec: AttentionSpec[Tensor]) -> str | None:
    """Why "auto" leaves a call to `dense` although this backend could run it."""
    found = _too_small(name, spec)
    return None if found is None else found[0].format(found[1])


def _too_small(name: str, spec: AttentionSpec[Tensor]) -> tuple[str, int] | None:
    """The reason, and the number in it: to write it down would make a graph of torch.compile one for that number alone.

    What torch.export leaves open may be small or large; `dense` takes only what is surely small: the others are right for all.
    """
    if name not in ("banded", "native"):
        return None
    if surely(spec.query_len <= dense.FEW_QUERIES):
        return f"T ≤ {dense.FEW_QUERIES}: dense has scored all keys before the certificate has read them", 0
    scores = spec.query_len * spec.key_len
    if name == "native":
        of_all = spec.batch * spec.num_heads * scores
        return (f"short input: B·H·T·S = {{}} < {FEWEST_SCORES}", of_all) if surely(of_all < FEWEST_SCORES) else None
    if surely(spec.key_len < SHORT_KEYS) and surely(scores < SHORT_SCORES):
        return f"short input: S < {SHORT_KEYS} and T·S = {{}} < {SHORT_SCORES}", scores
    if surely(scores <= FEW_SCORES):
        return f"few queries: T·S = {{}} ≤ {FEW_SCORES}", scores
    return None


def visits(
    name: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is read, and the scores computed; None = all of them."""
    if spec.query_len == 0 or spec.key_len == 0:
        return None
    found: tuple[Tensor, Tensor] | None = BACKENDS[name].visits(spec, query, key, value)
    return found


def choose(backend: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> str:
    """The name of the backend that runs: the named one, or for "auto" the device's first that can, or `dense` if it steps aside.

    Raises:
        ValueError: an unknown name, or a named backend that cannot run this call (with its reason).
    """
    if backend == "auto":
        for name in PREFERRED.get(query.device.type, ()):
            if why_not(name, spec, query, key, value) is None:
                return name if _too_small(name, spec) is None else "dense"
        return "dense"
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r} but must be 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    reason = why_not(backend, spec, query, key, value)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run this: {reason}; backend='auto' picks one that can")
    return backend
