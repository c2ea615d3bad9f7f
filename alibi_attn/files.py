"""How every file and folder of the package is written, so that readers see all of it or nothing.

    create     a temporary file or folder next to the target, with a unique hidden name, locked while its writer lives
    flush      its bytes reach the disk before its name does
    publish    one system call gives it its name; of several writers of one new path, the first wins, the others get an error

A killed writer leaves its temporary, whose lock the system releases. The next writer of the same path deletes it, and
never that of a living process. Windows has no such locks: there leftovers stay.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_WINDOWS = os.name == "nt"
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.partial", re.DOTALL)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
_UNLOCKABLE = (*_UNSUPPORTED, errno.EBADF)  # of folders on NFS
_ZEROS = bytes(1 << 20)


def replace_file(path: Path, content: bytes) -> Path:
    """Writes a file, or replaces it."""
    with new_file(path, replace=True) as file:
        file.write(content)
    return path


@contextlib.contextmanager
def new_file(path: Path, *, replace: bool = False) -> Iterator[BinaryIO]:
    """A temporary file, open for reading and writing, that becomes `path` at the end of the block.

    Its folder is created. If the block raises, no file remains. To keep the file and its lock after the block, duplicate its
    descriptor (`os.dup`).

    Args:
        replace: an existing file is replaced.

    Raises:
        FileExistsError: `path` exists, perhaps since another process has just written it; or it is a device, a pipe or a folder.
    """
    if not replace:
        check_new(path)
    elif path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is not a regular file, and is never replaced; pass another path")
    remove_leftovers(path.parent, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _temporary_file(path)
    temporary = Path(file.name)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not _WINDOWS:
                _publish_file(temporary, path, replace)
        if _WINDOWS:  # which renames closed files only
            _publish_file(temporary, path, replace)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` at the end of the block, with all that it then holds on the disk.

    Its parents are created. If the block raises, the temporary folder is deleted.

    Raises:
        FileExistsError: `path` exists, perhaps since another process has just written it.
    """
    check_new(path)
    remove_leftovers(path.parent, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, lock_number = _temporary_folder(path)
    try:
        yield temporary
        for inside in (*temporary.rglob("*"), temporary):
            _flush(inside)
        try:
            os.rename(temporary, path)  # replaces nothing but an empty folder
        except OSError as error:
            if error.errno in _TAKEN:
                raise _exists(path) from None
            raise
        _flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock_number is not None:
            os.close(lock_number)


def check_new(path: Path) -> None:
    """Raises FileExistsError if the path exists."""
    if os.path.lexists(path):
        raise _exists(path)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Deletes what killed writers left in a folder.

    Args:
        name: only leftovers of this file or folder; None = all.
    """
    for leftover in _temporaries(folder, name):
        number = _lock_of_dead(leftover)
        if number is None:
            continue
        try:
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
        finally:
            os.close(number)


def locked(path: Path, busy: str) -> BinaryIO:
    """A file, opened and locked until it is closed or its process ends; an empty one is created if it is missing.

    Raises:
        FileExistsError: another process holds the lock; `busy` is the message.
    """
    while True:
        file = path.open("ab")
        if not lock(file.fileno()):
            file.close()
            raise FileExistsError(busy)
        if names(path, file.fileno()):
            return file
        file.close()  # the process that held the lock has just finished and removed the file


def lock(number: int, *, shared: bool = False) -> bool:
    """Locks an open file or folder against other processes; False if one of them holds the lock."""
    import fcntl  # not on Windows

    try:
        fcntl.flock(number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def names(path: Path, number: int) -> bool:
    """Whether the path names the open file."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def reserve(number: int, start: int, size: int) -> None:
    """Reserves disk space for bytes that hold nothing yet, since a full disk kills a process that writes to a mapped file.

    Raises:
        OSError: the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(number, start, size)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    at, stop = start, start + size
    while at < stop:  # macOS, and file systems without the call
        at += os.pwrite(number, _ZEROS[: stop - at], at)


def _temporary_file(path: Path) -> BinaryIO:
    while True:
        temporary = _unused_name(path)
        file = temporary.open("x+b")
        if _is_own(temporary, file.fileno()):
            return file
        file.close()


def _temporary_folder(path: Path) -> tuple[Path, int | None]:
    while True:
        temporary = _unused_name(path)
        temporary.mkdir()
        if _WINDOWS:
            return temporary, None
        with contextlib.suppress(FileNotFoundError):  # another process took it for a leftover before it was opened
            number = os.open(temporary, os.O_RDONLY)
            if _is_own(temporary, number):
                return temporary, number
            os.close(number)


def _is_own(temporary: Path, number: int) -> bool:
    """Locks a new temporary; False if another process took it for a leftover before it was locked."""
    try:
        return _WINDOWS or (lock(number) and names(temporary, number))
    except OSError as error:
        if error.errno in _UNLOCKABLE:
            return True  # where nothing can be locked, nothing is deleted
        raise


def _publish_file(temporary: Path, path: Path, replace: bool) -> None:
    if replace:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)  # a rename would replace an existing file
    except FileExistsError:
        raise _exists(path) from None


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists, and is never overwritten; delete it, or pass another path")


def _unused_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")


def _temporaries(folder: Path, name: str | None) -> list[Path]:
    """Those of living and dead writers."""
    with contextlib.suppress(FileNotFoundError, PermissionError), os.scandir(folder) as entries:
        found = [(entry.name, _TEMPORARY.fullmatch(entry.name)) for entry in entries]
        return [folder / temporary for temporary, match in found if match and name in (None, match[1])]
    return []


def _lock_of_dead(temporary: Path) -> int | None:
    """The locked descriptor of a temporary whose writer is dead; None if it lives."""
    if _WINDOWS:
        return None
    try:
        number = os.open(temporary, os.O_RDONLY)
    except OSError:  # another process has just removed it, or owns it
        return None
    with contextlib.suppress(OSError):  # nothing can be locked there
        if lock(number):
            return number
    os.close(number)
    return None


def _flush(path: Path) -> None:
    if _WINDOWS and path.is_dir():  # which it cannot open
        return
    number = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # network file systems cannot flush folders
            raise
    finally:
        os.close(number)
