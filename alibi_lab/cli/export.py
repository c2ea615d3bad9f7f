"""`alibi export`: writes a model trained by the lab as a transformers checkpoint."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from alibi_attn.cli.console import needs
from alibi_lab.cli import checkpoints
from alibi_lab.cli.options import documented


@documented
def export(
    checkpoint: checkpoints.Checkpoint,
    out: Annotated[Path, typer.Argument(show_default=False)],
    family: Literal["mpt"] = "mpt",
) -> None:
    """Write a trained model as a checkpoint that AutoModelForCausalLM loads with equal logits, tokenizer included.

    The model must be trained with [bold]model.architecture=mpt[/] and ALiBi. No transformers family has the norm and
    feed-forward of the default architecture, "modern".

    [dim]alibi run quick --set model.architecture=mpt --out runs/mpt[/]

    [dim]alibi export runs/mpt/checkpoints/quick/alibi-128/seed-0-… my-mpt[/]

    Args:
        out: New folder to write.
        family: Model family to export to.
    """
    with needs("hf,lab"):
        from alibi_attn.hf.readers.export import DecoderConfig, export_mpt
        from alibi_attn.inspect import saved_tokenizer
        from alibi_lab.lab.model.language_model import decoder_state
        from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer
    checkpoint = checkpoints.find(checkpoint)
    model, config = load_checkpoint(checkpoint)
    about = DecoderConfig(num_heads=config.model.num_heads, trained_length=config.train.length)
    tokenizer = saved_tokenizer(load_checkpoint_tokenizer(checkpoint).dump())
    path = export_mpt(decoder_state(model), about, out, tokenizer=tokenizer)
    typer.echo(f"{family}  {path}")
