"""Axes in the page's style, names at the ends of lines, and figures as SVG with the page's colors.

Figures are drawn in the colors of a light page. `svg` replaces each color by a CSS variable (`--ink`, `--alibi`, ...), so that
the same picture works in light, in dark and in print. Hovering over a point of a labeled line shows the label and the numbers.
"""

import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from alibi_lab.position_methods import LOOKS, Look
from alibi_lab.records import LARGEST

Points = NDArray[np.float64]

STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("page.mplstyle"), use_default_template=False)
INK, MUTED, RULE = (str(STYLE[name]) for name in ("text.color", "axes.labelcolor", "grid.color"))
_TEXT_GAP = 0.068  # between two labels at the ends of lines, as a share of the height of the axes
_TICK_GAP = 0.17  # between two labeled lengths, as a share of the axis: more than the width of "16,384"
_READING_RADIUS = 6  # points; the area around a point of a line that shows its numbers


class End(NamedTuple):
    """A line's name, its color, and its last point."""

    name: str
    color: str
    x: float
    y: float
    bold: bool = False


class Plot(NamedTuple):
    """A figure with its texts.

    Args:
        heading, caption: shown above it.
        description: a description of the picture, for readers who cannot see it.
    """

    heading: str
    caption: str
    figure: Figure
    description: str


def plain_axes(title: str) -> tuple[Figure, Axes]:
    """An empty figure in the page's style, with its title above the y axis."""
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        axes = figure.add_axes((0.1, 0.155, 0.665, 0.745))
        axes.set_title(title, pad=8, x=-0.14)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    return figure, axes


def color_of(method: str, look: Look | None = None) -> str:
    """The color of a method on a light page; the color of text for other names without a look."""
    look = look or LOOKS.get(method)
    return look.light if look else INK


def marker_of(method: str, look: Look | None = None) -> str:
    """The marker of a method; a star for other names without a look."""
    look = look or LOOKS.get(method)
    return look.marker if look else "*"


def tinted(strengths: Points) -> Points:
    """A picture in ALiBi's color, from no color at 0 or below to full color at 1 or above: [rows, columns, 4]."""
    color = np.broadcast_to(to_rgb(color_of("alibi")), (*strengths.shape, 3))
    return np.dstack([color, np.clip(strengths, 0, 1)])


def css(theme: str) -> str:
    """CSS custom properties, one per method: `--alibi: #c63d0c;`. `theme` is "light" or "dark"."""
    return " ".join(f"--{name}: {getattr(look, theme)};" for name, look in LOOKS.items())


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


def length_ticks(axes: Axes, lengths: Sequence[int], label: str) -> None:
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


def name_lines(axes: Axes, ends: Sequence[End], *, column: bool = False) -> None:
    """Write every line's name at its end, without overlaps.

    Lines that reach the right end are named in a column on the right, in the order of their ends; lines that stop earlier are
    named next to their last point. `column`: name all lines in the column.
    """
    axes.autoscale_view()  # updates the limits that transData uses
    furthest = max(end.x for end in ends)
    inside = [end for end in ends if end.x < furthest and not column]
    place_names(axes, inside, others=ends, curves=_along_lines(axes))
    column_ends = [end for end in ends if end not in inside]
    pixels = axes.transData.transform([(end.x, end.y) for end in column_ends])
    heights = axes.transAxes.inverted().transform(pixels)[:, 1]
    order = np.argsort(heights, kind="stable")
    for height, at in zip(_spaced(heights[order].tolist(), _TEXT_GAP), order, strict=True):
        end = column_ends[at]
        size, weight = 8.5 if len(end.name) <= 15 else 7.5, "bold" if end.bold else "normal"
        style = {"color": end.color, "fontsize": size, "fontweight": weight, "annotation_clip": False}
        write(axes, end.name, (1, height), (7, 0), xycoords="axes fraction", va="center_baseline", **style)


