"""`alibi eval-text`: the exact perplexity of one long text, in which each token sees all tokens before it."""

import math
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from alibi_attn.cli.console import check_writable, console, interrupted, needs, progress
from alibi_attn.cli.embed import read_texts


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

    Losses are written as they are computed. To resume after an interruption, run the same command again.

    [dim]alibi eval-text bigscience/bloom-560m book.txt[/]
    """
    losses_path = file.with_name(file.name + ".losses") if out is None else out
    folder = losses_path.with_name(losses_path.name + ".cache") if cache is None else cache
    check_writable(losses_path)
    if losses_path.exists() and losses_path.samefile(file):
        raise ValueError(f"--out is {losses_path}, which is the text itself; pass another file")
    if losses_path.exists() and losses_path.stat().st_size and not folder.exists():
        raise ValueError(f"{losses_path} exists and has no cache to continue from; pass another --out, or delete it")
    text = read_texts([file], lines=False)[0].text
    with needs("hf"):
        import torch

        from alibi_attn.hf import ALiBiCache, read
        from alibi_attn.hf.loading import load_decoder
        from alibi_attn.hf.tokenizer_files import encode
    loaded, tokenizer = load_decoder(model)
    tokens = torch.tensor([encode(tokenizer, text, loaded)])
    if tokens.shape[1] < 2:
        raise ValueError(f"{file} has {tokens.shape[1]} tokens but a loss needs at least 2")
    losses_path.parent.mkdir(parents=True, exist_ok=True)
    store = ALiBiCache.open(folder) if folder.exists() else ALiBiCache(folder)
    losses_path.touch()
    with open(losses_path, "r+b") as stream:
        # The losses of n cached tokens are those of tokens 1 … n; after a kill either may be ahead by one chunk.
        done = min(len(stream.read()) // 4, store.get_seq_length())
        if store.get_seq_length() > done:
            store.crop(done - store.get_seq_length())
        stream.truncate(4 * done)
        stream.seek(4 * done)

        def write(losses: torch.Tensor) -> None:
            stream.write(losses[0].float().numpy().tobytes())
            stream.flush()

        try:
            with progress() as bar:
                task = bar.add_task("tokens", total=tokens.shape[1], completed=done)
                # The last token has no successor, so it need not be read.
                read(loaded, tokens, store, losses=write, progress=lambda at, _: bar.update(task, completed=at))
        except KeyboardInterrupt:
            interrupted("run the same command again to resume")
        stream.seek(0)
        losses = torch.frombuffer(bytearray(stream.read()), dtype=torch.float32).double()
    del store
    if cache is None:
        shutil.rmtree(folder)
    mean = float(losses.mean())
    bits = float(losses.sum()) / math.log(2.0) / len(text.encode())
    console.print(f"perplexity  {math.exp(mean):.4f}  ({mean:.4f} nats per token, {bits:.4f} bits per byte)")
    console.print(f"losses      {escape(str(losses_path))}  {len(losses):,} tokens", soft_wrap=True)
