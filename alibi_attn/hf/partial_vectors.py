"""Vectors that are being computed: a .npy file beside the output that grows, what it belongs to, and how much of it is there.

OUT.partial has all rows from the start, so that a full disk is noticed before any work; OUT.partial.json says how many are done,
of which model and texts. `finish` gives the file its name. The same question again goes on; another one is refused.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from alibi_attn.records import replace_file
from alibi_attn.strict_json import JsonError, parse

KEEP_SECONDS = 5.0  # how much work a killed process loses, beyond its batch


def check_new(out: Path) -> None:
    """Raises FileExistsError where vectors are there already."""
    if out.exists():
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
        for path in (partial, about):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return self.out


def _beside(out: Path) -> tuple[Path, Path]:
    return out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial.json")


def _done(partial: Path, about: Path, identity: str, shape: tuple[int, int]) -> int:
    """How many rows are there, of this very question."""
    if not about.exists():
        if partial.exists():
            raise FileExistsError(f"{partial} exists and no {about.name} beside it; delete it, or pass another --out")
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
    replace_file(about, f"{json.dumps(said)}\n".encode())


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged; delete {path.name.removesuffix('.json')} and its .json, and begin anew")
