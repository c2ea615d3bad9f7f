"""Launches Triton kernels inside programs that XLA compiles, with JAX's own launcher; `fused.py` calls them.

A kernel is compiled for the device by the installed Triton when a call is traced. JAX's launcher gets its code, the grid, the
numbers and the order of the pointers. It takes pointers from the operands first and then from the results. So all arrays are
operands in the kernel's order, and those that the kernel changes are results at the same addresses.
"""

import dataclasses
import importlib.util
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alibi_attn.attention.backends.fused.kernels.arguments import Rows

Array = jax.Array

TARGET = "triton_kernel_call_ffi"
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
_ALIGNED = [["tt.divisibility", 16]]


@dataclasses.dataclass(frozen=True)
class Changed:
    """An array that the kernel changes.

    Args:
        type: the numbers that the kernel sees in its bytes, if not those of its dtype; JAX may not have int64.
    """

    array: Array
    type: str | None = None


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A number that is compiled in; also Triton's `constexpr` of one."""

    number: Any


class Source(NamedTuple):
    """What Triton compiles: types of the parameters by name, and by place (of nested tuples) constants and alignments.

    The same as in PyTorch, with the empty lists that Triton 3.6 makes: kernels that it keeps in its cache are found again.
    """

    kernel: Any
    types: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    aligned: dict[tuple[int, ...], Any]
    options: dict[str, int]


class Launch:
    """A kernel with its arguments: arrays, `Changed`, ints (int32, or int64 where needed), floats (fp32), `Fixed`, None and
    named tuples of these.

    Args:
        arrays: those among the arguments, in order; `changed` are the places of the changed ones.
        numbers: (value, type) by place among all pointers and numbers; None = an array.
    """

    def __init__(
        self, kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, int]
    ) -> None:
        self.arrays: list[Array] = []
        self.changed: list[int] = []
        self.numbers: list[tuple[float, str] | None] = []
        self.source = Source(kernel, {}, {}, {}, options)
        names = kernel.arg_names
        assert list(constants) == names[len(arguments) :], f"the constants of {kernel} are {names[len(arguments) :]}"
        for at, (name, argument) in enumerate(zip(names, arguments, strict=False)):
            self.source.types[name] = self._type(argument, (at,))
        for at, name in enumerate(constants, len(arguments)):
            self.source.types[name], self.source.constants[at,] = "constexpr", constants[name]
            if isinstance(constants[name], str):
                self.source.aligned[at,] = []

    def _type(self, argument: Any, path: tuple[int, ...], *, aligned: bool = False) -> Any:
        if isinstance(argument, tuple):
            aligned = isinstance(argument, Rows) and all(int(str(x)) % 16 == 0 for x in argument[1:])
            types = [self._type(x, (*path, at), aligned=aligned) for at, x in enumerate(argument)]
            return type(argument)(*types)
        if argument is None or isinstance(argument, Fixed):
            self.source.constants[path] = None if argument is None else argument.number
            return "constexpr"
        if isinstance(argument, int | float):
            small = isinstance(argument, float) or -(2**31) <= argument < 2**31
            kind = "fp32" if isinstance(argument, float) else "i32" if small else "i64"
            if isinstance(argument, int):
                self.source.aligned[path] = _ALIGNED if aligned else []
            self.numbers.append((argument, kind))
            return kind
        array, given = argument, None
        if isinstance(argument, Changed):
            self.changed.append(len(self.arrays))
            array, given = argument.array, argument.type
        self.arrays.append(array)
        self.numbers.append(None)
        self.source.aligned[path] = _ALIGNED  # XLA aligns buffers; the launcher checks it
        return given or f"*{_TYPES[array.dtype.name]}"


def launch(
    kernel: Any, programs: int, arguments: Sequence[Any], *, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> list[Array]:
    """The changed arrays, in the order of the arguments."""
    asked = Launch(kernel, arguments, constants, {"num_warps": num_warps, "num_stages": num_stages})
    results = [asked.arrays[at] for at in asked.changed]
    call = jax.ffi.ffi_call(
        TARGET, results, input_output_aliases={operand: at for at, operand in enumerate(asked.changed)}
    )
    return list(call(*asked.arrays, opaque=_opaque(asked, programs)))


def _opaque(asked: Launch, programs: int) -> bytes:
    """The launch as JAX's launcher reads it."""
    from jaxlib import gpu_triton

    code = compiled(asked.source, capability())
    scratch = code.metadata.global_scratch_size
    assert scratch == 0, (
        f"{code.metadata.name} needs {scratch} bytes of scratch memory, which the launcher does not have"
    )
    parameters = [
        gpu_triton.create_array_parameter(0, 16) if number is None else gpu_triton.create_scalar_parameter(*number)
        for number in asked.numbers
    ]
    options, name = asked.source.options, code.metadata.name
    of_kernel = gpu_triton.TritonKernel(
        name, options["num_warps"], 1, code.metadata.shared, code.asm["ptx"], "", capability()
    )
    call = gpu_triton.TritonKernelCall(of_kernel, programs, 1, 1, parameters)
    return zlib.compress(call.to_proto(name, b""))


_COMPILED: dict[str, Any] = {}


def compiled(source: Source, capability: int) -> Any:
    """The code of a kernel for devices of this compute capability, 90 for 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    key = repr((source.kernel.fn, *source[1:], capability))
    if key not in _COMPILED:
        asked = ASTSource(source.kernel, source.types, source.constants, source.aligned)
        options = source.options | {"enable_fp_fusion": True}
        _COMPILED[key] = _with_ptx(asked, GPUTarget("cuda", capability, 32), options)
    return _COMPILED[key]


def _with_ptx(source: Any, target: Any, options: dict[str, Any]) -> Any:
    """The code of a kernel with its PTX, which JAX's launcher needs and Triton's cache may lack: then it is compiled again."""
    import triton

    code = triton.compile(source, target=target, options=options)
    if "ptx" not in code.asm:  # the cache was stripped, or TRITON_STORE_BINARY_ONLY is set
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            triton.knobs.compilation.store_binary_only = False
            code = triton.compile(source, target=target, options=options)
    return code


def capability() -> int:
    """The compute capability of the first CUDA device, 90 for 9.0; 0 = there is none."""
    if jax.default_backend() != "gpu":
        return 0
    said = str(getattr(jax.devices("gpu")[0], "compute_capability", ""))
    major, _, minor = said.partition(".")
    return int(major) * 10 + int(minor) if major.isdecimal() and minor.isdecimal() else 0


def missing() -> str | None:
    """What launching needs and this machine lacks; None = nothing."""
    if jax.__version_info__ < (0, 11):
        return f"it needs JAX 0.11 but this is {jax.__version__}"
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton; pip install triton"
    if capability() < 80:
        return "it needs a CUDA device of compute capability 8.0"
    return None


def empty(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Changed:
    """An array for a kernel to fill; zeros, because XLA has no uninitialized arrays."""
    return Changed(jnp.zeros(shape, dtype))
