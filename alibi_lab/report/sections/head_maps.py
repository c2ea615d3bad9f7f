"""Maps of the heads of a trained model, from records of kind "heads": one row per layer, one column per head.

The certified reach, the share of its keys that carried mass (the measured reach), the mean distance of the attention, the
attention to the first token, and the shares of weights that are zero in bfloat16 and in float16. Full color means the length of
the text, or 100 %. `heads/summary.py` has the definitions.
"""

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alibi_lab.records import MAX_COUNT, Record
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import Points
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.series import Array, numbers

_TITLES = {
    "certified": "certified reach in tokens, log scale; full color: {:,}",
    "carried": "share of its keys that carried mass; full color: 100 %",
    "mean_distance": "mean distance of the attention, log scale; full color: {:,}",
    "first_token": "attention to the first token; full color: 100 %",
    "zero_bfloat16": "weights that are zero in bfloat16; full color: 100 %",
    "zero_float16": "weights that are zero in float16; full color: 100 %",
}
_COLUMNS = ("layer", "head", "slope", "certified", "mean_distance", "carried", "first_token",
            "zero_float32", "zero_bfloat16", "zero_float16")  # fmt: skip
_WIDTH = 8.4  # inches; two maps side by side
_MOST_NUMBERS = 10  # with more heads per row, the numbers do not fit into the cells


def find(archive: Archive) -> list[Record]:
    """The records of kind "heads" with complete layers."""
    return [record for record in archive.records if is_drawn(record)]


def draw(record: Record, number: int, archive: Archive) -> Section:
    """The numbers of every head; `alibi heads summary --picture` draws them."""
    title = record.name.partition("/")[2] or record.name
    rows = list(zip(*(numbers(record, "heads", name) for name in _COLUMNS), strict=True))
    body = html("head_maps", sentence=sentence(record), rows=rows, title=title, record=record)
    group, heading = "Heads of trained models", f"Where the heads attend: {title}"
    return Section(f"m{number}", group, title, body, heading=heading, records=[record])


def is_drawn(record: Record) -> bool:
    """Whether the record has the heads of complete layers of equal size."""
    return record.kind == "heads" and _grid(record, "layer") is not None


def plot_heads(record: Record) -> Figure:
    """Maps of a model's heads by layer: certified reach, mean distance, share of the first token, weights that are zero in bf16.

    Args:
        record: the result of `alibi_lab.heads.summary.summary(load(folder), text)`.

    Raises:
        ValueError: a record of another kind.
    """
    if not is_drawn(record):
        raise ValueError(
            f"the record is of kind {record.kind!r} and has no heads; pass the result of alibi_lab.heads.summary.summary"
        )
    map_height = max(1.0, 0.22 * (int(max(numbers(record, "heads", "layer"))) + 1))
    rows, row = len(_TITLES) // 2, 0.62 + map_height
    with matplotlib.rc_context(drawing.STYLE):
        figure = Figure(figsize=(_WIDTH, rows * row), facecolor="white")
        for place, column in enumerate(_TITLES):
            down, across = divmod(place, 2)
            bottom = 1 - (down + 1) / rows + 0.3 / (rows * row)
            axes = figure.add_axes((0.055 + 0.5 * across, bottom, 0.43, (row - 0.62) / (rows * row)))
            values = _grid(record, column)
            if values is not None:
                _draw(axes, column, values, _length(record))
    return figure


def sentence(record: Record) -> str:
    """How many heads have collapsed onto the first token, and how many are blind in each dtype."""
    counts = {name: value for name, value in record.metrics.items() if value is not None}
    parts = [f"{counts.get('heads', 0):,.0f} heads on {_length(record):,} tokens"]
    collapsed, blind = (record.config.get(f"{name}_from") for name in ("collapsed", "blind"))
    if "collapsed" in counts and isinstance(collapsed, float):
        parts.append(f"{counts['collapsed']:,.0f} give {collapsed:.0%} or more of their attention to the first token")
    dtypes = [
        f"{value:,.0f} in {name.removeprefix('blind_')}" for name, value in counts.items() if name.startswith("blind_")
    ]
    if dtypes and isinstance(blind, float):
        parts.append(f"blind, with {blind:.0%} or more of their weights zero once rounded: {', '.join(dtypes)}")
    return "; ".join(parts) + "."


def _draw(axes: Axes, column: str, values: Points, length: int) -> None:
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
            axes.text(head, layer, text, ha="center", va="center", fontsize=7, color=drawing.INK)


def _length(record: Record) -> int:
    value = record.config.get("length")
    return value if isinstance(value, int) and 1 < value <= MAX_COUNT else 1


def _grid(record: Record, column: str) -> Points | None:
    """A column as [layers, heads]; None if it does not have one value for every head of every layer."""
    places = np.array([numbers(record, "heads", name) for name in ("layer", "head")])
    values = np.array(numbers(record, "heads", column))
    if not values.size or not np.isfinite(places).all() or places.min() < 0 or places.max() >= values.size:
        return None
    layers, heads = (int(last) + 1 for last in places.max(axis=1))
    if layers * heads != values.size or not (places == np.indices((layers, heads)).reshape(2, -1)).all():
        return None
    return values.reshape(layers, heads)


def weights_figure(matrix: Array) -> Figure:
    """The weights [H, n, n] of the heads of a layer, one square each, darker for more."""
    heads = len(matrix)
    columns = min(4, heads)
    rows = -(-heads // columns)
    with matplotlib.rc_context(drawing.STYLE):
        figure = Figure(figsize=(1.7 * columns, 1.9 * rows), layout="constrained", facecolor="white")
        for head, axes in enumerate(np.ravel(figure.subplots(rows, columns, squeeze=False))):
            axes.set_axis_off()
            if head < heads:
                axes.imshow(matrix[head] ** 0.5, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
                axes.set_title(f"head {head}", fontsize=8)
    return figure
