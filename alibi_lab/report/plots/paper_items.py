"""Pictures of the paper's items: the changes of our results and the paper's on one axis, and the levels of each separately.

A change is a ratio: a perplexity divided by the same model's perplexity at its trained length, against multiples of
that length. So bytes of one text and words of another can share an axis. Levels cannot; they have separate panels with
separate scales. `paper.py` draws. The changes are ratios to a baseline of the same source:

    by length, each model    perplexity / perplexity at the trained length L, against multiples of L
    by length, one baseline  if each length has its own sinusoidal model: all lines / the shortest of these models
    speed by L               speed / speed at the shortest L that both have
    four methods             value / that of sinusoidal at the same L
    the frontier             speed and perplexity / those of sinusoidal at the longest L

Our lines have bands: of ratios per seed, or over test text if there is one seed (see `verdicts.py`).
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from alibi_lab.records import Record
from alibi_lab.report import answers
from alibi_lab.report.answers import Column, Sources, between, item_name, published, recorded, way_of
from alibi_lab.report.intervals import interval
from alibi_lab.report.plots import bias as heads
from alibi_lab.report.plots import paper as paper_figures
from alibi_lab.report.plots.drawing import Plot, Points
from alibi_lab.report.plots.paper import Line, Panel
from alibi_lab.report.published import PUBLISHED, Number, PublishedItem, method_of, trained_length
from alibi_lab.report.series import grouped
from alibi_lab.report.verdicts import paired

_MEASURES = {
    "perplexity": "perplexity",
    "train_tokens_per_second": "tokens per second in training",
    "evaluation_tokens_per_second": "tokens per second in the test",
    "memory_bytes": "memory of the training in GB",
}
_OWN = "L = L_valid"
_REFERENCE = "Sinusoidal, L = 3072"
_OTHER = {"sliding": "nonoverlapping", "nonoverlapping": "sliding"}


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
    item, columns = answers.item_of(record), tuple(answers.item_of(record).columns)
    if "slope" in columns:
        return [[*heads.pictures(8, 64, 512)]]
    if "context" in columns:
        return _window_pictures(record, item)
    if item_name(record).startswith("table"):
        return []
    labels = answers.labels_of(record)
    # A method that the paper does not have is drawn with the models of its trained length.
    more = [(label, trained_length(label)) for label in labels[len(item.series) :]]
    panels = [
        (*panel, *(label for label, at in more if at in set(map(trained_length, panel)))) for panel in item.panels
    ]
    if "memory_bytes" in columns:
        rows = (_rows(record, item, "trained", y, labels, by_identity) for y in columns)
    else:
        rows = (_rows(record, item, columns[0], columns[-1], panel, by_identity) for panel in panels)
    return [row for several in rows for row in several if row]


def _rows(
    record: Record, item: PublishedItem, x: str, y: str, labels: Sequence[str], by_identity: Mapping[str, Record]
) -> list[list[Plot]]:
    """The changes on one axis, one picture per evaluation mode, and below them the levels."""
    drawn = [(source, tuple(_lines(source, labels, x, y))) for source in _sources(record, item, x, y)]
    draw = paper_figures.frontier if x.endswith("per_second") else paper_figures.lines
    together = [
        _change(record, x, y, way, [line for _, lines in members for line in lines], by_identity)
        for way, members in grouped(drawn, lambda one: one[0].way).items()
    ]
    own = [_panel(record, source, x, y, labels, lines) for source, lines in drawn if lines]
    return [[Plot(draw(panel), panel.heading, panel.caption) for panel in row if panel] for row in (together, own)]


def _sources(record: Record, item: PublishedItem, x: str, y: str) -> list[_Source]:
    """Ours in the paper's evaluation mode and in the other mode, then the paper's in its mode and, if published, the other."""
    way = way_of(item) if y == "perplexity" and x != "hours" else ""
    ours = _Source(True, recorded(record), item, way, factor=answers.scale_factor(record))
    theirs = _Source(False, published(item), item, way)
    if not way:
        return [ours, theirs]
    other = _OTHER[way]
    same = _published_as(item, other) if x == "length" else None
    too = [_Source(False, published(same), same, other)] if same else []
    return [ours, ours._replace(way=other, prefix=f"{other}_"), theirs, *too]


def _published_as(item: PublishedItem, way: str) -> PublishedItem | None:
    """The paper's numbers of the same models in another evaluation mode, up to the item's longest length; None without any."""
    tables = {
        name.removeprefix("table-"): table
        for name, table in PUBLISHED.items()
        if name.startswith("table") and "length" in table.columns and set(table.series) & set(item.series)
        if (table.corpus, way_of(table)) == (item.corpus, way)
    }
    if not tables:
        return None
    longest = max(length or 0 for columns in item.series.values() for length in columns["length"])
    series: dict[str, Mapping[str, Sequence[float | None]]] = {}
    for label, columns in (one for table in tables.values() for one in table.series.items()):
        kept = [at for at, length in enumerate(columns["length"]) if length and length <= longest]
        series[label] = {name: [columns[name][at] for at in kept] for name in ("length", "perplexity")}
    source = f"table{'s' if len(tables) > 1 else ''} {', '.join(tables)}"
    return dataclasses.replace(item, series=series, source=source, evaluation=next(iter(tables.values())).evaluation)


def _lines(source: _Source, labels: Sequence[str], x: str, y: str) -> Iterator[Line]:
    """Yields one line per label with such numbers; if x is "trained", one line per method with a point per trained length."""
    several_lengths, several_methods = (len(set(map(of, labels))) > 1 for of in (trained_length, method_of))
    known = (label for label in labels if np.isfinite(source.column(label, f"{source.prefix}{y}")).any())
    for label, *others in grouped(known, lambda label: label.split(",", 1)[0] if x == "trained" else label).values():
        points = np.concatenate([_points(source, one, x, y) for one in (label, *others)], axis=1)
        length, name = trained_length(label), label.split(",", 1)[0]
        if x != "trained" and several_lengths and length:
            at = f"{length / source.factor:,.0f}"
            name = f"{name} {at}" if several_methods else f"L = {at}"
        yield Line(name, label, method_of(label), source.ours, *points)


def _points(source: _Source, label: str, x: str, y: str) -> Points:
    """x, y, the lowest and the highest seed, and the paper's lengths of a series: [5, points], NaN where unknown."""
    names = x, f"{source.prefix}{y}", f"{source.prefix}low", f"{source.prefix}high", "paper_length"
    points = np.stack([source.column(label, name) for name in names])
    if x == "trained":
        points[4] = trained_length(label) or math.nan
        points[0] = points[4] / source.factor
    if y == "memory_bytes":
        points[1:4] /= 1e9
    return points


