"""Pictures of the paper's items: the changes of our results and the paper's on one axis, and the levels of each separately.

A change is a ratio: a perplexity divided by the same model's perplexity at its trained length, against multiples of
that length. So bytes of one text and words of another can share an axis. Levels cannot; they have separate panels with
separate scales. `paper_changes.py` computes the ratios, `paper.py` draws.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from alibi_lab.records import Record
from alibi_lab.report import answers
from alibi_lab.report.answers import Column, item_name, published, recorded, way_of
from alibi_lab.report.plots import bias as heads
from alibi_lab.report.plots import paper as paper_figures
from alibi_lab.report.plots import paper_changes as changes
from alibi_lab.report.plots.drawing import Plot, Points
from alibi_lab.report.plots.paper import Line, Panel
from alibi_lab.report.published import PUBLISHED, PublishedItem, method_of, trained_length

_BY_LENGTH = ("figure-1", "figure-4", "figure-6", "figure-9", "figure-11")
_MEASURES = {
    "perplexity": "perplexity",
    "train_tokens_per_second": "tokens per second in training",
    "evaluation_tokens_per_second": "tokens per second in the test",
    "memory_bytes": "memory of the training in GB",
}
_OTHER = {"sliding": "nonoverlapping", "nonoverlapping": "sliding"}
_OTHER_TABLES = {  # where the paper has the same models with the other evaluation mode
    "figure-1": ("table-13", "table-14", "table-15"),
    "figure-4": ("table-15",),
    "figure-11": ("table-5", "table-2", "table-3", "table-4"),
}


class _Source(NamedTuple):
    """Our numbers or the paper's, for one evaluation mode ("" if nothing was evaluated)."""

    ours: bool
    column: Column
    item: PublishedItem
    way: str
    prefix: str = ""  # of the columns
    factor: float = 1.0  # the paper's lengths divided by these


def pictures(record: Record, by_identity: Mapping[str, Record]) -> list[list[Plot]]:
    """Rows of pictures; the pictures of a row are side by side. Empty for tables.

    Args:
        by_identity: records, by identity; those that the answer is computed from give the bands.
    """
    name, item = item_name(record), answers.item_of(record)
    if name == "figure-3":
        return [[*heads.pictures(8, 64, 512)]]
    if name == "figure-10":
        return _window_pictures(record, item)
    every = [tuple(answers.labels_of(record))]
    more = every[0][len(item.series) :]
    # A method that the paper does not have is drawn with the models of its trained length.
    panels_of = [
        (*panel, *(label for label in more if trained_length(label) in {trained_length(one) for one in panel}))
        for panel in item.panels
    ]
    axes: dict[str, tuple[str, Iterable[str], Iterable[Sequence[str]]]] = {  # x, measures, labels of each panel
        "figure-2": ("trained", item.columns, every),
        "figure-5": ("hours", ["perplexity"], panels_of),
        "figure-7": ("length", ["train_tokens_per_second"], every),
        "figure-8": ("speed", ["perplexity"], every),
        **dict.fromkeys(_BY_LENGTH, ("length", ["perplexity"], panels_of)),
    }
    x, measures, panels = axes.get(name, ("", (), ()))
    rows = (_rows(record, item, x, y, labels, by_identity) for y in measures for labels in panels)
    return [row for several in rows for row in several if row]


def _rows(
    record: Record, item: PublishedItem, x: str, y: str, labels: Sequence[str], by_identity: Mapping[str, Record]
) -> list[list[Plot]]:
    """The changes on one axis, one picture per evaluation mode, and below them the levels."""
    labels = [label for label in labels if label not in item.cited]
    drawn = [(source, tuple(_lines(source, labels, x, y))) for source in _sources(record, item, x, y)]
    draw = paper_figures.frontier if x == "speed" else paper_figures.lines
    together = []
    for way in dict.fromkeys(source.way for source, _ in drawn):
        of_way = [line for source, lines in drawn if source.way == way for line in lines]
        together.append(changes.change(record, x, y, way, of_way, by_identity))
    own = [_panel(record, source, x, y, labels, lines) for source, lines in drawn if lines]
    return [[_picture(panel, draw(panel)) for panel in row if panel is not None] for row in (together, own)]


