"""`alibi bench late-chunking`: late chunking of one long document at base size: time, peak memory, and its vectors compared with
one undivided pass.

A base-size encoder with random weights. A document of `checked` tokens is compared first: the vectors of `late_chunking.py`,
whose feed-forward runs in blocks of tokens, with means over an undivided pass of the same model. Both run in fresh processes.

Cost: about five minutes on two cores in fp32, two in bf16.
Expected: memory of a few vectors per token, below 4 GiB at 100,000 tokens.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch

from alibi_attn.hf import ALiBiBertModel
from alibi_attn.hf.embedding.late_chunking import Document, Windows, computed
from alibi_lab.measure.embedding_peers import our_encoder
from alibi_lab.measure.harness import Config, Row, Rows, Say, keep
from alibi_lab.measure.peers.dense_encoder import Sizes
from alibi_lab.measure.timing import in_fresh_process, peak_raised_by, peak_rss_bytes

MOST_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}  # of the largest number of a vector
COLUMNS = ("forward_ms", "peak_memory_bytes", "cores_used")


def long_document(
    out: Path,
    *,
    tokens: int = 100_000,
    checked: int = 16_384,
    chunk: int = 256,
    layers: int = 12,
    dtype: str = "float32",
    sizes: Sizes | None = None,
    say: Say = print,
) -> list[Path]:
    """Compares, measures, saves one record and returns its path.

    Args:
        tokens: tokens of the document.
        checked: tokens of the document whose vectors are compared.
        chunk: tokens per chunk.
        layers: number of layers.
        dtype: "float32" or "bfloat16".
        sizes: sizes of the encoder; by default the base size with `layers` layers.

    Raises:
        ValueError: an unknown dtype.
        RuntimeError: vectors differ; nothing is timed.
        FileExistsError: the record already exists; nothing is measured.
    """
    if dtype not in MOST_ERROR:
        raise ValueError(f"dtype is {dtype!r} but must be {' or '.join(map(repr, MOST_ERROR))}")
    sizes = Sizes(layers=layers) if sizes is None else sizes
    shape = {name: getattr(sizes, name) for name in ("layers", "width", "heads", "inner")}
    lengths = {"tokens": tokens, "checked": checked, "chunk": chunk}
    config: Config = {**shape, **lengths, "dtype": dtype, "threads": torch.get_num_threads()}
    errors: dict[str, float | None] = {}

    def steps() -> Iterator[Mapping[str, Rows]]:
        error = in_fresh_process(vector_error, checked, chunk, sizes, dtype)
        if not error <= MOST_ERROR[dtype]:
            raise RuntimeError(f"vectors differ by {error:.1e} of the largest number from those of an undivided pass")
        errors["error_against_undivided"] = error
        measured = in_fresh_process(measure, tokens, chunk, sizes, dtype)
        row: Row = {"length": tokens, **dict(zip(COLUMNS, measured, strict=True))}
        yield {"late-chunking": {"ours": row}}

    return keep(out, {"late-chunking": config}, steps(), summary=lambda _: dict(errors), say=say)


def random_document(length: int, chunk: int, vocabulary: int) -> Document:
    """A text of random tokens, with chunks of `chunk` tokens; characters and tokens are the same."""
    ids = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(length))
    edges = np.append(np.arange(0, length, chunk), length)
    spans = np.stack([edges[:-1], edges[1:]], axis=1)
    return Document(ids.numpy().astype(np.int32), 0, length, spans, spans)


def vector_error(length: int, chunk: int, sizes: Sizes, dtype: str) -> float:
    """The largest difference of late chunks from means over an undivided pass, over the largest number of these."""
    document = random_document(length, chunk, sizes.vocabulary)
    model = _encoder(sizes, dtype).requires_grad_(False)
    ((_, (found,)),) = computed(model, [document], Windows(), batch_tokens=length, normalize=False)
    # With gradients enabled the feed-forward is never divided, and without any that are required nothing is kept.
    with torch.enable_grad():
        states = model(torch.from_numpy(document.ids).long()[None]).last_hidden_state[0].double()
    expected = torch.stack([states[start:end].mean(0) for start, end in document.tokens.tolist()]).numpy()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def measure(length: int, chunk: int, sizes: Sizes, dtype: str) -> tuple[float, int, float]:
    """(milliseconds of one pass; peak memory, model included; processor time over wall time: the cores used)."""
    before = peak_rss_bytes()
    model = _encoder(sizes, dtype)
    document = random_document(length, chunk, sizes.vocabulary)
    start, spent = time.perf_counter(), sum(os.times()[:2])
    vectors = [rows for _, (rows,) in computed(model, [document], Windows(), batch_tokens=length, normalize=False)]
    seconds = time.perf_counter() - start
    assert len(vectors[0]) == len(document.tokens)
    return seconds * 1e3, peak_raised_by(before), (sum(os.times()[:2]) - spent) / seconds


def _encoder(sizes: Sizes, dtype: str) -> ALiBiBertModel:
    return cast(ALiBiBertModel, our_encoder(sizes).to(getattr(torch, dtype)))
