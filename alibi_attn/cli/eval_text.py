"""`alibi eval-text`: the exact perplexity of one long text, in which each token sees all tokens before it."""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer
from rich.markup import escape

from alibi_attn import files
from alibi_attn.cli.console import check_writable, console, interrupted, needs, progress, quiet_loading
from alibi_attn.cli.text_files import read_texts
from alibi_attn.units import bits_per_byte, perplexity

if TYPE_CHECKING:
    from torch import Tensor


def eval_text(
    model: Annotated[
        str, typer.Argument(help="A folder with an ALiBi model, or its repository on the Hub.", show_default=False)
    ],
    file: Annotated[Path, typer.Argument(help="A text file in UTF-8.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="File of the losses: float32, nats per token.", show_default="FILE.losses"),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder of keys and values, kept to continue the text.", show_default="deleted at the end"),
    ] = None,
) -> None:
    """Compute the exact perplexity of a whole text: every token sees all tokens before it, however long the text is.

    The model is a BLOOM, MPT, Falcon with alibi=True, Baichuan-13B, BTLM, Jais, Replit, Refact, FoX, Step-1, or a decoder saved
    by this package. Losses are written as they are computed. To resume after an interruption, run the same command again.

    [dim]alibi eval-text bigscience/bloom-560m book.txt[/]
    """
    losses_path = file.with_name(file.name + ".losses") if out is None else out
    folder = losses_path.with_name(losses_path.name + ".cache") if cache is None else cache
    check_writable(losses_path)
    if losses_path.exists() and losses_path.samefile(file):
        raise ValueError(f"--out is {losses_path}, which is the text itself; pass another file")
    _check_continues(losses_path, folder)
    text = read_texts([file], lines=False)[0].text
    with needs("hf"):
        import torch

        from alibi_attn.hf import ALiBiCache, read
        from alibi_attn.hf.caches import cache_folder
        from alibi_attn.hf.patching import reading
        from alibi_attn.hf.patching.loading import load_decoder
        from alibi_attn.hf.readers.tokenizer_files import encode
    quiet_loading()
    loaded, tokenizer = load_decoder(model)
    tokens = torch.tensor([encode(tokenizer, text, loaded)])
    if tokens.shape[1] < 2:
        found = f"{file} has {tokens.shape[1]} tokens for the tokenizer of {model}"
        raise ValueError(f"{found}, but a loss needs at least 2")
    losses_path.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(losses_path) as stream:
        _check_continues(losses_path, folder)
        kept = _Losses(stream, losses_path)
        store = ALiBiCache.open(folder) if folder.exists() else ALiBiCache(folder)
        held = store.get_seq_length()
        # The losses of n cached tokens are those of tokens 1 … n; after a kill either may be ahead by one chunk.
        done = min(kept.count, held, tokens.shape[1] - 1)
        reading.check(loaded, tokens, store, compared=max(done, held - 1))  # a longer text may split the last token
        if done:
            store.verify()
        if held > done:
            store.crop(done - held)
        kept.crop(done)
        try:
            with progress() as bar:
                task = bar.add_task("tokens", total=tokens.shape[1], completed=done)
                # The last token has no successor, so it need not be read.
                read(loaded, tokens, store, losses=kept.write, progress=lambda at, _: bar.update(task, completed=at))
        except KeyboardInterrupt:
            interrupted("run the same command again to resume")
        stream.seek(0)
        losses = torch.frombuffer(bytearray(stream.read()), dtype=torch.float32).double()
        mean = float(losses.mean())
        bits = bits_per_byte(mean, bytes_per_token=len(text.encode()) / len(losses))
        console.print(f"perplexity  {perplexity(mean):.4f}  ({mean:.4f} nats per token, {bits:.4f} bits per byte)")
        console.print(f"losses      {escape(str(losses_path))}  {len(losses):,} tokens", soft_wrap=True)
        del store
        if cache is None:
            cache_folder.remove(folder)
            kept.sums.unlink()


class _Losses:
    """A file of losses. Next to it, `sums` has a CRC-32 of the first n losses for every n, so that what a kill left is verified.

    Raises:
        ValueError: the losses differ from what was written.
    """

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.stream, self.sums = stream, _beside(path)
        self.content, sums = stream.read(), self.sums.read_bytes() if self.sums.exists() else b""
        self.count = min(len(self.content), len(sums)) // 4
        if (
            self.count
            and zlib.crc32(self.content[: 4 * self.count]) != struct.unpack_from("<I", sums, 4 * self.count - 4)[0]
        ):
            raise ValueError(
                f"{path} is damaged: it does not match {self.sums.name}; delete both, and compute them again"
            )

    def crop(self, count: int) -> None:
        """Keeps the first losses only."""
        self.crc = zlib.crc32(self.content[: 4 * count])
        self.stream.truncate(4 * count)
        self.stream.seek(4 * count)
        self.sums.touch()
        os.truncate(self.sums, 4 * count)

    def write(self, losses: "Tensor") -> None:
        """Appends losses [1, n]."""
        content, sums = losses[0].float().numpy().tobytes(), b""
        for at in range(0, len(content), 4):
            self.crc = zlib.crc32(content[at : at + 4], self.crc)
            sums += struct.pack("<I", self.crc)
        self.stream.write(content)
        self.stream.flush()
        with self.sums.open("ab") as file:
            file.write(sums)


def _check_continues(losses: Path, cache: Path) -> None:
    if losses.exists() and losses.stat().st_size and not cache.exists():
        if not _beside(losses).exists():
            raise ValueError(
                f"{losses} is complete, or was not written by this command; to compute it again, delete it or pass another --out"
            )
        raise ValueError(f"{losses} exists and has no cache to continue from; pass another --out, or delete it")


@contextlib.contextmanager
def _claimed(losses: Path) -> Iterator[BinaryIO]:
    """The file of losses, open and reserved for this process; an empty one is removed at the end."""
    busy = f"another process is writing {losses}; wait for it, or pass another --out"
    with files.locked(losses, busy), open(losses, "r+b") as stream:
        try:
            yield stream
        finally:
            if os.fstat(stream.fileno()).st_size == 0:
                losses.unlink(missing_ok=True)
                _beside(losses).unlink(missing_ok=True)


def _beside(losses: Path) -> Path:
    return losses.with_name(losses.name + ".crc")
