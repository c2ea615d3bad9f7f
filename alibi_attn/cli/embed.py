"""`alibi embed`: embeds files or lines of text into a NumPy array, or the passages of files into a Parquet table.

With --ray the workers of a cluster embed them into a folder of Parquet files (`hf/embedding/ray_embedding.py`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.markup import escape

from alibi_attn.cli.cluster import Ray, cluster
from alibi_attn.cli.console import check_writable, console, errors, interrupted, needs, progress, quiet_loading
from alibi_attn.cli.text_files import Text, read_texts

if TYPE_CHECKING:
    from alibi_attn.hf.embedding.job import Settings

BATCH_TOKENS = 16384
OVERLAP = 512  # of the windows that read a long text


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
    if sys.platform == "win32":  # `hf/embedding/resumable_output.py` needs other systems' files
        raise NotImplementedError(
            "`alibi embed` renames and removes files that are locked and mapped, which Windows does not allow; "
            "use sentence_transformer in Python, or WSL"
        )
    rule = None if chunks is None else _chunk_rule(chunks, lines=lines)
    if ray is None:
        if workers is not None:
            raise ValueError("--workers is for --ray; omit it, or pass --ray local")
        check_writable(out)
        _check_name(chunks, out)
    else:
        _check_cluster(out, device)
        model = str(Path(model).absolute()) if Path(model).exists() else model
    found = read_texts(files, lines=lines)
    with needs("hf" if ray is None else "ray"):
        from alibi_attn.hf.embedding.job import Settings

        if ray is not None:
            from alibi_attn.hf.embedding import ray_embedding  # noqa: F401
    settings = Settings(model, rule, max_length, overlap, batch_tokens, normalize, dtype, device)
    if ray is None:
        _embed(found, settings, out)
    else:
        _embed_on_cluster(found, settings, out, ray, workers)


def _embed(found: Sequence[Text], settings: "Settings", out: Path) -> None:
    """Embeds the texts on this machine, and prints what was written."""
    from alibi_attn.hf.embedding import embedding, job, sentence_encoder
    from alibi_attn.hf.embedding.resumable_output import PartialVectors, claimed
    from alibi_attn.nn.device import checked_device

    names, texts = [one.name for one in found], [one.text for one in found]
    if settings.chunks is not None:
        with needs("index"):
            from alibi_attn.hf.embedding import chunk_table
    if kind := sentence_encoder.quantized_kind(settings.dtype):
        sentence_encoder.checked_place(kind, settings.device)
    else:
        checked_device(settings.device)
    quiet_loading()
    with claimed(out):
        sentences = settings.loaded()
        made = job.of(sentences, settings, texts, names)
        tokens, longest = f"{sum(made.lengths):,} tokens", sentences.max_seq_length
        unit, about = "chunks", f"{len(texts):,} files, {tokens}"
        if settings.chunks is None:
            for name, length in zip(names, made.lengths, strict=True):
                if length > settings.batch_tokens:
                    raise ValueError(
                        f"{name} has {length:,} tokens but a batch holds {settings.batch_tokens:,}; raise --batch-tokens if "
                        "there is enough memory, or cut texts with --max-length"
                    )
            unit, about = "texts", f"{tokens}, {made.cut:,} cut to {longest:,}" if made.cut else tokens
        if made.cut:
            errors.print(
                f"warning: {made.cut:,} of {len(texts):,} texts have more than {longest:,} tokens and are cut; pass "
                "--max-length, or --chunks for vectors of passages"
            )
        embedding.move(sentences.model, settings.device)
        identity, count = embedding.fingerprint(sentences.model, *made.identity), len(made.order)
        partial = PartialVectors.open(out, identity, made.order, sentences.model.config.hidden_size)
        if partial.done:
            console.print(f"resuming: {count - partial.done:,} of {count:,} {unit} are left")
        with progress() as bar:
            try:
                task = bar.add_task(unit, total=count, completed=partial.done)
                for vectors in made.batches(partial.done):
                    partial.put(vectors)
                    bar.update(task, completed=partial.done)
            except BaseException as error:
                partial.leave()
                if isinstance(error, KeyboardInterrupt):
                    interrupted("run the same command again to resume")
                raise
        path = partial.finish(
            None if settings.chunks is None else lambda file, x: chunk_table.write(file, names, texts, made.spans, x)
        )
    _print_shape(path, count, sentences.model.config.hidden_size, about)


def _embed_on_cluster(
    found: Sequence[Text], settings: "Settings", out: Path, address: str, workers: int | None
) -> None:
    """Embeds the texts with the workers of a Ray cluster, and prints what was written."""
    from alibi_attn.hf.embedding import ray_embedding

    def resume(done: int, shards: int) -> None:
        if done:
            console.print(f"resuming: {shards - done:,} of {shards:,} shards are left")

    texts = ray_embedding.Texts([one.file for one in found], [one.start for one in found], [one.text for one in found])
    with cluster(address), progress() as bar:
        task = bar.add_task("shards")
        try:
            made = ray_embedding.embed(
                texts,
                settings,
                out,
                workers=workers,
                on_resume=resume,
                on_shard=lambda done, shards: bar.update(task, completed=done, total=shards),
            )
        except KeyboardInterrupt:
            interrupted("run the same command again to resume")
    cut = f", {made.cut:,} cut" if made.cut else ""
    about = f"{len(made.parts):,} files, {made.tokens:,} tokens computed{cut}"
    _print_shape(out, made.rows, made.width, about)


def _print_shape(path: Path, rows: int, width: int, about: str) -> None:
    console.print(f"vectors  {escape(str(path))}  {rows:,} × {width:,}  ({about})", soft_wrap=True)


def _check_cluster(out: Path, device: str) -> None:
    """Raises an error if a cluster cannot write there, or has no such device."""
    if out.suffix in (".npy", ".parquet"):
        raise ValueError(
            f"--ray writes a folder of Parquet files; pass a name without {out.suffix} instead of {out.name}"
        )
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r} but Ray gives each worker a device; pass --device cpu or --device cuda")
    check_writable(out / "part")


def _check_name(chunks: str | None, out: Path) -> None:
    if chunks is not None and out.suffix != ".parquet":
        raise ValueError(f"--chunks writes a Parquet table; pass a name that ends in .parquet instead of {out.name}")
    if chunks is None and out.suffix == ".parquet":
        raise ValueError(f"{out} is a Parquet table, which needs --chunks; pass it, or a name that ends in .npy")
    if chunks is None and out.suffix not in ("", ".npy"):
        raise ValueError(f"vectors are written in NumPy's format; pass a name that ends in .npy instead of {out.name}")


def _chunk_rule(chunks: str, *, lines: bool) -> int | Literal["sentences", "paragraphs"]:
    if chunks not in ("sentences", "paragraphs") and not (chunks.isdecimal() and int(chunks) > 0):
        raise ValueError(f"--chunks is {chunks!r} but must be a number of tokens, sentences or paragraphs")
    if lines:
        raise ValueError("--chunks divides whole files; omit --lines")
    return int(chunks) if chunks.isdecimal() else cast("Literal['sentences', 'paragraphs']", chunks)
