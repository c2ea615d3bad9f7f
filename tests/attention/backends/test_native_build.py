"""How the compiled kernels are found: a damaged, unsafe or missing cache, and compilers of every kind.

A script stands in for the compiler; it copies a small library with the right names and counts its calls.
"""

import ctypes
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alibi_attn.attention.backends.native import build, compiling


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """small(*names) -> a shared library with empty functions of these names, and the checks that every library has."""
    folder = tmp_path_factory.mktemp("small")
    constants = "".join(f"ALIBI_{name}={value!r} " for name, value in build.FOR_CPP.items())
    answers = f'"{constants}"', '"few"', str(ctypes.sizeof(build.Call)), "0"
    asked = zip(("const char *", "const char *", "long ", "long "), build.QUESTIONS, answers, strict=True)
    questions = "".join(f'extern "C" {kind}{name}() {{ return {answer}; }}\n' for kind, name, answer in asked)

    def compiled(*names: str) -> bytes:
        source, target = folder / "small.cpp", folder / "small.so"
        source.write_text(questions + "".join(f'extern "C" void {name}(void *) {{}}\n' for name in names))
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
        return target.read_bytes()

    return compiled


class Compiler:
    """A command that `CXX` can name; `calls` are those that link a library."""

    def __init__(self, folder: Path, made: bytes) -> None:
        folder.mkdir()
        self.path, self._log = folder / "c++ of mine", folder / "log"
        (folder / "made.so").write_bytes(made)
        self._log.write_text("")
        quoted = {name: shlex.quote(str(folder / name)) for name in ("made.so", "log")}
        self.path.write_text(
            '#!/bin/sh\nfor word; do last="$word"; done\ncase "$*" in\n*-dM*) echo "#define MINE";;\n*" -c "*) : > "$last";;\n'
            f'*) echo "$*" >> {quoted["log"]}; cp {quoted["made.so"]} "$last";;\nesac\n'
        )
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.fixture
def compiler(tmp_path: Path, small: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """The compiler of this test; cache, home and temporary files are folders of this test."""
    mine = Compiler(tmp_path / "bin", small("alibi_run_team"))
    monkeypatch.setenv("CXX", shlex.quote(str(mine.path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    build._found.cache_clear()
    yield mine
    build._found.cache_clear()
    assert list((tmp_path / "tmp").iterdir()) == [], "a temporary file was left behind"


def asked_anew() -> str | None:
    build._found.cache_clear()
    return build.why_not("threads")


def replace(path: Path, data: bytes) -> None:
    """Replaces the file by a new one, since this process has loaded the old one."""
    path.unlink()
    path.write_bytes(data)


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "alibi-attn").iterdir())


def test_a_compiled_library_is_found_again(
    compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiling._announce.cache_clear()
    assert asked_anew() is None
    [said] = capsys.readouterr().err.splitlines()
    assert "compiling its kernels for this processor, once" in said
    (path,) = kept(tmp_path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.stat().st_mtime_ns
    assert asked_anew() is None
    assert path.stat().st_mtime_ns == before
    assert kept(tmp_path) == [path]
    assert len(compiler.calls) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "damage",
    [lambda x: b"", lambda x: x[:100], lambda x: x[:-1], lambda x: x[:5000] + bytes([x[5000] ^ 1]) + x[5001:]],
    ids=["empty", "cut early", "cut late", "one byte changed"],
)
def test_a_damaged_library_is_rebuilt_once(
    damage: Callable[[bytes], bytes], compiler: Compiler, tmp_path: Path
) -> None:
    assert asked_anew() is None
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    replace(path, damage(whole))
    assert asked_anew() is None
    assert asked_anew() is None
    assert len(compiler.calls) == 2
    assert kept(tmp_path) == [path]
    assert path.read_bytes() == whole


def test_a_library_without_one_function_is_rebuilt(
    compiler: Compiler, small: Callable[..., bytes], tmp_path: Path
) -> None:
    assert asked_anew() is None
    (path,) = kept(tmp_path)
    lacking = small()
    path.unlink()
    name = path.stem.rpartition("-")[0]
    (path.parent / f"{name}-{compiling.digest(lacking)}.so").write_bytes(lacking)
    assert asked_anew() is None
    assert path in kept(tmp_path)
    assert len(compiler.calls) == 2


def test_a_compiler_with_wrong_output_is_reported(
    tmp_path: Path, small: Callable[..., bytes], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Compiler(tmp_path / "other", small())
    monkeypatch.setenv("CXX", shlex.quote(str(other.path)))
    assert "cannot be loaded: " in str(asked_anew())
    assert "alibi_run_team" in str(asked_anew())
    empty = Compiler(tmp_path / "empty", b"")
    monkeypatch.setenv("CXX", shlex.quote(str(empty.path)))
    assert "the compiled kernels cannot be loaded: " in str(asked_anew())


CODE = """
from alibi_attn.attention.backends.native import build
print(build.why_not("threads"), build.library(part="threads")._name)
"""


# Replaces the system's locks by those of a file system that has none.
NO_LOCKS = """
import fcntl
def flock(*_):
    raise OSError(95, "Operation not supported")
fcntl.flock = flock
"""


def found_by_processes(count: int, first: str = "") -> set[str]:
    """The results of `count` processes that load the library at the same time."""
    command = [sys.executable, "-c", first + CODE]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return {process.communicate()[0].strip() for process in running}


def wait_in_the_compiler(compiler: Compiler, count: int, where: str) -> None:
    """Lets the compiler link when it was called `count` times: for its macros, or to link."""
    path, log = compiler.path, compiler.path.parent / where
    until = f'until [ "$(wc -l < {shlex.quote(str(log))})" -ge {count} ]; do sleep 0.05; done; cp '
    asked = f"*-dM*) echo >> {shlex.quote(str(path.parent / 'asked'))};"
    path.write_text(path.read_text().replace("cp ", until).replace("*-dM*)", asked))


def test_of_processes_that_start_at_once_one_compiles(compiler: Compiler, tmp_path: Path) -> None:
    wait_in_the_compiler(compiler, 3, "asked")  # before the first library exists, each has started
    (found,) = found_by_processes(3)
    assert len(compiler.calls) == 1
    assert [f"None {path}" for path in kept(tmp_path)] == [found]


def test_processes_that_compile_at_once_do_not_disturb_one_another(compiler: Compiler, tmp_path: Path) -> None:
    wait_in_the_compiler(compiler, 3, "log")  # so that none finds another's library
    (found,) = found_by_processes(3, NO_LOCKS)
    assert len(compiler.calls) == 3
    assert [f"None {path}" for path in kept(tmp_path)] == [found]


def test_a_process_waits_no_longer_than_a_compiler_may_take(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "alibi-attn").mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(compiling, "TIMEOUT_S", 0.2)
    with compiling.alone(tmp_path / "cache" / "alibi-attn"):
        assert asked_anew() is None
    assert len(compiler.calls) == 1


def test_processes_that_meet_a_damaged_library_do_not_disturb_one_another(compiler: Compiler, tmp_path: Path) -> None:
    assert asked_anew() is None
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    replace(path, whole[:3000])
    assert found_by_processes(4) == {f"None {path}"}
    assert path.read_bytes() == whole
    assert kept(tmp_path) == [path]


@pytest.mark.parametrize("name", ["other", "group"])
def test_a_folder_in_which_others_write_is_not_loaded_from(
    name: str, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked_anew() is None
    (path,) = kept(tmp_path)
    if name == "group":
        path.parent.chmod(0o770)
    else:
        owner = path.parent.stat().st_uid
        monkeypatch.setattr(build.os, "geteuid", lambda: owner + 1)
        if owner == 0:
            os.chown(path.parent, 12345, -1)
    before = path.stat().st_mtime_ns
    assert asked_anew() is None
    assert len(compiler.calls) == 2, "compiled for this process alone"
    assert path.stat().st_mtime_ns == before


def test_a_cache_that_cannot_be_written_is_read_and_no_files_remain(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(compiling, "replace_file", refuse)
        assert asked_anew() is None
        assert asked_anew() is None
        assert (len(compiler.calls), kept(tmp_path)) == (2, [])
    assert asked_anew() is None
    monkeypatch.setattr(build.Path, "mkdir", refuse)
    assert asked_anew() is None
    assert len(compiler.calls) == 3


@pytest.mark.parametrize("kind", ["a file", "relative", "empty", "a file as home", "no home"])
def test_an_unusable_cache_folder_is_not_an_error(
    kind: str, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    home = tmp_path / "home" / ".cache" / "alibi-attn"
    if kind == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif kind in ("relative", "empty"):
        monkeypatch.setenv("XDG_CACHE_HOME", "folder" if kind == "relative" else "")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
    if kind == "no home":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user that is unknown to the system
        with pytest.raises(RuntimeError, match="home"):
            Path.home()
    before = {path.name for path in tmp_path.iterdir()}
    assert asked_anew() is None
    assert len(compiler.calls) == 1
    in_home = kind in ("relative", "empty")
    assert home.exists() == in_home
    assert {path.name for path in tmp_path.iterdir()} - before == ({"home"} if in_home else set())
    assert asked_anew() is None
    assert len(compiler.calls) == (1 if in_home else 2)


@pytest.mark.parametrize(
    ("compiler_variable", "reason"),
    [
        (" ", "CXX is ' ' but must name a C++ compiler; unset it to use g++ or clang++"),
        ("'g++", 'CXX is "\'g++", which cannot be split into words (No closing quotation); set it to a C++ compiler'),
        (
            "nothing g++",
            "CXX names the C++ compiler 'nothing', which is not installed; install g++ (on Debian and Ubuntu: ",
        ),
    ],
)
def test_an_unusable_compiler_is_reported(
    compiler_variable: str, reason: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler_variable)
    assert reason in str(asked_anew())


def test_a_wrapper_and_options_belong_to_the_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked_anew() is None
    monkeypatch.setenv("CXX", f"{shutil.which('env')} {shlex.quote(str(compiler.path))} -O1 -DA='b c'")
    assert asked_anew() is None
    assert len(kept(tmp_path)) == 2, "other options make another library"
    assert compiler.calls[1].startswith("-O1 -DA=b c -std=c++17")


def test_clang_is_used_without_gcc_and_the_error_without_both_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        build.BuildError, match=r"no C\+\+ compiler \(g\+\+ or clang\+\+\); install g\+\+ .*, or set CXX"
    ):
        compiling.compiler(None)
    for name in ("clang++", "g++"):  # the better one last
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert compiling.compiler("") == [name]


def test_a_compiler_that_takes_too_long_is_reported_without_its_arguments(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(build.BuildError) as report:
        compiling.run([str(slow)], "-std=c++17", "-O3", timeout_s=0.2)
    assert str(report.value).startswith(f"{slow} did not finish within 0.2 s; try again when the machine is less busy")


def test_a_full_disk_is_reported(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.write_text(
        '#!/bin/sh\ncase "$*" in *-dM*) exit 0;; esac\n'
        "echo 'forward.cpp: In function f:' >&2\necho 'ld: final link failed: No space left on device' >&2\nexit 1\n"
    )
    full.chmod(0o755)
    monkeypatch.setenv("CXX", str(full))
    assert str(asked_anew()) == f"{full} could not compile it: ld: final link failed: No space left on device"
    monkeypatch.setenv("CXX", shlex.quote(str(compiler.path)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert "the temporary folder cannot be used: " in str(asked_anew())
    assert "set TMPDIR to a folder with free space" in str(asked_anew())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
