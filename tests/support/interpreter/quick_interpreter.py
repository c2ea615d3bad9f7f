"""Triton's interpreter in two thirds of its time, and with a check of overflows that can fail; for a process that interprets.

For every operation it computes anew what only depends on the types, and for every launch it puts its own functions into
triton.language and takes them out again. Here the one is kept and the other done once; every result is the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def prepare() -> None:
    """To be called once, before the first kernel."""
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
    """Whether every operation on 32-bit integers is checked: one list of cases does."""
    from triton.runtime import interpreter as its

    builder = its.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=on)


def _refuse_overflow(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """Triton's own computes as much and then asserts nothing, unless all of its debugging is on."""
    kind = left.type.scalar
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    exact = EXACT[operation.__name__](*(x.handle.data.astype(np.int64) for x in (left, right)))
    if exact.min() < kind.get_int_min_value() or exact.max() > kind.get_int_max_value():
        raise OverflowError(f"{operation.__name__} of {kind} gives {exact.min()} to {exact.max()}")


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function says of types, which are known by their names."""
    known: dict[tuple[str, ...], Any] = {}

    def found(*types: Any) -> Any:
        names = tuple(one.name for one in types)
        if names not in known:
            known[names] = function(*types)
        return known[names]

    return found


def _with_kept_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """What makes a tensor of a handle and a type; its shape is that of others of this type."""
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
    """For the functions of a module, which see the same of triton.language. A fresh `scope` has nothing to take back."""
    done: set[str] = set()

    def first(function: Any) -> Any:
        if function.__module__ not in done:
            done.add(function.__module__)
            patch(function)
        return scope()

    return first
