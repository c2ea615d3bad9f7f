"""`alibi heads`: the slopes for a number of heads, and where the heads of a trained model attend, one command per question."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from alibi_attn.cli.console import check_writable, console, needs, print_path
from alibi_attn.cli.text_files import read_texts
from alibi_attn.files import replace_file
from alibi_lab import records
from alibi_lab.cli import checkpoints
from alibi_lab.cli.options import documented
from alibi_lab.cli.report import print_table, right
from alibi_lab.report import rollouts
from alibi_lab.report.series import numbers
from alibi_lab.report.tables.table import fraction, head_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from alibi_lab.heads.loading import Loaded

MOST_HEADS, MOST_TOKENS = 4096, 2**20  # more would run for minutes
Heads = Annotated[int, typer.Option("--heads", min=1, max=MOST_HEADS, help="Number of heads.")]
Model = Annotated[
    Path, typer.Argument(help="A lab checkpoint, a run's folder (or RUN:alibi), or a transformers folder.")
]
Text: TypeAlias = Annotated[
    Path | None, typer.Argument(help="UTF-8 text for the model to read.", show_default="a checkpoint's validation text")
]
Length: TypeAlias = Annotated[int | None, typer.Option(min=2, max=MOST_TOKENS)]
Out: TypeAlias = Annotated[Path | None, typer.Option(help="Folder for the record, which alibi report can draw.")]
Picture: TypeAlias = Annotated[Path | None, typer.Option(help="Also write a picture, as .png or .svg.")]

app = typer.Typer(help="Look into the heads of ALiBi and of trained models.", no_args_is_help=True)


@app.command()
@documented
def slopes(
    num_heads: Heads = 8, length: Annotated[int, typer.Option(min=1, max=MOST_TOKENS)] = 1024, picture: Picture = None
) -> None:
    """Show slope, half-life, and the distance from which a key's factor is below 1e-6, for a number of heads.

    A head multiplies the weight of a key by the factor e^(−m·distance), so a head with a large slope m attends only to nearby
    keys.

    [dim]alibi heads slopes --heads 12 --picture heads.png[/]

    Args:
        length: Tokens that the picture spans.
    """
    _check(picture)
    columns = ("head", "slope m", "half-life", "below 1e-6 from")
    print_table(map(right, columns), head_rows(num_heads), caption="distances in tokens")
    if picture is not None:
        with needs("lab"):
            from alibi_lab.report.plots import bias
        _draw(bias.plot_alibi_bias(num_heads, length), picture)


@app.command()
@documented
def summary(
    model: Model,
    text: Text = None,
    method: checkpoints.Method = None,
    length: Length = None,
    out: Out = None,
    picture: Picture = None,
) -> None:
    """Show where the heads of a trained model attend: one row per layer; the record has every head.

    The certified reach of each head, the share of its keys that carried weight, the mean distance of its attention, the share
    that goes to the first token, and the share of its weights that are zero in bfloat16.

    [dim]alibi heads summary MODEL novel.txt --picture heads.svg --out runs/heads[/]

    Args:
        length: Tokens of the text to read; default twice the trained length, or 1024.
    """
    loaded, content = _opened(model, text, method, picture, out)
    from alibi_lab.heads.summary import summary as measure
    from alibi_lab.report.sections import heads as plots

    record = measure(loaded, content, length=length)
    _print_layers(record)
    console.print(plots.sentence(record), soft_wrap=True)
    if picture is not None:
        _draw(plots.plot_heads(record), picture)
    _save([record], out)


@app.command()
@documented
def weights(
    model: Model,
    text: Text = None,
    method: checkpoints.Method = None,
    length: Length = None,
    layer: Annotated[int, typer.Option(min=0)] = 0,
    query: Annotated[int | None, typer.Option(min=0, show_default="the last token")] = None,
    picture: Picture = None,
) -> None:
    """Show the keys that a token attends to most, for every head of a layer, as distance and weight.

    [dim]alibi heads weights MODEL novel.txt --layer 1 --picture weights.png[/]

    Args:
        length: Tokens of the text to read; default 64.
        layer: The layer, from 0.
        query: The token that attends, from 0.
    """
    loaded, content = _opened(model, text, method, picture, None)
    from alibi_lab.heads.summary import weights as measure

    matrix, slopes = measure(loaded, content, layer=layer, length=length)
    last = matrix.shape[1] - 1
    if query is not None and query > last:
        raise typer.BadParameter(
            f"--query is {query} but the last token that is read is {last}; pass a larger --length"
        )
    at = last if query is None else query
    shares, keys = matrix[:, at].topk(min(4, at + 1))
    rows = [
        (str(head), fraction(slope), *(f"{at - key:,} back: {share:.1%}" for share, key in zip(*pair, strict=True)))
        for head, (slope, *pair) in enumerate(zip(slopes.tolist(), shares.tolist(), keys.tolist(), strict=True))
    ]
    columns = ("head", "slope m", *["attends to"] * (len(rows[0]) - 2))
    print_table(map(right, columns), rows, caption=f"token {at} of layer {layer}")
    if picture is not None:
        from alibi_lab.report.sections import heads as plots

        _draw(plots.weights_figure(matrix.numpy()), picture)


@app.command()
@documented
def rollout(
    model: Annotated[Path | None, typer.Argument(help="As of summary. Without one, layers of equal attention.")] = None,
    text: Text = None,
    method: checkpoints.Method = None,
    length: Length = None,
    num_heads: Heads = 8,
    out: Out = None,
    picture: Picture = None,
) -> None:
    """Show where attention ends that is accumulated over the layers: at the first token, the first tenth, or the last tenth.

    Without a model, every layer has the same attention under each mask.

    [dim]alibi heads rollout MODEL novel.txt --out runs/heads[/]

    Args:
        length: Tokens of each stretch of the text; default the trained length, or 512.
    """
    with needs("lab"):
        from alibi_lab.heads.rollout import THEORY_LENGTH, rolled_out, stretches, theory
        from alibi_lab.report.sections import heads as plots
    if model is None:
        _check(picture, out)
        record = theory(length or THEORY_LENGTH, num_heads)
    else:
        loaded, content = _opened(model, text, method, picture, out)
        from alibi_lab.heads.loading import config_of

        tokens = stretches(loaded.encode(content), length or loaded.length or 512)
        record = rolled_out(loaded.name, config_of(loaded, content), tokens, loaded.accumulate)
    _print_depths(record)
    if picture is not None:
        _draw(plots.rollout_figure(record), picture)
    _save([record], out)


@app.command()
@documented
def reach(
    model: Model,
    text: Text = None,
    method: checkpoints.Method = None,
    length: Length = None,
    out: Out = None,
    picture: Picture = None,
) -> None:
    """Compare the certified reach of every head with the true one: the distance at which the dropped mass passes the tolerance.

    [dim]alibi heads reach MODEL novel.txt --out runs/heads[/]

    Args:
        length: Tokens of the text to read; default twice the trained length, or 1024.
    """
    loaded, content = _opened(model, text, method, picture, out)
    from alibi_lab.heads.reach import reach as measure
    from alibi_lab.report.section import Archive
    from alibi_lab.report.sections import heads as plots

    found = measure(loaded, content, length=length)
    (drawn,) = plots.find(Archive(found))
    print_table(map(right, plots.COLUMNS), plots.head_table(drawn), caption="distances in tokens")
    if picture is not None:
        _draw(plots.reach_figure(drawn), picture)
    _save(found, out)


def _opened(
    model: Path, text: Path | None, method: str | None, picture: Path | None, out: Path | None
) -> "tuple[Loaded, str]":
    """The model and the text; first checks that the results can be written."""
    _check(picture, out)
    with needs("lab"), needs("hf"):
        from alibi_attn.inspect import read_config
        from alibi_lab.heads.loading import load
    model = checkpoints.find(model)
    if text is None and (model / "config.json").is_file() and "schema" not in read_config(model):
        raise typer.BadParameter(f"{model} was not trained by alibi run, so it has no validation text; pass TEXT")
    content = read_texts([text], lines=False)[0].text if text else checkpoints.validation_text(model, method)
    return load(model, method), content


def _check(picture: Path | None, out: Path | None = None) -> None:
    if picture is not None:
        check_writable(picture)
        if picture.suffix not in (".png", ".svg"):
            raise typer.BadParameter(f"--picture is {picture} but must end in .png or .svg")
    if out is not None:
        check_writable(out / "record")


def _draw(figure: "Figure", picture: Path) -> None:
    from alibi_lab.report.plots import drawing

    print_path("picture", replace_file(picture, drawing.file_of(figure, picture.suffix, "heads")))


def _save(found: Sequence[records.Record], out: Path | None) -> None:
    for record in found if out is not None else ():
        print_path("record ", records.save(record, out))  # type: ignore[arg-type]


def _print_depths(record: records.Record) -> None:
    """Prints the shares of a rollout: one row per way and depth, averaged over the texts."""
    rows = []
    for way, by_depth in rollouts.shares(record).items():
        for depth, shares in by_depth.items():
            rows.append((way, f"{depth:.0f}", *(f"{share:.1%}" for share in shares.mean(axis=0))))
    columns = ("accumulated", "layers", *rollouts.SHARES.values())
    print_table(map(right, columns), rows, caption="means of the second half of the queries")


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
    print_table(map(right, titles), rows, caption="minimum and maximum over the heads; distances in tokens")
