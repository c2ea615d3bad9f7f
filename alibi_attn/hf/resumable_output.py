"""An output file of vectors that grows while they are computed, and that an interrupted run continues.

OUT.partial is a .npy file with all rows allocated from the start, so that a full disk is noticed before any work.
OUT.partial.json says how many rows are done, and identifies the model, texts and settings. `finish` renames the file.
Running the same command again continues it; a different command is refused, and so is a second process with the same output
(`claimed`).
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from alibi_attn.strict_json import JsonError, parse

KEEP_SECONDS = 5.0  # how much work a killed process loses, beyond its batch


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Reserves `out` for this process while the block runs; other processes are refused until then.

    The lock is on OUT.partial, and the system releases it if the process is killed. Nothing is left behind if the block ends
    before `PartialVectors.open`.

    Raises:
        FileExistsError: `out` exists, or another process is writing it.
        OSError: the folder cannot be created or written.
    """
    partial = _beside(out)[0]
    created = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out, partial) as file:
            try:
                yield
            finally:
                if _is_at(file, partial) and os.fstat(file.fileno()).st_size == 0:
                    partial.unlink()
    finally:
        for folder in created:
            with contextlib.suppress(OSError):  # it holds the output
                folder.rmdir()


def check_new(out: Path) -> None:
    """Raises FileExistsError if the output exists, after removing what a run that was killed inside `finish` left."""
    partial, about = _beside(out)
    if out.exists():
        if partial.exists() and partial.samefile(out):
            about.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
        raise FileExistsError(f"{out} exists; vectors are never overwritten: delete it, or pass another --out")


@dataclasses.dataclass
class PartialVectors:
    """Rows [N, E] in float32 that are put in any order; `done` of them, in the order of the work, are safe on the disk.

    Args:
        out: where they go in the end.
        identity: of the question that they answer.
    """

    out: Path
    identity: str
    vectors: NDArray[np.float32]
    done: int
    _kept_at: float = 0.0

    @classmethod
    def open(cls, out: Path, identity: str, shape: tuple[int, int]) -> "PartialVectors":
        """What an interrupted run left, or a new file.

        Raises:
            FileExistsError: `out` exists, or what lies beside it answers another question.
            ValueError: what lies beside it is damaged.
            OSError: it cannot be written, or the disk is full.
        """
        check_new(out)
        partial, about = _beside(out)
        done = _done(partial, about, identity, shape)
        if done > 0:
            size = partial.stat().st_size  # before it is opened, which would fill up what lacks with zeros
            try:
                vectors = np.lib.format.open_memmap(partial, mode="r+")
            except (ValueError, EOFError):
                raise _damaged(partial) from None
            wanted = (shape, np.dtype(np.float32), vectors.offset + vectors.nbytes)
            if (vectors.shape, vectors.dtype, size) != wanted:
                raise _damaged(partial)
            return cls(out, identity, vectors, done)
        _write(about, identity, 0, shape)
        try:
            vectors = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
            if hasattr(os, "posix_fallocate"):  # a mapped file on a full disk is a bus error, and this one a sentence
                with partial.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
        except OSError:
            for path in (partial, about):
                path.unlink(missing_ok=True)
            raise
        return cls(out, identity, vectors, 0)

    def put(self, places: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """The next rows of the work, which belong at these places."""
        self.vectors[list(places)] = vectors
        self.done += len(places)
        if time.monotonic() - self._kept_at > KEEP_SECONDS:
            self.keep()

    def keep(self) -> None:
        """Bring what is done to the disk."""
        self.vectors.flush()  # type: ignore[attr-defined]
        _write(_beside(self.out)[1], self.identity, self.done, self.vectors.shape)
        self._kept_at = time.monotonic()

    def finish(self) -> Path:
        """All rows are there: give the file its name.

        Raises:
            FileExistsError: another file came to have it meanwhile.
        """
        assert self.done == len(self.vectors)
        self.keep()
        partial, about = _beside(self.out)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        try:
            os.link(partial, self.out)
        except FileExistsError:
            check_new(self.out)
            raise
        for path in (about, partial):  # in this order, so that `check_new` recognizes what a killed run leaves
            path.unlink(missing_ok=True)
        return self.out


def _locked(out: Path, partial: Path) -> BinaryIO:
    """OUT.partial, opened and locked; an empty file is created if it is missing."""
    while True:
        check_new(out)
        file = partial.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FileExistsError(
                f"another process is writing {out} ({partial.name} is locked); wait for it, or pass another --out"
            ) from None
        if _is_at(file, partial):
            return file
        file.close()  # the process that held the lock has just finished and removed the file


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _beside(out: Path) -> tuple[Path, Path]:
    return out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial.json")


def _done(partial: Path, about: Path, identity: str, shape: tuple[int, int]) -> int:
    """How many rows are there, of this very question."""
    if not about.exists():
        if partial.exists() and partial.stat().st_size:
            raise FileExistsError(f"{partial} exists without {about.name}; delete it, or pass another --out")
        return 0
    try:
        said = parse(about.read_bytes())
    except JsonError:
        raise _damaged(about) from None
    done = said.get("rows_done") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(done, int) or done < 0:
        raise _damaged(about)
    if done == 0 or not partial.exists():
        return 0  # nothing that could be lost
    if said.get("identity") != identity:
        raise FileExistsError(
            f"{partial} was begun with another model, other texts or other settings; give the same again, delete it, or pass "
            "another --out"
        )
    if done > shape[0]:
        raise _damaged(about)
    return done


def _write(about: Path, identity: str, done: int, shape: Sequence[int]) -> None:
    said = {"identity": identity, "rows_done": done, "shape": list(shape)}
    # One process writes at a time, so the name can be fixed: what a killed one leaves, the next one replaces.
    temporary = about.with_name(f"{about.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(f"{json.dumps(said)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, about)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged; delete {path.name.removesuffix('.json')} and its .json, and begin anew")
