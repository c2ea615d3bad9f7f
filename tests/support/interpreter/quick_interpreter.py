"""Makes Triton's interpreter a third faster, with an overflow check that can fail; for the process that interprets.

For every operation, Triton recomputes values that depend only on the types; for every launch, it patches
triton.language and restores it. Here the values are cached and the patch is applied once; every result is the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def prepare() -> None:
    """Installs the faster interpreter. Call it once, before the first kernel."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter as its

    its._get_np_dtype = _kept(its._get_np_dtype)
    core.block_type.with_element_ty = _kept(core.block_type.with_element_ty)
    core.tensor.__init__ = _with_kept_shapes(core.tensor.__init__)
    its._patch_lang = _once(its._patch_lang, its._LangPatchScope)
    TritonSemantic.binary_op_sanitize_overflow_impl = _refuse_overflow
    check_overflow(on=False)


def check_overflow(*, on: bool) -> None:
    """Turns the overflow check of all 32-bit integer operations on or off; one list of cases uses it."""
    from triton.runtime import interpreter as its

    builder = its.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=on)


def _refuse_overflow(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """Raises on overflow. Triton's own check asserts nothing unless its debug mode is on."""
    kind = left.type.scalar
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    exact = EXACT[operation.__name__](*(x.handle.data.astype(np.int64) for x in (left, right)))
    if exact.min() < kind.get_int_min_value() or exact.max() > kind.get_int_max_value():
        raise OverflowError(f"{operation.__name__} of {kind} gives {exact.min()} to {exact.max()}")


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Caches a function of types, keyed by the types' names."""
    known: dict[tuple[str, ...], Any] = {}

    def found(*types: Any) -> Any:
        names = tuple(one.name for one in types)
        if names not in known:
            known[names] = function(*types)
        return known[names]

    return found


def _with_kept_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Caches the shape per type in the constructor of tensors."""
    known: dict[str, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[type.name]
        else:
            make(self, handle, type)
            known[type.name] = self.shape, self.numel

    return init


def _once(patch: Callable[..., Any], scope: Callable[[], Any]) -> Callable[..., Any]:
    """Applies a patch once for all functions, which share triton.language. A fresh `scope` restores nothing."""
    done: set[str] = set()

    def first(function: Any) -> Any:
        if function.__module__ not in done:
            done.add(function.__module__)
            patch(function)
        return scope()

    return first
