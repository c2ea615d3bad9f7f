"""Figures: a study in, a matplotlib figure out, and the figure as SVG that takes its colors from the page around it.

Nothing is smoothed and nothing is left out: with several seeds the line is their mean and the band goes from the lowest to
the highest. A method keeps its color and its marker in every figure. Colors are those of a light page; `svg` replaces
each by a CSS variable (`--ink`, `--alibi`, ...), so that the same picture is drawn in light, in dark and in print.
"""

import io
import math
import re
from collections.abc import Sequence
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.typing import RcKeyType
from numpy.typing import NDArray

from alibi_attn.records import LARGEST
from alibi_attn.report.methods import METHODS
from alibi_attn.report.series import MODES, Mode, Series, Study

Measure = Literal["tokens_per_second", "peak_memory_bytes"]
Points = NDArray[np.float64]

INK, MUTED, RULE = "#1d2430", "#667080", "#d5dae1"
COLORS = {name: look.light for name, look in METHODS.items()}
MARKERS = {name: look.marker for name, look in METHODS.items()}
STYLE: dict[RcKeyType, str | float | bool] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
}
_LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))  # by trained length
_SIZE = (4.1, 3.1)  # inches: as wide as a phone, so that the text keeps its size there
_TEXT_GAP = 0.068  # of the height of the axes, between two labels at the end of lines


def perplexity_by_length(study: Study, mode: Mode) -> Figure | None:
    """Perplexity, exp(mean loss), against the length it was tested at; all modes of a study share their y axis."""
    curves = {m: [(s, *s.perplexities("by_length", "length", f"{m}_nats")) for s in study.series] for m in MODES}
    drawn = [(s, x, y) for s, x, y in curves[mode] if y.size]
    every = [y.ravel() for panel in curves.values() for _, _, y in panel]
    if not drawn:
        return None
    figure, axes = _axes(f"perplexity per {study.unit}, log scale")
    _lines(axes, study, drawn)
    _log_y(axes, np.concatenate(every))
    _length_axis(axes, study, f"{study.unit}s the model reads at once")
    _end_labels(axes, drawn)
    return figure


def loss_by_position(study: Study) -> Figure | None:
    """Mean loss of the tokens at each position of the longest sequence: bits per byte where a token is a byte, else nats."""
    scale = 1 / math.log(2) if study.unit == "byte" else 1.0
    drawn = [
        (s, x, y * scale) for s in study.series for x, y in [s.curve("by_position", "position", "loss_nats")] if y.size
    ]
    if not drawn:
        return None
    figure, axes = _axes("bits per byte" if study.unit == "byte" else "nats per token")
    _lines(axes, study, drawn, markers=False)
    axes.set_ylim(top=axes.get_ylim()[1] + 0.06 * np.ptp(axes.get_ylim()))  # place for "trained length"
    axes.set_xscale("log", base=2)
    last = max(x[-1] for _, x, _ in drawn)
    ticks = [2.0**p for p in range(0, math.ceil(math.log2(last)) + 1, 2) if 2**p <= last]
    _ticks(axes, ticks if ticks[-1] >= last / 2 else [*ticks, last])
    axes.set_xlabel("position in the sequence, log scale")
    _mark_trained(axes, study)
    _end_labels(axes, drawn)
    return figure


def training_curves(study: Study) -> Figure | None:
    """Training loss against step, as logged: bits per byte where a token is a byte, else nats per token."""
    scale = 1 / math.log(2) if study.unit == "byte" else 1.0
    drawn = [(s, x, y * scale) for s in study.series for x, y in [s.curve("training", "step", "loss_nats")] if y.size]
    if not drawn:
        return None
    figure, axes = _axes("bits per byte" if study.unit == "byte" else "nats per token")
    _lines(axes, study, drawn, markers=False)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("training step")
    _end_labels(axes, drawn)
    return figure


def validation_curves(study: Study, x: Literal["seconds", "step"]) -> Figure | None:
    """Perplexity on text that is not trained on, through the training, against its seconds or its steps."""
    drawn = [(s, at, y) for s in study.series for at, y in [s.perplexities("validation", x, "nats")] if y.size]
    if not drawn:
        return None
    figure, axes = _axes(f"perplexity per {study.unit}, log scale")
    _lines(axes, study, drawn, markers=False, alone=x == "seconds")
    _log_y(axes, np.concatenate([y.ravel() for _, _, y in drawn]))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("seconds of training" if x == "seconds" else "training step")
    _end_labels(axes, drawn, column=True)
    return figure


