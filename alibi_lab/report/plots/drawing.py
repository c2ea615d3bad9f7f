"""Axes in the page's style, legends, and figures as SVG with the page's colors.

Figures are drawn in the colors of a light page. `svg` replaces each color by a CSS variable (`--ink`, `--alibi`, ...), so that
the same picture works in light, in dark and in print. A script of the page shows the label and the numbers of the nearest point.
"""

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from alibi_lab.position_methods import LOOKS, Look
from alibi_lab.records import LARGEST

Points = NDArray[np.float64]

STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("page.mplstyle"), use_default_template=False)
INK, MUTED, RULE = (str(STYLE[name]) for name in ("text.color", "axes.labelcolor", "grid.color"))
COLORED = 5  # lines at either end that keep their color, where there are more than twice as many
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))  # of lines in one color
_TICK_GAP = 0.17  # between two labeled lengths, as a share of the axis: more than the width of "16,384"


class Plot(NamedTuple):
    """A figure with its texts.

    Args:
        heading, caption: shown above it.
        description: the content for readers who cannot see the picture, to which `described` adds the lines; the heading if "".
    """

    figure: Figure
    heading: str
    caption: str
    description: str = ""


def plain_axes(title: str) -> tuple[Figure, Axes]:
    """An empty figure in the page's style, with its title above the y axis."""
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        axes = figure.add_axes((0.1, 0.155, 0.665, 0.745))
        axes.set_title(title, pad=8, x=-0.14)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    return figure, axes


def grid(
    count: int, columns: int, row: float, box: Sequence[float], *, inches: float = 4.1, below: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """A white figure with small axes in the page's style, row by row.

    Args:
        row: the height of a row in inches.
        box: where the first axes begin, their distance, and their width, as shares of the figure's width; where axes begin above
            the end of their row, and their height, as shares of the row.
        inches, below: the width of the figure, and the height of the empty space at its end.
    """
    (first, step, width, bottom, height), rows = box, math.ceil(count / columns)
    whole = rows * row + below
    share = (1 - below / whole) / rows
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(inches, whole), facecolor="white")
        for place in range(count):
            down, column = divmod(place, columns)
            corner = column * step + first, 1 - (down + 1) * share + bottom * share
            figure.add_axes((*corner, width, height * share))
    return figure, figure.axes


def style_of(method: str, look: Look | None = None) -> dict[str, Any]:
    """The color of a method on a light page and its marker; that of text and a star for other names without a look."""
    look = look or LOOKS.get(method)
    return {"color": look.light, "marker": look.marker} if look else {"color": INK, "marker": "*"}


def color_of(method: str) -> str:
    """The color of a built-in method on a light page."""
    return str(style_of(method)["color"])


def tinted(strengths: Points) -> Points:
    """A picture in ALiBi's color, from no color at 0 or below to full color at 1 or above: [rows, columns, 4]."""
    color = np.broadcast_to(to_rgb(color_of("alibi")), (*strengths.shape, 3))
    return np.dstack([color, np.clip(strengths, 0, 1)])


def css(theme: str, looks: Mapping[str, Look] = LOOKS) -> str:
    """CSS custom properties, one per method: `--alibi: #c63d0c;`. `theme` is "light" or "dark"."""
    return " ".join(f"--{name}: {getattr(look, theme)};" for name, look in looks.items())


def short_number(value: float) -> str:
    """The label of a tick: 2.5, 40, 30k, 2M."""
    size, letter = next(((size, x) for size, x in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= size), (1, ""))
    return f"{value / size:.4g}{letter}"


def log_axis(axes: Axes, values: Points) -> None:
    """Makes the y axis logarithmic, with round numbers and room for the values.

    Values of 0 have no logarithm and are not visible; if all are 0, the axis stays linear.
    """
    positive = values[(values >= 1 / LARGEST) & (values <= LARGEST)]
    if not positive.size:
        return
    low, high = float(positive.min()), float(positive.max())
    room = max(math.log(high / low) * 0.08, 0.02)
    low, high = low * math.exp(-room), high * math.exp(2 * room)  # room above for "trained length"
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks(axes.yaxis, _round_numbers(low, high), short_number)


def length_ticks(axes: Axes, lengths: Sequence[float], label: str) -> None:
    """Makes the x axis logarithmic, with labels at the longest and the shortest length, and at those between that have room."""
    axes.set_xscale("log", base=2)
    named = with_room(sorted(lengths, reverse=True), max(lengths) / min(lengths))
    ticks(axes.xaxis, [min(lengths), *named[-2::-1]])
    axes.set_xlabel(label)


def with_room(places: Sequence[float], ratio: float) -> list[float]:
    """The places, ascending or descending, whose labels do not overlap on a logarithmic axis; always includes the first.

    Args:
        ratio: the ratio of the two ends of the axis.
    """
    kept: list[float] = []
    for place in places:
        if not kept or abs(math.log(place / kept[-1])) > _TICK_GAP * math.log(ratio):
            kept.append(place)
    return kept


