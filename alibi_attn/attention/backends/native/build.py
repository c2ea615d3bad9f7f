"""The compiled kernels: built once for this processor by the compiler that is there, kept in the user's cache, then only loaded.

Nothing is compiled before the first call that wants it (four seconds). A file in the cache is named by what it was made from:
sources, flags, compiler and processor, so a change of any of them makes another.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("forward.cpp", "backward.cpp")
HEADERS = ("vectors.hpp", "block.hpp", "certificate.hpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-exceptions", "-fno-rtti")
TIMEOUT_S = 120


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here."""


def why_not() -> str | None:
    """What keeps the kernels from running on this machine; the first call may compile them."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        BuildError: no compiler, or one that cannot compile or link this; says what to do.
    """
    found = _found(os.environ.get("CXX"), os.environ.get("XDG_CACHE_HOME"))
    if isinstance(found, str):
        raise BuildError(found)
    return found


@functools.cache
def _found(compiler: str | None, cache: str | None) -> ctypes.CDLL | str:
    """The library, or why there is none; asked once a process."""
    try:
        return _load(_built(compiler or "g++", Path(cache or Path.home() / ".cache") / "alibi-attn"))
    except BuildError as error:
        return str(error)


def _built(compiler: str, cache: Path) -> Path:
    if shutil.which(compiler.split()[0]) is None:
        raise BuildError(f"there is no C++ compiler {compiler!r} to build it with; install g++, or name yours in CXX")
    # Everything the compiler defines for this processor: its version, and the instructions that it may use.
    defined = _run(compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    sources = b"".join((FOLDER / name).read_bytes() for name in (*HEADERS, *SOURCES))
    name = hashlib.sha256(sources + defined + " ".join(FLAGS).encode()).hexdigest()[:16]
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as inside:
            return _compiled(compiler, cache / f"kernels-{name}.so", Path(inside))
    except OSError:  # a cache that cannot be written: compile for this process alone
        return _compiled(compiler, Path(tempfile.mkdtemp(prefix="alibi-attn-")) / "kernels.so", None)


def _compiled(compiler: str, target: Path, inside: Path | None) -> Path:
    """The target, compiled beside it and moved there whole, so that a process never loads half of what another writes."""
    if not target.exists():
        part = (inside or target.parent) / "kernels.part.so"
        _run(compiler, *FLAGS, "-shared", *(str(FOLDER / name) for name in SOURCES), "-o", str(part))
        os.replace(part, target)
    return target


def _run(*command: str) -> bytes:
    words = command[0].split() + list(command[1:])
    try:
        done = subprocess.run(words, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(f"{command[0]} could not compile it: {said[0]}")
    return done.stdout


def _load(path: Path) -> ctypes.CDLL:
    """torch has loaded its OpenMP for everybody before: the kernels share its threads."""
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"what the compiler made cannot be loaded: {error}") from None
    for name in ("forward_float32", "forward_float64", "backward_float32", "backward_float64"):
        function = getattr(loaded, f"alibi_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return loaded
