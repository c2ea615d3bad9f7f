"""Compiles and loads the kernels.

A wheel contains them for several instruction levels (`levels.py`), and the best one that this processor supports is loaded.
Otherwise (source tree, editable install, wheel built without a compiler) the first call compiles them for this processor, which
costs some seconds, and keeps them in the user's cache.

The name of a cached file holds its level, a digest of its sources, flags, compiler and processor, and a digest of its content:
if one of these changes, or the file is damaged, it is compiled again. Of processes that start at the same time, one compiles and
the others wait. If the cache cannot be used, each process compiles its own copy and deletes the file.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alibi_attn.attention.backends.native.levels import LEVELS, NATIVE, Level
from alibi_attn.attention.certificate.constants import FOR_CPP
from alibi_attn.files import replace_file
from alibi_attn.processor import features

if sys.platform != "win32":
    import fcntl

FOLDER = Path(__file__).parent
PROCESSOR = "processor.cpp"  # compiled without the flags of a level
SOURCES = (  # those that take longest to compile first
    "decoder_layers.cpp", "forward.cpp", "backward.cpp", "decoding.cpp", "linear.cpp", "threads.cpp", PROCESSOR,
)  # fmt: skip
HEADERS = tuple(sorted(path.name for path in FOLDER.glob("*.hpp")))
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
COMPILERS = ("g++", "clang++")  # the first that is installed, unless CXX names another
HOW_TO_INSTALL = {
    "darwin": "run xcode-select --install, which installs clang++",
    "win32": 'install LLVM, or run pip install ziglang and set CXX to "python -m ziglang c++"',
}.get(sys.platform, "install g++ (on Debian and Ubuntu: apt install g++)")
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
    "alibi_built_with", "alibi_instructions", "alibi_call_bytes", "alibi_backward_tasks", "alibi_multiplies_bf16",
)  # fmt: skip
TIMEOUT_S = 600  # of the first call, which takes minutes on a busy machine; building a wheel has no limit


class Rows(ctypes.Structure):
    """`Rows` in `call.hpp`: an address, and strides in numbers."""

    _fields_ = [("at", ctypes.c_void_p), *((axis, ctypes.c_int64) for axis in ("sequence", "head", "row"))]


class Call(ctypes.Structure):
    """`Call` in `call.hpp`, which explains the fields."""

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
    """The kernels cannot be compiled or loaded here, or have the wrong level or version."""


def why_not() -> str | None:
    """Why the kernels cannot run on this machine, or None; the first call may compile them."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def library(level: Level | None = None) -> ctypes.CDLL:
    """The loaded library, from the wheel or compiled here, for `level` or for the best level of this processor.

    Raises:
        BuildError: there is no compiler, it fails, or the processor does not support the level; the message names the
            fix.
    """
    loaded = _found(level, *map(os.environ.get, ("CXX", "XDG_CACHE_HOME", "HOME")))
    if isinstance(loaded, str):
        raise BuildError(loaded)
    return loaded


def instructions() -> str:
    """Which instructions the kernels use, and their origin: "AVX2, from the wheel"."""
    loaded = library()
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
        _build(compiler or _command(os.environ.get("CXX")), flags, ["-s", *named], Path(folder), target, timeout_s=None)


def multiplies_bf16() -> bool:
    """Whether the kernels read bf16; otherwise it must be widened to fp32."""
    return bool(library().alibi_multiplies_bf16())


@functools.cache
def _found(level: Level | None, compiler: str | None, cache: str | None, home: str | None) -> ctypes.CDLL | str:
    """The library, or why it cannot be loaded; determined once per process and environment."""
    try:
        if level is not None and level.missing:
            raise BuildError(
                f"{level.words} kernels cannot run here: this processor does not have {', '.join(level.missing)}"
            )
        for candidate in LEVELS if level is None else (level,):
            if shipped(candidate).exists() and _runs_here(candidate):
                return _load(shipped(candidate))
        level = level or NATIVE
        sources, headers = ([FOLDER / name for name in names] for names in (SOURCES, HEADERS))
        return made(f"kernels-{level.name}", sources, headers, (*FLAGS, *level.flags), _load)
    except BuildError as error:
        return str(error)


def _runs_here(level: Level) -> bool:
    """Whether this processor supports a level of the wheel; without /proc/cpuinfo, the level's library lists the features."""
    if not level.needs or features():
        return not level.missing
    listing = ctypes.CDLL(str(shipped(level))).alibi_processor_features
    listing.restype = ctypes.c_char_p
    return level.needs <= set(listing().decode().split())


def made(
    stem: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str], load: Callable[[Path], ctypes.CDLL]
) -> ctypes.CDLL:  # fmt: skip
    """A library of these sources, from the cache or compiled now; also used for JAX's binding to the kernels.

    Args:
        stem: the start of its file name in the cache.
        headers: the package's headers that the sources include.
        load: loads a file; raises BuildError if the content is not as expected.

    Raises:
        BuildError: there is no compiler, or it fails; the message names the fix.
    """
    command = _command(os.environ.get("CXX"))
    text = b"".join(path.read_bytes() for path in (*headers, *sources))
    name = f"{stem}-{_digest(text + _defined(command, flags) + shlex.join([*command, *flags]).encode())}"
    folder = _cache_folder(os.environ.get("XDG_CACHE_HOME"))
    if found := _kept(folder, name, load):
        return found
    with _alone(folder):
        return _kept(folder, name, load) or _compiled(command, sources, flags, folder, name, load)