def ticks(axis: Axis, places: Sequence[float], name: Callable[[float], str] = "{:,.0f}".format) -> None:
    """Puts ticks with these names (by default integers) at these places of an axis, without minor ticks."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_major_formatter(FixedFormatter([name(place) for place in places]))
    axis.set_minor_locator(NullLocator())


def name_lines(axes: Axes, names: Mapping[str, str] | None = None) -> None:
    """A legend right of the axes with the labeled lines, the one that ends highest first; of many, only the ends are colored.

    Args:
        names: the labels to show, by the label of a line; lines without one are left out. Default: all labels.
    """
    by_name: dict[str, Line2D] = {}
    for line in _labeled(axes):
        label = str(line.get_label())
        by_name[label if names is None else names.get(label, "")] = line
    by_name.pop("", None)
    named = sorted(by_name.items(), key=lambda one: -_last(one[1]))
    if len(named) > 2 * COLORED:
        for _, line in named[COLORED:-COLORED]:
            _fade(axes, line)
    size = 8.5 if all(len(name) <= 13 for name, _ in named) and len(named) <= 8 else 7
    axes.legend(
        [line for _, line in named], [name for name, _ in named], loc="upper left", bbox_to_anchor=(1.0, 1.03),
        frameon=False, fontsize=size, labelcolor="linecolor", handlelength=1.4, handletextpad=0.5, borderpad=0.1,
        labelspacing=0.35,
    )  # fmt: skip


def _last(line: Line2D) -> float:
    """The last finite y; below all others without one."""
    points = _points(line)
    return points[-1][1] if points else -math.inf


def _labeled(axes: Axes) -> list[Line2D]:
    return [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def _points(line: Line2D) -> list[list[float]]:
    """The finite points [x, y]."""
    return [point for point in np.asarray(line.get_xydata(), dtype=np.float64).tolist() if math.isfinite(sum(point))]


def _fade(axes: Axes, line: Line2D) -> None:
    """Makes a line and the band of its color gray, unless it is ALiBi's."""
    color = line.get_color()
    if color == color_of("alibi"):
        return
    for band in axes.collections:
        if to_hex(np.asarray(band.get_facecolor())[0]) == to_hex(str(color)):
            band.set_facecolor(MUTED)
    line.set(color=MUTED, linewidth=0.9, zorder=2)


def svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an inline SVG element, with text as text (in the page's font) and colors as CSS variables.

    Args:
        name: prefix of every id in the SVG, unique on the page.
        description: the content for readers who cannot see the picture.
    """
    text = file_of(figure, ".svg", name, transparent=True).decode()
    left_out = re.compile(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*|<style.*?</style>\s*", re.DOTALL)
    text = left_out.sub("", text[text.index("<svg") :])
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    methods = {name: look.light for name, look in LOOKS.items()}
    for variable, color in {"ink": INK, "muted": MUTED, "rule": RULE, **methods}.items():
        text = text.replace(color, f"var(--{variable})")
    label = f'role="img" aria-labelledby="{name}-title"'
    head = re.sub(r'\s(width|height)="[^"]*"', "", text[: text.index(">")])
    title = f'<title id="{name}-title">{escape(description, quote=False)}</title>'
    return f"{head} {label}{_readings(figure)}>{title}{text[text.index('>') + 1 :]}"


def described(figure: Figure, description: str) -> str:
    """The description of a picture, then the first and the last point of every labeled line."""
    parts = [description.rstrip(".")]
    for axes in figure.axes:
        labeled, ends = _labeled(axes), []
        for line in labeled:
            if points := _points(line):
                both = dict.fromkeys(f"{_digits(y)} at {_digits(x)}" for x, y in (points[0], points[-1]))
                ends.append(f"{line.get_label()} {' to '.join(both)}")
        if labeled:
            parts.append(f"{axes.get_title('left') or axes.get_title()} by {axes.get_xlabel()}: {'; '.join(ends)}")
    return f"{'. '.join(parts)}."


def file_of(figure: Figure, suffix: str, name: str, *, transparent: bool = False) -> bytes:
    """The figure as the content of a ".png" or ".svg" file; `name` seeds the ids in an SVG, so that files are reproducible."""
    file = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if suffix == ".svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format=suffix.removeprefix("."), dpi=200, metadata=metadata, transparent=transparent)
    return file.getvalue()


def _readings(figure: Figure) -> str:
    """The points of all labeled lines, [x, y, text] in points, which the page's script shows; "" if there are none."""
    height, to_points, found = 72 * figure.get_size_inches()[1], 72 / figure.dpi, list[tuple[float, float, str]]()
    for axes in figure.axes:
        box = axes.get_window_extent().padded(1)
        for line in _labeled(axes):
            points = _points(line)
            places = axes.transData.transform(np.reshape(points, (-1, 2)))
            for (x, y), (left, bottom) in zip(points, places.tolist(), strict=True):
                if math.isfinite(left + bottom) and box.contains(left, bottom):
                    place = round(left * to_points, 1), round(height - bottom * to_points, 1)
                    found.append((*place, f"{line.get_label()}: {_digits(y)} at {_digits(x)}"))
    return f" data-readings='{escape(json.dumps(found, ensure_ascii=False))}'" if found else ""


def _digits(value: float) -> str:
    """Integers in full, other numbers with four digits: 15,512, 0.9281."""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:,.4g}"


def _round_numbers(low: float, high: float) -> list[float]:
    """Four to eight round numbers between two positive bounds, about evenly spaced on a logarithmic axis."""
    if high / low < 3:
        return [float(tick) for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
        if len(ticks) <= 8:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 6)]
