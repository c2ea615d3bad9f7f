"""`alibi embed`: embeds files or lines of text into a NumPy array, or the passages of files into a Parquet table.

With --ray the workers of a cluster embed them into a folder of Parquet files (`embed_on_cluster.py`).
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.markup import escape

from alibi_attn.cli.cluster import Ray
from alibi_attn.cli.console import check_writable, console, errors, interrupted, needs, progress, quiet_loading
from alibi_attn.cli.embed_on_cluster import check_cluster, embed_on_cluster
from alibi_attn.cli.text_files import read_texts

if TYPE_CHECKING:
    from alibi_attn.hf.embedding.late_chunking import Windows
    from alibi_attn.hf.embedding.resumable_output import PartialVectors
    from alibi_attn.hf.embedding.sentence_encoder import Sentences

BATCH_TOKENS = 16384
OVERLAP = 512  # of the windows that read a long text


@dataclasses.dataclass(frozen=True)
class _Job:
    """The rows of an output.

    Args:
        unit: the name of a row's unit, for messages.
        order: the rows, in the order of computation.
        identity: a hash of model, texts and settings.
        batches: given the number of finished rows, yields vectors of the next ones.
        write: as for `PartialVectors.finish`.
        about: the end of the command's message.
    """

    unit: str
    order: Sequence[int]
    identity: str
    batches: Callable[[int], Iterator[Any]]
    write: Callable[[Path, Any], None] | None
    about: str


def embed(
    model: Annotated[
        str, typer.Argument(help="A checkpoint folder, or a repository on the Hugging Face Hub.", show_default=False)
    ],
    files: Annotated[list[Path], typer.Argument(help="Text files in UTF-8.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(help="New file: .npy, one float32 row per text, or with --chunks .parquet. With --ray: a folder."),
    ],
    lines: Annotated[bool, typer.Option("--lines", help="One text per line instead of one per file.")] = False,
    chunks: Annotated[
        str | None,
        typer.Option(help="One row per passage: tokens per passage, sentences or paragraphs.", show_default=False),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per batch.")] = BATCH_TOKENS,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cut texts to this many tokens; with --chunks read longer ones in windows instead.",
            show_default="from the model, else 8192; none with --chunks",
        ),
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(min=0, help="With --chunks: tokens that neighboring windows share.", show_default=f"{OVERLAP}"),
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale vectors to length 1.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "int8", "float8"],
        typer.Option(help="Dtype of the computation; int8 and (on a GPU) float8 are for the linear layers."),
    ] = "float32",
    device: Annotated[str, typer.Option(help='A torch device: "cpu", "cuda" or "cuda:1".')] = "cpu",
    ray: Ray = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --ray: processes that hold the model.",
            show_default="one per machine; with --device cuda one per GPU",
        ),
    ] = None,
) -> None:
    """Embed texts with an ALiBi encoder: MosaicBERT, DNABERT-2, Jina v2, Jina v2 code, Jina CLIP v1's text tower, or one saved
    by this package.

    Row i is the i-th file, or with --lines the i-th line of all files. With --chunks, each row of a Parquet table is a passage
    of a file (file, start, end, text, vector), computed with the whole file in view. To resume after an interruption, run the
    same command again.

    [dim]alibi embed jinaai/jina-embeddings-v2-base-en chapter-*.txt --out chapters.npy[/]

    [dim]alibi embed MODEL sentences.txt --lines --normalize --out sentences.npy[/]

    [dim]alibi embed MODEL book-*.txt --chunks paragraphs --out passages.parquet[/]

    [dim]alibi embed MODEL book-*.txt --chunks 256 --ray auto --out passages[/]    on all machines of a Ray cluster
    """
    if overlap is not None and chunks is None:
        raise ValueError(
            "--overlap is for the windows of --chunks, but texts are embedded whole; omit it, or pass --chunks"
        )
    overlap = OVERLAP if overlap is None else overlap
    _check_platform()
    if ray is not None:
        check_cluster(out, device)
        rule = None if chunks is None else _chunk_rule(chunks, lines=lines)
        found = read_texts(files, lines=lines)
        with needs("ray"):
            from alibi_attn.hf.embedding.ray_embedding import Settings
        place = str(Path(model).absolute()) if Path(model).exists() else model
        shared = Settings(place, rule, max_length, overlap, batch_tokens, normalize, dtype, device)
        embed_on_cluster(found, shared, out, ray, workers)
        return
    if workers is not None:
        raise ValueError("--workers is for --ray; omit it, or pass --ray local")
    check_writable(out)
    _check_chunks(chunks, out, lines=lines)
    found = read_texts(files, lines=lines)
    names, texts = [one.name for one in found], [one.text for one in found]
    with needs("hf"):
        from alibi_attn.hf.embedding import embedding, sentence_encoder
        from alibi_attn.hf.embedding.late_chunking import Windows
        from alibi_attn.hf.embedding.resumable_output import PartialVectors, claimed
        from alibi_attn.nn.device import checked_device
    if chunks is not None:
        with needs("index"):
            from alibi_attn.hf.embedding import chunk_table  # noqa: F401
    if kind := sentence_encoder.quantized_kind(dtype):
        sentence_encoder.checked_place(kind, device)
    else:
        checked_device(device)
    quiet_loading()
    with claimed(out):
        longest = max_length if chunks is None else None
        sentences = sentence_encoder.load(model, max_seq_length=longest, dtype=dtype, device=device)
        settings = sentences.folder
        embedding.check_plain(settings, model)
        normalize = normalize or settings.normalize
        if chunks is None:
            job = _text_job(sentences, names, texts, device, batch_tokens=batch_tokens, normalize=normalize)
        else:
            windows = Windows(max_length, overlap)
            job = _chunk_job(
                sentences, names, texts, device, chunks, windows, batch_tokens=batch_tokens, normalize=normalize
            )
        partial, count = (
            PartialVectors.open(out, job.identity, job.order, sentences.model.config.hidden_size),
            len(job.order),
        )
        if partial.done:
            console.print(f"resuming: {count - partial.done:,} of {count:,} {job.unit} are left")
        with progress() as bar, _kept_on_error(partial):
            task = bar.add_task(job.unit, total=count, completed=partial.done)
            for vectors in job.batches(partial.done):
                partial.put(vectors)
                bar.update(task, completed=partial.done)
        path = partial.finish(job.write)
    shape = partial.vectors.shape
    console.print(f"vectors  {escape(str(path))}  {shape[0]:,} × {shape[1]:,}  ({job.about})", soft_wrap=True)


def _text_job(
    sentences: "Sentences",
    names: Sequence[str],
    texts: Sequence[str],
    device: str,
    *,
    batch_tokens: int,
    normalize: bool,
) -> _Job:
    """One row per text."""
    from alibi_attn.hf.embedding import embedding

    rows, cut = embedding.tokenize(sentences.tokenizer, texts, sentences.max_seq_length)
    _check_rows(names, [len(row) for row in rows], batch_tokens)
    embedding.move(sentences.model, device)
    encoder, pooling = sentences.model, sentences.folder.pooling
    order = embedding.longest_first(rows)

    def batches(done: int) -> Iterator[Any]:
        for indices in embedding.batches(rows, order[done:], batch_tokens):
            some = [rows[index] for index in indices]
            yield embedding.embed(encoder, some, pooling=pooling, normalize=normalize)

    if cut:
        errors.print(
            f"warning: {len(cut):,} of {len(texts):,} texts have more than {sentences.max_seq_length:,} tokens and are cut; pass "
            "--max-length, or --chunks for vectors of passages"
        )
    shortened = f", {len(cut):,} cut to {sentences.max_seq_length:,}" if cut else ""
    identity = embedding.fingerprint(encoder, rows, [pooling, normalize])
    return _Job("texts", order, identity, batches, None, f"{sum(map(len, rows)):,} tokens{shortened}")


def _chunk_job(
    sentences: "Sentences",
    names: Sequence[str],
    texts: Sequence[str],
    device: str,
    chunks: str,
    windows: "Windows",
    *,
    batch_tokens: int,
    normalize: bool,
) -> _Job:
    """One row per chunk, in the order of the files and inside them."""
    import numpy as np

    from alibi_attn.hf.embedding import chunk_table, embedding, late_chunking

    rule = _chunk_rule(chunks, lines=False)
    documents = late_chunking.prepared(sentences, texts, rule, windows, names=names)
    embedding.move(sentences.model, device)
    counts = [len(document.spans) for document in documents]
    first = [0, *np.cumsum(counts).tolist()]
    order = embedding.longest_first(documents)

    def batches(done: int) -> Iterator[Any]:
        skipped = int(np.searchsorted(np.cumsum([counts[at] for at in order]), done, "right")) if done else 0
        for _, vectors in late_chunking.computed(
            sentences.model, documents, windows, batch_tokens=batch_tokens, normalize=normalize, order=order[skipped:]
        ):
            yield np.concatenate(vectors)

    spans = [document.spans for document in documents]
    arrays = [array for document in documents for array in (document.ids, document.spans.astype(np.int32).ravel())]
    identity = embedding.fingerprint(sentences.model, arrays, ["chunks", chunks, windows, normalize])
    about = f"{len(documents):,} files, {sum(map(len, documents)):,} tokens"
    rows = [row for at in order for row in range(first[at], first[at + 1])]
    return _Job(
        "chunks", rows, identity, batches, lambda path, x: chunk_table.write(path, names, texts, spans, x), about
    )


def _check_platform() -> None:
    """Raises an error on platforms where files cannot be handled as `hf/embedding/resumable_output.py` needs."""
    if sys.platform == "win32":
        raise NotImplementedError(
            "`alibi embed` renames and removes files that are locked and mapped, which Windows does not allow; "
            "use sentence_transformer in Python, or WSL"
        )


def _check_chunks(chunks: str | None, out: Path, *, lines: bool) -> None:
    if chunks is None:
        if out.suffix == ".parquet":
            raise ValueError(f"{out} is a Parquet table, which needs --chunks; pass it, or a name that ends in .npy")
        if out.suffix not in ("", ".npy"):
            raise ValueError(
                f"vectors are written in NumPy's format; pass a name that ends in .npy instead of {out.name}"
            )
        return
    _chunk_rule(chunks, lines=lines)
    if out.suffix != ".parquet":
        raise ValueError(f"--chunks writes a Parquet table; pass a name that ends in .parquet instead of {out.name}")


def _chunk_rule(chunks: str, *, lines: bool) -> int | Literal["sentences", "paragraphs"]:
    if chunks not in ("sentences", "paragraphs") and not (chunks.isdecimal() and int(chunks) > 0):
        raise ValueError(f"--chunks is {chunks!r} but must be a number of tokens, sentences or paragraphs")
    if lines:
        raise ValueError("--chunks divides whole files; omit --lines")
    return int(chunks) if chunks.isdecimal() else cast("Literal['sentences', 'paragraphs']", chunks)


def _check_rows(names: Sequence[str], lengths: Sequence[int], batch_tokens: int) -> None:
    """Raises a ValueError if a text has no tokens or does not fit into a batch."""
    for name, length in zip(names, lengths, strict=True):
        if length == 0:
            raise ValueError(f"{name} has no tokens with this tokenizer; leave it out")
        if length > batch_tokens:
            raise ValueError(
                f"{name} has {length:,} tokens but a batch holds {batch_tokens:,}; raise --batch-tokens if there is enough "
                "memory, or cut texts with --max-length"
            )


@contextlib.contextmanager
def _kept_on_error(partial: "PartialVectors") -> Iterator[None]:
    """Saves the finished vectors if the block is interrupted or fails."""
    try:
        yield
    except KeyboardInterrupt:
        partial.leave()
        interrupted("run the same command again to resume")
    except BaseException:
        partial.leave()
        raise
