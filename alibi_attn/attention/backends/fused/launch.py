"""Launches Triton kernels at the driver's cost: arguments are prepared once per call, and compiled kernels are kept.

`kernel[grid](...)` makes Triton inspect every argument of every launch, to find the code that was compiled for such arguments.
Here an argument carries its `kind` with it: what the code depends on, in the form of an argument for Triton's `warmup`, which
compiles. The compiled kernel is kept by the kinds of its arguments, and launched with addresses and numbers. On a CPU, Triton's
interpreter gets the tensors themselves.
"""

import contextlib
import enum
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS, Shape
from alibi_attn.attention.backends.fused.kernels.arguments import Rows, Tiling
from alibi_attn.attention.call.transforms import in_memory

MAX_ROW_STRIDE = 2**31 // PLAN_ROWS  # elements from one row to the next; no tile has more rows than PLAN_ROWS

# Numbers from which the compiler learns only their type: neither 1 nor divisible by 16.
_NUMBER, _LARGE_NUMBER = 17, 2**40 + 1


class Pointer:
    """A pointer as Triton's compiler sees it: the type of its elements, and an address that shows whether it is aligned."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class Varying(enum.IntEnum):
    """Numbers that change from one decoding step to the next."""

    KEY_LEN = 0
    QUERY_OFFSET = 1


class Argument(NamedTuple):
    """An argument of a kernel: its value, or a tuple of values, and its kind.

    `owner`: the tensor that the value is an address in, the arguments that it is a tuple of, or which `Varying` number it is.
    """

    value: Any
    kind: Any
    owner: Any = None


NONE = Argument(None, None)


class Constants:
    """The compile-time constants of a kernel, in the order of its parameters, and the compiler's options."""

    def __init__(self, named: dict[str, Any], options: dict[str, Any]) -> None:
        self.named, self.options, self.values = named, options, tuple(named.values())


@functools.cache
def constants(*, num_warps: int = 4, num_stages: int = 3, **named: Any) -> Constants:
    # Without this option Triton 3.9 warns, because its default will change.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return Constants(named, options)


@functools.cache
def tiling(
    head_dim: int,
    causal: bool,
    tile: tuple[int, int],
    rows: int | None,
    unit: int | None = None,
    *,
    described: bool = False,
) -> Argument:
    """The `Tiling` of an attention kernel.

    Args:
        tile: its queries and keys.
        rows: as in `Plan`; None = decoding.
        unit: queries of a block of the bands; None = rows.
    """
    known = Tiling.of(head_dim, *tile, rows, unit or rows, causal, precision(), described)
    return Argument(known, known)


def interpreted(known: Tiling) -> types.SimpleNamespace:
    """A `Tiling` for Triton's interpreter, which makes tensors of the numbers in a tuple."""
    return types.SimpleNamespace(**{name: x.value for name, x in known._asdict().items()})


def of_shape(shape: Shape) -> Constants:
    """The compiler's options for a tile of this shape."""
    return constants(num_warps=shape.warps, num_stages=shape.stages)


_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    device: torch.device, kernel: Any, grid: tuple[int, int, int], constants: Constants, *arguments: Argument
) -> None:
    """Launches a kernel on a device, or interprets it on a CPU."""
    values = [argument.value for argument in arguments]
    if device.type == "cpu":
        values = [interpreted(x) if isinstance(x, Tiling) else x for x in values]
        options = {name: constants.options[name] for name in ("num_warps", "num_stages")}
        kernel[grid](*values, **constants.named, **options)
        return
    key = (kernel.fn, device.index, constants, *[argument.kind for argument in arguments])
    with on(device):
        compiled = _COMPILED.get(key)
        if compiled is None:
            kinds = [argument.kind for argument in arguments]
            names = kernel.arg_names[len(kinds) :]
            assert list(constants.named) == names, f"{kernel.fn.__name__} has the constants {names}"
            compiled = kernel.warmup(*kinds, grid=grid, **constants.named, **constants.options)
            _COMPILED[key] = compiled
        run = _launcher(compiled, grid, device.index)
        if kinds_described := {at: x.kind for at, x in enumerate(arguments) if isinstance(x.value, Described)}:
            run = _describing(run, kinds_described)
        run(*values, *constants.values)
    if WATCHED.recorder is not None:
        WATCHED.recorder.launched(run, arguments, constants.values)


def _launcher(compiled: Any, grid: tuple[int, int, int], device: int) -> Any:
    """What `compiled[grid]` launches, without what Triton prepares for hooks of profilers, unless there are some."""
    from triton import knobs
    from triton.runtime import driver

    watched, hooks, stream = compiled[grid], knobs.runtime, driver.active.get_current_stream  # [grid] loads the code
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launched(*values: Any) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            watched(*values)
        else:
            run(*grid, stream(device), function, metadata, None, None, None, *values)

    return launched


