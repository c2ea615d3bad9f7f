"""Which backend runs a call: a literal table of backends per device, and the reason why each of the others does not.

"auto" decides from shapes, dtypes and the device only, never from tensor values, so it compiles and never synchronizes. A backend
gets no call with a field that it does not read: `splitting.py` splits that off, or the backend is refused.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends import dense, flex, reference
from alibi_attn.attention.backends.banded import backend as banded
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.protocol import Backend, Formula, Kernel, TooSmall
from alibi_attn.attention.call.explanation import refusal, verdict_on
from alibi_attn.attention.call.reads import NUMBERED_DROPOUT, arguments_of
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import why_not_compiled
from alibi_attn.attention.run import few_queries, splitting
from alibi_attn.attention.run.guards import Run, guarded

_FORMULAS: tuple[Formula, ...] = (reference, dense)
_KERNELS: tuple[Kernel, ...] = (banded, native, fused, flex)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (*_FORMULAS, *_KERNELS)}
# Their `run` comes from `operator.py`, which refuses second derivatives itself.
WITH_OPERATOR = frozenset({banded.name, native.name, fused.name})
# They compute every score of a row, also those between segments.
WITHOUT_SKIPPING = frozenset(backend.name for backend in _FORMULAS)

# In order of preference. `dense` runs on every device of torch, and other devices always get it.
PREFERRED: dict[str, tuple[Backend, ...]] = {"cpu": (native, banded, dense), "cuda": (fused, flex, dense)}


# How each runs: kernels unmodified, formulas without bad numbers.
RUNS: dict[str, Run] = {kernel.name: kernel.run for kernel in _KERNELS}
RUNS |= {backend.name: guarded(backend.formula) for backend in _FORMULAS}
RUNS[dense.name] = guarded(dense.formula, slow=dense.READS - few_queries.READS - NUMBERED_DROPOUT)


class Choice(NamedTuple):
    """The name of the backend that runs a call, and the fields that are split off before."""

    name: str
    off: frozenset[str]


def choose(backend: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> Choice:
    """The backend that runs: the named one, or for "auto" the device's first that can; `dense` for small calls.

    Raises:
        ValueError: an unknown name, or a named backend that cannot run this call (with its reason).
    """
    check_name(backend)
    auto = backend == "auto"
    candidates = (*PREFERRED.get(query.device.type, ()), dense) if auto else (BACKENDS[backend],)
    among = candidates if auto and not torch.compiler.is_compiling() else ()
    for chosen in candidates:
        off, reason, small = _judged(chosen, spec, query, key, value, among)
        if reason is None:
            break
    else:
        raise refusal(backend, str(reason))
    if auto and small is not None:
        of_dense = splitting.split(spec.used(), dense.READS)
        if not of_dense.unread:
            return Choice(dense.name, of_dense.off)
    return Choice(chosen.name, off)


def _judged(
    backend: Backend, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor,
    among: tuple[Backend, ...] = (),
) -> tuple[frozenset[str], str | None, TooSmall | None]:  # fmt: skip
    """(the fields that are split off before, why the backend cannot run the call, why "auto" prefers `dense`).

    A reason is a field that it does not read, and that cannot be split off, or its own. If `dense` is preferred to each backend
    of `among`, no reason is looked for: it would not change the choice, and a compiled graph would have more guards.
    """
    used, off, small = spec.used(), splitting.WHOLE.off, backend.too_small(spec)
    is_small = small is not None and among and all(one is dense or one.too_small(spec) is not None for one in among)
    if is_small and not splitting.split(used, dense.READS).unread:
        return off, None, small
    if not used <= backend.READS:
        off, unread = splitting.split(used, backend.READS)
        if unread:
            return off, f"it does not compute {arguments_of(unread)}", small
        spec = _without(spec, off)
    reason = None
    if torch.compiler.is_compiling() and backend.name in WITH_OPERATOR:
        reason = why_not_compiled()
    return off, reason or backend.why_not(spec, query, key, value), small


def _without(spec: AttentionSpec[Tensor], off: frozenset[str]) -> AttentionSpec[Tensor]:
    """A call like the parts of this one."""
    return dataclasses.replace(spec, **(spec.defaults(off) | {"return_lse": True}))


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
        _, reason, small = _judged(candidate, spec, query, key, value)
        otherwise = "can run" if small is None else f"can run; auto takes dense instead: {small}"
        if candidate not in preferred:
            otherwise = "can run; auto does not pick it on this device"
        words[name] = verdict_on(name, runs, backend, reason, otherwise)
    if runs == native.name:
        words[runs] += f": {build.instructions()}"
        if query.dtype == torch.bfloat16 and build.instructions().startswith("AVX2,"):
            words[runs] += (
                "; without bf16 products, so prefer fp32: here it is torch's linear layers that bf16 slows down"
            )
    return words
