"""The compiled kernels: those of the wheel, for the best level that this processor has (`levels.py`); where there is none (the
source tree, an editable install, a wheel made without a compiler) they are built once by the compiler that is there, for this
processor, kept in the user's cache, then only loaded.

Nothing is compiled before the first call that wants it (some seconds). A file in the cache is named by its level, by what it was
made from (sources, flags, compiler and processor, so a change of any of them makes another) and by what it holds: one that is
damaged is not loaded but made anew. Where nothing can be kept it is compiled for the process alone, and nothing is left behind.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from alibi_attn.attention.backends.native.levels import LEVELS, NATIVE, Level
from alibi_attn.attention.certificate.constants import FOR_CPP

FOLDER = Path(__file__).parent
SOURCES = ("forward.cpp", "backward.cpp", "decoding.cpp", "linear.cpp")
HEADERS = (
    "constants.hpp",
    "vectors.hpp",
    "products_bf16.hpp",
    "call.hpp",
    "denormals.hpp",
    "allowed.hpp",
    "origins.hpp",
    "block.hpp",
    "diagonals.hpp",
    "dropout.hpp",
    "norms.hpp",
    "tails.hpp",
    "certificate.hpp",
    "tasks.hpp",
    "decoding.hpp",
    "stored.hpp",
)
FLAGS = (  # and those of a level
    "-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-exceptions", "-fno-rtti",
    *(f"-DALIBI_{name}={value!r}" for name, value in FOR_CPP.items()),
)  # fmt: skip
FLAGS_HERE = (*FLAGS, *NATIVE.flags)
FUNCTIONS = (
    "alibi_forward_float32", "alibi_forward_float64", "alibi_backward_float32", "alibi_backward_float64",
    "alibi_decode_float32", "alibi_decode_bfloat16", "alibi_decode_float16", "alibi_norms_float32", "alibi_norms_bfloat16",
    "alibi_norms_float16", "alibi_linear_float32", "alibi_linear_bfloat16", "alibi_linear_float16", "alibi_decoding_bytes",
)  # fmt: skip
QUESTIONS = (
    "alibi_built_with",
    "alibi_instructions",
    "alibi_call_bytes",
    "alibi_backward_tasks",
    "alibi_multiplies_bf16",
)
TIMEOUT_S = 120  # of a first call; who makes a wheel waits as long as it takes


class Rows(ctypes.Structure):
    """`Rows` of `call.hpp`: an address, and strides in numbers."""

    _fields_ = [("at", ctypes.c_void_p), *((axis, ctypes.c_int64) for axis in ("sequence", "head", "row"))]


class Call(ctypes.Structure):
    """`Call` of `call.hpp`, which says what each field is."""

    ROWS = ("query", "key", "value", "grad", "output", "query_grad", "key_grad", "value_grad")
    ARRAYS = (
        "slopes", "right_slopes", "first", "key_mask", "query_segments", "key_segments", "key_bias", "dropout_seed", "lse",
        "rows", "grad_lse", "slope_grads", "key_bias_grad", "query_bias_grad", "visited", "table", "table_grads",
    )  # fmt: skip
    _fields_ = [
        *((name, ctypes.c_int64) for name in "BHKTSD"),
        *((name, Rows) for name in ROWS),
        *((name, ctypes.c_void_p) for name in ARRAYS),
        *((name, ctypes.c_int64) for name in ("window", "causal", "has_values")),
        *((name, ctypes.c_double) for name in ("scale", "tolerance")),
        *((name, ctypes.c_int64) for name in ("threads", "dropout_runs", "dropout_threshold")),
        ("dropout_factor", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("distances", "table_first", "bf16")),
    ]


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here, or are not those that are asked for."""