def cost_by_length(study: Study, measure: Measure) -> Figure | None:
    """Speed or memory of the evaluation against its length, both axes logarithmic."""
    unit = 1.0 if measure == "tokens_per_second" else 2.0**20
    drawn = [(s, x, y / unit) for s in study.series for x, y in [s.curve("by_length", "length", measure)] if y.size]
    if not drawn:
        return None
    names = {"tokens_per_second": "tokens per second, log scale", "peak_memory_bytes": "peak memory in MiB, log scale"}
    figure, axes = _axes(names[measure])
    _lines(axes, study, drawn)
    _log_y(axes, np.concatenate([y.ravel() for _, _, y in drawn]))
    _length_axis(axes, study, f"{study.unit}s the model reads at once")
    _end_labels(axes, drawn)
    return figure


def plain_axes(title: str) -> tuple[Figure, Axes]:
    """An empty figure in the page's style."""
    return _axes(title)


def color_of(method: str) -> str:
    """The color of a method, or ink."""
    return COLORS.get(method, INK)


def marker_of(method: str) -> str:
    """The marker of a method, or a circle."""
    return MARKERS.get(method, "o")


def variable_of(method: str) -> str:
    """The CSS variable of a method's color, or of ink."""
    return method if method in COLORS else "ink"


def short_number(value: float) -> str:
    """A tick: 2.5, 40, 30k, 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def log_axis(axes: Axes, values: Points) -> None:
    """A logarithmic y axis with round numbers, wide enough for the values."""
    _log_y(axes, values)


def length_ticks(axes: Axes, lengths: Sequence[int], label: str) -> None:
    """A logarithmic x axis of lengths."""
    axes.set_xscale("log", base=2)
    thin = math.ceil(len(lengths) / 6)
    _ticks(axes, list(lengths)[(len(lengths) - 1) % thin :: thin])
    axes.set_xlabel(label)


def name_lines(axes: Axes, ends: Sequence[tuple[str, str, float, float]], furthest: float) -> None:
    """Write every line's name, (name, color, x, y of its last point), at its end; no two touch in the right column."""
    axes.autoscale_view()
    column = []
    for name, color, x, y in ends:
        if x < furthest:
            lowest = all(y <= other for _, _, _, other in ends)
            # In the left half a name before the point would run out of the figure.
            early = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[0] < 0.4
            place, side = ((4, -10), "left") if lowest else ((5, 4), "left") if early else ((-2, 6), "right")
            axes.annotate(name, (x, y), place, textcoords="offset points", ha=side, color=color, fontsize=8)
        else:
            height = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1]
            column.append((float(height), name, color))
    column.sort()
    for height, (_, name, color) in zip(_apart([c[0] for c in column], _TEXT_GAP), column, strict=True):
        axes.annotate(
            name, (1, height), (7, 0), xycoords="axes fraction", textcoords="offset points", va="center_baseline",
            color=color, fontsize=8.5, annotation_clip=False,
        )  # fmt: skip


def svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an inline SVG element, with text as text (in the page's font) and colors as CSS variables.

    Args:
        name: prefix of every id in it, unique in the page.
        description: what a reader who does not see the picture should know.
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", dpi=200, metadata=nothing, transparent=True)
    text = file.getvalue()
    text = re.sub(
        r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*|<style.*?</style>\s*",
        "",
        text[text.index("<svg") :],
        flags=re.DOTALL,
    )
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    for variable, color in {"ink": INK, "muted": MUTED, "rule": RULE, **COLORS}.items():
        text = text.replace(color, f"var(--{variable})")
    label = f'role="img" aria-labelledby="{name}-title"'
    head = re.sub(r'\s(width|height)="[^"]*"', "", text[: text.index(">")])
    return f'{head} {label}><title id="{name}-title">{_escape(description)}</title>{text[text.index(">") + 1 :]}'


def _axes(title: str) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE)
        axes = figure.add_axes((0.1, 0.155, 0.665, 0.745))
        axes.set_title(title, pad=8, x=-0.14)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    return figure, axes


