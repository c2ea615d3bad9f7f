"""The library of kernels: its sources, flags, functions and structures, and which copy of it is loaded.

A wheel contains them for several instruction levels (`levels.py`), and the best one that this processor supports is loaded.
Otherwise (source tree, editable install, wheel built without a compiler) they are compiled for this processor, each of `PARTS`
when it is first needed, which costs some seconds, and kept in the user's cache (`compiling.py`).
"""

import ctypes
import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from alibi_attn.attention.backends.native import compiling
from alibi_attn.attention.backends.native.compiling import SUFFIX, BuildError
from alibi_attn.attention.backends.native.levels import LEVELS, NATIVE, Level
from alibi_attn.attention.certificate.constants import FOR_CPP
from alibi_attn.processor import features

FOLDER = Path(__file__).parent
PROCESSOR = "processor.cpp"  # compiled without the flags of a level
SOURCES = (  # those that take longest to compile first
    "decoder_layers.cpp",
    "forward.cpp",
    "backward.cpp",
    "decoding.cpp",
    "linear.cpp",
    "library.cpp",
    "threads.cpp",
    PROCESSOR,
)
HEADERS = tuple(sorted(path.name for path in FOLDER.glob("*.hpp")))
FLAGS = (  # without the flags of a level
    "-std=c++17", "-O3", "-pthread", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti",
    *(f"-DALIBI_{name}={value!r}" for name, value in FOR_CPP.items()),
)  # fmt: skip
FLAGS_HERE = (*FLAGS, *NATIVE.flags)
FUNCTIONS = (
    "alibi_forward_float32", "alibi_forward_float64", "alibi_backward_float32", "alibi_backward_float64",
    "alibi_decode_float32", "alibi_decode_bfloat16", "alibi_decode_float16", "alibi_norms_float32", "alibi_norms_bfloat16",
    "alibi_norms_float16", "alibi_linear_float32", "alibi_linear_bfloat16", "alibi_linear_float16", "alibi_decoding_bytes",
    "alibi_layers_float32", "alibi_layers_bfloat16", "alibi_layers_float16", "alibi_layers_bytes",
)  # fmt: skip
QUESTIONS = (
    "alibi_built_with",
    "alibi_instructions",
    "alibi_call_bytes",
    "alibi_multiplies_bf16",
)


class Part(NamedTuple):
    """A library that is compiled when a call first needs it.

    Attributes:
        number: its `ALIBI_PART` in C++.
        sources: besides `library.cpp`.
        functions: the first letters of those of `FUNCTIONS` that it has.
    """

    number: int
    sources: tuple[str, ...]
    functions: tuple[str, ...] = ()


PARTS = {
    "threads": Part(1, ("threads.cpp", PROCESSOR)),  # of all other parts
    "float32": Part(
        32,
        ("forward.cpp", "backward.cpp"),
        ("alibi_forward_float32", "alibi_backward_float32"),
    ),
    "bfloat16": Part(16, ("forward.cpp", "backward.cpp"), ("alibi_forward_float32", "alibi_backward_float32")),
    "float64": Part(64, ("forward.cpp", "backward.cpp"), ("alibi_forward_float64", "alibi_backward_float64")),
    "decoding": Part(
        8,
        ("decoder_layers.cpp", "decoding.cpp", "linear.cpp"),
        ("alibi_layers", "alibi_decod", "alibi_linear", "alibi_norms"),
    ),
}


class Rows(ctypes.Structure):
    """`Rows` in `call.hpp`: an address, and strides in numbers."""

    _fields_ = [("at", ctypes.c_void_p), *((axis, ctypes.c_int64) for axis in ("sequence", "head", "row"))]


class Call(ctypes.Structure):
    """`Call` in `call.hpp`, which explains the fields."""

    ROWS = ("query", "key", "value", "grad", "output", "query_grad", "key_grad", "value_grad")
    ARRAYS = (
        "slopes", "right_slopes", "first", "key_mask", "query_segments", "key_segments", "key_bias", "dropout_seed",
        "query_numbers", "key_numbers", "lse", "rows", "grad_lse", "slope_grads", "key_bias_grad", "query_bias_grad", "visited",
        "query_points", "key_points", "table", "table_grads",
    )  # fmt: skip
    _fields_ = [
        *((name, ctypes.c_int64) for name in "BHKTSD"),
        *((name, Rows) for name in ROWS),
        *((name, ctypes.c_void_p) for name in ARRAYS),
        *((name, ctypes.c_int64) for name in ("window", "causal", "has_values")),
        *((name, ctypes.c_double) for name in ("scale", "tolerance")),
        *((name, ctypes.c_int64) for name in ("threads", "dropout_runs", "dropout_threshold")),
        ("dropout_factor", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("distances", "table_first", "for_backward", "bf16")),
    ]


def why_not(part: str = "float32") -> str | None:
    """Why a part of the kernels cannot run on this machine, or None; the first call may compile it."""
    try:
        library(part=part)
    except BuildError as error:
        return str(error)
    return None


