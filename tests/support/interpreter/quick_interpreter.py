"""Makes Triton's interpreter take half the time, with an overflow check that can fail; for the process that interprets.

For every operation, Triton recomputes values that depend only on the types: the type of the result, and whether an
operand must be cast or broadcast. For every launch, it patches triton.language and restores it. Here the values are
cached and the patch is applied once; every result is the same.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

# By operator: Triton's function, and numpy's, which does the same for these types and broadcasts shapes as Triton does.
OPERATORS = {
    "__add__": ("add", np.add),
    "__sub__": ("sub", np.subtract),
    "__mul__": ("mul", np.multiply),
    "__and__": ("and_", np.bitwise_and),
    "__lt__": ("less_than", np.less),
    "__le__": ("less_equal", np.less_equal),
    "__gt__": ("greater_than", np.greater),
    "__ge__": ("greater_equal", np.greater_equal),
    "__eq__": ("equal", np.equal),
    "__ne__": ("not_equal", np.not_equal),
}
FLAGS = {frozenset({"int1"})}
NUMBERS = {frozenset({name}) for name in ("fp32", "int32", "int64")} | {frozenset({"int32", "int64"})}
EXACT = {name: operation for name, operation in OPERATORS.values() if name in ("add", "sub", "mul")}  # may overflow


def prepare() -> None:
    """Installs the faster interpreter. Call it once, before the first kernel."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter as its

    its._get_np_dtype = _kept(its._get_np_dtype)
    core.block_type.with_element_ty = _kept(core.block_type.with_element_ty)
    core.block_type.to_ir = lambda self, builder: self  # what a block type made anew is equal to
    core.dtype.__eq__ = _of_equal_names(core.dtype, core.constexpr)
    core.block_type.__eq__ = _of_equal_names(core.block_type, core.constexpr)
    TritonSemantic.computation_type_impl = _with_kept_results(TritonSemantic.computation_type_impl)
    TritonSemantic.cast = _with_casts_only_where_types_differ(TritonSemantic.cast)
    TritonSemantic.broadcast_impl_value = _with_kept_broadcasts(TritonSemantic.broadcast_impl_value, its, core)
    TritonSemantic.binary_op_type_checking_impl = _with_kept_checks(
        TritonSemantic.binary_op_type_checking_impl, core.tensor
    )
    for name, operation in OPERATORS.values():
        setattr(TritonSemantic, name, _directly(getattr(TritonSemantic, name), operation, its, core))
    its._patch_lang_tensor = _with_short_operators(its._patch_lang_tensor, its.interpreter_semantic, core.constexpr)
    core.tensor.__init__ = _with_kept_shapes(core.tensor.__init__)
    its._patch_lang = _once(its._patch_lang, its._LangPatchScope)
    its.InterpretedFunction.__call__ = _without_none_in_tuples(its.InterpretedFunction.__call__)
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


def _without_none_in_tuples(call: Callable[..., Any]) -> Callable[..., Any]:
    """Triton 3.6 cannot compile a function that returns a tuple with None in it; neither the interpreter nor 3.9 minds."""

    def called(function: Any, *args: Any, **options: Any) -> Any:
        result = call(function, *args, **options)
        if _has_none(result):
            raise TypeError(f"{function.fn.__name__} returns None in a tuple, which Triton 3.6 cannot compile")
        return result

    return called


def _has_none(result: Any) -> bool:
    return isinstance(result, tuple) and any(part is None or _has_none(part) for part in result)


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Caches a function of types, keyed by the types' names."""
    known: dict[tuple[str, ...], Any] = {}

    def found(*types: Any) -> Any:
        names = tuple(one.name for one in types)
        if names not in known:
            known[names] = function(*types)
        return known[names]

    return found


def _of_equal_names(kind: type, constexpr: type) -> Callable[[Any, Any], bool]:
    """A type's name has everything that equality compares: element type and shape."""

    def equal(self: Any, other: Any) -> bool:
        other = other.value if type(other) is constexpr else other
        return isinstance(other, kind) and self.name == other.name

    return equal