def _lines(
    axes: Axes,
    study: Study,
    drawn: Sequence[tuple[Series, Points, Points]],
    *,
    markers: bool = True,
    alone: bool = False,
) -> None:
    """The mean of the seeds and the band around it; `alone`: every seed for itself, because no two share an x."""
    stretches = ["none", *sorted({series.stretch for series, _, _ in drawn} - {"none"})]
    for series, x, y in drawn:
        color = COLORS.get(series.method, INK)
        style = _LINES[(study.trained.index(series.trained) + stretches.index(series.stretch)) % len(_LINES)]
        marker = MARKERS.get(series.method, "*") if markers else None
        zorder = 4 if series.method == "alibi" else 3
        if alone and len(y) > 1:
            for row in y:
                some = np.isfinite(row)
                axes.plot(x[some], row[some], color=color, linestyle=style, zorder=zorder, alpha=0.75)
            continue
        axes.plot(x, np.nanmean(y, axis=0), color=color, linestyle=style, marker=marker, zorder=zorder, clip_on=False)
        if len(y) > 1:
            axes.fill_between(
                x, np.nanmin(y, axis=0), np.nanmax(y, axis=0), color=color, alpha=0.22, linewidth=0, zorder=2
            )


def _length_axis(axes: Axes, study: Study, label: str) -> None:
    axes.set_xscale("log", base=2)
    lengths = study.lengths
    thin = math.ceil(len(lengths) / 6)
    _ticks(axes, lengths[(len(lengths) - 1) % thin :: thin])
    axes.set_xlabel(label)
    _mark_trained(axes, study)


def _ticks(axes: Axes, places: Sequence[float]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{place:,.0f}" for place in places]))
    axes.xaxis.set_minor_locator(NullLocator())


def _mark_trained(axes: Axes, study: Study) -> None:
    for length in study.trained:
        axes.axvline(length, color=MUTED, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        text = "trained length" if len(study.trained) == 1 else f"{length:,}"
        axes.annotate(
            text,
            (length, 1),
            (3, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=MUTED,
        )


def _log_y(axes: Axes, values: Points) -> None:
    """Of what a logarithm has: points at 0 are below the picture; where all are, the axis stays linear."""
    positive = values[(values >= 1 / LARGEST) & (values <= LARGEST)]
    if not positive.size:
        return
    low, high = float(positive.min()), float(positive.max())
    room = max(math.log(high / low) * 0.08, 0.02)
    low, high = low * math.exp(-room), high * math.exp(2 * room)  # above: place for "trained length"
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(_round_numbers(low, high)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _round_numbers(low: float, high: float) -> list[float]:
    """Four to eight round numbers between two positive bounds, about evenly apart in the logarithm."""
    if high / low < 3:
        return [float(tick) for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
        if len(ticks) <= 8:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 6)]


def _end_labels(axes: Axes, drawn: Sequence[tuple[Series, Points, Points]], *, column: bool = False) -> None:
    """Each line's name at its end, moved up or down until no two touch; `column`: all on the right, wherever they end."""
    axes.autoscale_view()  # so that transData knows the limits
    ends: list[tuple[float, Series]] = []
    furthest = max(x[-1] for _, x, _ in drawn)
    for series, x, y in drawn:
        mean = y[np.isfinite(y[:, -1]), -1:].mean(axis=0) if column else np.nanmean(y, axis=0)
        place = axes.transAxes.inverted().transform(axes.transData.transform((x[-1], mean[-1])))
        if x[-1] < furthest and not column:  # ends early: its name stands at its end, not in the column on the right
            axes.annotate(
                series.short,
                (x[-1], mean[-1]),
                (4, -11),
                textcoords="offset points",
                color=_color(series),
                fontsize=8.5,
            )
        else:
            ends.append((float(place[1]), series))
    ends.sort(key=lambda end: end[0])
    heights = _apart([end[0] for end in ends], _TEXT_GAP)
    for height, (_, series) in zip(heights, ends, strict=True):
        weight = "bold" if series.method == "alibi" and series.stretch == "none" else "normal"
        axes.annotate(
            series.short,
            (1, height),
            (7, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center_baseline",
            color=_color(series),
            fontweight=weight,
            fontsize=9 if len(series.short) <= 15 else 7.5,
            annotation_clip=False,
        )


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places moved as little as possible so that neighbors are a gap apart (pools of equal violators)."""
    pools: list[tuple[float, int]] = []  # mean of (place − index·gap), members
    for index, place in enumerate(places):
        pools.append((place - index * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    flat = [mean for mean, members in pools for _ in range(members)]
    return [mean + index * gap for index, mean in enumerate(flat)]


def _color(series: Series) -> str:
    return COLORS.get(series.method, INK)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
