"""`alibi bench texts`: long texts: a cache in files that processes share, late chunking of a document, and passages in windows.

`cache` reads a text into a cache in files: time per token and memory along the text, the bytes that opening reads from a cold
disk, and the memory of processes that share one cache; for up to 65,536 tokens also what llama.cpp needs to load its saved state,
if `cyllama` and `gguf` are installed. `document` has the time and memory of late chunking; `passages` how close the vectors of
passages are to those of one undivided pass, when the text is read in windows or in int8.
"""

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import BloomForCausalLM

from alibi_attn.files import new_file
from alibi_attn.hf import ALiBiBertModel, ALiBiCache, read
from alibi_attn.hf.embedding.late_chunking import Document, Windows, computed
from alibi_attn.nn.allocator import resident_bytes
from alibi_attn.nn.linear import quantized
from alibi_lab.measure.harness import Config, Row, Rows, Say, check_names, keep, number
from alibi_lab.measure.model_programs import Setting, our_encoder, patched
from alibi_lab.measure.models import MOST_ERROR, relative_error
from alibi_lab.measure.peers import missing
from alibi_lab.measure.peers.dense_encoder import Sizes
from alibi_lab.measure.peers.llama_cpp import STATE_NEEDS, LlamaState
from alibi_lab.measure.timing import elapsed_ms, in_fresh_process, peak_raised_by, peak_rss_bytes

PARTS = ("cache", "document", "passages")
VOCABULARY = 1024  # of the BLOOM
WARM_TOKENS = 20  # decoded after opening; their median is a warm token
COMPARED = 65_536  # the most tokens whose losses are compared with those of a cache in memory
PEER_LONGEST = 65_536  # tokens of llama.cpp, whose reading is quadratic in the length of the text
MOST_VECTOR_ERROR = {"float32": 1e-4, "bfloat16": 2e-2}  # as a share of the norm
CHUNK = 256  # tokens of a passage
WINDOWS = ((512, 128), (1024, 256), (4096, 512))  # (tokens, of which the previous window has had these)