def _sources(record: Record, item: PublishedItem, x: str, y: str) -> list[_Source]:
    """Ours in the paper's evaluation mode and in the other mode, then the paper's in its mode and, if published, the other."""
    way = way_of(item) if y == "perplexity" and x != "hours" else ""
    ours = _Source(True, recorded(record), item, way, factor=answers.scale_factor(record))
    theirs = _Source(False, published(item), item, way)
    if not way:
        return [ours, theirs]
    other, same = _OTHER[way], _other_published(item_name(record), item)
    too = [_Source(False, published(same), same, other)] if same else []
    return [ours, ours._replace(way=other, prefix=f"{other}_"), theirs, *too]


def _other_published(name: str, item: PublishedItem) -> PublishedItem | None:
    """The paper's numbers of the same models in the other evaluation mode, up to the item's longest length."""
    tables = [PUBLISHED[table] for table in _OTHER_TABLES.get(name, ())]
    if not tables:
        return None
    series: dict[str, Mapping[str, Sequence[float | None]]] = {}
    longest = max(length or 0 for columns in item.series.values() for length in columns["length"])
    for label in item.series:
        columns = next((table.series[label] for table in tables if label in table.series), None)
        if columns is not None:
            kept = [at for at, length in enumerate(columns["length"]) if length and length <= longest]
            series[label] = {key: [columns[key][at] for at in kept] for key in ("length", "perplexity")}
    numbers = ", ".join(table.source.removeprefix("table ") for table in tables)
    source = f"tables {numbers}" if tables[1:] else tables[0].source
    return dataclasses.replace(item, series=series, source=source, evaluation=tables[0].evaluation)


def _lines(source: _Source, labels: Sequence[str], x: str, y: str) -> Iterator[Line]:
    """Yields one line per label with such numbers; if x is "trained", one line per method with a point per trained length."""
    several_lengths, several_methods = (len(set(map(of, labels))) > 1 for of in (trained_length, method_of))
    together: dict[str, list[str]] = {}  # the labels of one line
    for label in labels:
        if np.isfinite(source.column(label, f"{source.prefix}{y}")).any():
            together.setdefault(label.split(",", 1)[0] if x == "trained" else label, []).append(label)
    for label, *others in together.values():
        points = np.concatenate([_points(source, one, x, y) for one in (label, *others)], axis=1)
        length, name = trained_length(label), label.split(",", 1)[0]
        if x != "trained" and several_lengths and length:
            at = f"{length / source.factor:,.0f}"
            name = f"{name} {at}" if several_methods else f"L = {at}"
        yield Line(name, label, method_of(label), source.ours, *points)


def _points(source: _Source, label: str, x: str, y: str) -> Points:
    """x, y, the lowest and the highest seed, and the paper's lengths of a series: [5, points], NaN where unknown."""
    of_x = {"speed": "train_tokens_per_second"}.get(x, x)
    names = of_x, f"{source.prefix}{y}", f"{source.prefix}low", f"{source.prefix}high", "paper_length"
    points = np.stack([source.column(label, name) for name in names])
    if x == "trained":
        points[4] = trained_length(label) or math.nan
        points[0] = points[4] / source.factor
    if y == "memory_bytes":
        points[1:4] /= 1e9
    return points


