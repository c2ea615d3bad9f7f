"""What a release is checked for: what the kernels in a wheel export, and the section of the CHANGELOG."""

import importlib
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from alibi_attn import __version__

ROOT = Path(__file__).parent.parent
NEEDED = ("g++", "llvm-nm", "llvm-readobj")
with_tools = pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"{', '.join(NEEDED)} are needed")


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`release/check.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    return importlib.import_module("check")


def library(folder: Path, source: str, *flags: str) -> Path:
    built = folder / "kernels-made.so"
    command = ["g++", "-shared", "-fPIC", "-fvisibility=hidden", "-x", "c++", "-", "-o", str(built), *flags]
    subprocess.run(command, input=source, text=True, check=True)
    return built


EXPORT = 'extern "C" __attribute__((visibility("default"))) int '


@with_tools
def test_a_library_of_kernels_may_export_and_need_nothing_else(release: ModuleType, tmp_path: Path) -> None:
    check = release.libraries.assert_only_kernels
    check(library(tmp_path, EXPORT + "alibi_sum() { return 1; } int hidden() { return 2; }"))
    with pytest.raises(AssertionError, match=r"kernels-made\.so exports sum$"):
        check(library(tmp_path, EXPORT + "alibi_sum() { return 1; }" + EXPORT + "sum() { return 2; }"))
    with pytest.raises(AssertionError, match="exports nothing"):
        check(library(tmp_path, "int hidden() { return 2; }"))
    with pytest.raises(AssertionError, match=r"needs .*libgomp\.so"):
        check(library(tmp_path, EXPORT + "alibi_sum() { return 1; }", "-Wl,--no-as-needed", "-lgomp"))


def test_the_changelog_begins_with_this_version(release: ModuleType) -> None:
    release.release_date((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)


def test_dlls_linked_at_different_times_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    wheels = importlib.import_module("wheels")
    start = bytes(0x3C) + (0x78).to_bytes(4, "little") + bytes(0x38) + b"PE\0\0\x64\x86\x06\0"
    early, late = (start + seconds.to_bytes(4, "little") + b"the rest" for seconds in (0x6B07583A, 0x6B075901))
    assert wheels.without_link_time(early) == wheels.without_link_time(late) == start + bytes(4) + b"the rest"
