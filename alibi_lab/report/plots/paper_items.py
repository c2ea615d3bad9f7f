"""Pictures of the paper's items: the changes of our results and the paper's on one axis, and the levels of each separately.

A change is a ratio: a perplexity divided by the same model's perplexity at its trained length, against multiples of
that length. So bytes of one text and words of another can share an axis. Levels cannot; they have separate panels with
separate scales. `paper_changes.py` computes the ratios, `paper.py` draws.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from alibi_lab.records import Record
from alibi_lab.report.answers import (
    Column,
    item_name,
    item_of,
    labels_of,
    published,
    recorded,
    scale_factor,
    unit_of,
    way_of,
)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Numbers:
    """The numbers of one source, ours or the paper's, for one evaluation mode ("" if nothing was evaluated)."""

    column: Column
    ours: bool
    way: str
    y: str  # the name of the column
    spread: str  # prefix of the columns of the lowest and highest seed
    source: PublishedItem
    factor: float  # the paper's lengths divided by these

    @property
    def windows(self) -> str:
        """The end of a heading: ", sliding windows"."""
        return f", {self.way} windows" if self.way else ""


def pictures(record: Record, by_identity: Mapping[str, Record]) -> list[list[Plot]]:
    """Rows of pictures; the pictures of a row are side by side. Empty for tables.

    Args:
        by_identity: records, by identity; those that the answer is computed from give the bands.
    """
    name, item = item_name(record), item_of(record)
    if name == "figure-3":
        return [[*heads.pictures(8, 64, 512)]]
    if name == "figure-10":
        return _window_pictures(record, item)
    every = [tuple(labels_of(record))]
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
    found = _numbers(record, item, x, y)
    lines = [_lines(numbers, labels, x) for numbers in found]
    draw = paper_figures.frontier if x == "speed" else paper_figures.lines
    together = []
    for way in dict.fromkeys(numbers.way for numbers in found):
        of_way = [line for numbers, own in zip(found, lines, strict=True) if numbers.way == way for line in own]
        together.append(changes.change(record, x, y, way, of_way, by_identity))
    own = [_panel(record, numbers, x, labels, drawn) for numbers, drawn in zip(found, lines, strict=True) if drawn]
    return [[_picture(panel, draw(panel)) for panel in row if panel is not None] for row in (together, own)]


def _numbers(record: Record, item: PublishedItem, x: str, y: str) -> list[_Numbers]:
    """Ours in the paper's evaluation mode and in the other mode, then the paper's in its mode and, if published, the other."""
    way = way_of(item) if y == "perplexity" and x != "hours" else ""
    ours = _Numbers(
        column=recorded(record), ours=True, way=way, y=y, spread="", source=item, factor=scale_factor(record)
    )
    theirs = dataclasses.replace(ours, column=published(item), ours=False, factor=1.0)
    if not way:
        return [ours, theirs]
    other = _OTHER[way]
    ours_too = dataclasses.replace(ours, way=other, y=f"{other}_{y}", spread=f"{other}_")
    same = _other_published(item_name(record), item)
    too = [dataclasses.replace(theirs, column=published(same), way=other, source=same)] if same else []
    return [ours, ours_too, theirs, *too]


def _other_published(name: str, item: PublishedItem) -> PublishedItem | None:
    """The paper's numbers of the same models in the other evaluation mode, up to the item's longest length."""
    tables = [PUBLISHED[table] for table in _OTHER_TABLES.get(name, ())]
    if not tables:
        return None
    series: dict[str, Mapping[str, Sequence[float | None]]] = {}
    longest = max(length or 0 for columns in item.series.values() for length in columns["length"])
    for label in item.series:
        for table in tables:
            columns = table.series.get(label)
            if columns is not None and label not in series:
                kept = [at for at, length in enumerate(columns["length"]) if length and length <= longest]
                series[label] = {key: [columns[key][at] for at in kept] for key in ("length", "perplexity")}
    source = "tables " + ", ".join(table.source.removeprefix("table ") for table in tables)
    source = source if tables[1:] else tables[0].source
    return dataclasses.replace(item, series=series, source=source, evaluation=tables[0].evaluation)