def _defined(command: list[str], flags: Sequence[str]) -> bytes:
    """The compiler's predefined macros: its version, and the instructions that it may use."""
    return _run(command, *flags, "-dM", "-E", "-x", "c++", os.devnull)


def _command(compiler: str | None) -> list[str]:
    """$CXX split like a shell command, for example `ccache g++` or a quoted path with options; else the first of COMPILERS."""
    if not compiler:
        found = next(filter(shutil.which, COMPILERS), None)
        if found is None:
            raise BuildError(
                f"there is no C++ compiler (g++ or clang++); {HOW_TO_INSTALL}, or set CXX to the path of one"
            )
        return [found]
    try:
        command = shlex.split(compiler, posix=os.name == "posix")
    except ValueError as error:
        raise BuildError(
            f"CXX is {compiler!r}, which cannot be split into words ({error}); set it to a C++ compiler"
        ) from None
    if not command:
        raise BuildError(f"CXX is {compiler!r} but must name a C++ compiler; unset it to use g++ or clang++")
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"CXX names the C++ compiler {command[0]!r}, which is not installed; {HOW_TO_INSTALL}, or unset CXX"
        )
    return command


def _cache_folder(cache: str | None) -> Path | None:
    """In $XDG_CACHE_HOME if that is an absolute path, else in ~/.cache; None for a user without a home directory."""
    if cache and Path(cache).is_absolute():
        return Path(cache) / "alibi-attn"
    try:
        return Path.home() / ".cache" / "alibi-attn"
    except RuntimeError:
        return None


def _kept(folder: Path | None, name: str, load: Callable[[Path], ctypes.CDLL]) -> ctypes.CDLL | None:
    """A library that an earlier process compiled, after its content was verified: loading a truncated file crashes a process."""
    if folder is None or not _is_safe(folder):
        return None
    for path in sorted(folder.glob(f"{name}-*{SUFFIX}")):
        try:
            if path.stem == f"{name}-{_digest(path.read_bytes())}":
                return load(path)
        except (OSError, BuildError):
            continue  # it is compiled again
    return None


@contextlib.contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Waits until no other process compiles for this cache; at most as long as a compiler may take.

    The lock is on the folder and needs no file; the system frees it when the process ends. Windows locks no folders.
    """
    descriptor = None
    if sys.platform != "win32" and folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_safe(folder):
                descriptor = os.open(folder, os.O_RDONLY)
                _lock(descriptor)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # a process that was forked meanwhile has the descriptor, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Raises OSError if the file system has no locks, or after `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _compiled(
    command: list[str], sources: Sequence[Path], flags: Sequence[str], folder: Path | None, name: str,
    load: Callable[[Path], ctypes.CDLL],
) -> ctypes.CDLL:  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix="alibi-attn-", ignore_cleanup_errors=True) as temporary:
            built = Path(temporary) / f"kernels{SUFFIX}"
            _build(command, dict.fromkeys(sources, flags), flags, Path(temporary), built)
            return load(_keep(built, folder, name) or built)  # a loaded library stays valid when its file is deleted
    except OSError as error:
        raise BuildError(
            f"the temporary folder cannot be used: {error}; set TMPDIR to a folder with free space"
        ) from None


def _keep(built: Path, folder: Path | None, name: str) -> Path | None:
    """Moves the library into the cache atomically, so that no other process loads half of it; None if that fails."""
    if folder is None:
        return None
    target = folder / f"{name}-{_digest(built.read_bytes())}{SUFFIX}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_safe(folder):
            return None
        replace_file(target, built.read_bytes())
    except OSError:
        return None
    return target


def _is_safe(folder: Path) -> bool:
    """Whether only this user and root can write to the folder; libraries in it are loaded and run."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return os.name != "posix" or (status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _build(
    command: list[str], flags: Mapping[Path, Sequence[str]], link_flags: Sequence[str], folder: Path, target: Path,
    timeout_s: float | None = TIMEOUT_S,
) -> None:  # fmt: skip
    """Compiles each source with its flags, as many at a time as there are processors, and links them to a library."""
    objects = [str(folder / f"{source.stem}.o") for source in flags]

    def compile_one(source: Path, compiled: str) -> None:
        _run(command, *flags[source], "-c", str(source), "-o", compiled, timeout_s=timeout_s)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, flags, objects))  # raises the first error
    _run(command, *link_flags, "-shared", *objects, "-o", str(target), timeout_s=timeout_s)


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
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        message = next((line for line in lines if "error" in line or "No space" in line), lines[0])
        raise BuildError(f"{called} could not compile it: {message}")
    return done.stdout


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        functions = [getattr(loaded, name) for name in FUNCTIONS]
        built_with, words, call_bytes, tasks, multiplies_bf16 = (getattr(loaded, name) for name in QUESTIONS)
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from None
    for function in functions:
        function.argtypes, function.restype = [ctypes.c_void_p], None
    built_with.restype = words.restype = ctypes.c_char_p
    call_bytes.restype = tasks.restype = multiplies_bf16.restype = ctypes.c_int64
    tasks.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    constants = f"{built_with().decode()}call_bytes={call_bytes()}"
    expected = "".join(f"ALIBI_{name}={value!r} " for name, value in FOR_CPP.items())
    expected += f"call_bytes={ctypes.sizeof(Call)}"
    if constants != expected:
        raise BuildError(f"the kernels were built with the wrong constants: {constants}, not {expected}")
    return loaded
