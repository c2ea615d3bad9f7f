"""The certified and the true reach of the heads of a trained model (records of `alibi heads reach`).

Each record is one layer; all layers of a model share a picture. If the certified reach is the length of the text, nothing is
skipped. The gap between the two marks is the work that a tighter bound could still avoid.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from alibi_lab.records import MAX_COUNT, Json, Record, identity
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import INK, MUTED, color_of
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.series import numbers
from alibi_lab.report.tables.heads import fraction

_COLUMNS = 2
COLUMNS = ("layer", "slope", "certified", "true", "ratio")
_HEIGHT = 2.0  # inches per layer


@dataclass(frozen=True)
class TrainedHeads:
    """The records of one model by layer; `length` is the length of the text, `trained` the trained length (0 if unknown)."""

    title: str
    length: int
    trained: int
    records: tuple[Record, ...]


def find(archive: Archive) -> list[TrainedHeads]:
    """One entry per model, with its layers."""
    return trained_heads(archive.records)


def draw(model: TrainedHeads, number: int, archive: Archive) -> Section:
    """Reach and attention of every head of every layer."""
    name, reach, mass = f"h{number}", reach_figure(model), mass_figure(model)
    body = html(
        "trained_heads", name=name, model=model, reach=reach, mass=mass, columns=COLUMNS, rows=head_table(model)
    )
    group, heading, about = "Heads of trained models", f"Reach of trained heads: {model.title}", count_of(model.records)
    return Section(name, group, model.title, body, heading=heading, about=about, records=model.records)


def is_drawn(record: Record) -> bool:
    """Whether the record is a certificate with the reach of every head."""
    columns = record.curves.get("heads", {})
    named = record.kind == "certificate" and {"slope", "certified", "true"} <= set(columns)
    return named and any(map(math.isfinite, numbers(record, "heads", "certified")))


def trained_heads(records: Sequence[Record]) -> list[TrainedHeads]:
    """The records grouped by model: those that differ only in the layer."""
    models: dict[str, list[Record]] = {}
    for record in {identity(r.kind, r.name, r.config): r for r in records if is_drawn(r)}.values():
        config = {key: value for key, value in record.config.items() if key != "layer"}
        models.setdefault(identity("", _title(record), config), []).append(record)
    found = []
    for members in models.values():
        members.sort(key=lambda record: (len(layer_of(record)), layer_of(record)))
        certified = (value for record in members for value in numbers(record, "heads", "certified"))
        length, trained = (_number(members[0].config, name) for name in ("length", "trained"))
        length = length or max(2, int(max(filter(math.isfinite, certified))))
        found.append(TrainedHeads(_title(members[0]), length, trained, tuple(members)))
    return found


def layer_of(record: Record) -> str:
    """The name of the layer: "layer-0"."""
    value = record.config.get("layer")
    return value if isinstance(value, str) else record.name.rpartition("/")[2]


def reach_figure(model: TrainedHeads) -> Figure:
    """For every layer, the heads from steep to flat: certified reach (filled) and true distance (open), on a log axis."""
    figure, grid = _grid(model)
    for axes, record in grid:
        slopes, certified, true = zip(*sorted(_heads(record), reverse=True), strict=True)
        places = range(len(slopes))
        axes.plot([places, places], [certified, true], color=color_of("alibi"), linewidth=1, alpha=0.5)
        axes.plot(places, certified, "o", color=color_of("alibi"), markersize=4)
        axes.plot(places, true, "o", color=INK, markersize=4, fillstyle="none")
        for length in filter(None, (model.length, model.trained)):
            axes.axhline(length, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        axes.set_yscale("log", base=2)
        axes.set_ylim(0.8, model.length * 1.7)
        _distances(axes.yaxis, model.length)
        shown = places[:: max(1, math.ceil(len(places) / 4))]
        axes.set_xticks(list(shown), [fraction(slopes[at]) for at in shown])
        axes.set_xlabel("slope of the head", fontsize=8)
    return figure


def mass_figure(model: TrainedHeads) -> Figure | None:
    """For every layer, the share of each head's attention on keys nearer than a distance; flat heads are pale."""
    if not all("mass" in record.curves for record in model.records):
        return None
    figure, grid = _grid(model)
    for axes, record in grid:
        of_head, distances, shares = (np.array(numbers(record, "mass", name)) for name in ("head", "distance", "share"))
        slopes = numbers(record, "heads", "slope")
        for rank, head in enumerate(sorted(range(len(slopes)), key=lambda head: -slopes[head])):
            points = sorted(zip(distances[of_head == head], shares[of_head == head], strict=True))
            fade = 1 - 0.65 * rank / max(len(slopes) - 1, 1)
            if points:
                name = f"head {head}, m = {fraction(slopes[head])}"
                axes.plot(*zip(*points, strict=True), color=color_of("alibi"), linewidth=1.2, alpha=fade, label=name)
        axes.set_xscale("log", base=2)
        axes.set(xlim=(1, model.length), ylim=(0, 1.03), yticks=[0, 0.5, 1])
        _distances(axes.xaxis, model.length)
        axes.set_xlabel("distance in tokens", fontsize=8)
    return figure


def head_table(model: TrainedHeads) -> list[tuple[str, str, str, str, str]]:
    """Layer, slope, certified reach, true distance and their ratio, for every head."""
    return [
        (layer_of(record), fraction(m), f"{certified:,.0f}", f"{true:,.0f}", f"{certified / true:.2f}" if true else "—")
        for record in model.records
        for m, certified, true in _heads(record)
    ]


def _heads(record: Record) -> list[tuple[float, float, float]]:
    """(slope, certified reach, true distance) of every head."""
    columns = (numbers(record, "heads", name) for name in ("slope", "certified", "true"))
    return list(zip(*columns, strict=True))


def _title(record: Record) -> str:
    """The name of the model."""
    return record.name.rpartition("/")[0] or record.name


def _number(config: Mapping[str, Json], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and 1 < value <= MAX_COUNT else 0


def _grid(model: TrainedHeads) -> tuple[Figure, list[tuple[Axes, Record]]]:
    """A figure with axes for every layer, two per row."""
    rows = math.ceil(len(model.records) / _COLUMNS)
    figure = Figure(figsize=(4.1, rows * _HEIGHT))
    grid = []
    with rc_context(drawing.STYLE):
        for place, record in enumerate(model.records):
            row, column = divmod(place, _COLUMNS)
            bottom = 1 - (row + 1) / rows + 0.44 / (rows * _HEIGHT)
            axes = figure.add_axes((0.1 + column * 0.5, bottom, 0.39, 1.25 / (rows * _HEIGHT)))
            axes.set_title(layer_of(record).replace("-", " "), fontsize=8.5, pad=3)
            axes.tick_params(labelsize=7.5)
            axes.grid(axis="y")
            grid.append((axes, record))
    return figure, grid


def _distances(axis: Axis, length: int) -> None:
    ticks = [4.0**power for power in range(math.ceil(math.log(length, 4)) + 1) if 4**power <= length]
    drawing.ticks(axis, ticks[:: max(1, math.ceil(len(ticks) / 4))])
