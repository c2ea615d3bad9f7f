"""`alibi generate`: continue a text with a trained model."""

import codecs
from typing import Annotated

import typer

from alibi_attn.cli.console import needs
from alibi_lab.cli import checkpoints


def generate(
    checkpoint: checkpoints.Checkpoint,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Number of tokens to add, even beyond the trained length.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the most likely token; 1 samples from the model's distribution.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Sample only from this many most likely tokens.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=2**63 - 1)] = 0,
    method: checkpoints.Method = None,
) -> None:
    """Continue a text with a trained model, token by token with a KV cache.

    [dim]alibi generate runs/quick/checkpoints/quick/alibi-128/seed-0-… --prompt "def main" --max-new-tokens 500[/]
    """
    with needs("lab"):
        from alibi_lab.lab.model import generation
        from alibi_lab.lab.training.checkpoint import load_checkpoint_tokenizer
    checkpoint = checkpoints.find(checkpoint)
    model, _ = checkpoints.load(checkpoint, method)
    tokenizer = load_checkpoint_tokenizer(checkpoint)
    ids = tokenizer.encode(prompt).tolist()
    stream = generation.generate(
        model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(prompt, end="", flush=True)
    printed = len(tokenizer.decode(ids))
    for token in stream:
        ids.append(token)
        text = tokenizer.decode(ids)
        print(decoder.decode(text[printed:]), end="", flush=True)
        printed = len(text)
    print(decoder.decode(b"", final=True))
