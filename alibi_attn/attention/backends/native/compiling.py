"""Compiles C++ into a library, once per user: finds the compiler, and keeps what it made in the user's cache.

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

from alibi_attn.files import replace_file

if sys.platform != "win32":
    import fcntl

SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
COMPILERS = ("g++", "clang++")  # the first that is installed, unless CXX names another
HOW_TO_INSTALL = {
    "darwin": "run xcode-select --install, which installs clang++",
    "win32": 'install LLVM, or run pip install ziglang and set CXX to "python -m ziglang c++"',
}.get(sys.platform, "install g++ (on Debian and Ubuntu: apt install g++)")
TIMEOUT_S = 600  # of the first call, which takes minutes on a busy machine; building a wheel has no limit


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here, or have the wrong level or version."""


def cached(
    stem: str,
    sources: Sequence[Path],
    headers: Sequence[Path],
    flags: Sequence[str],
    load: Callable[[Path], ctypes.CDLL],
) -> ctypes.CDLL:
    """A library of these sources, from the cache or compiled now; also used for JAX's binding to the kernels.

    Args:
        stem: the start of its file name in the cache.
        headers: the package's headers that the sources include.
        load: loads a file; raises BuildError if the content is not as expected.

    Raises:
        BuildError: there is no compiler, or it fails; the message names the fix.
    """
    command = compiler(os.environ.get("CXX"))
    text = b"".join(path.read_bytes() for path in (*headers, *sources))
    macros = run(command, *flags, "-dM", "-E", "-x", "c++", os.devnull)  # the compiler's version, and its instructions
    name = f"{stem}-{digest(text + macros + shlex.join([*command, *flags]).encode())}"
    folder = _cache_folder(os.environ.get("XDG_CACHE_HOME"))
    if found := _kept(folder, name, load):
        return found
    with alone(folder):
        if found := _kept(folder, name, load):
            return found
        _announce()
        try:
            with tempfile.TemporaryDirectory(prefix="alibi-attn-", ignore_cleanup_errors=True) as temporary:
                built = Path(temporary) / f"kernels{SUFFIX}"
                compile_and_link(command, dict.fromkeys(sources, flags), flags, Path(temporary), built)
                # A loaded library stays valid when its file is deleted.
                return load(_keep(built, folder, name) or built)
        except OSError as error:
            raise BuildError(
                f"the temporary folder cannot be used: {error}; set TMPDIR to a folder with free space"
            ) from None


def compiler(named: str | None) -> list[str]:
    """$CXX split like a shell command, for example `ccache g++` or a quoted path with options; else the first of COMPILERS."""
    if not named:
        found = next(filter(shutil.which, COMPILERS), None)
        if found is None:
            raise BuildError(
                f"there is no C++ compiler (g++ or clang++); {HOW_TO_INSTALL}, or set CXX to the path of one"
            )
        return [found]
    try:
        command = shlex.split(named, posix=os.name == "posix")
    except ValueError as error:
        raise BuildError(
            f"CXX is {named!r}, which cannot be split into words ({error}); set it to a C++ compiler"
        ) from None
    if not command:
        raise BuildError(f"CXX is {named!r} but must name a C++ compiler; unset it to use g++ or clang++")
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
            if path.stem == f"{name}-{digest(path.read_bytes())}":
                return load(path)
        except (OSError, BuildError):
            continue  # it is compiled again
    return None


@contextlib.contextmanager
def alone(folder: Path | None) -> Iterator[None]:
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


@functools.cache  # one line per process, also for several libraries
def _announce() -> None:
    print("alibi_attn: compiling its kernels for this processor, once; a wheel has them compiled", file=sys.stderr)


def _keep(built: Path, folder: Path | None, name: str) -> Path | None:
    """Moves the library into the cache atomically, so that no other process loads half of it; None if that fails."""
    if folder is None:
        return None
    target = folder / f"{name}-{digest(built.read_bytes())}{SUFFIX}"
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


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def compile_and_link(
    command: list[str],
    flags: Mapping[Path, Sequence[str]],
    link_flags: Sequence[str],
    folder: Path,
    target: Path,
    timeout_s: float | None = TIMEOUT_S,
) -> None:
    """Compiles each source with its flags, as many at a time as there are processors, and links them to a library."""
    objects = [str(folder / f"{source.stem}.o") for source in flags]

    def compile_one(source: Path, compiled: str) -> None:
        run(command, *flags[source], "-c", str(source), "-o", compiled, timeout_s=timeout_s)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, flags, objects))  # raises the first error
    run(command, *link_flags, "-shared", *objects, "-o", str(target), timeout_s=timeout_s)


def run(command: list[str], *arguments: str, timeout_s: float | None = TIMEOUT_S) -> bytes:
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
