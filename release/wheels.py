"""The wheels of all systems and the sdist, made on one machine from the last commit.

    python release/wheels.py dist        # `make wheels`

The kernels are compiled by zig (`ziglang` from PyPI), which contains clang and the C and C++ libraries of every system, and are
added to the pure wheel. Timestamps are those of the commit and files are sorted, so the same commit gives the same bytes.
"""

import argparse
import base64
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from alibi_attn import __version__
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.levels import OF_MACHINE

ROOT = Path(__file__).parent.parent
NAME = f"alibi_attn-{__version__}"
OPERATOR_NEW = Path(__file__).parent / "operator_new.cpp"
INSIDE = "alibi_attn/attention/backends/native"


class System(NamedTuple):
    """A wheel's platform tag, zig's name of the system, its machine in `OF_MACHINE`, and the suffix of its libraries."""

    tag: str
    zig: str
    machine: str
    suffix: str


SYSTEMS = (
    System("manylinux_2_17_x86_64", "x86_64-linux-gnu.2.17", "x86_64", ".so"),
    System("manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", "aarch64", ".so"),
    System("macosx_11_0_arm64", "aarch64-macos.11.0", "arm64", ".dylib"),
    System("win_amd64", "x86_64-windows-gnu", "AMD64", ".dll"),
)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=[system.tag for system in SYSTEMS], action="append")
    options = parser.parse_args(arguments)
    changed = _run(["git", "diff", "--name-only", "HEAD"], ROOT).decode().split()
    assert not changed, (
        f"{', '.join(changed)} differ from the last commit, which the wheels are made from; commit first"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    seconds = int(_run(["git", "log", "-1", "--format=%ct"], ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pure = _packages(folder, seconds, options.out)
        # Each library is compiled by up to seven processes, so that many at a time would start too many.
        with ThreadPoolExecutor(-(-(os.cpu_count() or 1) // 4)) as pool:
            chosen = [system for system in SYSTEMS if options.only is None or system.tag in options.only]
            for system, libraries in zip(chosen, [_libraries(system, folder, pool) for system in chosen], strict=True):
                wheel = options.out / f"{NAME}-py3-none-{system.tag}.whl"
                _write_wheel(wheel, pure, libraries(), system.tag, seconds)
                print(f"{wheel}: {wheel.stat().st_size / 2**20:.2f} MiB", flush=True)


def _packages(folder: Path, seconds: int, out: Path) -> Path:
    """Writes the sdist of the last commit; returns its pure wheel."""
    with tarfile.open(fileobj=io.BytesIO(_run(["git", "archive", "HEAD"], ROOT))) as archive:
        archive.extractall(folder / "tree", filter="data")
    hooks = (
        "import sys; from setuptools import build_meta as m; out = sys.argv[1]; m.build_sdist(out); m.build_wheel(out)"
    )
    _run(
        [sys.executable, "-c", hooks, str(folder)],
        folder / "tree",
        PATH="/nowhere",
        CXX="",
        SOURCE_DATE_EPOCH=str(seconds),
    )
    _write_sdist(folder / f"{NAME}.tar.gz", out / f"{NAME}.tar.gz", seconds)
    return folder / f"{NAME}-py3-none-any.whl"


def _libraries(system: System, folder: Path, pool: ThreadPoolExecutor) -> Callable[[], dict[str, bytes]]:
    """Starts to compile the kernels of a system; the result waits for them and returns them by their names in the wheel."""
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", system.zig]
    windows = system.suffix == ".dll"  # exports nothing that is not declared
    more_sources = () if windows else (OPERATOR_NEW,)
    compiler += [] if windows else ["-fvisibility-global-new-delete=force-hidden"]
    targets = [
        (level, folder / system.tag / f"kernels-{level.name}{system.suffix}") for level in OF_MACHINE[system.machine]
    ]
    (folder / system.tag).mkdir()
    running = [pool.submit(build.compile_for_wheel, level, target, compiler, more_sources) for level, target in targets]

    def libraries() -> dict[str, bytes]:
        for one in running:
            one.result()
        read = without_link_time if windows else bytes
        return {f"{INSIDE}/{target.name}": read(target.read_bytes()) for _, target in targets}

    return libraries


def without_link_time(dll: bytes) -> bytes:
    """A DLL with zeros for the time at which it was linked, which would differ from build to build."""
    header = int.from_bytes(dll[0x3C:0x40], "little")  # of the format PE: "PE", two zeros, machine, sections, time
    return dll[: header + 8] + bytes(4) + dll[header + 12 :]


def _write_wheel(wheel: Path, pure: Path, libraries: dict[str, bytes], tag: str, seconds: int) -> None:
    about = f"{NAME}.dist-info"
    with zipfile.ZipFile(pure) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name != f"{about}/RECORD"}
    label = files[f"{about}/WHEEL"].replace(b"py3-none-any", f"py3-none-{tag}".encode())
    files |= libraries | {f"{about}/WHEEL": label.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")}
    files = dict(sorted(files.items(), key=lambda item: (item[0].startswith(about), item[0])))
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for name, data in files.items()
    }
    lines = [f"{name},sha256={digests[name]},{len(data)}\n" for name, data in files.items()]
    files[f"{about}/RECORD"] = "".join([*lines, f"{about}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, time.gmtime(seconds)[:6])
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


def _write_sdist(source: Path, target: Path, seconds: int) -> None:
    """The same files, sorted, with the same owner and time each."""
    with (
        tarfile.open(source) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            data = old.extractfile(member)
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() else 0o644, {}
            new.addfile(member, data)


def _run(command: list[str], folder: Path, **environment: str) -> bytes:
    return subprocess.run(command, cwd=folder, env=os.environ | environment, check=True, capture_output=True).stdout


if __name__ == "__main__":
    main(sys.argv[1:])
