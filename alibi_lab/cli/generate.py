"""`alibi generate`: continue a text with a trained model."""

import codecs
from typing import Annotated

import typer

from alibi_attn.cli.console import needs
from alibi_lab.cli import checkpoints
from alibi_lab.cli.options import documented


@documented
def generate(
    checkpoint: checkpoints.Checkpoint,
    prompt: str,
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: Annotated[int | None, typer.Option(show_default="all")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    method: checkpoints.Method = None,
) -> None:
    """Continue a text with a trained model, token by token with a KV cache.

    [dim]alibi generate runs/quick/checkpoints/quick/alibi-128/seed-0-… --prompt "def main" --max-new-tokens 500[/]

    Args:
        prompt: Text to continue.
        max_new_tokens: Number of tokens to add, even beyond the trained length.
        temperature: 0 always takes the most likely token; 1 samples from the model's distribution.
        top_k: Sample only from this many most likely tokens.
        seed: Seed of the sampling.
    """
    with needs("lab"):
        from alibi_lab.lab.model import generation
        from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer
    checkpoint = checkpoints.find(checkpoint)
    model, _ = load_checkpoint(checkpoint, method=method)
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
