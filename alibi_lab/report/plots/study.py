"""Figures of a study: perplexity by length, loss by position and during training, and the cost of the evaluation.

Nothing is smoothed or left out: with several seeds the line is their mean and the band spans the lowest to the highest. A
method has the same color and marker in every figure. `drawing.py` has the axes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from alibi_lab.records import find
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import MUTED, STYLE, Points
from alibi_lab.report.series import MODES, Mode, Series, Study, studies

Curves = Sequence[tuple[Series, Points, Points]]  # series, x, y of every seed
Measure = Literal["tokens_per_second", "peak_memory_bytes"]
Curve = Literal["nonoverlapping", "sliding", "position", "training"]

FEWEST = 32  # tokens in a mean of the loss by position
_LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))  # by trained length


def perplexity_by_length(study: Study, mode: Mode) -> Figure | None:
    """Perplexity, exp(mean loss), against the tested length; all modes of a study share the range of the y axis."""
    curves = {m: [(s, *s.perplexities("by_length", "length", f"{m}_nats")) for s in study.series] for m in MODES}
    every = [curve for of_mode in curves.values() for curve in of_mode]
    return _figure(study, curves[mode], f"perplexity per {study.unit}, log scale", _length_axis, log=every)


def loss_by_position(study: Study) -> Figure | None:
    """Mean loss at each position of the longest sequence: in bits per byte if a token is a byte, else in nats.

    Neighboring positions are joined until a mean is over FEWEST tokens.
    """
    title, curves = _losses(study, "by_position", "position")
    counts = [series.curve("by_position", "position", "tokens")[1] for series in study.series]
    joined = [(one[0], *_joined(*one[1:], count)) for one, count in zip(curves, counts, strict=True)]
    return _figure(study, joined, title, _position_axis, markers=False)


def training_curves(study: Study) -> Figure | None:
    """Training loss against step, as logged: in bits per byte if a token is a byte, else in nats per token."""
    title, curves = _losses(study, "training", "step")
    axis = functools.partial(_time_axis, name="training step", integer=True)
    return _figure(study, curves, title, axis, markers=False)


def validation_curves(study: Study, x: Literal["seconds", "step"]) -> Figure | None:
    """Perplexity on held-out text during training, against seconds or steps."""
    curves = [(s, *s.perplexities("validation", x, "nats")) for s in study.series]
    axis = functools.partial(_time_axis, name="seconds of training" if x == "seconds" else "training step")
    title = f"perplexity per {study.unit}, log scale"
    return _figure(study, curves, title, axis, log=curves, markers=False, alone=x == "seconds")


def cost_by_length(study: Study, measure: Measure) -> Figure | None:
    """Speed, on a logarithmic axis, or memory, from zero, of the evaluation against length."""
    speed = measure == "tokens_per_second"
    title, unit = (f"{study.unit}s per second, log scale", 1.0) if speed else ("peak memory in MiB", 2.0**20)
    curves = [(s, x, y / unit) for s in study.series for x, y in [s.curve("by_length", "length", measure)]]
    figure = _figure(study, curves, title, _length_axis, log=curves if speed else ())
    if figure is not None and not speed:
        figure.axes[0].set_ylim(0, 1.15 * figure.axes[0].get_ylim()[1])  # room above for "trained length"
    return figure


def plot_run(folder: str | Path, curve: Curve = "nonoverlapping") -> Figure:
    """The curves of the models that `alibi run` recorded in a folder (`--out`), one per model.

    Args:
        folder: the `--out` of a run, or its folder of records.
        curve: perplexity against tested length ("nonoverlapping" or "sliding"), loss by "position", or loss in "training".

    Raises:
        ValueError: another curve, or a folder without records of it.
    """
    if curve not in _CURVES:
        raise ValueError(f"curve is {curve!r}; pass one of {', '.join(map(repr, _CURVES))}")
    places = [place for place in (Path(folder) / "records", Path(folder)) if place.exists()]
    loaded = list(find(*places[:1]))
    found = max(studies(loaded), key=lambda study: len(study.series), default=None)
    with matplotlib.rc_context({**STYLE, "figure.facecolor": "white"}):
        figure = None if found is None else _CURVES[curve](found)
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


def _losses(study: Study, curve: str, x: str) -> tuple[str, Curves]:
    """The title and the curves of a loss."""
    scale, title = (1 / math.log(2), "bits per byte") if study.unit == "byte" else (1.0, "nats per token")
    return title, [(s, at, y * scale) for s in study.series for at, y in [s.curve(curve, x, "loss_nats")]]


def _figure(
    study: Study,
    curves: Curves,
    title: str,
    x_axis: Callable[[Axes, Study, Curves], None],
    *,
    log: Curves = (),
    markers: bool = True,
    alone: bool = False,
) -> Figure | None:
    """A line per series with values, named at its end; None if there are none.

    Args:
        log: the y axis is logarithmic and has room for these curves.
        alone: draws each seed separately, because they do not share x.
    """
    drawn = [curve for curve in curves if curve[2].size]
    if not drawn:
        return None
    figure, axes = drawing.plain_axes(title)
    stretches = ["none", *sorted({series.stretch for series, _, _ in drawn} - {"none"})]
    for series, x, y in drawn:
        color, mean = drawing.color_of(series.method, series.look), np.nanmean(y, axis=0)
        dashes = _LINES[(study.trained.index(series.trained) + stretches.index(series.stretch)) % len(_LINES)]
        style: dict[str, Any] = {"color": color, "linestyle": dashes, "label": series.short}
        style["zorder"] = 4 if series.method == "alibi" else 3
        if alone and len(y) > 1:
            for row in y:
                axes.plot(x[np.isfinite(row)], row[np.isfinite(row)], alpha=0.75, **style)
        else:
            marker = drawing.marker_of(series.method, series.look) if markers else None
            axes.plot(x, mean, marker=marker, clip_on=False, **style)
            if len(y) > 1:
                low, high = np.nanmin(y, axis=0), np.nanmax(y, axis=0)
                axes.fill_between(x, low, high, color=color, alpha=0.22, linewidth=0, zorder=2)
    if log:
        drawing.log_axis(axes, np.concatenate([y.ravel() for _, _, y in log]))
    x_axis(axes, study, drawn)
    drawing.name_lines(axes)
    return figure


def _length_axis(axes: Axes, study: Study, drawn: Curves) -> None:
    drawing.length_ticks(axes, study.lengths, f"{study.unit}s the model reads at once")
    _mark_trained(axes, study)


def _position_axis(axes: Axes, study: Study, drawn: Curves) -> None:
    axes.set_ylim(top=axes.get_ylim()[1] + 0.06 * np.ptp(axes.get_ylim()))  # room for "trained length"
    axes.set_xscale("log", base=2)
    last = max(x[-1] for _, x, _ in drawn)
    ticks = [2.0**p for p in range(0, math.ceil(math.log2(last)) + 1, 2) if 2**p <= last]
    drawing.ticks(axes.xaxis, ticks if ticks[-1] >= last / 2 else [*ticks, last])
    axes.set_xlabel("position in the sequence, log scale")
    _mark_trained(axes, study)


def _time_axis(axes: Axes, study: Study, drawn: Curves, *, name: str, integer: bool = False) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=integer))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(name)


def _mark_trained(axes: Axes, study: Study) -> None:
    for length in study.trained:
        axes.axvline(length, color=MUTED, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        text, place = "trained length" if len(study.trained) == 1 else f"{length:,}", ("data", "axes fraction")
        drawing.write(axes, text, (length, 1), (3, -2), xycoords=place, va="top", fontsize=8, color=MUTED)


_CURVES: dict[Curve, Callable[[Study], Figure | None]] = {
    "nonoverlapping": lambda study: perplexity_by_length(study, "nonoverlapping"),
    "sliding": lambda study: perplexity_by_length(study, "sliding"),
    "position": loss_by_position,
    "training": training_curves,
}