def why_not() -> str | None:
    """What keeps the kernels from running on this machine; the first call may compile them."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def library(level: Level | None = None) -> ctypes.CDLL:
    """The loaded library: the wheel's or one compiled here, of `level` or of the best that this processor has.

    Raises:
        BuildError: no compiler, one that cannot compile or link this, or no such processor; says what to do.
    """
    found = _found(level, *map(os.environ.get, ("CXX", "XDG_CACHE_HOME", "HOME")))
    if isinstance(found, str):
        raise BuildError(found)
    return found


def instructions() -> str:
    """Which instructions the kernels use, and where they come from: "AVX2, from the wheel"."""
    loaded = library()
    origin = "from the wheel" if Path(loaded._name).parent == FOLDER else "compiled here"
    return f"{loaded.alibi_instructions().decode()}, {origin}"


def shipped(level: Level) -> Path:
    """Where a wheel has the kernels of a level."""
    return FOLDER / f"kernels-{level.name}.so"


def compile_for_wheel(sources: Sequence[str], flags: Sequence[str], target: Path) -> None:
    """A library without an OpenMP of its own: it takes the process's, so no wheel brings torch's a second time.

    Raises:
        BuildError: no compiler, one that fails, or clang, whose code calls another OpenMP than torch's.
    """
    command = _command(os.environ.get("CXX"))
    if b"__clang__" in _defined(command, flags):
        told = f"{shlex.join(command)} is clang, whose code calls libomp, but torch brings GCC's libgomp"
        raise BuildError(f"the kernels of a wheel must be compiled by GCC: {told}; unset CXX, or name g++ in it")
    with tempfile.TemporaryDirectory(prefix="alibi-attn-") as inside:
        objects = [f"{inside}/{at}.o" for at in range(len(sources))]
        for source, compiled in zip(sources, objects, strict=True):
            _run(command, *flags, "-c", source, "-o", compiled, timeout_s=None)
        _run(command, "-shared", *objects, "-o", str(target))  # with -fopenmp here it would name libgomp


def multiplies_bf16() -> bool:
    """Whether the kernels take bf16 as it is; else it must come as fp32."""
    return bool(library().alibi_multiplies_bf16())


@functools.cache
def _found(level: Level | None, compiler: str | None, cache: str | None, home: str | None) -> ctypes.CDLL | str:
    """The library, or why there is none; asked once a process and environment."""
    try:
        if level is not None and level.lacks:
            raise BuildError(f"{level.words} kernels cannot run here: this processor lacks {', '.join(level.lacks)}")
        for candidate in LEVELS if level is None else (level,):
            if not candidate.lacks and shipped(candidate).exists():
                return _load(shipped(candidate))
        level = level or NATIVE
        sources, headers = ([FOLDER / name for name in names] for names in (SOURCES, HEADERS))
        return made(f"kernels-{level.name}", sources, headers, (*FLAGS, *level.flags), _load)
    except BuildError as error:
        return str(error)


def made(
    stem: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str], load: Callable[[Path], ctypes.CDLL]
) -> ctypes.CDLL:  # fmt: skip
    """A library of these sources, from the cache or compiled now; JAX's binding to the kernels is another one.

    Args:
        stem: what its files in the cache begin with.
        headers: what the sources include, of ours.
        load: raises BuildError where a file does not hold what it should.

    Raises:
        BuildError: no compiler, or one that cannot compile or link this; says what to do.
    """
    command = _command(os.environ.get("CXX"))
    text = b"".join(path.read_bytes() for path in (*headers, *sources))
    name = f"{stem}-{_digest(text + _defined(command, flags) + shlex.join([*command, *flags]).encode())}"
    folder = _cache_folder(os.environ.get("XDG_CACHE_HOME"))
    return _kept(folder, name, load) or _compiled(command, [*flags, "-shared", *map(str, sources)], folder, name, load)


def _defined(command: list[str], flags: Sequence[str]) -> bytes:
    """Everything the compiler defines: its version, and the instructions that it may use."""
    return _run(command, *flags, "-dM", "-E", "-x", "c++", os.devnull)


def _command(compiler: str | None) -> list[str]:
    """$CXX as a shell reads it, which may be `ccache g++` or a quoted path with options."""
    try:
        command = shlex.split(compiler or "g++")
    except ValueError as error:
        raise BuildError(f"CXX is {compiler!r}, which no shell can read ({error}); name a C++ compiler in it") from None
    if not command:
        raise BuildError(f"CXX is {compiler!r} but must name a C++ compiler, say g++; without CXX it is g++")
    if shutil.which(command[0]) is None:
        raise BuildError(f"there is no C++ compiler {command[0]!r} to build it with; install g++, or name yours in CXX")
    return command


def _cache_folder(cache: str | None) -> Path | None:
    """$XDG_CACHE_HOME, which counts only if it is absolute, or ~/.cache; None for a user without a home."""
    if cache and Path(cache).is_absolute():
        return Path(cache) / "alibi-attn"
    try:
        return Path.home() / ".cache" / "alibi-attn"
    except RuntimeError:
        return None


def _kept(folder: Path | None, name: str, load: Callable[[Path], ctypes.CDLL]) -> ctypes.CDLL | None:
    """What an earlier process compiled. A file cut short would not be refused but kill the process: what it holds is compared."""
    if folder is None or not _is_safe(folder):
        return None
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            if path.stem == f"{name}-{_digest(path.read_bytes())}":
                return load(path)
        except (OSError, BuildError):
            continue  # it is compiled anew
    return None


def _compiled(
    command: list[str], arguments: list[str], folder: Path | None, name: str, load: Callable[[Path], ctypes.CDLL]
) -> ctypes.CDLL:
    try:
        with tempfile.TemporaryDirectory(prefix="alibi-attn-", ignore_cleanup_errors=True) as inside:
            built = Path(inside) / "kernels.so"
            _run(command, *arguments, "-o", str(built))
            kept = None if folder is None else _keep(built, folder, name)
            return load(kept or built)  # what is loaded stays, though its file goes
    except OSError as error:
        raise BuildError(f"there is no room to compile it in: {error}; name a folder in TMPDIR that has some") from None


def _keep(built: Path, folder: Path, name: str) -> Path | None:
    """Moves it into the cache whole, so that no process loads half of what another writes; None where that cannot be."""
    target = folder / f"{name}-{_digest(built.read_bytes())}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_safe(folder):
            return None
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            os.replace(shutil.copy(built, beside), target)
    except OSError:
        return None
    return target


def _is_safe(folder: Path) -> bool:
    """Whether nobody but this user and root can write there: what lies there is run."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return os.name != "posix" or (found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _run(command: list[str], *arguments: str, timeout_s: float | None = TIMEOUT_S) -> bytes:
    called = shlex.join(command)
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        advice = "try again when the machine is less busy, or install a wheel, which has the kernels compiled"
        raise BuildError(f"{called} did not finish within {timeout_s} s; {advice}") from None
    except OSError as error:
        raise BuildError(f"{called} failed: {error}") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        told = next((line for line in said if "error" in line or "No space" in line), said[0])
        raise BuildError(f"{called} could not compile it: {told}")
    return done.stdout


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = _opened(path)
        functions = [getattr(loaded, name) for name in FUNCTIONS]
        built_with, words, call_bytes, tasks, multiplies_bf16 = (getattr(loaded, name) for name in QUESTIONS)
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from None
    for function in functions:
        function.argtypes, function.restype = [ctypes.c_void_p], None
    built_with.restype = words.restype = ctypes.c_char_p
    call_bytes.restype = tasks.restype = multiplies_bf16.restype = ctypes.c_int64
    tasks.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    found = f"{built_with().decode()}call_bytes={call_bytes()}"
    wanted = "".join(f"ALIBI_{name}={value!r} " for name, value in FOR_CPP.items())
    wanted += f"call_bytes={ctypes.sizeof(Call)}"
    if found != wanted:
        raise BuildError(f"the kernels were built with other constants than these: {found}, not {wanted}")
    return loaded


def _opened(path: Path) -> ctypes.CDLL:
    """torch has loaded its OpenMP for everybody before: the kernels share its threads; without torch they get the system's."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        if path.parent != FOLDER:
            raise
    try:
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise OSError(f"{error}; import torch before, which brings it, or install GCC's OpenMP (libgomp1)") from None
    return ctypes.CDLL(str(path))
