"""`alibi embed`: files or lines of text in, one vector each out, as an array of numpy."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from alibi_attn.cli.console import check_writable, console, errors, interrupted, needs

if TYPE_CHECKING:
    from alibi_attn.hf.partial_vectors import PartialVectors

BATCH_TOKENS = 16384


def embed(
    model: Annotated[str, typer.Argument(help="A folder, or a repository of the hub.", show_default=False)],
    files: Annotated[list[Path], typer.Argument(help="Texts in UTF-8.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The new file: .npy, float32, a row a text.")],
    lines: Annotated[bool, typer.Option("--lines", help="Every line is a text, instead of every file.")] = False,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are computed at once.")] = BATCH_TOKENS,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a text that are read.", show_default="what the model says, else 8192"),
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Vectors of length 1.")] = False,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the computation.")] = "float32",
    device: Annotated[str, typer.Option(help='As in torch: "cpu", "cuda", "cuda:1".')] = "cpu",
) -> None:
    """Embed texts with an encoder with ALiBi: Jina v2, MosaicBERT, DNABERT-2, or a folder that was saved here.

    Row i is the i-th file, or the i-th line of all files. Texts are computed by length, and nothing is computed on padding.
    What is interrupted goes on with the same command.

    [dim]alibi embed jinaai/jina-embeddings-v2-base-en chapter-*.txt --out chapters.npy[/]

    [dim]alibi embed MODEL sentences.txt --lines --normalize --out sentences.npy[/]
    """
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} exists; vectors are never overwritten: delete it, or pass another --out")
    check_writable(out)
    names, texts = read_texts(files, lines=lines)
    with needs("hf"):
        import torch

        from alibi_attn.hf import embedding, sentences
        from alibi_attn.hf.partial_vectors import PartialVectors
    found = sentences.load(model, max_seq_length=max_length, dtype=getattr(torch, dtype))
    said = found.folder
    if said.default_prompt_name or said.truncate_dim:
        raise ValueError(
            f"{model} asks for a prompt or shorter vectors, which this command does not make; use "
            "alibi_attn.hf.sentence_transformer"
        )
    rows, cut = embedding.tokenize(found.tokenizer, texts, found.max_seq_length)
    _check_rows(names, [len(row) for row in rows], batch_tokens)
    try:
        encoder = found.model.to(torch.device(device))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:  # torch's words for a device that is not there
        raise ValueError(f"device is {device!r} but it cannot be used here ({str(error).splitlines()[0]})") from None
    normalize = normalize or said.normalize
    identity = embedding.fingerprint(encoder, rows, [said.pooling, normalize])
    order, total = embedding.longest_first(rows), sum(map(len, rows))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = PartialVectors.open(out, identity, (len(rows), encoder.config.hidden_size))
    if partial.done:
        console.print(f"going on with {len(rows) - partial.done:,} of {len(rows):,} texts")
    with _progress() as bar, _kept(partial):
        task = bar.add_task("texts", total=len(rows), completed=partial.done)
        for some in embedding.batches(rows, order[partial.done :], batch_tokens):
            batch = [rows[at] for at in some]
            partial.put(some, embedding.embed(encoder, batch, pooling=said.pooling, normalize=normalize))
            bar.update(task, completed=partial.done)
    shape = partial.vectors.shape
    path = partial.finish()
    shortened = f", {len(cut):,} cut to {found.max_seq_length:,}" if cut else ""
    console.print(
        f"vectors  {escape(str(path))}  {shape[0]:,} × {shape[1]:,}  ({total:,} tokens{shortened})", soft_wrap=True
    )


def read_texts(files: Sequence[Path], *, lines: bool) -> tuple[list[str], list[str]]:
    """Names and texts, one a file or one a line.

    Raises:
        OSError: a file that is not there, or cannot be read.
        ValueError: a file that is empty or no text, or an empty line among `lines`.
    """
    names: list[str] = []
    texts: list[str] = []
    for path in files:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; pass files of text")
        content = path.read_bytes()
        if b"\0" in content:
            raise ValueError(f"{path} is a binary file, since there are zero bytes in it; pass files of text")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte {error.start} is none; save it as UTF-8") from None
        if not text.strip():
            raise ValueError(f"{path} is empty; pass files with text")
        found = text.removesuffix("\n").split("\n") if lines else [text]
        for number, line in enumerate(found, start=1):
            if not line.strip():
                raise ValueError(f"{path} has no text in line {number}; delete it, so that rows are lines")
            names.append(f"line {number} of {path}" if lines else str(path))
            texts.append(line.removesuffix("\r") if lines else line)
    return names, texts


def _check_rows(names: Sequence[str], lengths: Sequence[int], batch_tokens: int) -> None:
    """Before any work: every text has tokens, and fits into a batch."""
    for name, length in zip(names, lengths, strict=True):
        if length == 0:
            raise ValueError(f"{name} has no tokens for this tokenizer; leave it out")
        if length > batch_tokens:
            raise ValueError(
                f"{name} has {length:,} tokens and a batch may have {batch_tokens:,}; raise --batch-tokens if memory is "
                "there, or cut texts with --max-length"
            )


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


@contextlib.contextmanager
def _kept(partial: "PartialVectors") -> Iterator[None]:
    """What is done is kept, however the work ends."""
    try:
        yield
    except KeyboardInterrupt:
        partial.keep()
        interrupted("the same command goes on where it stopped")
    except BaseException:
        partial.keep()
        raise