def texts(
    out: Path,
    *,
    parts: Sequence[str] = ("cache", "document", "passages"),
    tokens: int = 100_000,
    checked: int = 16_384,
    layers: int = 0,
    width: int = 0,
    dtype: str = "float32",
    processes: int = 10,
    cache: str = "",
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record per part, and returns their paths.

    Args:
        parts: of cache (a BLOOM on Linux), document and passages (an encoder); default all.
        tokens: length of the text, random tokens. An interrupted reading into a cache resumes.
        checked: tokens of the document whose vectors are compared with those of an undivided pass.
        layers: default 2, of the encoder 12.
        width: default 1024, of the encoder 768; heads have size 64.
        dtype: of the encoder: "float32" or "bfloat16".
        processes: processes that share the cache.
        cache: folder of the cache, which stays; on a disk, not in memory. Default: next to the record.

    Raises:
        RuntimeError: losses or vectors differ; nothing is timed.
    """
    check_names(parts=(parts, PARTS), dtype=([dtype], MOST_VECTOR_ERROR))
    run: Config = {"tokens": tokens, "threads": torch.get_num_threads()}
    sizes, encoder = {"layers": layers or 2, "width": width or 1024}, Sizes.of(layers or 12, width or 768)
    shape = {**dataclasses.asdict(encoder), "dtype": dtype, "chunk": CHUNK}
    configs: dict[str, Config] = {
        "document": {**run, **shape, "checked": checked},
        "passages": {**shape, "tokens": checked, "windows": [list(each) for each in WINDOWS]},
    }
    rows = {"document": _document(tokens, checked, encoder, dtype), "passages": _passages(checked, encoder, dtype)}
    metrics: dict[str, float | None] = {}  # of the part cache
    if "cache" in parts:
        if sys.platform != "linux":
            raise NotImplementedError("the part cache counts bytes in /proc, which only Linux has; use Linux or WSL")
        if tokens < 20_000:
            raise ValueError(
                f"tokens is {tokens} but the part cache reads at least 20000; pass them, or --parts document"
            )
        folder = Path(cache or out / f"cache-{sizes['width']}x{sizes['layers']}-{tokens}")
        system: Config = {"processes": processes, "vocabulary": VOCABULARY, "file_system": file_system(folder)}
        configs["cache"] = {**run, **sizes, **system}
        rows["cache"] = cached(folder, tokens, processes, metrics, say, **sizes)
    chosen = {f"texts/{part}": part for part in PARTS if part in parts}
    steps = ({name: each} for name, part in chosen.items() for each in rows[part])
    named = {name: configs[part] for name, part in chosen.items()}
    return keep(out, named, steps, summary=lambda name, columns: metrics if name == "texts/cache" else {}, say=say)


def cached(
    folder: Path, tokens: int, processes: int, metrics: dict[str, float | None], say: Say, *, layers: int, width: int
) -> Iterator[Rows]:
    """Reads a text into a cache in files, opens it again and shares it; fills the metrics."""
    model = patched(Setting(model="bloom", sizes=Sizes.of(layers, width, VOCABULARY)))
    text = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    before = resident_bytes()
    metrics.update(compared_losses(model, text[:, :COMPARED], folder))
    rows = read_text(model, text, folder, before, say)
    yield from ({"ours": row} for row in rows)
    times = [number(row["token_cpu_seconds"]) for row in rows]
    metrics["last_to_second_tenth"] = times[-1] / times[1]
    metrics["peak_added_bytes"] = max(number(row["added_bytes"]) for row in rows)
    one_token(model, folder)  # brings the pages into memory
    metrics.update(opened(folder, lambda: one_token(model, folder)))
    alone, together = (sum(shared_bytes(model, folder, count)) for count in (1, processes))
    metrics.update({"pss_of_one_bytes": alone, "pss_of_all_bytes": together, "pss_ratio": together / alone})
    if tokens <= PEER_LONGEST and missing(STATE_NEEDS) is None:
        metrics.update(saved_state(model, text, folder))
    yield {}


def compared_losses(model: BloomForCausalLM, text: Tensor, folder: Path) -> dict[str, float | None]:
    """The largest difference, in nats, between the losses of a cache in files and of a cache in memory.

    Raises:
        RuntimeError: the losses are not equal.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    losses = []
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        for cache in (ALiBiCache(), ALiBiCache(Path(place) / "cache")):
            parts: list[Tensor] = []
            read(model, text, cache, losses=parts.append)
            losses.append(torch.cat(parts, dim=1))
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


def shared_bytes(model: BloomForCausalLM, folder: Path, processes: int) -> list[int]:
    """Proportional set size of the cache's mappings in each process, while all have it open and have decoded a token."""
    context = get_context("fork")
    with contextlib.ExitStack() as stack:
        started = []
        for index in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_continue, args=(model, folder, index, theirs))
            process.start()
            theirs.close()  # so that waiting ends if the process fails
            stack.callback(process.join)
            stack.callback(process.terminate)  # the processes wait for a message, also after one of them has failed
            started.append((process.pid, ours))
        for _, pipe in started:
            assert pipe.recv() == "decoded"
        return [proportional_bytes(pid, folder) for pid, _ in started]


@torch.no_grad()
def _continue(model: BloomForCausalLM, folder: Path, index: int, pipe: Connection) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: with two this process waits forever
    cache = ALiBiCache.open(folder, mode="c")
    model(torch.full((1, 8), 3 + index), past_key_values=cache, use_cache=True)
    pipe.send("decoded")
    pipe.recv()


