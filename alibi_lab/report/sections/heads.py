"""The heads of ALiBi, and of trained models.

The biases of ALiBi are drawn once for each number of heads in the records.

The certified and the true reach of trained heads (records of `alibi heads reach`): each record is one layer; all layers of a
model share a picture. If the certified reach is the length of the text, nothing is skipped. The gap between the two marks is the
work that a tighter bound could still avoid.

Their maps (records of kind "heads"): one row per layer, one column per head. The certified reach, the share of its keys that
carried mass (the measured reach), the mean distance of the attention, the attention to the first token, and the shares of weights
that are zero in bfloat16 and in float16. Full color means the length of the text, or 100 %. `heads/summary.py` has the
definitions.

Attention accumulated over the layers (records of `alibi heads rollout`): does the first token win with depth?
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from alibi_attn import alibi_slopes
from alibi_lab.records import MAX_COUNT, Json, Record, flat, identity
from alibi_lab.report import rollouts
from alibi_lab.report.plots import bias, drawing
from alibi_lab.report.plots.drawing import INK, MUTED, Points, color_of
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.series import Array, grouped, numbers
from alibi_lab.report.tables.table import fraction, head_rows

COLUMNS = ("layer", "slope", "certified", "true", "ratio")
_TITLES = {
    "certified": "certified reach in tokens, log scale; full color: {:,}",
    "carried": "share of its keys that carried mass; full color: 100 %",
    "mean_distance": "mean distance of the attention, log scale; full color: {:,}",
    "first_token": "attention to the first token; full color: 100 %",
    "zero_bfloat16": "weights that are zero in bfloat16; full color: 100 %",
    "zero_float16": "weights that are zero in float16; full color: 100 %",
}
_NUMBERS = ("layer", "head", "slope", "certified", "mean_distance", "carried", "first_token",
            "zero_float32", "zero_bfloat16", "zero_float16")  # fmt: skip
_MAPS_WIDTH = 8.4  # inches; two maps side by side
_MOST_NUMBERS = 10  # with more heads per row, the numbers do not fit into the cells
_MOST_HEADS = 1024  # the biases of models with more heads are not drawn


@dataclass(frozen=True)
class TrainedHeads:
    """The records of one model by layer; `length` is the length of the text, `trained` the trained length (0 if unknown)."""

    title: str
    length: int
    trained: int
    records: tuple[Record, ...]


def find_slopes(archive: Archive) -> list[tuple[int, int]]:
    """(number of heads, longest trained or tested length), one per number of heads."""
    longest: dict[int, int] = {}
    for study in archive.studies:
        records = [record for series in study.series if series.method == "alibi" for record in series.records]
        for count in [flat(record.config).get("model.num_heads") for record in records]:
            if isinstance(count, int) and 1 <= count <= _MOST_HEADS:
                longest[count] = max([longest.get(count, 1), *study.lengths, *study.trained])
    return sorted(longest.items())


def draw_slopes(heads: tuple[int, int], number: int, archive: Archive) -> Section:
    """The bias and the factor of every head, and the slopes in a table."""
    count, length = heads
    biases = [f"{slope * length:.3g}" for slope in alibi_slopes(count).tolist()]
    rows = [(*row, nats) for row, nats in zip(head_rows(count), biases, strict=True)]
    several = f": {count}" if len(find_slopes(archive)) > 1 else ""
    body = html(
        "alibi_heads", name=f"heads{count}", plots=bias.pictures(count, length, length), rows=rows, length=length
    )
    return Section(f"heads{count}", "", "", body, heading=f"The heads of ALiBi{several}")


def find(archive: Archive) -> list[TrainedHeads]:
    """The records grouped by model: those that differ only in the layer."""

    def model(record: Record) -> str:
        return identity("", _title(record), {key: value for key, value in record.config.items() if key != "layer"})

    models = grouped(filter(is_drawn, archive.records), model)
    found = []
    for members in models.values():
        members.sort(key=lambda record: (len(layer_of(record)), layer_of(record)))
        certified = (value for record in members for value in numbers(record, "heads", "certified"))
        length, trained = (_number(members[0].config, name) for name in ("length", "trained"))
        length = length or max(2, int(max(filter(math.isfinite, certified))))
        found.append(TrainedHeads(_title(members[0]), length, trained, tuple(members)))
    return found


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


@rc_context(drawing.STYLE)
def _grid(model: TrainedHeads) -> tuple[Figure, list[tuple[Axes, Record]]]:
    """A figure with axes for every layer, two per row."""
    figure, each = drawing.grid(len(model.records), 2, 2.0, (0.1, 0.5, 0.39, 0.22, 0.625))
    found = list(zip(each, model.records, strict=True))
    for axes, record in found:
        axes.set_title(layer_of(record).replace("-", " "), fontsize=8.5, pad=3)
        axes.tick_params(labelsize=7.5)
        axes.grid(axis="y")
    return figure, found


def _distances(axis: Axis, length: int) -> None:
    ticks = [4.0**power for power in range(math.ceil(math.log(length, 4)) + 1) if 4**power <= length]
    drawing.ticks(axis, ticks[:: max(1, math.ceil(len(ticks) / 4))])


def find_maps(archive: Archive) -> list[Record]:
    """The records of kind "heads" with complete layers."""
    return [record for record in archive.records if has_maps(record)]


def draw_map(record: Record, number: int, archive: Archive) -> Section:
    """The numbers of every head; `alibi heads summary --picture` draws them."""
    title = record.name.partition("/")[2] or record.name
    rows = list(zip(*(numbers(record, "heads", name) for name in _NUMBERS), strict=True))
    body = html("head_maps", sentence=sentence(record), rows=rows, title=title, record=record)
    group, heading = "Heads of trained models", f"Where the heads attend: {title}"
    return Section(f"m{number}", group, title, body, heading=heading, records=[record])


def has_maps(record: Record) -> bool:
    """Whether the record has the heads of complete layers of equal size."""
    return _shape(record) is not None


@rc_context(drawing.STYLE)
def plot_heads(record: Record) -> Figure:
    """Maps of a model's heads by layer: certified reach, mean distance, share of the first token, weights that are zero in bf16.

    Args:
        record: the result of `alibi_lab.heads.summary.summary(load(folder), text)`.

    Raises:
        ValueError: a record of another kind.
    """
    if (shape := _shape(record)) is None:
        raise ValueError(
            f"the record is of kind {record.kind!r} and has no heads; pass the result of alibi_lab.heads.summary.summary"
        )
    row, length = 0.62 + max(1.0, 0.22 * shape[0]), _number(record.config, "length") or 1
    figure, each = drawing.grid(len(_TITLES), 2, row, (0.055, 0.5, 0.43, 0.3 / row, 1 - 0.62 / row), inches=_MAPS_WIDTH)
    for axes, column in zip(each, _TITLES, strict=True):
        _draw_map(axes, column, np.array(numbers(record, "heads", column)).reshape(shape), length)
    return figure


def sentence(record: Record) -> str:
    """How many heads have collapsed onto the first token, and how many are blind in each dtype."""
    counts = {name: value for name, value in record.metrics.items() if value is not None}
    parts = [f"{counts.get('heads', 0):,.0f} heads on {_number(record.config, 'length') or 1:,} tokens"]
    collapsed, blind = (record.config.get(f"{name}_from") for name in ("collapsed", "blind"))
    if "collapsed" in counts and isinstance(collapsed, float):
        parts.append(f"{counts['collapsed']:,.0f} give {collapsed:.0%} or more of their attention to the first token")
    dtypes = [
        f"{value:,.0f} in {name.removeprefix('blind_')}" for name, value in counts.items() if name.startswith("blind_")
    ]
    if dtypes and isinstance(blind, float):
        parts.append(f"blind, with {blind:.0%} or more of their weights zero once rounded: {', '.join(dtypes)}")
    return "; ".join(parts) + "."


def _draw_map(axes: Axes, column: str, values: Points, length: int) -> None:
    in_tokens = column in ("certified", "mean_distance")
    shares = np.log1p(np.clip(values, 0, None)) / math.log1p(length) if in_tokens else values
    layers, heads = values.shape
    picture = drawing.tinted(np.nan_to_num(shares))
    axes.imshow(picture, aspect="auto", extent=(-0.5, heads - 0.5, layers - 0.5, -0.5))
    axes.set_title(_TITLES[column].format(length), fontsize=8.5, pad=4)
    axes.set_yticks(range(0, layers, max(1, math.ceil(layers / 12))))
    axes.set_xticks(range(0, heads, max(1, math.ceil(heads / 16))))
    axes.tick_params(length=0, pad=2, labelsize=7.5)
    axes.set_xlabel("head", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    if heads <= _MOST_NUMBERS:
        for (layer, head), value in np.ndenumerate(values):
            text = f"{value:,.0f}" if in_tokens else f"{value:.0%}"
            axes.text(head, layer, text, ha="center", va="center", fontsize=7, color=INK)


def _shape(record: Record) -> tuple[int, int] | None:
    """The numbers of layers and of heads; None if there is not one row for every head of every layer, in this order."""
    places = np.array([numbers(record, "heads", name) for name in ("layer", "head")])
    count = places.shape[1]
    if record.kind != "heads" or not count or not ((places >= 0) & (places < count)).all():
        return None
    layers, heads = (int(last) + 1 for last in places.max(axis=1))
    whole = layers * heads == count and (places == np.indices((layers, heads)).reshape(2, -1)).all()
    return (layers, heads) if whole else None


@rc_context(drawing.STYLE)
def weights_figure(matrix: Array) -> Figure:
    """The weights [H, n, n] of the heads of a layer, one square each, darker for more."""
    heads = len(matrix)
    columns = min(4, heads)
    rows = -(-heads // columns)
    figure = Figure(figsize=(1.7 * columns, 1.9 * rows), layout="constrained", facecolor="white")
    for head, axes in enumerate(np.ravel(figure.subplots(rows, columns, squeeze=False))):
        axes.set_axis_off()
        if head < heads:
            axes.imshow(matrix[head] ** 0.5, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"head {head}", fontsize=8)
    return figure


def find_rollouts(archive: Archive) -> list[list[Record]]:
    """All records of rollouts, as one entry."""
    records = [record for record in archive.records if rollouts.is_drawn(record)]
    return [records] if records else []


def draw_rollouts(records: Sequence[Record], number: int, archive: Archive) -> Section:
    """The shares at the last layer of trained models; `alibi heads rollout` draws them by layer."""
    rows, first = [], {}
    for name, members in rollouts.models(records).items():
        label, layers = rollouts.label_of(name, members[0]), max(rollouts.shares(members[0])[rollouts.PLAIN])
        shares = [(way, share) for way in (rollouts.PLAIN, rollouts.RESIDUAL) for share in rollouts.SHARES]
        ends = [np.mean([rollouts.by_depth(record, *one)[layers] for record in members]) for one in shares]
        rows.append((label, f"{layers:.0f}", *map("{:.1%}".format, ends)))
        first[label] = f"{label} {ends[0]:.0%}"
    names = rollouts.SHARES.values()
    body = html("rollout", columns=("model", "layers", *names, *(f"{name}, residual" for name in names)), rows=rows)
    found = f"Share of the first token in the attention accumulated over all layers: {', '.join(first.values())}."
    group, title = "Heads of trained models", "Attention through the layers"
    heading, about = "Attention accumulated over the layers", count_of(records)
    finding = found if first else ""
    return Section("rollout", group, title, body, heading, about=about, records=records, finding=finding)


def rollout_figure(record: Record) -> Figure:
    """The share of the first token by depth: of a model, or for each mask of their setting, where dashes tell slopes apart."""
    figure, axes = drawing.plain_axes("share of the first token")
    figure.set_facecolor("white")
    axes.set_ylim(0, 1.03)
    theory, dashes = record.name == rollouts.THEORY, itertools.cycle(drawing.DASHES)
    depths: Sequence[float] = ()
    for way in rollouts.shares(record) if theory else (rollouts.PLAIN,):
        if "random" in way:
            continue
        if not theory:
            label = rollouts.label_of(record.name, record)
            style = drawing.style_of(rollouts.method_of(record))
        else:
            method = {"causal mask": "none", "rotary": "rotary"}.get(way, "alibi" if way.startswith("ALiBi") else "")
            kind = next(dashes) if method == "alibi" else "-" if method else ":"
            label, style = way, {"color": drawing.color_of(method) if method else drawing.MUTED, "linestyle": kind}
        depths, shares = zip(*rollouts.by_depth(record, way, "first_token").items(), strict=True)
        axes.plot(depths, shares, label=label, **style)
    if theory:
        drawing.length_ticks(axes, [2**power for power in range(0, int(np.log2(depths[-1])) + 1, 2)], "layers")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("layer")
    drawing.name_lines(axes)
    return figure
