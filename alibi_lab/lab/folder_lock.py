"""The lock of an experiment's folder: shards of one count may share it, any other experiment is refused."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from alibi_lab.lab.config import ConfigError
from alibi_lab.lab.data.corpus import CorpusError
from alibi_lab.lab.data.symbol_tasks import TaskError

_LOCK = re.compile(r"\.lock(?:-(\d+)-of-(\d+))?")


class ExperimentError(ValueError):
    """A folder that cannot be written or is in use by another experiment, or a missing package."""


@contextlib.contextmanager
def alone_in(out: Path, shard: tuple[int, int]) -> Iterator[None]:
    """Holds the folder for this shard. An experiment that cannot begin removes the folders that it made.

    Raises:
        ExperimentError: the folder cannot be written, or another experiment runs in it.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = _lock(out, shard)
    except OSError as error:
        raise ExperimentError(f"{out} cannot be written ({error.strerror}); pass a folder that you may write") from None
    try:
        yield
    except (CorpusError, ConfigError, TaskError):
        if made and shard[1] == 1 and not (out / "records").exists() and not (out / "checkpoints").exists():
            shutil.rmtree(out, ignore_errors=True)  # nothing was done yet: remove a folder that is new
            with contextlib.suppress(OSError):  # other experiments may have used the folders above it since
                for folder in made[1:]:
                    folder.rmdir()
        raise
    finally:
        lock.release()


def _lock(out: Path, shard: tuple[int, int]) -> FileLock:
    """Acquires and returns this shard's lock; only other shards of the same count may hold theirs at the same time.

    Raises:
        ExperimentError: another experiment in this folder may write the same files; the error names its shard.
    """
    index, count = shard
    mine = ".lock" if count == 1 else f".lock-{index}-of-{count}"
    with FileLock(out / ".lock-start"):  # if two start at once, the second one sees the first one's lock
        others = sorted(path for path in out.glob(".lock*") if path.name != mine)
        for path in [*others, out / mine]:
            found = _LOCK.fullmatch(path.name)
            if not found or (path.name != mine and found[2] == str(count) != "1"):
                continue
            lock = FileLock(path, timeout=0)
            try:
                lock.acquire()
            except Timeout:
                running = f"shard {found[1]}/{found[2]} of an experiment" if found[1] else "another experiment"
                also = f" (shards i/{found[2]} may run at the same time)" if found[1] else ""
                advice = f"wait for it, or pass another folder{also}"
                raise ExperimentError(f"{running} is running in {out}; {advice}") from None
            if path.name != mine:
                lock.release()
    return lock
