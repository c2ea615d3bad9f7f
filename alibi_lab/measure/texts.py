"""`alibi bench texts`: long texts: a cache in files that processes share, late chunking of a document, and passages in windows.

`cache` reads a text into a cache in files: time per token and memory along the text, the bytes that opening reads from a cold
disk, and the memory of processes that share one cache; for up to 65,536 tokens also what llama.cpp needs to load its saved state,
if `cyllama` and `gguf` are installed. `document` has the time and memory of late chunking; `passages` how close the vectors of
passages are to those of one undivided pass, when the text is read in windows or in int8.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from alibi_attn.hf import ALiBiBertModel
from alibi_attn.hf.embedding.late_chunking import Document, Windows, computed
from alibi_attn.nn.linear import quantized
from alibi_lab.measure import cached_text
from alibi_lab.measure.harness import Config, Row, Rows, Say, check_names, keep
from alibi_lab.measure.model_programs import our_encoder
from alibi_lab.measure.models import relative_error
from alibi_lab.measure.peers.dense_encoder import Sizes
from alibi_lab.measure.timing import in_fresh_process, peak_raised_by, peak_rss_bytes

MOST_ERROR = {"float32": 1e-4, "bfloat16": 2e-2}  # as a share of the norm
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
    check_names(parts=(parts, PARTS), dtype=([dtype], MOST_ERROR))
    run: Config = {"tokens": tokens, "threads": torch.get_num_threads()}
    configs, rows = dict[str, Config](), dict[str, Iterator[Rows]]()
    metrics: dict[str, float | None] = {}  # of the part cache
    if "cache" in parts:
        if sys.platform != "linux":
            raise NotImplementedError("the part cache counts bytes in /proc, which only Linux has; use Linux or WSL")
        if tokens < 20_000:
            raise ValueError(
                f"tokens is {tokens} but the part cache reads at least 20000; pass them, or --parts document"
            )
        sizes = {"layers": layers or 2, "width": width or 1024}
        folder = Path(cache or out / f"cache-{sizes['width']}x{sizes['layers']}-{tokens}")
        configs["texts/cache"] = {
            **run, **sizes, "processes": processes, "vocabulary": cached_text.VOCABULARY,
            "file_system": cached_text.file_system(folder),
        }  # fmt: skip
        rows["texts/cache"] = cached_text.cached(folder, tokens, processes, metrics, say, **sizes)
    encoder = Sizes(layers or 12, width or 768, (width or 768) // 64, 4 * (width or 768))
    shape = {**dataclasses.asdict(encoder), "dtype": dtype, "chunk": CHUNK}
    if "document" in parts:
        configs["texts/document"] = {**run, **shape, "checked": checked}
        rows["texts/document"] = _document(tokens, checked, encoder, dtype)
    if "passages" in parts:
        configs["texts/passages"] = {**shape, "tokens": checked, "windows": [list(each) for each in WINDOWS]}
        rows["texts/passages"] = _passages(checked, encoder, dtype)
    steps = ({name: each} for name, of_part in rows.items() for each in of_part)
    return keep(out, configs, steps, summary=lambda name, columns: metrics if name == "texts/cache" else {}, say=say)


PARTS = ("cache", "document", "passages")


def _document(tokens: int, checked: int, sizes: Sizes, dtype: str) -> Iterator[Rows]:
    """Late chunking of one document: the error of its vectors, and time and memory of a pass."""
    error = in_fresh_process(vector_error, checked, sizes, dtype)
    if not error <= MOST_ERROR[dtype]:
        raise RuntimeError(f"vectors differ by {error:.1e} of their norm from those of an undivided pass")
    ms, peak, cores = in_fresh_process(measure, tokens, sizes, dtype)
    row: Row = {"length": tokens, "forward_ms": ms, "peak_memory_bytes": peak, "cores_used": cores}
    yield {"ours": {**row, "error_against_undivided": error}}


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


def measure(length: int, sizes: Sizes, dtype: str) -> tuple[float, int, float]:
    """(milliseconds of one pass; peak memory, model included; processor time over wall time: the cores used)."""
    before = peak_rss_bytes()
    model, document = our_encoder(sizes).to(getattr(torch, dtype)), random_document(length, sizes.vocabulary)
    start, spent = time.perf_counter(), sum(os.times()[:2])
    found = vectors(model, document)
    seconds = time.perf_counter() - start
    assert len(found) == len(document.tokens)
    return seconds * 1e3, peak_raised_by(before), (sum(os.times()[:2]) - spent) / seconds
