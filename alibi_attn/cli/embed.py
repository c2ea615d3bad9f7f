"""`alibi embed`: embeds files or lines of text into a NumPy array with one row per text."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from alibi_attn.cli.console import check_writable, console, errors, interrupted, needs

if TYPE_CHECKING:
    from alibi_attn.hf.resumable_output import PartialVectors

BATCH_TOKENS = 16384


def embed(
    model: Annotated[
        str, typer.Argument(help="A checkpoint folder, or a repository on the Hugging Face Hub.", show_default=False)
    ],
    files: Annotated[list[Path], typer.Argument(help="Text files in UTF-8.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New .npy file: float32, one row per text.")],
    lines: Annotated[bool, typer.Option("--lines", help="One text per line instead of one per file.")] = False,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per batch.")] = BATCH_TOKENS,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Cut texts to this many tokens.", show_default="from the model, else 8192"),
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale vectors to length 1.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Dtype of the computation.")
    ] = "float32",
    device: Annotated[str, typer.Option(help='A torch device: "cpu", "cuda" or "cuda:1".')] = "cpu",
) -> None:
    """Embed texts with an ALiBi encoder: Jina v2, MosaicBERT, DNABERT-2, or an encoder saved by this package.

    Row i is the i-th file, or with --lines the i-th line of all files. Texts are batched by length without computing padding.
    To resume after an interruption, run the same command again.

    [dim]alibi embed jinaai/jina-embeddings-v2-base-en chapter-*.txt --out chapters.npy[/]

    [dim]alibi embed MODEL sentences.txt --lines --normalize --out sentences.npy[/]
    """
    check_writable(out)
    names, texts = read_texts(files, lines=lines)
    with needs("hf"):
        import torch

        from alibi_attn.hf import embedding, sentence_encoder
        from alibi_attn.hf.resumable_output import PartialVectors, claimed
    with claimed(out):
        sentences = sentence_encoder.load(model, max_seq_length=max_length, dtype=getattr(torch, dtype))
        settings = sentences.folder
        if settings.default_prompt_name or settings.truncate_dim:
            raise ValueError(
                f"{model} needs a prompt or truncated vectors, which this command does not support; use "
                "alibi_attn.hf.sentence_transformer"
            )
        rows, cut = embedding.tokenize(sentences.tokenizer, texts, sentences.max_seq_length)
        _check_rows(names, [len(row) for row in rows], batch_tokens)
        try:
            encoder = sentences.model.to(torch.device(device))  # type: ignore[arg-type]
        except (RuntimeError, AssertionError) as error:  # what torch raises for a missing device
            reason = str(error).splitlines()[0]
            raise ValueError(f"device is {device!r} but it cannot be used here ({reason})") from None
        normalize = normalize or settings.normalize
        identity = embedding.fingerprint(encoder, rows, [settings.pooling, normalize])
        order, total = embedding.longest_first(rows), sum(map(len, rows))
        partial = PartialVectors.open(out, identity, (len(rows), encoder.config.hidden_size))
        if partial.done:
            console.print(f"resuming: {len(rows) - partial.done:,} of {len(rows):,} texts are left")
        with _progress() as bar, _kept_on_error(partial):
            task = bar.add_task("texts", total=len(rows), completed=partial.done)
            for indices in embedding.batches(rows, order[partial.done :], batch_tokens):
                batch = [rows[index] for index in indices]
                partial.put(indices, embedding.embed(encoder, batch, pooling=settings.pooling, normalize=normalize))
                bar.update(task, completed=partial.done)
        path = partial.finish()
    shape = partial.vectors.shape
    shortened = f", {len(cut):,} cut to {sentences.max_seq_length:,}" if cut else ""
    console.print(
        f"vectors  {escape(str(path))}  {shape[0]:,} × {shape[1]:,}  ({total:,} tokens{shortened})", soft_wrap=True
    )


def read_texts(files: Sequence[Path], *, lines: bool) -> tuple[list[str], list[str]]:
    """(names, texts) of the files, one per file or one per line.

    Raises:
        OSError: a file does not exist or cannot be read.
        ValueError: a file is empty or is not UTF-8 text, or, with `lines`, a line is empty.
    """
    names: list[str] = []
    texts: list[str] = []
    for path in files:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; pass text files")
        content = path.read_bytes()
        if b"\0" in content:
            raise ValueError(f"{path} is a binary file (it has zero bytes); pass text files")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte {error.start} is invalid; save it as UTF-8") from None
        if not text.strip():
            raise ValueError(f"{path} is empty; pass files with text")
        parts = text.removesuffix("\n").split("\n") if lines else [text]
        for number, line in enumerate(parts, start=1):
            if not line.strip():
                raise ValueError(
                    f"{path} has no text in line {number}; delete the line, because every line becomes a row"
                )
            names.append(f"line {number} of {path}" if lines else str(path))
            texts.append(line.removesuffix("\r") if lines else line)
    return names, texts


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


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


@contextlib.contextmanager
def _kept_on_error(partial: "PartialVectors") -> Iterator[None]:
    """Saves the finished vectors if the block is interrupted or fails."""
    try:
        yield
    except KeyboardInterrupt:
        partial.keep()
        interrupted("run the same command again to resume")
    except BaseException:
        partial.keep()
        raise
