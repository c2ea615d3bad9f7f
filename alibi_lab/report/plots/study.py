"""Figures of a study: perplexity by length, loss by position and during training, and the cost of the evaluation.

Nothing is smoothed or left out: with several seeds the line is their mean and the band spans the lowest to the highest. A
method has the same color and marker in every figure. `drawing.py` has the axes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from alibi_lab.records import LARGEST, find
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import MUTED, STYLE, Points
from alibi_lab.report.series import Mode, Series, Study, studies
from alibi_lab.report.tables.study import WINDOWS
from alibi_lab.report.tables.table import mean

Curves = Sequence[tuple[Series, Points, Points]]  # series, x, y of every seed
Curve = Literal["nonoverlapping", "sliding", "position", "training"]

FEWEST = 32  # tokens in a mean of the loss by position
_LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))  # by trained length


class Kind(NamedTuple):
    """A figure of a study.

    Args:
        curve, x, y: the columns that it draws.
        quantity: what y becomes: e to its power, bits per byte (nats if a token is not a byte), or as it is recorded.
        text: its description.
    """

    curve: str
    x: str
    y: str
    quantity: Literal["perplexity", "loss", "speed", "memory"]
    text: str


_COST = "by length, for every method; the table below has the numbers."
KINDS: dict[str, Kind] = {
    **{
        mode: Kind("by_length", "length", f"{mode}_nats", "perplexity", f"Perplexity by length, {words}. {{ends}}")
        for mode, words in WINDOWS.items()
    },
    "position": Kind("by_position", "position", "loss_nats", "loss", "Loss by position. {ends}"),
    "training": Kind("training", "step", "loss_nats", "loss", "Training loss of every run by step."),
    "seconds": Kind("validation", "seconds", "nats", "perplexity", "Perplexity during training, by seconds."),
    "step": Kind("validation", "step", "nats", "perplexity", "Perplexity during training, by step."),
    "speed": Kind("by_length", "length", "tokens_per_second", "speed", f"{{Unit}}s evaluated per second, {_COST}"),
    "memory": Kind("by_length", "length", "peak_memory_bytes", "memory", f"Peak memory of the evaluation, {_COST}"),
}


def figure_of(study: Study, name: str) -> Figure | None:
    """One of KINDS: a line per series with values, named at its end; None if there are none.

    Perplexity and speed have a logarithmic axis, whose range all modes of perplexity by length share; memory is from zero.
    """
    kind = KINDS[name]
    drawn = [curve for curve in _curves(study, kind) if curve[2].size]
    if not drawn:
        return None
    figure, axes = drawing.plain_axes(_title(study, kind))
    stretches = ["none", *sorted({series.stretch for series, _, _ in drawn} - {"none"})]
    for series, x, y in drawn:
        color = drawing.color_of(series.method, series.look)
        dashes = _LINES[(study.trained.index(series.trained) + stretches.index(series.stretch)) % len(_LINES)]
        style: dict[str, Any] = {"color": color, "linestyle": dashes, "label": series.short}
        style["zorder"] = 4 if series.method == "alibi" else 3
        if kind.x == "seconds" and len(y) > 1:  # the seeds do not share x
            for row in y:
                axes.plot(x[np.isfinite(row)], row[np.isfinite(row)], alpha=0.75, **style)
        else:
            marker = drawing.marker_of(series.method, series.look) if kind.x == "length" else None
            axes.plot(x, np.nanmean(y, axis=0), marker=marker, clip_on=False, **style)
            if len(y) > 1:
                low, high = np.nanmin(y, axis=0), np.nanmax(y, axis=0)
                axes.fill_between(x, low, high, color=color, alpha=0.22, linewidth=0, zorder=2)
    if kind.quantity in ("perplexity", "speed"):
        sharing = [KINDS[mode] for mode in WINDOWS] if name in WINDOWS else [kind]
        drawing.log_axis(axes, np.concatenate([y.ravel() for one in sharing for _, _, y in _curves(study, one)]))
    elif kind.quantity == "memory":
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room above for "trained length"
    _x_axis(axes, study, kind, max(x[-1] for _, x, _ in drawn))
    drawing.name_lines(axes)
    return figure


def describe(study: Study, name: str) -> str:
    """A description of one of KINDS, with where each line starts and ends, for readers who cannot see it."""
    mode: Mode = next((mode for mode in WINDOWS if mode == name), "nonoverlapping")
    ends = [
        f"{series.label}: perplexity {mean(series.perplexity(first, mode)):.3g} at {first:,} {study.unit}s, "
        f"{mean(series.perplexity(last, mode)):.3g} at {last:,}."
        for series, (first, last) in study.ended(mode)
    ]
    return KINDS[name].text.format(unit=study.unit, Unit=study.unit.capitalize(), ends=" ".join(ends))


def plot_run(folder: str | Path, curve: Curve = "nonoverlapping") -> Figure:
    """The curves of the models that `alibi run` recorded in a folder (`--out`), one per model.

    Args:
        folder: the `--out` of a run, or its folder of records.
        curve: perplexity against tested length ("nonoverlapping" or "sliding"), loss by "position", or loss in "training".

    Raises:
        ValueError: another curve, or a folder without records of it.
    """
    if curve not in get_args(Curve):
        raise ValueError(f"curve is {curve!r}; pass one of {', '.join(map(repr, get_args(Curve)))}")
    places = [place for place in (Path(folder) / "records", Path(folder)) if place.exists()]
    loaded = list(find(*places[:1]))
    found = max(studies(loaded), key=lambda study: len(study.series), default=None)
    with matplotlib.rc_context({**STYLE, "figure.facecolor": "white"}):
        figure = None if found is None else figure_of(found, curve)
    if figure is None:
        raise ValueError(
            f"{folder} has {len(loaded)} records and none with the curve {curve!r}; pass the --out of a run"
        )
    figure.set_facecolor("white")
    return figure


def _joined(x: Points, y: Points, tokens: Points) -> tuple[Points, Points]:
    """Points and the values of every seed, with neighbors joined until each is over FEWEST tokens."""
    if not y.size or tokens.shape != y.shape:
        return x, y
    counts, starts, whole = np.nan_to_num(tokens), [0], 0.0
    for place, count in enumerate(counts.min(axis=0)):
        if whole >= FEWEST:
            starts, whole = [*starts, place], 0.0
        whole += count
    if whole < FEWEST and len(starts) > 1:  # too few are left for a mean
        starts.pop()
    sums = np.add.reduceat(counts, starts, axis=1)
    means = np.add.reduceat(np.where(counts > 0, y, 0.0) * counts, starts, axis=1) / np.where(sums > 0, sums, np.nan)
    weights = counts.sum(axis=0)
    at = np.add.reduceat(x * weights, starts) / np.maximum(np.add.reduceat(weights, starts), 1.0)
    return at, means


def _curves(study: Study, kind: Kind) -> Curves:
    """The values of every series; those too large to draw are NaN."""
    factor = {"loss": 1 / math.log(2) if study.unit == "byte" else 1.0, "memory": 2.0**-20}.get(kind.quantity, 1.0)
    most = math.log(LARGEST) if kind.quantity == "perplexity" else LARGEST
    found = []
    for series in study.series:
        x, y = series.curve(kind.curve, kind.x, kind.y, most=most)
        y = np.exp(y) if kind.quantity == "perplexity" else y * factor
        if kind.x == "position":
            x, y = _joined(x, y, series.curve(kind.curve, kind.x, "tokens")[1])
        found.append((series, x, y))
    return found


def _title(study: Study, kind: Kind) -> str:
    return {
        "perplexity": f"perplexity per {study.unit}, log scale",
        "loss": "bits per byte" if study.unit == "byte" else "nats per token",
        "speed": f"{study.unit}s per second, log scale",
        "memory": "peak memory in MiB",
    }[kind.quantity]


def _x_axis(axes: Axes, study: Study, kind: Kind, last: float) -> None:
    if kind.x in ("seconds", "step"):
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=kind.curve == "training"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("seconds of training" if kind.x == "seconds" else "training step")
        return
    if kind.x == "length":
        drawing.length_ticks(axes, study.lengths, f"{study.unit}s the model reads at once")
    else:
        axes.set_ylim(top=axes.get_ylim()[1] + 0.06 * np.ptp(axes.get_ylim()))  # room for "trained length"
        axes.set_xscale("log", base=2)
        ticks = [2.0**p for p in range(0, math.ceil(math.log2(last)) + 1, 2) if 2**p <= last]
        drawing.ticks(axes.xaxis, ticks if ticks[-1] >= last / 2 else [*ticks, last])
        axes.set_xlabel("position in the sequence, log scale")
    for length in study.trained:
        axes.axvline(length, color=MUTED, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        text, place = "trained length" if len(study.trained) == 1 else f"{length:,}", ("data", "axes fraction")
        axes.annotate(text, (length, 1), (3, -2), place, "offset points", va="top", fontsize=8, color=MUTED)
