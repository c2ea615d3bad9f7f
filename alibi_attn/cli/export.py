"""`alibi export`: what was trained here leaves as a standard checkpoint of transformers."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from alibi_attn.cli.console import needs


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder below OUT/checkpoints.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The new folder.", show_default=False)],
    family: Annotated[Literal["mpt"], typer.Option(help="What it becomes.")] = "mpt",
) -> None:
    """Write a trained model as a checkpoint that AutoModelForCausalLM loads with equal logits, tokenizer included.

    A model of [bold]model.architecture=mpt[/] and ALiBi is an MPT; "modern" has a norm and feed-forward that no family has.

    [dim]alibi run quick --set model.architecture=mpt --out runs/mpt[/]

    [dim]alibi export runs/mpt/checkpoints/quick/alibi-128/seed-0-… my-mpt[/]
    """
    with needs("hf,lab"):
        from alibi_attn.hf.decoder import DecoderConfig
        from alibi_attn.hf.export import export_mpt
        from alibi_attn.hf.tokenizing import saved_tokenizer
        from alibi_attn.lab.checkpoint import load_checkpoint, load_checkpoint_tokenizer
        from alibi_attn.lab.model import decoder_state
    model, config = load_checkpoint(checkpoint)
    about = DecoderConfig(num_heads=config.model.num_heads, trained_length=config.train.length)
    tokenizer = saved_tokenizer(load_checkpoint_tokenizer(checkpoint).dump())
    path = export_mpt(decoder_state(model), about, out, tokenizer=tokenizer)
    typer.echo(f"{family}  {path}")
