"""Maps of the heads of a trained model, from records of kind "heads": one row per layer, one column per head.

The certified reach, the share of its keys that carried mass (the measured reach), the mean distance of the attention, the
attention to the first token, and the shares of weights that are zero in bfloat16 and in float16. Full color means the length of
the text, or 100 %. `measure/model_heads.py` has the definitions.
"""

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from alibi_lab.records import MAX_COUNT, Record
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import Points
from alibi_lab.report.series import numbers
from alibi_lab.report.tables.heads import fraction

_COLUMNS = ("certified", "carried", "mean_distance", "first_token", "zero_bfloat16", "zero_float16")
_WIDTH = 8.4  # inches; two maps side by side
_MOST_NUMBERS = 10  # with more heads per row, the numbers do not fit into the cells


def is_drawn(record: Record) -> bool:
    """Whether the record has the heads of complete layers of equal size."""
    return record.kind == "heads" and _grid(record, "layer") is not None


def heads_figure(record: Record) -> Figure:
    """The maps of a record that `is_drawn`."""
    layers = int(max(numbers(record, "heads", "layer"))) + 1
    length = _length(record)
    row = 0.62 + max(1.0, 0.22 * layers)
    with matplotlib.rc_context(drawing.STYLE):
        rows = len(_COLUMNS) // 2
        figure = Figure(figsize=(_WIDTH, rows * row))
        for place, column in enumerate(_COLUMNS):
            down, across = divmod(place, 2)
            height = (row - 0.62) / (rows * row)
            axes = figure.add_axes((0.055 + 0.5 * across, 1 - (down + 1) / rows + 0.3 / (rows * row), 0.43, height))
            values = _grid(record, column)
            if values is not None:
                _draw(axes, column, values, length)
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


def rows(record: Record) -> list[tuple[str, ...]]:
    """Layer, head, slope, certified reach, mean distance; shares that carried mass, of the first token, of zeros by dtype."""
    shares = ("carried", "first_token", "zero_float32", "zero_bfloat16", "zero_float16")
    names = ("layer", "head", "slope", "certified", "mean_distance", *shares)
    found = []
    for layer, head, slope, certified, distance, *values in zip(
        *(numbers(record, "heads", name) for name in names), strict=True
    ):
        cells = [f"{value:.1%}" if math.isfinite(value) else "—" for value in values]
        found.append((f"{layer:.0f}", f"{head:.0f}", fraction(slope), f"{certified:,.0f}", f"{distance:,.1f}", *cells))
    return found


def _draw(axes: Axes, column: str, values: Points, length: int) -> None:
    titles = {
        "certified": f"certified reach in tokens, log scale; full color: {length:,}",
        "carried": "share of its keys that carried mass; full color: 100 %",
        "mean_distance": f"mean distance of the attention, log scale; full color: {length:,}",
        "first_token": "attention to the first token; full color: 100 %",
        "zero_bfloat16": "weights that are zero in bfloat16; full color: 100 %",
        "zero_float16": "weights that are zero in float16; full color: 100 %",
    }
    shares = values
    if column in ("certified", "mean_distance"):
        shares = np.log1p(np.clip(values, 0, None)) / math.log1p(length)
    colored = np.empty((*values.shape, 4))
    colored[..., :3] = to_rgb(drawing.color_of("alibi"))
    colored[..., 3] = np.clip(np.nan_to_num(shares), 0, 1)
    axes.imshow(colored, aspect="auto", extent=(-0.5, values.shape[1] - 0.5, values.shape[0] - 0.5, -0.5))
    axes.set_title(titles[column], fontsize=8.5, pad=4)
    thin = max(1, math.ceil(values.shape[0] / 12)), max(1, math.ceil(values.shape[1] / 16))
    axes.set_yticks(range(0, values.shape[0], thin[0]))
    axes.set_xticks(range(0, values.shape[1], thin[1]))
    axes.tick_params(length=0, pad=2, labelsize=7.5)
    axes.set_xlabel("head", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    if values.shape[1] <= _MOST_NUMBERS:
        for (layer, head), value in np.ndenumerate(values):
            text = f"{value:,.0f}" if column in ("certified", "mean_distance") else f"{value:.0%}"
            axes.text(head, layer, text, ha="center", va="center", fontsize=7, color=drawing.INK)


def _length(record: Record) -> int:
    value = record.config.get("length")
    return value if isinstance(value, int) and 1 < value <= MAX_COUNT else 1


def _grid(record: Record, column: str) -> Points | None:
    """A column as [layers, heads]; None if it does not have one value for every head of every layer."""
    columns = {name: np.array(numbers(record, "heads", name)) for name in ("layer", "head", column)}
    layer, head, values = columns["layer"], columns["head"], columns[column]
    count = len(values)
    if not count or not np.isfinite([layer, head]).all() or max(layer.max(), head.max()) >= count:
        return None
    layers, heads = int(layer.max()) + 1, int(head.max()) + 1
    expected = np.repeat(np.arange(layers), heads), np.tile(np.arange(heads), layers)
    if layers * heads != count or not ((layer == expected[0]).all() and (head == expected[1]).all()):
        return None
    grid: Points = values.reshape(layers, heads)
    return grid