def _with_kept_checks(check: Callable[..., Any], tensor: type) -> Callable[..., Any]:
    """Checks and casts the operands once for every pair of types that needs no cast; other operands every time."""
    known: set[tuple[Any, ...]] = set()

    def checked(self: Any, left: Any, right: Any, *flags: Any, **named: Any) -> Any:
        if type(left) is not tensor or type(right) is not tensor:
            return check(self, left, right, *flags, **named)
        key = left.dtype.name, right.dtype.name, flags, *named.items()
        if key in known:
            return self.broadcast_impl_value(left, right)
        found = check(self, left, right, *flags, **named)
        if (found[0].dtype.name, found[1].dtype.name) == key[:2]:
            known.add(key)
        return found

    return checked


def _with_kept_results(promote: Callable[..., Any]) -> Callable[..., Any]:
    """Caches the type in which two scalar types are computed."""
    known: dict[tuple[Any, ...], Any] = {}

    def promoted(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return promoted


def _with_casts_only_where_types_differ(cast: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, input: Any, to: Any, *rounding: Any, **named: Any) -> Any:
        return input if input.dtype.name == to.scalar.name else cast(self, input, to, *rounding, **named)

    return changed


def _with_kept_broadcasts(broadcast: Callable[..., Any], its: Any, core: Any) -> Callable[..., Any]:
    """Caches the types to which two types are broadcast; None where an operand stays as it is."""
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def broadcasted(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        names = left.type.name, right.type.name
        if names not in known:
            found = broadcast(self, left, right)
            pairs = zip(found, (left, right), strict=True)
            known[names] = tuple(None if new is old else new.type for new, old in pairs)
            return found
        to_left, to_right = known[names]
        return left if to_left is None else wide(left, to_left), right if to_right is None else wide(right, to_right)

    def wide(x: Any, to: Any) -> Any:
        shape, data = tuple(to.shape.values), x.handle.data
        if x.type.is_block():
            data = np.broadcast_to(data, shape)
        else:
            data = np.full(shape, data, dtype=its._get_np_dtype(x.dtype))
        return core.tensor(its.TensorHandle(data, x.dtype), to)

    return broadcasted


def _directly(slow: Callable[..., Any], operation: np.ufunc, its: Any, core: Any) -> Callable[..., Any]:
    """Calls numpy for operands whose types Triton has computed with before, without asking for casts and shapes again."""
    known: dict[tuple[str, str], tuple[Any, Any, Any]] = {}
    allowed = FLAGS if operation is np.bitwise_and else NUMBERS
    may_overflow = slow.__name__ in EXACT

    @functools.wraps(slow)
    def computed(self: Any, left: Any, right: Any, *sanitize: Any) -> Any:
        is_tensor = type(right) is core.tensor
        if type(left) is not core.tensor or not (is_tensor or type(right) in (int, float)):
            return slow(self, left, right, *sanitize)
        key = left.type.name, right.type.name if is_tensor else repr(right)
        if key in known:
            of_handle, of_tensor, constant = known[key]
            right = right if is_tensor else constant
            if of_tensor.scalar.is_ptr():
                return core.tensor(self.builder.create_addptr(left.handle, right.handle), of_tensor)
            if may_overflow and of_handle.name == "int32" and all(sanitize):
                _refuse_overflow(self, left, right, slow)
            return core.tensor(its.TensorHandle(operation(left.handle.data, right.handle.data), of_handle), of_tensor)
        found = slow(self, left, right, *sanitize)
        of_handle = found.handle.dtype
        if is_tensor:
            is_moved = left.dtype.is_ptr() and right.dtype.is_int_signed() and operation is np.add
            if is_moved or frozenset({left.dtype.name, right.dtype.name}) in allowed:
                known[key] = of_handle, found.type, None
        elif left.dtype.name == of_handle.name and frozenset({of_handle.name}) in NUMBERS:
            known[key] = of_handle, found.type, self.scalar_constant(right, of_handle)
        return found

    return computed


def _with_short_operators(patch: Callable[..., None], semantic: Any, constexpr: type) -> Callable[..., None]:
    """Lets the operators of tensors call Triton's functions without the layers that hand over the interpreter."""

    def short(name: str) -> Callable[[Any, Any], Any]:
        function = getattr(semantic, name)
        checks = (True,) if name in EXACT else ()
        return lambda self, other: function(self, other.value if type(other) is constexpr else other, *checks)

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        for operator, (name, _) in OPERATORS.items():
            scope.set_attr(tensor, operator, short(name))

    return patched


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
