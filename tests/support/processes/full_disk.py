"""Caches in files on a disk with less and less room: full_disk.py FOLDER, where FOLDER is a small file system of its own.

A call either completes, or raises OSError and leaves the files as they were; it never kills the process. Prints JSON: for each
kind of call, its exit code (negative for a signal), and how many calls completed and failed.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from kills import end_of
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn import KVCache
from alibi_attn.hf import ALiBiCache, patch, read

PAGE = 4096
KEYS = torch.arange(8 * 1064, dtype=torch.float32).view(1, 1, 1064, 8)


def fill(folder: Path, room: int) -> Path:
    """Fills the disk up to a number of free bytes; returns the file to delete."""
    filler, status = folder / "filler", os.statvfs(folder)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - room)
    return filler


def fails(call: Callable[[], object]) -> bool:
    """Whether the call raises OSError; the exception, which keeps files open, is gone afterwards."""
    try:
        call()
    except OSError:
        return True
    return False


def create(folder: Path, count: int) -> Iterator[bool]:
    path, some = folder / "cache", KEYS[:, :, :count]
    for room in range(0, 160 * 1024, PAGE):
        filler = fill(folder, room)
        failed = fails(lambda: KVCache(path).append(some, some))
        if failed:
            assert os.listdir(folder) == ["filler"]
        else:
            check(path, count)
            path.unlink()
        filler.unlink()
        yield failed


def extend(folder: Path) -> Iterator[bool]:
    path, first, added = folder / "cache", KEYS[:, :, :1000], KEYS[:, :, 1000:]
    for room in range(0, 160 * 1024, PAGE):
        KVCache(path).append(first, first)
        filler = fill(folder, room)
        failed = fails(lambda: KVCache.open(path).append(added, added))
        check(path, 1000 if failed else 1064)
        filler.unlink()
        if failed:
            KVCache.open(path).append(added, added)
            check(path, 1064)
        path.unlink()
        yield failed


def check(path: Path, count: int) -> None:
    cache = KVCache.open(path)
    cache.verify()
    assert torch.equal(cache.key, KEYS[:, :, :count])
    assert torch.equal(cache.value, KEYS[:, :, :count])


def read_text(folder: Path) -> Iterator[bool]:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50)).eval()
    patch(model)
    ids = torch.randint(3, 50, (1, 1500))
    expected, path = read(model, ids, ALiBiCache()), folder / "cache"
    for room in range(0, 1200 * 1024, 5 * PAGE):
        filler = fill(folder, room)
        failed = fails(lambda: read(model, ids, ALiBiCache(path)))
        filler.unlink()
        cache = ALiBiCache.open(path) if path.exists() else ALiBiCache(path)
        cache.verify()
        assert failed or cache.get_seq_length() == 1500
        torch.testing.assert_close(read(model, ids, cache), expected, rtol=1e-4, atol=1e-5)
        cache.verify()
        del cache
        shutil.rmtree(path)
        yield failed


def main() -> None:
    folder, told = Path(sys.argv[1]), {}
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], Iterator[bool]]] = {
        "one token": lambda: create(folder, 1),
        "64 tokens": lambda: create(folder, 64),
        "more tokens": lambda: extend(folder),
        "read": lambda: read_text(folder),
    }
    for name, call in calls.items():
        counts = folder.parent / "counts"
        counts.write_bytes(b"")

        def work(call: Callable[[], Iterator[bool]] = call, counts: Path = counts) -> None:
            with torch.no_grad(), open(counts, "ab", buffering=0) as file:
                for failed in call():
                    file.write(b"0" if failed else b"1")

        code = end_of(work)
        found = counts.read_bytes()
        told[name] = {"code": code, "completed": found.count(b"1"), "failed": found.count(b"0")}
        for left in folder.iterdir():
            left.unlink() if left.is_file() else None
    print(json.dumps(told))


if __name__ == "__main__":
    main()
