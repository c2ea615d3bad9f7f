"""What the libraries of the kernels export and need, read by LLVM's tools, which know the files of every system."""

import re
import shutil
import subprocess
from pathlib import Path

TOOLS = "llvm-nm", "llvm-readobj"
# Names that a library exports besides the kernels': the linker's own on macOS.
LINKER_NAMES = {"__mh_dylib_header", "___dso_handle"}
# Libraries that every system of a wheel's platform tag has.
OF_SYSTEMS = re.compile(
    r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-(x86-64\.so\.2|aarch64\.so\.1)"
    r"|/usr/lib/libSystem\.B\.dylib|KERNEL32\.dll|ntdll\.dll|api-ms-win-crt-[\w-]+\.dll"
)


def missing_tools() -> list[str]:
    """The tools of LLVM that are not installed here (Debian: apt install llvm)."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def assert_only_kernels(library: Path) -> None:
    """The library exports the kernels only, and needs only what its system has.

    Raises:
        AssertionError: it does not; the message lists the names.
    """
    others = {name for name in exported(library) if not name.lstrip("_").startswith("alibi_")} - LINKER_NAMES
    assert not others, f"{library.name} exports {', '.join(sorted(others))}"
    extra = {name for name in needed(library) if not OF_SYSTEMS.fullmatch(name)} - {f"@rpath/{library.name}"}
    assert not extra, f"{library.name} needs {', '.join(sorted(extra))}"


def exported(library: Path) -> list[str]:
    """The names that the library exports; one without any is not a library of kernels."""
    if library.suffix == ".dll":
        names = re.findall(r"^  Name: (\S+)$", _output("llvm-readobj", "--coff-exports", str(library)), re.MULTILINE)
    else:
        flags = ["--dynamic"] if library.suffix == ".so" else ["--extern-only"]
        names = _output("llvm-nm", *flags, "--defined-only", "--format=just-symbols", str(library)).split()
    assert names, f"{library.name} exports nothing"
    return names


def needed(library: Path) -> list[str]:
    """The libraries that this one loads."""
    told = _output("llvm-readobj", "--needed-libs", str(library))
    return re.search(r"^NeededLibraries \[\n(.*?)^\]", told, re.MULTILINE | re.DOTALL).group(1).split()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
