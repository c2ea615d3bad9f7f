"""Files and folders appear complete or not at all, one writer wins, and only leftovers of dead writers are deleted."""

import errno
import functools
import multiprocessing
import os
import shutil
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from alibi_attn import files

LOCKS = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locks that end with their process")
# In a worker that has loaded JAX, a fork warns. The children here write files and end.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
FORKS = multiprocessing.get_context("fork") if sys.platform != "win32" else None


def write_file(path: Path, content: bytes) -> None:
    with files.new_file(path) as file:
        file.write(content)


def write_folder(path: Path, content: bytes) -> None:
    with files.new_folder(path) as folder:
        for name in "abc":
            (folder / name).write_bytes(content)


def content_of(path: Path) -> set[bytes]:
    return {path.read_bytes()} if path.is_file() else {(path / name).read_bytes() for name in "abc"}


WRITERS = [write_file, write_folder]


@pytest.mark.parametrize("write", WRITERS)
def test_what_exists_is_not_overwritten(write, tmp_path):
    write(tmp_path / "x", b"first")
    with pytest.raises(FileExistsError, match="x exists, and is never overwritten"):
        write(tmp_path / "x", b"second")
    assert content_of(tmp_path / "x") == {b"first"}
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("write", WRITERS)
def test_what_another_writer_published_meanwhile_wins(write, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "check_new", lambda _: write_first())

    def write_first() -> None:
        monkeypatch.undo()
        write(tmp_path / "x", b"first")

    with pytest.raises(FileExistsError, match="never overwritten"):
        write(tmp_path / "x", b"second")
    assert content_of(tmp_path / "x") == {b"first"}
    assert os.listdir(tmp_path) == ["x"]


def test_a_file_is_replaced(tmp_path):
    for content in (b"first", b"second"):
        assert files.replace_file(tmp_path / "new" / "x", content).read_bytes() == content
    assert os.listdir(tmp_path / "new") == ["x"]


@pytest.mark.parametrize("fails", ["block", "flush", "publish"])
@pytest.mark.parametrize(
    ("write", "name", "publish"),
    [
        (functools.partial(files.new_file, replace=True), "old", "replace"),
        (files.new_file, "new", "link"),
        (files.new_folder, "new", "rename"),
    ],
)
def test_a_failure_leaves_what_was_there(write, name, publish, fails, tmp_path, monkeypatch):
    files.replace_file(tmp_path / "old", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails != "block":
        monkeypatch.setattr(os, "fsync" if fails == "flush" else publish, full)
    block = full if fails == "block" else lambda: None
    with pytest.raises(OSError, match="No space left"), write(tmp_path / name):
        block()
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        files.replace_file(tmp_path / "x", b"")
        write_folder(tmp_path / "y", b"")
    finally:
        os.umask(before)
    if sys.platform != "win32":
        assert [oct((tmp_path / name).stat().st_mode)[-3:] for name in "xy"] == ["640", "750"]


def race(target: Path, write, number: int, barrier: Barrier, results) -> None:
    barrier.wait()
    try:
        write(target, b"%d" % number)
    except FileExistsError:
        return
    results.put(number)


@LOCKS
@pytest.mark.parametrize("trials", [10, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("write", WRITERS)
def test_of_several_writers_of_one_path_exactly_one_wins(write, trials, tmp_path):
    for trial in range(trials):
        target, barrier, results = tmp_path / f"x{trial}", FORKS.Barrier(4), FORKS.Queue()
        processes = [FORKS.Process(target=race, args=(target, write, n, barrier, results)) for n in range(4)]
        for process in processes:
            process.start()
        winner = results.get(timeout=60)
        for process in processes:
            process.join()
        assert results.empty()
        assert content_of(target) == {b"%d" % winner}
    assert len(os.listdir(tmp_path)) == trials


def killed(work) -> None:
    """Runs work in a child process that ends without running any `finally`."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    os.waitpid(child, 0)


@LOCKS
@pytest.mark.parametrize("write", [files.new_file, files.new_folder])
def test_leftovers_of_the_dead_are_deleted_and_those_of_the_living_are_not(write, tmp_path):
    def dies() -> None:
        with write(tmp_path / "x"):
            os._exit(0)

    killed(dies)
    assert len(os.listdir(tmp_path)) == 1
    with write(tmp_path / "x"):
        assert len(os.listdir(tmp_path)) == 1, "the leftover is gone"
        killed(lambda: files.remove_leftovers(tmp_path))  # in another process
        assert len(os.listdir(tmp_path)) == 1, "a living writer's is not"
    assert os.listdir(tmp_path) == ["x"]


@LOCKS
def test_a_name_limits_what_is_deleted(tmp_path):
    left = [".x.0123456789ab.partial", ".x.partial", ".y.0123456789ab.partial"]
    for name in left:
        (tmp_path / name).mkdir()
    files.remove_leftovers(tmp_path, "x")
    assert sorted(os.listdir(tmp_path)) == left[1:]
    files.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [".x.partial"], "not ours"
    files.remove_leftovers(tmp_path / "none")


@LOCKS
def test_a_duplicate_keeps_the_lock_of_a_published_file(tmp_path):
    with files.new_file(tmp_path / "x") as file:
        number = os.dup(file.fileno())
    with pytest.raises(FileExistsError, match="busy"):
        files.locked(tmp_path / "x", "busy")
    os.close(number)
    files.locked(tmp_path / "x", "busy").close()


@LOCKS
@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_files_are_written_and_nothing_is_deleted(error, tmp_path, monkeypatch):
    def unsupported(*_: object, **__: object) -> bool:
        raise OSError(error, "no locks here")

    leftover = tmp_path / ".x.0123456789ab.partial"
    leftover.touch()
    monkeypatch.setattr(files, "lock", unsupported)
    write_file(tmp_path / "x", b"x")
    write_folder(tmp_path / "y", b"y")
    assert leftover.exists()


@LOCKS
@pytest.mark.parametrize("call", ["posix_fallocate", "zeros"])
def test_reserving_more_than_there_is_raises(call, tmp_path, monkeypatch):
    if call == "zeros":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    elif not hasattr(os, "posix_fallocate"):
        pytest.skip("this system has no posix_fallocate")
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "x", "w+b") as file:
        file.write(b"content")
        file.flush()
        files.reserve(file.fileno(), 7, 3_000_000)
        assert os.fstat(file.fileno()).st_size == 3_000_007
        assert os.fstat(file.fileno()).st_blocks * 512 >= 3_000_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                files.reserve(file.fileno(), 3_000_007, 3_000_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "x").read_bytes()[:8] == b"content\0"


def test_where_the_system_cannot_reserve_zeros_are_written(tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    with open(tmp_path / "x", "w+b") as file:
        files.reserve(file.fileno(), 0, 10)
    assert (tmp_path / "x").read_bytes() == bytes(10)
    shutil.rmtree(tmp_path)
