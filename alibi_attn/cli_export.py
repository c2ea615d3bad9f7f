"""`alibi export`: what was trained here leaves as a standard checkpoint of transformers."""

from pathlib import Path
from typing import Annotated, Literal

import typer

TOKENIZER = "tokenizer.json"  # beside a checkpoint's weights


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder below OUT/checkpoints.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The new folder.", show_default=False)],
    family: Annotated[Literal["mpt"], typer.Option(help="What it becomes.")] = "mpt",
) -> None:
    """Write a trained model as a checkpoint that AutoModelForCausalLM loads with equal logits, tokenizer included.

    A model of [bold]model.architecture=mpt[/] is an MPT; "modern" has a norm and a feed-forward that no family here has.

    [dim]alibi run quick --set model.architecture=mpt --set model.method=alibi --out runs/mpt[/]

    [dim]alibi export runs/mpt/checkpoints/quick/alibi-128/seed-0-… my-mpt[/]
    """
    try:
        from alibi_attn.hf.decoder import DecoderConfig
        from alibi_attn.hf.export import export_mpt
        from alibi_attn.hf.tokenizing import saved_tokenizer
        from alibi_attn.lab.checkpoint import load_checkpoint, newest
        from alibi_attn.lab.model import decoder_state
    except ModuleNotFoundError as error:
        if str(error.name).startswith("alibi_attn"):
            raise
        raise ImportError(
            f'alibi export needs {error.name}; install it with: pip install "alibi-attn[hf,lab]"'
        ) from None
    model, config = load_checkpoint(checkpoint)
    about = DecoderConfig(num_heads=config.model.num_heads, trained_length=config.train.length)
    saved = (newest(checkpoint) or checkpoint) / TOKENIZER
    if not saved.exists() and config.data.tokenizer != "bytes":
        raise ValueError(
            f"{saved} is not there, and a model of {config.data.tokenizer} tokens is nothing without them; copy the "
            "tokenizer there that lies beside the tokens it was trained on"
        )
    tokenizer = saved_tokenizer(saved.read_bytes()) if saved.exists() else None
    path = export_mpt(decoder_state(model), about, out, tokenizer=tokenizer)
    typer.echo(f"{family}  {path}")