def _lines(numbers: _Numbers, labels: Sequence[str], x: str) -> tuple[Line, ...]:
    """One line per label with such numbers; if x is "trained", one line per method with a point per trained length."""
    trained = {trained_length(label) for label in labels}
    methods = {method_of(label) for label in labels}
    lines: dict[str, Line] = {}
    for label in labels:
        y = numbers.column(label, numbers.y)
        if not np.isfinite(y).any():
            continue
        length = trained_length(label)
        name = label.split(",", 1)[0]
        if x == "trained":
            places = np.full(len(y), (length or math.nan) / numbers.factor)
            lengths = numbers.factor * places
        else:
            places = numbers.column(label, {"speed": "train_tokens_per_second"}.get(x, x))
            lengths = numbers.column(label, "paper_length")
            if len(trained) > 1 and length:
                at = f"{length / numbers.factor:,.0f}"
                name = f"{name} {at}" if len(methods) > 1 else f"L = {at}"
        scale = 1e9 if numbers.y == "memory_bytes" else 1.0
        spread = [numbers.column(label, f"{numbers.spread}{end}") for end in ("low", "high")]
        line = Line(
            name=name,
            label=label,
            method=method_of(label),
            ours=numbers.ours,
            x=places,
            y=y / scale,
            low=spread[0],
            high=spread[1],
            paper_length=lengths if lengths.size == y.size else np.full(len(y), math.nan),
        )
        key = name if x == "trained" else label
        lines[key] = paper_figures.joined(lines[key], line) if key in lines else line
    return tuple(lines.values())


def _panel(record: Record, numbers: _Numbers, x: str, labels: Sequence[str], lines: tuple[Line, ...]) -> Panel:
    """The panel of the levels of one source, with its unit and scale."""
    ours, source = numbers.ours, numbers.source
    trained = {trained_length(label) for label in labels}
    (only,) = trained if len(trained) == 1 else (None,)
    y = "perplexity" if "perplexity" in numbers.y else numbers.y
    unit = only / numbers.factor if only and x == "length" and y == "perplexity" else None
    per = unit_of(record) if ours else "token"
    if x == "hours" and (time := _time_unit(lines)) == "minutes":
        lines = tuple(dataclasses.replace(line, x=60 * line.x) for line in lines)
    x_label = {
        "length": f"{per}s read at once" + (f", L = {unit:,.0f}" if unit else ", log scale"),
        "trained": f"L, {per}s of a training example",
        "hours": f"{time if x == 'hours' else ''} of training" + ("" if ours else " (GPU)"),
        "speed": f"{per}s per second in training, log scale",
    }[x]
    if y == "train_tokens_per_second" and x == "length":
        x_label = f"L, {per}s of a training example"
    return Panel(
        heading=f"{'Ours' if ours else 'The paper'}{numbers.windows if x != 'hours' else ''}",
        caption="" if ours else f"Numbers of {source.source}: {source.corpus}, {source.evaluation}.",
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
    return Plot(panel.heading, panel.caption, figure, description)


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
                row.append(Plot(f"{label}: {who.lower()}", caption, figure, text))
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
    column = recorded(record)
    whole: list[str] = []
    lines: list[Line] = []
    for label in item.series:
        token, loss, mean = (column(label, name) for name in ("token", "loss_nats", "whole_text_nats"))
        if not np.isfinite(loss).any():
            continue
        method = "sinusoidal" if not lines else "alibi"  # two colors that are easy to distinguish
        unknown: Any = dict.fromkeys(("low", "high", "paper_length"), np.full(len(token), math.nan))
        lines.append(Line(name=label, label=label, method=method, ours=True, x=token, y=loss, **unknown))
        if np.isfinite(mean).any():
            whole.append(f"{mean[0]:.3f} nats ({label.lower()})")
    if not lines:
        return None
    panel = Panel(
        heading="Its effect on the loss: ours",
        caption="The loss of a trained model at each token."
        + (f" Over the whole text: {', '.join(whole)}." if whole else ""),
        x_label="token of the text",
        y_label="nats per token, log scale",
        lines=tuple(lines),
        log_x=False,
    )
    return _picture(panel, paper_figures.lines(panel))
