"""`alibi heads`: the slopes for a number of heads, or where the heads of a trained model attend."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column
from rich.table import Table as RichTable

from alibi_attn.cli.console import check_writable, console, needs, print_path
from alibi_attn.cli.text_files import read_texts
from alibi_attn.files import replace_file
from alibi_lab import records
from alibi_lab.cli import checkpoints
from alibi_lab.cli.options import documented
from alibi_lab.report import rollouts
from alibi_lab.report.series import numbers
from alibi_lab.report.tables.heads import head_rows

MOST_HEADS, MOST_TOKENS = 4096, 2**20  # more would run for minutes
DEFAULT_LENGTH = "twice the trained length, or 1024; with --rollout the trained length, or 512"


@documented
def heads(
    model: Annotated[Path | None, typer.Argument()] = None,
    text: Annotated[Path | None, typer.Option(show_default="a checkpoint's validation text")] = None,
    method: checkpoints.Method = None,
    length: Annotated[int | None, typer.Option(min=1, max=MOST_TOKENS, show_default=DEFAULT_LENGTH)] = None,
    rollout: bool = False,
    out: Path | None = None,
    num_heads: Annotated[int, typer.Option("--heads", min=1, max=MOST_HEADS)] = 8,
    picture: Path | None = None,
) -> None:
    """Show the slopes of ALiBi heads, or where the heads of a trained model attend.

    Without a model: slope, half-life, and the distance from which a key's factor is below 1e-6. A head multiplies the
    weight of a key by the factor e^(−m·distance), so a head with a large slope m attends only to nearby keys.

    [dim]alibi heads --heads 12 --picture heads.png[/]

    With a model: the certified reach of each head, the share of its keys that carried weight, the mean distance of its
    attention, the share that goes to the first token, and the share of its weights that are zero in bfloat16. The table has
    one row per layer; the record has every head.

    [dim]alibi heads MODEL --text novel.txt --picture heads.svg --out runs/heads[/]

    With --rollout: the shares of the first token, of the first tenth and of the last tenth of a text in the attention that has
    been accumulated over the layers. Without a model, every layer has the same attention.

    [dim]alibi heads MODEL --rollout --text novel.txt --out runs/heads[/]

    Args:
        model: A trained model: a lab checkpoint, a run's folder (or RUN:alibi), or a transformers folder.
        text: UTF-8 text file for the model to read.
        length: With a model: tokens of the text to read. Without one: tokens that the picture spans.
        rollout: Attention accumulated over the layers: of a model, or with equal scores under each mask.
        out: With a model: folder for the record, which alibi report can draw.
        num_heads: Without a model: number of heads.
        picture: Also write a picture, as .png or .svg.
    """
    for option, value in (("--text", text), ("--method", method), ("--out", out)):
        if model is None and value is not None and not (rollout and option == "--out"):
            raise typer.BadParameter(f"{option} is for a trained model; pass MODEL too")
    if picture is not None:
        check_writable(picture)
        if picture.suffix not in (".png", ".svg"):
            raise typer.BadParameter(f"--picture is {picture} but must end in .png or .svg")
    if model is None and not rollout:
        _print_slopes(num_heads, length or 1024, picture)
        return
    if length == 1:
        raise typer.BadParameter("--length is 1 but a model needs at least 2 tokens")
    if out is not None:
        check_writable(out / "record")
    record = _measured(model, text, method, length, rollout, num_heads)
    with needs("lab"):
        from alibi_lab.report.plots import drawing, head_maps, inline
        from alibi_lab.report.plots import rollouts as plots
    if rollout:
        _print_depths(record)
    else:
        _print_layers(record)
        console.print(head_maps.sentence(record), soft_wrap=True)
    if picture is not None:
        figure = plots.rollout_figure(record) if rollout else inline.plot_heads(record)
        print_path("picture", replace_file(picture, drawing.file_of(figure, picture.suffix, "heads")))
    if out is not None:
        print_path("record ", records.save(record, out))


def _measured(
    model: Path | None, text: Path | None, method: str | None, length: int | None, rollout: bool, num_heads: int
) -> records.Record:
    with needs("lab"), needs("hf"):
        from alibi_attn.inspect import read_config
        from alibi_lab.measure.model_heads import model_heads, model_rollout
        from alibi_lab.measure.rollout import THEORY_LENGTH, theory
    if model is None:
        return theory(length or THEORY_LENGTH, num_heads)
    model = checkpoints.find(model)
    if text is None and (model / "config.json").is_file() and "schema" not in read_config(model):
        raise typer.BadParameter(f"{model} was not trained by alibi run, so it has no validation text; pass --text")
    content = read_texts([text], lines=False)[0].text if text else checkpoints.validation_text(model, method)
    return (model_rollout if rollout else model_heads)(model, content, length=length, method=method)


def _print_depths(record: records.Record) -> None:
    """Prints the shares of a rollout: one row per way and depth, averaged over the texts."""
    rows = []
    for way in rollouts.ways(record):
        shares = [rollouts.by_depth(record, way, share) for share in rollouts.SHARES]
        for depth, *cells in zip(rollouts.depths(record, way), *shares, strict=True):
            rows.append((way, f"{depth:.0f}", *(f"{cell:.1%}" for cell in cells)))
    columns = ("accumulated", "layers", *rollouts.SHARES.values())
    _print_table(columns, rows, "means of the second half of the queries")


def _print_slopes(num_heads: int, length: int, picture: Path | None) -> None:
    _print_table(("head", "slope m", "half-life", "below 1e-6 from"), head_rows(num_heads), "distances in tokens")
    if picture is not None:
        with needs("lab"):
            from alibi_lab.report.plots import bias, drawing
        figure = bias.plot_alibi_bias(num_heads, length)
        print_path("picture", replace_file(picture, drawing.file_of(figure, picture.suffix, "bias")))


def _print_layers(record: records.Record) -> None:
    """Prints a model's heads: one row per layer, with the range over its heads."""
    names = ("certified", "carried", "mean_distance", "first_token", "zero_bfloat16")
    titles = ("layer", "certified", "of it carried", "mean distance", "first token", "zero in bf16")
    layers, rows = numbers(record, "heads", "layer"), []
    for layer in sorted(set(layers)):
        cells = [f"{layer:.0f}"]
        for name in names:
            values = [value for at, value in zip(layers, numbers(record, "heads", name), strict=True) if at == layer]
            show = "{:,.0f}" if name in ("certified", "mean_distance") else "{:.0%}"
            cells.append(" to ".join(dict.fromkeys(show.format(bound) for bound in (min(values), max(values)))))
        rows.append(cells)
    _print_table(titles, rows, "minimum and maximum over the heads; distances in tokens")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    table = RichTable(*(Column(name, justify="right") for name in columns), caption=caption, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