def _panel(record: Record, source: _Source, x: str, y: str, labels: Sequence[str], lines: tuple[Line, ...]) -> Panel:
    """The panel of the levels of one source, with its unit and scale."""
    ours, item = source.ours, source.item
    trained = {trained_length(label) for label in labels}
    (only,) = trained if len(trained) == 1 else (None,)
    unit = only / source.factor if only and x == "length" and y == "perplexity" else None
    per = answers.unit_of(record) if ours else "token"
    time = _time_unit(lines) if x == "hours" else ""
    if time == "minutes":
        lines = tuple(dataclasses.replace(line, x=60 * line.x) for line in lines)
    x_label = {
        "length": f"{per}s read at once" + (f", L = {unit:,.0f}" if unit else ", log scale"),
        "trained": f"L, {per}s of a training example",
        "hours": f"{time} of training" + ("" if ours else " (GPU)"),
        "speed": f"{per}s per second in training, log scale",
    }["trained" if (x, y) == ("length", "train_tokens_per_second") else x]
    return Panel(
        heading=f"{'Ours' if ours else 'The paper'}{f', {source.way} windows' if source.way else ''}",
        caption="" if ours else f"Numbers of {item.source}: {item.corpus}, {item.evaluation}.",
        x_label=x_label,
        y_label=f"{_MEASURES[y]}{f' per {per}' if y == 'perplexity' else ''}, log scale",
        lines=lines,
        log_x=x != "hours",
        unit=unit,
    )


def _time_unit(lines: Sequence[Line]) -> str:
    longest = max((value for line in lines for value in line.x.tolist() if math.isfinite(value)), default=0.0)
    return "minutes" if longest < 2 else "hours"


def _picture(panel: Panel, figure: Figure) -> Plot:
    ends = []
    for line in panel.lines:
        some = np.isfinite(line.y)
        if some.any():
            ends.append(f"{line.name} from {line.y[some][0]:,.4g} to {line.y[some][-1]:,.4g}")
    description = f"{panel.heading}: {panel.y_label.removesuffix(', log scale')}. {'; '.join(ends)}."
    return Plot(figure, description, panel.heading, panel.caption)


def _window_pictures(record: Record, item: PublishedItem) -> list[list[Plot]]:
    rows = []
    for label in item.series:
        row = []
        for who, column in (("Ours", recorded(record)), ("The paper", published(item))):
            token, context, passes = (column(label, name) for name in ("token", "context", "pass"))
            if _are_windows(token, context, passes):
                caption = "Filled: scored in this pass. Pale: read again, for context."
                text = f"{label} over {len(token)} tokens takes {passes.max():.0f} forward passes."
                figure = paper_figures.windows(token, context, passes)
                row.append(Plot(figure, text, f"{label}: {who.lower()}", caption))
        rows.append(row)
    measured = _window_losses(record, item)
    return [*rows, [measured]] if measured else rows


def _are_windows(token: Points, context: Points, passes: Points) -> bool:
    """Whether every pass scores a token and reads only tokens of the text."""
    whole = np.concatenate([token, context, passes])
    if not token.size or not np.isfinite(whole).all() or whole.min() < 1 or (whole % 1).any():
        return False
    numbered = passes.max() <= token.size and set(passes) == set(range(1, int(passes.max()) + 1))
    return bool((context <= token).all() and numbered)


def _window_losses(record: Record, item: PublishedItem) -> Plot | None:
    """The loss of a trained model on the tokens of the drawing, if the record has it."""
    column, lines, whole = recorded(record), list[Line](), list[str]()
    measured = [label for label in item.series if np.isfinite(column(label, "loss_nats")).any()]
    for label, method in zip(
        measured, ("sinusoidal", "alibi"), strict=False
    ):  # two colors that are easy to distinguish
        token, loss, mean = (column(label, name) for name in ("token", "loss_nats", "whole_text_nats"))
        lines.append(Line(label, label, method, True, token, loss, *np.full((3, len(token)), math.nan)))
        if np.isfinite(mean).any():
            whole.append(f"{mean[0]:.3f} nats ({label.lower()})")
    panel = Panel(
        heading="Its effect on the loss: ours",
        caption="The loss of a trained model at each token."
        + (f" Over the whole text: {', '.join(whole)}." if whole else ""),
        x_label="token of the text",
        y_label="nats per token, log scale",
        lines=tuple(lines),
        log_x=False,
    )
    return _picture(panel, paper_figures.lines(panel)) if lines else None