def proportional_bytes(pid: int | None, folder: Path) -> int:
    """The proportional set size of a process's mappings of the folder's files, from /proc/PID/smaps."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
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
        with open(file, "rb") as stored:
            os.fsync(stored.fileno())
            os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def file_system(path: Path) -> str:
    """The type of the file system that holds the path, as in /proc/mounts."""
    path = path.absolute()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(len(place), kind) for place, kind in mounts if path.is_relative_to(place)]
    return max(inside)[1]


def _document(tokens: int, checked: int, sizes: Sizes, dtype: str) -> Iterator[Rows]:
    """Late chunking of one document: the error of its vectors, and time and memory of a pass."""
    error = in_fresh_process(vector_error, checked, sizes, dtype)
    if not error <= MOST_VECTOR_ERROR[dtype]:
        raise RuntimeError(f"vectors differ by {error:.1e} of their norm from those of an undivided pass")
    yield {"ours": {**in_fresh_process(measure, tokens, sizes, dtype), "error_against_undivided": error}}


def _passages(tokens: int, sizes: Sizes, dtype: str) -> Iterator[Rows]:
    """How close the vectors of passages are to those of one pass in fp32: read in windows, in int8, or alone."""
    document = random_document(tokens, sizes.vocabulary)
    model = our_encoder(sizes).to(getattr(torch, dtype))
    true = vectors(our_encoder(sizes), document)
    ways: dict[str, tuple[ALiBiBertModel, Windows]] = {"one pass": (model, Windows())}
    ways |= {f"windows of {size}, {shared} shared": (model, Windows(size, shared)) for size, shared in WINDOWS}
    ways["each passage alone"] = model, Windows(CHUNK, 0)
    with contextlib.suppress(ValueError):  # a processor without int8
        quantized.check_supported()
        small = our_encoder(sizes)
        quantized.convert(small)
        ways["int8"] = small, Windows()
    rows: dict[str, Row] = {}
    for name, (encoder, windows) in ways.items():
        started = time.perf_counter()
        found = vectors(encoder, document, windows)
        cosines = (found * true).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(true, axis=1)
        ms = (time.perf_counter() - started) * 1e3
        closeness = {"cosine": float(cosines.mean()), "worst_cosine": float(cosines.min())}
        rows[name] = {"length": tokens, "forward_ms": ms, **closeness}
    yield rows


def random_document(length: int, vocabulary: int) -> Document:
    """A text of random tokens, with passages of CHUNK tokens; characters and tokens are the same."""
    ids = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(length))
    edges = np.append(np.arange(0, length, CHUNK), length)
    spans = np.stack([edges[:-1], edges[1:]], axis=1)
    return Document(ids.numpy().astype(np.int32), 0, length, spans, spans)


def vectors(model: ALiBiBertModel, document: Document, windows: Windows | None = None) -> np.ndarray:
    """The late vectors of a document's passages."""
    some = computed(model, [document], windows or Windows(), batch_tokens=len(document.ids), normalize=False)
    ((_, (found,)),) = some
    return found


def vector_error(length: int, sizes: Sizes, dtype: str) -> float:
    """The error of late vectors against means over an undivided pass."""
    document, model = random_document(length, sizes.vocabulary), our_encoder(sizes).to(getattr(torch, dtype))
    found = vectors(model.requires_grad_(False), document)
    # With gradients enabled the feed-forward is never divided, and without any that are required nothing is kept.
    with torch.enable_grad():
        states = model(torch.from_numpy(document.ids).long()[None]).last_hidden_state[0].double()
    true = torch.stack([states[start:end].mean(0) for start, end in document.tokens.tolist()])
    return relative_error(torch.from_numpy(found), true)


def measure(length: int, sizes: Sizes, dtype: str) -> Row:
    """Time and peak memory of one pass, model included, and the cores it used: processor time over wall time."""
    before = peak_rss_bytes()
    model, document = our_encoder(sizes).to(getattr(torch, dtype)), random_document(length, sizes.vocabulary)
    start, spent = time.perf_counter(), sum(os.times()[:2])
    found = vectors(model, document)
    seconds = time.perf_counter() - start
    assert len(found) == len(document.tokens)
    peak, cores = peak_raised_by(before), (sum(os.times()[:2]) - spent) / seconds
    return {"length": length, "forward_ms": seconds * 1e3, "peak_memory_bytes": peak, "cores_used": cores}