def library(level: Level | None = None, *, part: str = "float32") -> ctypes.CDLL:
    """The library with a part of the kernels, from the wheel or compiled here, for `level` or the best level of this processor.

    Raises:
        BuildError: there is no compiler, it fails, or the processor does not support the level; the message names the
            fix.
    """
    loaded = _found(level, part, *map(os.environ.get, ("CXX", "XDG_CACHE_HOME", "HOME")))
    if isinstance(loaded, str):
        raise BuildError(loaded)
    return loaded


def instructions() -> str:
    """Which instructions the kernels use, and their origin: "AVX2, from the wheel"."""
    loaded = library(part="threads")
    origin = "from the wheel" if Path(loaded._name).parent == FOLDER else "compiled here"
    amx = " and AMX" if loaded.alibi_multiplies_bf16() == 2 else ""
    return f"{loaded.alibi_instructions().decode()}{amx}, {origin}"


def shipped(level: Level) -> Path:
    """The path of a wheel's kernels for a level."""
    return FOLDER / f"kernels-{level.name}{SUFFIX}"


def compile_for_wheel(
    level: Level, target: Path, compiler: list[str] | None = None, more_sources: Sequence[Path] = ()
) -> None:
    """Compiles a library for a level, on any processor, with the given compiler or that of a first call.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    sources = [*(FOLDER / source for source in SOURCES), *more_sources]
    flags = {source: FLAGS if source.name == PROCESSOR else (*FLAGS, *level.flags) for source in sources}
    # On macOS a library holds its own name, by default the path that it was written to.
    named = [f"-Wl,-install_name,@rpath/{target.name}"] if target.suffix == ".dylib" else []
    with tempfile.TemporaryDirectory(prefix="alibi-attn-") as folder:
        command = compiler or compiling.compiler(os.environ.get("CXX"))
        compiling.compile_and_link(command, flags, ["-s", *named], Path(folder), target, timeout_s=None)


def multiplies_bf16() -> bool:
    """Whether the kernels read bf16; otherwise it must be widened to fp32."""
    return bool(library(part="threads").alibi_multiplies_bf16())


def part_of(dtype: str) -> str:
    """The part that computes attention for inputs of a dtype."""
    if dtype == "bfloat16" and multiplies_bf16():
        return dtype
    return "float64" if dtype == "float64" else "float32"


@functools.cache
def _found(
    level: Level | None, part: str, compiler: str | None, cache: str | None, home: str | None
) -> ctypes.CDLL | str:
    """The library, or why it cannot be loaded; determined once per process and environment."""
    try:
        if level is not None and level.missing:
            raise BuildError(
                f"{level.words} kernels cannot run here: this processor does not have {', '.join(level.missing)}"
            )
        for candidate in LEVELS if level is None else (level,):
            if shipped(candidate).exists() and _runs_here(candidate):
                return _load(shipped(candidate))
        if part == "threads":
            return _compiled(level, part)
        threads = _found(level, "threads", compiler, cache, home)
        if isinstance(threads, str):
            return threads
        loaded = _compiled(level, part)
        loaded.alibi_use_team(ctypes.cast(threads.alibi_run_team, ctypes.c_void_p))
        return loaded
    except BuildError as error:
        return str(error)


def _compiled(level: Level | None, part: str) -> ctypes.CDLL:
    """A part of the kernels, compiled now or kept by an earlier process."""
    name, (number, sources, functions) = (level or NATIVE).name, PARTS[part]
    flags = (*FLAGS, *(level or NATIVE).flags, f"-DALIBI_PART={number}")
    has = [function for function in FUNCTIONS if function.startswith(functions)]
    load = functools.partial(_load, functions=[*has, "alibi_run_team" if part == "threads" else "alibi_use_team"])
    files, headers = ([FOLDER / name for name in names] for names in ((*sources, "library.cpp"), HEADERS))
    return compiling.cached(f"kernels-{name}-{part}", files, headers, flags, load)


def _runs_here(level: Level) -> bool:
    """Whether this processor supports a level of the wheel; without /proc/cpuinfo, the level's library lists the features."""
    if not level.needs or features():
        return not level.missing
    listing = ctypes.CDLL(str(shipped(level))).alibi_processor_features
    listing.restype = ctypes.c_char_p
    return level.needs <= set(listing().decode().split())


def _load(path: Path, functions: Sequence[str] = FUNCTIONS) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        found = [getattr(loaded, name) for name in functions]
        built_with, words, call_bytes, multiplies_bf16 = (getattr(loaded, name) for name in QUESTIONS)
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from None
    for function in found:
        function.argtypes, function.restype = [ctypes.c_void_p], None
    built_with.restype = words.restype = ctypes.c_char_p
    call_bytes.restype = multiplies_bf16.restype = ctypes.c_int64
    constants = f"{built_with().decode()}call_bytes={call_bytes()}"
    expected = "".join(f"ALIBI_{name}={value!r} " for name, value in FOR_CPP.items())
    expected += f"call_bytes={ctypes.sizeof(Call)}"
    if constants != expected:
        raise BuildError(f"the kernels were built with the wrong constants: {constants}, not {expected}")
    return loaded