def scratch(size: int | tuple[int, int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """A tensor of 32-bit numbers that only the kernels of this call use."""
    tensor = torch.empty(size, dtype=dtype, device=device)
    if WATCHED.recorder is not None:
        WATCHED.recorder.allocated(tensor)
    return tensor


def part_of(tensor: Tensor, heads: slice) -> Tensor:
    """Some heads of a tensor [B, heads, …] or [heads], at an address that is known if the tensor's is."""
    part = tensor[heads] if tensor.ndim == 1 else tensor[:, heads]
    if WATCHED.recorder is not None:
        WATCHED.recorder.taken(part, tensor)
    return part


def begin(call: int) -> None:
    """What is launched from here on belongs to this one of several calls, each of which has its own `Varying` numbers."""
    if WATCHED.recorder is not None:
        WATCHED.recorder.call = call


class _Watched(threading.local):
    """The recorder of `recording.py` that sees the launches of this thread; None = none."""

    recorder: Any = None


WATCHED = _Watched()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes the device current, because Triton launches on the current device."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NO_GUARD
    return torch.cuda.device(device)


_NO_GUARD = contextlib.nullcontext()


def in_rows(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors with a last stride of 1, and rows so near to each other that addresses within a tile fit int32."""
    return (
        x if x.stride(-1) == 1 and x.stride(-2) < MAX_ROW_STRIDE else x.contiguous() for x in map(in_memory, tensors)
    )


def rows_of(tensor: Tensor) -> Argument:
    """The `Rows` of a tensor [B, heads, rows, D] with a last stride of 1, or of single numbers, [B, heads, rows]."""
    strides = tensor.stride()[:3]
    if tensor.device.type == "cpu":
        return Argument(Rows(tensor, *strides), None)
    address, numbers = tensor.data_ptr(), strides[0] | strides[1] | strides[2]
    kind = _rows_kind(tensor.dtype, tensor.ndim == 4 and (address | numbers) & 15 == 0, numbers >> 31 > 0)
    return Argument(Rows(address, *strides), kind, tensor)


class Described(NamedTuple):
    """Rows that a device fetches by itself: their address, and the sizes and strides of [B, heads, rows, D]."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def is_describable(tensor: Tensor) -> bool:
    """Whether `described` can describe a tensor [B, heads, rows, D]: its rows begin at multiples of 16 bytes."""
    words, *strides = 16 // tensor.itemsize, *tensor.stride()[:-1]
    return (
        tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        and all(0 < stride < 2**36 and stride % words == 0 for stride in strides)
    )


def described(tensor: Tensor, rows: int, width: int) -> Argument:
    """The descriptor of a tensor, from which a kernel loads `rows` rows of `width` numbers; zeros beyond the tensor."""
    sizes, strides = tuple(tensor.shape), tensor.stride()
    if tensor.device.type == "cpu":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return Argument(TensorDescriptor(tensor, list(sizes), list(strides), [1, 1, rows, width]), None)
    parts = pointer(tensor), Argument(sizes, None), Argument(strides, None)
    return Argument(Described(parts[0].value, sizes, strides), _described_kind(tensor.dtype, rows, width), parts)


@functools.cache
def _described_kind(dtype: torch.dtype, rows: int, width: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    class Kind(TensorDescriptor):  # type: ignore[misc]
        __eq__, __hash__ = object.__eq__, object.__hash__

    return Kind(pointer_kind(dtype), [1, 1, rows, width], [width, width, width, 1], [1, 1, rows, width])


def _describing(run: Any, kinds: dict[int, Any]) -> Any:
    """A launch that makes descriptors of the arguments at some places, which are `Described`, given their kinds."""

    def launched(*values: Any) -> None:
        fit = list(values)
        for at, kind in kinds.items():
            fit[at] = _descriptor(kind, *fit[at])
        run(*fit)

    return launched


@functools.lru_cache(maxsize=256)  # torch gives later calls the same addresses
def _descriptor(kind: Any, address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(Pointer(kind.base.dtype, address), list(sizes), list(strides), kind.block_shape)


def pointer(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Argument:
    """A contiguous tensor; None stays None. `dtype`: what its bytes are for the kernel, if not numbers of its dtype."""
    if tensor is None:
        return NONE
    if tensor.device.type == "cpu":
        return Argument(tensor if dtype is None else tensor.view(dtype), None)
    address = tensor.data_ptr()
    return Argument(address, pointer_kind(dtype or tensor.dtype, address & 15 == 0), tensor)


def number(value: int) -> Argument:
    """A whole number of which the code depends on nothing but whether it fits 32 bits."""
    return Argument(value, _NUMBER if -(2**31) <= value < 2**31 else _LARGE_NUMBER)


def varying(value: int, which: Varying) -> Argument:
    """A whole number that a recording does not hold: every call that replays it gives its own."""
    return Argument(value, number(value).kind, which)


def real(value: float) -> Argument:
    return Argument(value, 0.5)


def one_or_more(value: int) -> Argument:
    """A whole number that fits 32 bits, for which the code is shorter if it is 1."""
    return Argument(value, 1 if value == 1 else _NUMBER)


def grouped(kind: Any, *arguments: Argument) -> Argument:
    """A named tuple of arguments."""
    return Argument(kind(*[x.value for x in arguments]), kind(*[x.kind for x in arguments]), arguments)


@functools.cache
def pointer_kind(dtype: torch.dtype, aligned: bool = True) -> Pointer:
    return Pointer(dtype, 16 if aligned else 1)


@functools.cache
def _rows_kind(dtype: torch.dtype, aligned: bool, large: bool) -> Rows:
    stride = (_LARGE_NUMBER if large else _NUMBER) - (1 if aligned else 0)
    return Rows(pointer_kind(dtype, aligned), stride, stride, stride)


def precision() -> str:
    """The precision of matrix products in fp32."""
    return "ieee" if torch.version.hip else "tf32x3"