# A ratio to 0, or of a huge number, is not finite and not drawn.
@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def _change(
    record: Record, x: str, y: str, way: str, lines: Sequence[Line], by_identity: Mapping[str, Record]
) -> Panel | None:
    """Our lines and the paper's for one evaluation mode, as ratios; None if one of the two is missing.

    Args:
        x: "trained" or the column of the x axis; "hours" has no change, because times have no common unit.
        y: the measure.
        by_identity: records for the bands.
    """
    if x == "hours" or not _both(lines):
        return None
    own = [line.label for line in lines if _OWN in line.label][:1]
    if x == "trained":
        bases = _bases(line for line in lines if line.method == "sinusoidal")
        drawn = [_over(line, bases[line.ours]) for line in lines if line.ours in bases and line.method != "sinusoidal"]
        texts = "L of the paper, log scale", "times that of sinusoidal at the same L"
    elif x != "length":
        bases = _bases(line for line in lines if line.label == _REFERENCE)
        drawn = [_over_point(line, bases[line.ours]) for line in lines if line.ours in bases]
        texts = "speed of training / sinusoidal's", "perplexity / sinusoidal's, both at L = 3,072"
    elif y != "perplexity" or _both(line for line in lines if line.label in own):
        # Lines with these labels are divided by their own value at the shortest length that all of them have.
        labels = own if y == "perplexity" else [line.label for line in lines]
        bases = _bases(line for line in lines if line.label in labels)
        measured = [set(line.paper_length[np.isfinite(line.y)].tolist()) for line in lines if line.label in labels]
        shortest = min(set.intersection(*measured), default=0.0)
        divided = (_over(line, line if line.label in labels else bases[line.ours], shortest) for line in lines)
        drawn = list(divided) if shortest else []
        name = "perplexity / sinusoidal's" if y == "perplexity" else "speed / speed"
        texts = f"multiples of L = {shortest:,.0f} of the paper", f"{name} at L = {shortest:,.0f}"
    else:
        drawn = [_over(line, line, length) for line in lines if (length := trained_length(line.label))]
        texts = "multiples of the trained length L", "perplexity / perplexity at L"
    drawn = [line for line in drawn if np.isfinite(line.y).any()]
    if not _both(drawn):
        return None
    bands = ""
    if x == "length" and y == "perplexity":
        drawn, bands = _with_bands(drawn, Sources(record, by_identity), way)
    scale = f", {answers.scale_of(record)}" if answers.scale_of(record) else ""
    return Panel(
        heading=f"Both on one axis{f', {way} windows' if way else ''}",
        caption=f"Solid: ours{scale}. Dashed and hollow: the paper's. {bands}".strip(),
        x_label=texts[0],
        y_label=f"{texts[1]}, log scale",
        lines=tuple(drawn),
        unit=1.0 if x == "length" else None,
        ratio=True,
    )


