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
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from alibi_lab.records import LARGEST, find
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import MUTED, STYLE, Points
from alibi_lab.report.series import Series, Study, studies
from alibi_lab.report.tables.study import TASKS, WINDOWS, Shares, shares, tested

Curves = Sequence[tuple[Series, Points, Points]]  # series, x, y of every seed
Curve = Literal["nonoverlapping", "sliding", "position", "training"]

FEWEST = 32  # tokens in a mean of the loss by position


class Kind(NamedTuple):
    """A figure of a study.

    Args:
        curve, x, y: the columns that it draws.
        quantity: what y becomes: e to its power, bits per byte (nats if a token is not a byte), or as it is recorded.
    """

    curve: str
    x: str
    y: str
    quantity: Literal["perplexity", "loss", "speed", "memory", "share"]


KINDS: dict[str, Kind] = {
    **{mode: Kind("by_length", "length", f"{mode}_nats", "perplexity") for mode in WINDOWS},
    "position": Kind("by_position", "position", "loss_nats", "loss"),
    "training": Kind("training", "step", "loss_nats", "loss"),
    "seconds": Kind("validation", "seconds", "nats", "perplexity"),
    "step": Kind("validation", "step", "nats", "perplexity"),
    "speed": Kind("by_length", "length", "tokens_per_second", "speed"),
    "memory": Kind("by_length", "length", "peak_memory_bytes", "memory"),
    **{task: Kind(task, "distance" if task == "recall" else "length", "accuracy", "share") for task in TASKS},
}


def figure_of(study: Study, name: str) -> Figure | None:
    """One of KINDS: a line per series with values, named at its end; None if there are none.

    Perplexity and speed have a logarithmic axis, whose range all modes of perplexity by length share; memory is from zero. The
    recall is that at the longest length of each series. Of passkeys there is a picture per series.
    """
    if name == "passkey":
        return _passkeys(found) if (found := tested(study, name)) else None
    kind = KINDS[name]
    drawn = [curve for curve in _curves(study, kind) if curve[2].size]
    if not drawn:
        return None
    figure, axes = drawing.plain_axes(_title(study, kind))
    stretches = ["none", *sorted({series.stretch for series, _, _ in drawn} - {"none"})]
    for series, x, y in drawn:
        method = drawing.style_of(series.method, series.look)
        place = study.trained.index(series.trained) + stretches.index(series.stretch)
        dashes = drawing.DASHES[place % len(drawing.DASHES)]
        style: dict[str, Any] = {"color": method["color"], "linestyle": dashes, "label": series.short}
        style["zorder"] = 4 if series.method == "alibi" else 3
        if kind.x == "seconds" and len(y) > 1:  # the seeds do not share x
            for row in y:
                axes.plot(x[np.isfinite(row)], row[np.isfinite(row)], alpha=0.75, **style)
        else:
            marker = method["marker"] if kind.x in ("length", "distance") else None
            axes.plot(x, np.nanmean(y, axis=0), marker=marker, clip_on=False, **style)
            if len(y) > 1:
                low, high = np.nanmin(y, axis=0), np.nanmax(y, axis=0)
                axes.fill_between(x, low, high, color=method["color"], alpha=0.22, linewidth=0, zorder=2)
    if kind.quantity in ("perplexity", "speed"):
        sharing = [KINDS[mode] for mode in WINDOWS] if name in WINDOWS else [kind]
        drawing.log_axis(axes, np.concatenate([y.ravel() for one in sharing for _, _, y in _curves(study, one)]))
    elif kind.quantity == "memory":
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room above for "trained length"
    elif kind.quantity == "share":
        axes.set_ylim(0, 1.03 if kind.x == "distance" else 1.12)
    _x_axis(axes, study, kind, sorted({at for _, x, _ in drawn for at in x.tolist()}))
    drawing.name_lines(axes)
    return figure


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
        if kind.x == "distance":
            grid = shares(series, kind.curve)
            longest = max((length for length, _ in grid), default=0.0)
            points = sorted((at, share) for (length, at), share in grid.items() if length == longest)
            x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
            y = y[None]
        else:
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
        "share": f"share of {'repeated tokens that are correct' if kind.x == 'distance' else 'correct answers'}",
    }[kind.quantity]


def _x_axis(axes: Axes, study: Study, kind: Kind, places: Sequence[float]) -> None:
    if kind.x in ("seconds", "step"):
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=kind.curve == "training"))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("seconds of training" if kind.x == "seconds" else "training step")
        return
    if kind.x in ("length", "distance"):
        label = "distance in {}s, log scale" if kind.x == "distance" else "{}s the model reads at once"
        lengths = study.lengths if kind.curve == "by_length" else places
        drawing.length_ticks(axes, lengths, label.format(study.unit))
    else:
        axes.set_ylim(top=axes.get_ylim()[1] + 0.06 * np.ptp(axes.get_ylim()))  # room for "trained length"
        axes.set_xscale("log", base=2)
        ticks = [2.0**p for p in range(0, math.ceil(math.log2(places[-1])) + 1, 2) if 2**p <= places[-1]]
        drawing.ticks(axes.xaxis, ticks if ticks[-1] >= places[-1] / 2 else [*ticks, places[-1]])
        axes.set_xlabel("position in the sequence, log scale")
    for length in study.trained if kind.x != "distance" else ():
        axes.axvline(length, color=MUTED, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        text, place = "trained length" if len(study.trained) == 1 else f"{length:,}", ("data", "axes fraction")
        axes.annotate(text, (length, 1), (3, -2), place, "offset points", va="top", fontsize=8, color=MUTED)


def _passkeys(grids: Sequence[tuple[Series, Shares]]) -> Figure:
    """One picture per series: length to the right, depth down, with the share of numbers found in every cell."""
    lengths, depths = (sorted({place[axis] for _, grid in grids for place in grid}) for axis in (0, 1))
    row = 0.55 + 0.21 * len(depths)
    figure, each = drawing.grid(len(grids), 2, row, (0.075, 0.485, 0.42, 0.31 / row, 1 - 0.55 / row))
    for number, (axes, (series, grid)) in enumerate(zip(each, grids, strict=True)):
        color = drawing.style_of(series.method, series.look)["color"]
        axes.set_title(series.short, fontsize=8.5, pad=3, color=color)
        for (length, depth), share in grid.items():
            x, y = lengths.index(length), depths.index(depth)
            place = (x - 0.47, y - 0.45)
            axes.add_patch(Rectangle(place, 0.94, 0.9, facecolor=drawing.RULE, alpha=0.45, linewidth=0))
            axes.add_patch(Rectangle(place, 0.94, 0.9, facecolor=color, alpha=0.8 * share, linewidth=0))
            if len(lengths) <= 6:
                axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=drawing.INK)
        axes.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(len(depths) - 0.5, -0.5))
        thin = max(1, math.ceil(len(lengths) / 6))
        axes.set_xticks(range(0, len(lengths), thin), [_short(length) for length in lengths[::thin]], fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths] if number % 2 == 0 else [], fontsize=7)
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_visible(False)
    return figure


def _short(length: float) -> str:
    return f"{length / 1024:g}k" if length >= 1024 and length % 1024 == 0 else f"{length:,.0f}"
