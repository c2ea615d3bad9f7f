"""`alibi heads`: the slopes of so many heads, or where the heads of a trained model look."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from alibi_attn import records
from alibi_attn.cli.console import check_writable, console, needs
from alibi_attn.report import tables
from alibi_attn.report.series import numbers


def heads(
    model: Annotated[
        Path | None, typer.Argument(help="A trained model: a checkpoint of the lab, or a folder of transformers.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text in UTF-8 that the model reads.")] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of it.", show_default="twice the trained length, or 1024", min=2)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the record; alibi report draws it.")] = None,
    num_heads: Annotated[int, typer.Option(help="Without a model: how many heads.", min=1)] = 8,
    png: Annotated[Path | None, typer.Option(help="Also draw a picture into this file; a model's may be .svg.")] = None,
    seq_len: Annotated[int, typer.Option(help="Without a model: tokens in the picture.", min=1)] = 1024,
) -> None:
    """Show the heads: slope, half-life, and the distance from which a key's factor is under 1e-6.

    A head multiplies the weight of a key by e^(−m·distance). A large slope m sees only what is near.

    [dim]alibi heads --num-heads 12 --png heads.png[/]

    With a model: for every layer and head how far it is certified to look, how far its attention is on average, how much goes to
    the first token, and how many of its weights are zero in bfloat16.

    [dim]alibi heads MODEL --text novel.txt --png heads.svg --out runs/heads[/]
    """
    if (model is None) != (text is None):
        raise typer.BadParameter(
            "a model is looked at while it reads a text: pass MODEL and --text, or neither of them"
        )
    if png is not None:
        check_writable(png)
        if model is not None and png.suffix not in (".png", ".svg"):
            raise typer.BadParameter(f"--png is {png}; the picture of a model ends in .png or .svg")
    if model is None or text is None:
        _of_a_number(num_heads, seq_len, png)
        return
    if out is not None:
        check_writable(out / "record")
    with needs("lab"), needs("hf"):
        from alibi_attn.recipes.model_heads import model_heads
        from alibi_attn.report.head_maps import picture, sentence
    record = model_heads(model, text.read_text(encoding="utf-8"), length=length)
    console.print(_by_layer(record))
    console.print(sentence(record), soft_wrap=True)
    if png is not None:
        console.print(f"picture  {escape(str(records.replace_file(png, picture(record, png.suffix))))}", soft_wrap=True)
    if out is not None:
        console.print(f"record   {escape(str(records.save(record, out)))}", soft_wrap=True)


def _of_a_number(num_heads: int, seq_len: int, png: Path | None) -> None:
    table = RichTable("head", "slope m", "half-life", "under 1e-6 from", caption="distances in tokens", box=None)
    for column in table.columns:
        column.justify = "right"
    for row in tables.head_rows(num_heads):
        table.add_row(*row)
    console.print(table)
    if png is not None:
        with needs("lab"):
            from alibi_attn.report.heads import bias_png
        console.print(
            f"picture  {escape(str(records.replace_file(png, bias_png(num_heads, seq_len))))}", soft_wrap=True
        )


def _by_layer(record: records.Record) -> RichTable:
    """A row a layer: from the least to the most of its heads."""
    names = {
        "certified": "certified",
        "mean_distance": "mean distance",
        "first_token": "first token",
        "zero_bfloat16": "zero in bf16",
    }
    table = RichTable(
        "layer", *names.values(), caption="the least and the most of its heads; distances in tokens", box=None
    )
    for column in table.columns:
        column.justify = "right"
    layers = numbers(record, "heads", "layer")
    for layer in sorted(set(layers)):
        cells = []
        for name in names:
            values = [value for at, value in zip(layers, numbers(record, "heads", name), strict=True) if at == layer]
            show = "{:,.0f}" if name in ("certified", "mean_distance") else "{:.0%}"
            cells.append(" to ".join(dict.fromkeys(show.format(bound) for bound in (min(values), max(values)))))
        table.add_row(f"{layer:.0f}", *cells)
    return table
