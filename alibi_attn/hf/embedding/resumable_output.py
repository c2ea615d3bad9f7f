"""An output file of vectors that is written during the computation, so that an interrupted run can continue.

OUT.partial is a .npy file with all rows allocated from the start, so that a full disk is noticed before any work.
OUT.partial.json records the number of finished rows and their checksum, and identifies the model, texts and settings.
`finish` renames the file. Running the same command again continues it. A different command raises an error, and so does a second
process with the same output (`claimed`).
"""

import contextlib
import dataclasses
import os
import time
import tokenize
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from alibi_attn.files import locked, names, replace_file, reserve
from alibi_attn.hf.readers.checkpoint_files import read_json
from alibi_attn.strict_json import is_sealed, sealed

KEEP_SECONDS = 5.0  # the most work that a killed process loses, in addition to its current batch
_ROWS = 4096  # read at a time


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Reserves `out` for this process while the block runs; other processes get an error until then.

    The lock is on OUT.partial, and the system releases it if the process is killed. No file remains if the block ends before
    `PartialVectors.open`.

    Raises:
        FileExistsError: `out` exists, or another process is writing it.
        OSError: the folder cannot be created or written.
    """
    partial = _beside(out)[0]
    with folder_for_output(out.parent):
        busy = f"another process is writing {out} ({partial.name} is locked); wait for it, or pass another --out"
        with locked(partial, busy) as file:
            try:
                check_new(out)
                yield
            finally:
                if names(partial, file.fileno()) and os.fstat(file.fileno()).st_size == 0:
                    partial.unlink()


@contextlib.contextmanager
def folder_for_output(folder: Path) -> Iterator[None]:
    """Creates a folder and its parents. After the block, those that are new and still empty are removed."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # it holds files
                path.rmdir()


def check_new(out: Path) -> None:
    """Raises FileExistsError if the output exists; first removes the leftovers of a run killed inside `finish`."""
    partial, about, complete = _beside(out)
    if out.exists():
        if any(path.exists() and path.samefile(out) for path in (partial, complete)):
            _remove(about, partial, complete)
        raise FileExistsError(f"{out} exists; vectors are never overwritten: delete it, or pass another --out")


@dataclasses.dataclass
class PartialVectors:
    """Rows [N, E] in float32, written in a given order. The first `done` rows of that order are safe on the disk.

    Args:
        out: the final path.
        identity: a hash of model, texts and settings.
        order: the row of each next vector.
        written: the number of finished rows and their CRC-32, one tuple since an interruption may come between two assignments.
    """

    out: Path
    identity: str
    order: Sequence[int]
    vectors: NDArray[np.float32]
    written: tuple[int, int]
    _flushed_at: float = 0.0

    @property
    def done(self) -> int:
        """The number of finished rows."""
        return self.written[0]

    @classmethod
    def open(cls, out: Path, identity: str, order: Sequence[int], width: int) -> "PartialVectors":
        """Opens the partial file of an interrupted run, or creates one.

        Raises:
            FileExistsError: `out` exists, or a partial file of another model, other texts or other settings.
            ValueError: the partial file is damaged.
            OSError: the file cannot be written, or the disk is full.
        """
        check_new(out)
        partial, about, _ = _beside(out)
        shape = (len(order), width)
        done, crc = written = _written(partial, about, identity)
        if done > 0:
            size = partial.stat().st_size  # before opening, which would pad a short file with zeros
            try:
                vectors = np.lib.format.open_memmap(partial, mode="r+")
            except (ValueError, EOFError, tokenize.TokenError):  # NumPy reads a header as Python code
                raise _damaged(partial) from None
            wanted = (shape, np.dtype(np.float32), vectors.offset + vectors.nbytes)
            if (vectors.shape, vectors.dtype, size) != wanted or _crc(vectors, order[:done]) != crc:
                raise _damaged(partial)
            return cls(out, identity, order, vectors, written)
        _write(about, identity, written)
        try:
            vectors = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
            with partial.open("r+b") as file:
                reserve(file.fileno(), vectors.offset, vectors.nbytes)
        except OSError:
            _remove(partial, about)
            raise
        return cls(out, identity, order, vectors, written)

    def put(self, vectors: NDArray[np.float32]) -> None:
        """Write the next computed vectors into their rows."""
        done, crc = self.written
        places = self.order[done : done + len(vectors)]
        self.vectors[list(places)] = vectors
        self.written = (done + len(places), _crc(self.vectors, places, crc))
        if time.monotonic() - self._flushed_at > KEEP_SECONDS:
            self.keep()

    def keep(self) -> None:
        """Flush the finished rows to the disk, then record their number."""
        self.vectors.flush()  # type: ignore[attr-defined]
        _write(_beside(self.out)[1], self.identity, self.written)
        self._flushed_at = time.monotonic()

    def leave(self) -> None:
        """`keep`, when the work ends early; without finished rows no file remains."""
        if self.done:
            self.keep()
        else:
            _remove(*_beside(self.out)[:2])

    def finish(self, write: Callable[[Path, NDArray[np.float32]], None] | None = None) -> Path:
        """Rename the complete file to `out`.

        Args:
            write: writes (path, vectors) in another format; the result becomes `out`.

        Raises:
            FileExistsError: `out` was created meanwhile.
            OSError: the disk is full; the vectors are kept.
        """
        assert self.done == len(self.vectors)
        self.keep()
        partial, about, complete = _beside(self.out)
        if write is None:
            complete = partial
        else:
            try:
                write(complete, self.vectors)
            except BaseException:
                _remove(complete)
                raise
        with complete.open("rb") as file:
            os.fsync(file.fileno())
        try:
            os.link(complete, self.out)
        except FileExistsError:
            check_new(self.out)
            raise
        _remove(about, partial, complete)  # in this order, so that `check_new` recognizes the leftovers of a killed run
        return self.out


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _beside(out: Path) -> tuple[Path, Path, Path]:
    """The vectors, their progress, and the complete file in another format."""
    partial, about, complete = (out.with_name(f"{out.name}.partial{end}") for end in ("", ".json", ".complete"))
    return partial, about, complete


def _written(partial: Path, about: Path, identity: str) -> tuple[int, int]:
    """The number of finished rows in a partial file with this identity, and their checksum."""
    if not about.exists():
        if partial.exists() and partial.stat().st_size:
            raise FileExistsError(f"{partial} exists without {about.name}; delete it, or pass another --out")
        return 0, 0
    try:
        progress = read_json(about)
    except ValueError:
        raise _damaged(about) from None
    if not is_sealed(progress):
        raise _damaged(about)
    if progress["rows_done"] == 0 or not partial.exists():
        return 0, 0  # no finished rows could be lost
    if progress["identity"] != identity:
        raise FileExistsError(
            f"{partial} was started with another model, other texts or other settings; pass the same ones, delete it, or pass "
            "another --out"
        )
    return progress["rows_done"], progress["crc32"]


def _write(about: Path, identity: str, written: tuple[int, int]) -> None:
    progress = {"identity": identity, "rows_done": written[0], "crc32": written[1]}
    replace_file(about, sealed(progress) + b"\n")


def _crc(vectors: NDArray[np.float32], places: Sequence[int], crc: int = 0) -> int:
    """The checksum of these rows, after rows with the checksum `crc`."""
    for start in range(0, len(places), _ROWS):
        crc = zlib.crc32(vectors[list(places[start : start + _ROWS])].tobytes(), crc)
    return crc


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged; delete {path.name.removesuffix('.json')} and its .json, and start again")
