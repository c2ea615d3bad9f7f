"""Figures of the paper's items: lines by length, points by speed, windows over a text.

Each method has the same color everywhere. Ours is solid with filled markers and a band from the lowest to the highest seed; the
paper's is dashed with hollow markers. Next: `paper_items.py`, which fills the panels.
"""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import Points
from alibi_lab.report.published import Number

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
_OURS: dict[str, Any] = {"linestyle": "-", "fillstyle": "full"}
_PAPERS: dict[str, Any] = {"linestyle": (0, (4, 2)), "fillstyle": "none"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One series of a panel.

    Args:
        name, label: its name in the picture, and the paper's label.
        low, high: its lowest and highest seed, NaN if unknown.
        paper_length: the lengths of the paper that its points correspond to, NaN if there are none.
        base: the number that its values were divided by; None if they are not such ratios.
    """

    name: str
    label: str
    method: str
    ours: bool
    x: Points
    y: Points
    low: Points
    high: Points
    paper_length: Points
    base: Number | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture; `unit` is the length L that all its lines share, if they do; a picture of a `ratio` has a line at 1."""

    heading: str
    caption: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = True
    unit: float | None = None
    ratio: bool = False


def lines(panel: Panel) -> Figure:
    """The lines of a panel on a logarithmic y axis, each named at its end."""
    figure, axes = drawing.plain_axes(panel.y_label)
    axes.set_xlabel(panel.x_label)
    names: dict[str, str] = {}
    methods = {line.label: line.method for line in panel.lines}
    markers = dict(zip(methods, itertools.cycle(_MARKERS), strict=False))
    if len(set(methods.values())) == len(methods):
        markers = {label: drawing.style_of(method)["marker"] for label, method in methods.items()}
    for line in panel.lines:
        some = np.isfinite(line.y) & np.isfinite(line.x)
        if not some.any():
            continue
        x, y, low, high = (column[some] for column in (line.x, line.y, line.low, line.high))
        style = {"linewidth": 1.8, **_OURS} if line.ours else {"linewidth": 1.2, **_PAPERS}
        style["color"] = color = drawing.color_of(line.method)
        style |= {"marker": markers[line.label], "markevery": max(1, len(x) // 8)}
        axes.plot(x, y, zorder=4 if line.method == "alibi" else 3, clip_on=False, label=reading(line), **style)
        if np.isfinite(low).all():
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0, zorder=2)
        if len(x) > 1 or line.base is None or line.base.label != line.label:  # a ratio to itself needs no name
            names[reading(line)] = _end_name(line, panel)
    if not names:
        return figure
    if panel.ratio:
        axes.axhline(1, color=drawing.MUTED, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
    drawn = [(line, np.isfinite(line.y)) for line in panel.lines]
    xs = np.concatenate([line.x[some & (line.x > 0) & np.isfinite(line.x)] for line, some in drawn])
    x_low, x_high = (float(xs.min()), float(xs.max())) if xs.size else (1.0, 1.0)
    drawing.log_axis(axes, np.concatenate([of[some] for line, some in drawn for of in (line.y, line.low, line.high)]))
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xlim(x_low / 1.05, x_high * 1.05)
        _length_ticks(axes, x_low, x_high, panel)
    else:
        axes.set_xlim(0, x_high * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=all((line.x % 1 == 0).all() for line in panel.lines)))
        axes.xaxis.set_major_formatter("{x:,.4g}")
    drawing.name_lines(axes, names)
    return figure


def reading(line: Line) -> str:
    """The name of a line in its tooltips."""
    return line.name if line.ours else f"{line.name}, the paper"


def _end_name(line: Line, panel: Panel) -> str:
    """A line's name at its end. Next to our lines, the paper's are named "paper", since they have the same colors."""
    if line.ours or not any(other.ours for other in panel.lines):
        return line.name
    digits = "".join(filter(str.isdigit, line.name.rpartition(" ")[2]))
    return f"paper {digits}" if digits else "paper"


def frontier(panel: Panel) -> Figure:
    """Named points, perplexity (y) against speed (x, logarithmic); each method's points are joined."""
    figure, axes = drawing.plain_axes(panel.y_label)
    axes.set_position((0.1, 0.155, 0.86, 0.745))
    axes.set_xlabel(panel.x_label)
    points = [line for line in panel.lines if np.isfinite([line.x[0], line.y[0]]).all()]
    if not points:
        return figure
    xs = [float(line.x[0]) for line in points]
    heights = [value for line in points for value in (line.y[0], line.low[0], line.high[0]) if math.isfinite(value)]
    low, high = min(xs) / 1.25, max(xs) * 1.25
    ticks = [digit * 10.0**decade for decade in range(-3, 10) for digit in (1, 1.5, 2, 3, 5, 7)]
    axes.set(xscale="log", xlim=(low, high))
    drawing.ticks(axes.xaxis, [tick for tick in ticks if low <= tick <= high], drawing.short_number)
    drawing.log_axis(axes, np.array([min(heights) / 1.02, max(heights) * 1.02]))
    for method, ours in dict.fromkeys((line.method, line.ours) for line in points):
        same = [line for line in points if (line.method, line.ours) == (method, ours)]
        same.sort(key=lambda line: float(line.x[0]))
        style = drawing.style_of(method) | (_OURS if ours else _PAPERS)
        axes.plot([line.x[0] for line in same], [line.y[0] for line in same], linewidth=1, markersize=6, **style)
        for line in same:
            axes.plot(line.x[:1], line.y[:1], linestyle="none", label=reading(line))
            if math.isfinite(line.low[0]):
                axes.plot([line.x[0]] * 2, [line.low[0], line.high[0]], color=style["color"], linewidth=1.2)
    for at, line in enumerate(sorted(points, key=lambda line: float(line.x[0]))):
        style = {"color": drawing.color_of(line.method), "fontsize": 8, "ha": "center", "textcoords": "offset points"}
        axes.annotate(_end_name(line, panel), (line.x[0], line.y[0]), (0, (7, -14, 17, -24)[at % 4]), **style)
    return figure


def windows(token: Points, context: Points, passes: Points) -> Figure:
    """Which tokens each forward pass reads (pale) and scores (filled): one row per pass, one column per token."""
    rows, color = int(np.max(passes)), drawing.color_of("sinusoidal")
    figure, axes = drawing.plain_axes("")
    high, whole = 0.3 * rows, 0.55 + 0.3 * rows
    figure.set_size_inches(4.1, whole)
    axes.set_position((0.13, 0.4 / whole, 0.85, high / whole))
    for number in range(1, rows + 1):
        scored = token[passes == number]
        first = float(np.min(scored - context[passes == number])) + 1
        for place in np.arange(first, scored.max() + 1):
            corner, alpha = (place - 0.46, number - 0.4), 0.95 if place in scored else 0.28
            axes.add_patch(Rectangle(corner, 0.92, 0.8, facecolor=color, linewidth=0, alpha=alpha))
    axes.set(xlabel="token of the text", xlim=(0.4, float(token.max()) + 0.6), ylim=(rows + 0.5, 0.5))
    axes.set_yticks(range(1, rows + 1), [f"pass {number}" for number in range(1, rows + 1)])
    axes.set_xticks(token.tolist(), [f"{place:.0f}" for place in token])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _length_ticks(axes: Axes, low: float, high: float, panel: Panel) -> None:
    """Ticks at L, 2 L, 4 L ... if the panel has one L, else at the lengths."""
    if panel.unit:
        doublings = range(max(0, math.ceil(math.log2(low / panel.unit))), math.floor(math.log2(high / panel.unit)) + 1)
        names = {panel.unit * 2.0**power: "L" if power == 0 else f"{2**power} L" for power in doublings}
    else:
        names = {place: f"{place:,.0f}" for place in sorted({float(x) for line in panel.lines for x in line.x})}
    drawing.ticks(axes.xaxis, drawing.with_room(list(names), high / low), names.__getitem__)
