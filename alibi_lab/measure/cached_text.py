"""A text in a cache in files: reading it, opening it from a cold disk, and sharing it (`alibi bench texts`, Linux only)."""

import contextlib
import functools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from transformers import BloomForCausalLM

from alibi_attn.files import new_file
from alibi_attn.hf import ALiBiCache, patch, read
from alibi_attn.nn.allocator import resident_bytes
from alibi_lab.measure.harness import Row, Rows, Say, number
from alibi_lab.measure.models import MOST_ERROR, relative_error
from alibi_lab.measure.peers import missing
from alibi_lab.measure.peers.dense_encoder import Sizes
from alibi_lab.measure.peers.llama_cpp import STATE_NEEDS, LlamaState
from alibi_lab.measure.peers.transformers_models import decoder
from alibi_lab.measure.timing import elapsed_ms

VOCABULARY = 1024
WARM_TOKENS = 20  # decoded after opening; their median is a warm token
COMPARED = 65_536  # the most tokens whose losses are compared with those of a cache in memory
PEER_LONGEST = 65_536  # tokens of llama.cpp, whose reading is quadratic in the length of the text


def cached(
    folder: Path, tokens: int, processes: int, metrics: dict[str, float | None], say: Say, *, layers: int, width: int
) -> Iterator[Rows]:
    """Reads a text into a cache in files, opens it again and shares it; fills the metrics."""
    model = decoder("bloom", Sizes(layers, width, width // 64, 4 * width, VOCABULARY))
    patch(model)
    text = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    before = resident_bytes()
    metrics.update(compared_losses(model, text[:, :COMPARED], folder))
    rows = read_text(model, text, folder, before, say)
    yield from ({"ours": row} for row in rows)
    times = [number(row["token_cpu_seconds"]) for row in rows]
    metrics["last_to_second_tenth"] = times[-1] / times[1]
    metrics["peak_added_bytes"] = max(number(row["added_bytes"]) for row in rows)
    one_token(model, folder)  # brings the pages into memory
    metrics.update(opened(folder, lambda: one_token(model, folder)) | sharing(model, folder, processes))
    if tokens <= PEER_LONGEST and missing(STATE_NEEDS) is None:
        metrics.update(saved_state(model, text, folder))
    yield {}


def compared_losses(model: BloomForCausalLM, text: Tensor, folder: Path) -> dict[str, float | None]:
    """The largest difference, in nats, between the losses of a cache in files and of a cache in memory.

    Raises:
        RuntimeError: the losses are not equal.
    """
    place = folder.with_name(folder.name + ".compared")
    shutil.rmtree(place, ignore_errors=True)  # of an interrupted run
    place.parent.mkdir(parents=True, exist_ok=True)
    losses = []
    for cache in (ALiBiCache(), ALiBiCache(place)):
        parts: list[Tensor] = []
        read(model, text, cache, losses=parts.append)
        losses.append(torch.cat(parts, dim=1))
    del cache  # closes the files
    shutil.rmtree(place)
    difference = (losses[0] - losses[1]).abs().max().item()
    if difference != 0:
        raise RuntimeError(
            f"the losses of a cache in files differ from those of a cache in memory by {difference} nats"
        )
    return {"compared_tokens": float(text.shape[1]), "largest_loss_difference": difference}


def read_text(model: BloomForCausalLM, text: Tensor, folder: Path, before: int, say: Say) -> list[Row]:
    """Ten rows, one per tenth of the text: seconds per token (wall time and CPU time), and the increase of memory.

    The increase is that of the largest memory in use over `before`, in bytes. Chunks are logged in a file next to
    the cache, so that an interrupted run can resume.
    """
    length, log = text.shape[1], folder.with_name(folder.name + ".times")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter(), time.process_time()
    with open(log, "a") as file:

        def progress(stop: int, _: int) -> None:
            nonlocal start
            now = time.perf_counter(), time.process_time()
            file.write(json.dumps([stop, now[0] - start[0], now[1] - start[1], resident_bytes() - before]) + "\n")
            file.flush()
            if stop % (length // 20 + 1) < 1024:
                say(f"{stop:>9,} tokens, {resident_bytes() - before:,} bytes added")
            start = time.perf_counter(), time.process_time()

        cache = ALiBiCache.open(folder) if folder.exists() else ALiBiCache(folder)
        read(model, text, cache, progress=progress)
    chunks = {stop: figures for stop, *figures in map(json.loads, log.read_text().splitlines())}
    rows, read_before = list[Row](), 0
    for high in (tenth * length // 10 for tenth in range(1, 11)):
        inside = [stop for stop in sorted(chunks) if read_before < stop <= high]
        seconds, cpu_seconds, added = zip(*(chunks[stop] for stop in inside), strict=True)
        tokens, read_before = inside[-1] - read_before, inside[-1]
        times = {"token_seconds": sum(seconds) / tokens, "token_cpu_seconds": sum(cpu_seconds) / tokens}
        rows.append({"length": high, **times, "added_bytes": max(added)})
    return rows


@torch.no_grad()
def one_token(model: BloomForCausalLM, folder: Path) -> dict[str, float | None]:
    """Opens a private copy and decodes: milliseconds of the first and of a warm token, page faults of the warm ones."""
    start = time.perf_counter()
    cache = ALiBiCache.open(folder, mode="c")
    decode = functools.partial(model, torch.full((1, 1), 5), past_key_values=cache, use_cache=True)
    decode()
    first, before = (time.perf_counter() - start) * 1e3, page_faults()
    warm = statistics.median_high(elapsed_ms(decode) for _ in range(WARM_TOKENS))
    faults = (page_faults() - before) / WARM_TOKENS
    return {"open_and_first_token_ms": first, "warm_token_ms": warm, "warm_token_page_faults": faults}


def saved_state(model: BloomForCausalLM, text: Tensor, folder: Path) -> dict[str, float | None]:
    """What llama.cpp needs to load its saved state of the same text and compute a token, as `opened`.

    The state stays next to the cache: reading the text takes llama.cpp minutes, so a repeated run only loads it.

    Raises:
        RuntimeError: its logits are wrong.
    """
    length, listed, path = text.shape[1], text[0].tolist(), folder.with_name(folder.name + ".llama-state")
    last = torch.full((1, 1), 5)
    with torch.no_grad():
        true = model(last, past_key_values=ALiBiCache.open(folder, mode="c"), use_cache=True).logits[0, -1]
    with tempfile.TemporaryDirectory(prefix="alibi-attn-") as weights:
        peer = LlamaState(model, Path(weights), room=length + WARM_TOKENS, threads=torch.get_num_threads())
        if not path.exists():
            peer.read(listed)
            with new_file(path) as file:
                peer.save(Path(file.name), listed)
        logits, _, _ = peer.load(path, 5)
        off = relative_error(torch.from_numpy(logits), true)
        if not off < MOST_ERROR["float32"]:
            raise RuntimeError(f"llama.cpp is off by {off:.1e} of the norm of its logits at {length} tokens")

        def one() -> dict[str, float | None]:
            _, first, warm = peer.load(path, 5)
            return {"open_and_first_token_ms": first, "warm_token_ms": warm}

        metrics = opened(path, one)
    return {f"llama_cpp_{name}": value for name, value in metrics.items()}


def opened(path: Path, one: Callable[[], dict[str, float | None]]) -> dict[str, float | None]:
    """The milliseconds that `one` returns with pages in memory, those of the first token from a cold disk, and bytes read."""
    metrics = one()
    drop_from_page_cache(path)
    before = storage_bytes_read()
    metrics["cold_open_and_first_token_ms"] = one()["open_and_first_token_ms"]
    metrics["cold_bytes_read"] = storage_bytes_read() - before
    metrics["stored_bytes"] = sum(file.stat().st_blocks * 512 for file in files(path))  # without holes
    return metrics


def sharing(model: BloomForCausalLM, folder: Path, processes: int) -> dict[str, float | None]:
    """Proportional set size of the cache's mappings in one process, and in all of them together."""
    alone, together = (sum(shared_bytes(model, folder, count)) for count in (1, processes))
    return {"pss_of_one_bytes": alone, "pss_of_all_bytes": together, "pss_ratio": together / alone}


def shared_bytes(model: BloomForCausalLM, folder: Path, processes: int) -> list[int]:
    """Proportional set size of the cache's mappings in each process, while all have it open and have decoded a token."""
    context = get_context("fork")
    with contextlib.ExitStack() as stack:
        pipes = []
        for index in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_continue, args=(model, folder, index, theirs))
            process.start()
            theirs.close()  # so that waiting ends if the process fails
            stack.callback(process.join)
            stack.callback(process.terminate)  # the processes wait for messages, also after one of them has failed
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.recv() == "decoded"
        sizes = []
        for pipe in pipes:
            pipe.send("measure")
            sizes.append(int(pipe.recv()))
    return sizes


@torch.no_grad()
def _continue(model: BloomForCausalLM, folder: Path, index: int, pipe: Connection) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: with two this process waits forever
    cache = ALiBiCache.open(folder, mode="c")
    model(torch.full((1, 8), 3 + index), past_key_values=cache, use_cache=True)
    pipe.send("decoded")
    pipe.recv()
    pipe.send(proportional_bytes(folder))
    pipe.recv()


def proportional_bytes(folder: Path) -> int:
    """The proportional set size of the mappings of the folder's files, from /proc/self/smaps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if ":" not in line.split(" ")[0]:
            inside = f"{folder.resolve()}/" in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def page_faults() -> int:
    """Page faults of this process so far, minor and major."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]) + int(fields[9])


def storage_bytes_read() -> int:
    """Bytes that this process has read from the disk so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def files(path: Path) -> list[Path]:
    """The file itself, or the files in a folder."""
    return list(path.iterdir()) if path.is_dir() else [path]


def drop_from_page_cache(path: Path) -> None:
    """Writes a file, or the files in a folder, to the disk and asks the system to drop their pages from memory."""
    for file in files(path):
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def file_system(path: Path) -> str:
    """The type of the file system that holds the path, as in /proc/mounts."""
    path = path.absolute()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(len(place), kind) for place, kind in mounts if path.is_relative_to(place)]
    return max(inside)[1]
