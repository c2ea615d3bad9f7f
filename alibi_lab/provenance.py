"""Where and with what a record was measured: machine, versions, commit, a hash of the kernels, and the command line."""

import contextlib
import functools
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import alibi_attn
from alibi_attn import processor

_DOCSTRINGS = re.compile(r'^[ \t]*"""(?:.|\n)*?"""[ \t]*$', re.MULTILINE)
_COMMENTS = re.compile(r"^[ \t]*(?:# |//).*$", re.MULTILINE)  # whole lines, in Python and C++
_PACKAGES = ("alibi-attn", "numpy", "torch", "triton", "jax", "flax", "transformers", "accelerate")


def machine() -> dict[str, str | int | None]:
    """A description of this machine, without host name or user name."""
    torch = sys.modules.get("torch")
    return {
        "processor": processor.name(),
        "instructions": processor.instructions(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpu": torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


@functools.cache
def versions() -> Mapping[str, str]:
    """Installed versions of the packages that results depend on."""
    installed = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


@functools.cache
def commit() -> str | None:
    """The commit of the source tree this package runs from, with "+" if files differ from it; None outside a checkout.

    It is determined once per process, because the loaded code does not change when the files do.
    """
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    words = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, cwd=here, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def kernels() -> str:
    """A hash of the sources that decide how fast attention is, without comments, docstrings and white space."""
    folder, digest = Path(alibi_attn.__file__).parent / "attention", hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".hpp")):
        text = f"{path.relative_to(folder).as_posix()}\n{path.read_text(encoding='utf-8')}"
        digest.update(" ".join(_COMMENTS.sub("", _DOCSTRINGS.sub("", text)).split()).encode())
    return digest.hexdigest()[:12]


def command() -> str:
    """The running command line, with the program's name without its folder."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = "python -m alibi_lab"
    words = shlex.join([*program.split(), *sys.argv[1:]]) if sys.argv[0] else ""
    return words.encode(errors="backslashreplace").decode()  # a file's name may be no UTF-8


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