def _both(lines: Iterable[Line]) -> bool:
    """Whether some lines are ours and some are the paper's."""
    return {line.ours for line in lines} == {True, False}


def _bases(lines: Iterable[Line]) -> dict[bool, Line]:
    """The first line of each source."""
    return {line.ours: line for line in reversed(list(lines))}


def _over(line: Line, base: Line, length: float | None = None) -> Line:
    """The line divided by the value of another at one of the paper's lengths, by default at each of its own."""
    values = dict(zip(base.paper_length.tolist(), base.y.tolist(), strict=True))
    under = np.array([values.get(length or at, math.nan) for at in line.paper_length.tolist()])
    number = Number(base.label, int(length)) if length else None
    return dataclasses.replace(line, x=line.paper_length / (length or 1), y=line.y / under, base=number)


def _over_point(line: Line, point: Line) -> Line:
    """The line divided by another of one point, in both directions."""
    of_y = {name: getattr(line, name) / point.y for name in ("y", "low", "high")}
    return dataclasses.replace(line, x=line.x / point.x, **of_y)


def _with_bands(lines: Sequence[Line], sources: Sources, way: str) -> tuple[list[Line], str]:
    """The lines with bands for ours, and a sentence that explains the bands."""
    found, seeds, parts = list[Line](), set[int](), set[int]()
    for line in lines:
        low, high = np.full((2, len(line.y)), math.nan)
        base = [line.base] if line.ours and line.base else []
        for at in np.flatnonzero(np.isfinite(line.paper_length)) if base else ():
            pair = paired(sources, [Number(line.label, int(line.paper_length[at]))], base, way=way)
            if len(pair.logs) > 1 and np.isfinite(pair.logs).all():
                low[at], high[at] = np.exp(pair.logs.min()), np.exp(pair.logs.max())
                seeds.add(len(pair.logs))
            elif bounds := interval(pair):
                low[at], high[at] = bounds.low, bounds.high
                parts.add(len(pair.parts))
        found.append(dataclasses.replace(line, low=low, high=high))
    captions = []
    if seeds:
        captions.append(f"Bands: the lowest and the highest ratio of {between([*seeds])} seeds.")
    if parts:
        over = f"95 % over {between([*parts])} parts of the text"
        captions.append(f"Bands of single trainings: {over}." if seeds else f"Bands: {over}, one training each.")
    return found, " ".join(captions)


def _panel(record: Record, source: _Source, x: str, y: str, labels: Sequence[str], lines: tuple[Line, ...]) -> Panel:
    """The panel of the levels of one source, with its unit and scale."""
    ours, item = source.ours, source.item
    trained = {trained_length(label) for label in labels}
    (only,) = trained if len(trained) == 1 else (None,)
    unit = only / source.factor if only and x == "length" and y == "perplexity" else None
    per = answers.unit_of(record) if ours else "token"
    minutes = x == "hours" and all((line.x[np.isfinite(line.x)] < 2).all() for line in lines)
    if minutes:
        lines = tuple(dataclasses.replace(line, x=60 * line.x) for line in lines)
    x_label = {
        "length": f"{per}s read at once" + (f", L = {unit:,.0f}" if unit else ", log scale"),
        "trained": f"L, {per}s of a training example",
        "hours": f"{'minutes' if minutes else 'hours'} of training" + ("" if ours else " (GPU)"),
        "train_tokens_per_second": f"{per}s per second in training, log scale",
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
                row.append(Plot(figure, f"{label}: {who.lower()}", caption, text))
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
    column, methods = recorded(record), ("sinusoidal", "alibi")  # two colors that are easy to distinguish
    measured = [label for label in item.series if np.isfinite(column(label, "loss_nats")).any()]
    lines, whole = list[Line](), list[str]()
    for label, method in zip(measured, methods, strict=False):
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
    return Plot(paper_figures.lines(panel), panel.heading, panel.caption) if lines else None