def write(axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Writes a text at an offset, in points (1/72 inch), from a point of the data; `style` as for `Axes.annotate`."""
    axes.annotate(text, point, offset, textcoords="offset points", **style)


def _along_lines(axes: Axes) -> Points:
    """Points along all curves inside the axes, a few pixels from one to the next, in pixels: [points, 2]."""
    stretches = [np.empty((0, 2))]
    for line in axes.get_lines():
        if line.get_transform() == axes.transData:  # else it is a mark across the axes
            corners = axes.transData.transform(line.get_xydata())
            for start, stop in itertools.pairwise(corners):
                stretches.append(np.linspace(start, stop, 2 + int(np.hypot(*(stop - start)) / 8)))
    along, window = np.concatenate(stretches), axes.get_window_extent()
    # A logarithmic axis puts 0 very far below.
    inside: Points = along[((along >= window.min) & (along <= window.max)).all(axis=1)]
    return inside


def place_names(axes: Axes, names: Sequence[End], *, others: Sequence[End] = (), curves: Points | None = None) -> None:
    """Write the names next to their points, each on the first side where it overlaps no point and no other name.

    Sizes are estimated from the number of letters. `others` are further points that names must not overlap, and `curves` points
    that they cross as little as possible, in pixels.
    """
    points = [axes.transData.transform((end.x, end.y)) for end in (*names, *others)]
    written: list[Bbox] = []
    pixel, edge = axes.get_figure(root=True).dpi / 72, axes.get_window_extent().x0  # type: ignore[union-attr]
    for end, (x, y) in zip(names, points, strict=False):  # those of the others follow
        wide, high = 4.6 * len(end.name) * pixel, 9 * pixel
        corners = {((0, up), "center"): (x - wide / 2, y + up * pixel) for up in (7, -15, 17, -25, 27, -35, 37, -45)}
        corners |= {((8, -3), "left"): (x + 8, y - high / 2), ((-8, -3), "right"): (x - 8 - wide, y - high / 2)}
        boxes = {side: Bbox.from_bounds(*corner, wide, high) for side, corner in corners.items() if corner[0] >= edge}
        free = {
            side: box
            for side, box in boxes.items()
            if not box.padded(6).count_contains(points) and not box.count_overlaps(written)
        }
        crossed = {side: box.padded(6).count_contains(() if curves is None else curves) for side, box in free.items()}
        offset, align = min(free, key=lambda side: crossed[side], default=((4, 8), "left"))
        written += [box for side, box in free.items() if side == (offset, align)]
        write(axes, end.name, (end.x, end.y), offset, ha=align, color=end.color, fontsize=8)


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
    text = text.removesuffix("\n").removesuffix("</svg>") + f"{_readings(figure)}</svg>\n"
    return f'{head} {label}><title id="{name}-title">{escape(description, quote=False)}</title>{text[text.index(">") + 1 :]}'


def file_of(figure: Figure, suffix: str, name: str, *, transparent: bool = False) -> bytes:
    """The figure as the content of a ".png" or ".svg" file; `name` seeds the ids in an SVG, so that files are reproducible."""
    file = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if suffix == ".svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format=suffix.removeprefix("."), dpi=200, metadata=metadata, transparent=transparent)
    return file.getvalue()


def _readings(figure: Figure) -> str:
    """An invisible circle for every point of every labeled line, whose tooltip has the label and the numbers."""
    height, to_points = 72 * figure.get_size_inches()[1], 72 / figure.dpi
    found = []
    for axes in figure.axes:
        box = axes.get_window_extent().padded(1)
        for line in axes.get_lines():
            label = str(line.get_label())
            if label.startswith("_"):
                continue
            points = np.asarray(line.get_xydata(), dtype=np.float64)
            places = axes.transData.transform(points)
            for (x, y), (left, bottom) in zip(points.tolist(), places.tolist(), strict=True):
                if math.isfinite(left + bottom) and box.contains(left, bottom):
                    found.append(
                        f'<circle cx="{left * to_points:.1f}" cy="{height - bottom * to_points:.1f}" r="{_READING_RADIUS}">'
                        f"<title>{escape(label, quote=False)}: {_digits(y)} at {_digits(x)}</title></circle>"
                    )
    return f'<g class="readings" fill="none" pointer-events="all">{"".join(found)}</g>' if found else ""


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


def _spaced(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places, from 0 to 1, moved as little as possible so that neighbors keep a gap (pool adjacent violators).

    If they do not fit, they continue above 1.
    """
    pools: list[tuple[float, int]] = []  # mean of (place − index·gap), members
    for index, place in enumerate(places):
        pools.append((place - index * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    highest = max(0.0, 1.0 - (len(places) - 1) * gap)
    flat = [min(max(mean, 0.0), highest) for mean, members in pools for _ in range(members)]
    return [mean + index * gap for index, mean in enumerate(flat)]
