"""Whether a model finds distant information: passkey by length and depth, recall by distance, symbols by length.

A share is the mean over seeds; beyond the positions of a method, its cell is empty. Perplexity cannot show retrieval.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from alibi_lab.report.plots import drawing
from alibi_lab.report.series import Series, Study, numbers
from alibi_lab.report.tables.table import NOTHING, Block, Cell, Table, series_row

_COLUMNS = 2
TITLES = {  # in tables, with the quantity that is counted
    "passkey": "Passkey: numbers found, at the worst depth",
    "recall": "Recall: tokens repeated, at the worst distance",
    "mqar": "Associative recall: values of 8 keys; chance is 6 %",
    "needles": "Needles: values of 4 keys in noise; chance is 6 %",
    "copy": "Copy: symbols of a string; chance is 2 %",
    "flip-flop": "Flip-flop: bits that were last written; chance is 50 %",
}
_PLACES = {"passkey": "depth", "recall": "distance"}  # the column that varies within one length of such a task

Shares = Mapping[tuple[float, float], float]  # (length, depth or distance or 0) -> share
Grids = Sequence[tuple[Series, Shares]]


def shares(series: Series, task: str) -> Shares:
    """(length, depth or distance) -> the share of correct answers, averaged over seeds; empty if not tested."""
    found: dict[tuple[float, float], list[float]] = {}
    for record in series.evaluations:
        lengths, accuracies = (numbers(record, task, name) for name in ("length", "accuracy"))
        places = numbers(record, task, _PLACES[task]) if task in _PLACES else [0.0] * len(lengths)
        for length, place, accuracy in zip(lengths, places, accuracies, strict=True):
            if math.isfinite(length + place + accuracy):
                found.setdefault((length, place), []).append(accuracy)
    return {key: sum(values) / len(values) for key, values in found.items()}


def tested(study: Study, task: str) -> Grids:
    """The series with shares of a task."""
    return [(series, grid) for series in study.series if (grid := shares(series, task))]


def figure_of(study: Study, task: str) -> Figure | None:
    """Shares of symbols against the length; of recall, against the distance at the longest length of each series; of passkeys, a
    picture per series. None if the task was not tested."""
    grids = tested(study, task)
    if not grids or task == "passkey":
        return _passkey_grid(grids) if grids else None
    recall = task == "recall"
    figure, axes = drawing.plain_axes(f"share of {'repeated tokens that are correct' if recall else 'correct answers'}")
    places: set[int] = set()
    for series, grid in grids:
        longest = max(length for length, _ in grid)
        points = {at[recall]: share for at, share in grid.items() if not recall or at[0] == longest}
        x, y = np.array(sorted(points.items())).T
        color, marker = (of(series.method, series.look) for of in (drawing.color_of, drawing.marker_of))
        axes.plot(x, y, color=color, marker=marker, clip_on=False, label=series.short)
        places |= set(map(int, x))
    axes.set_ylim(0, 1.03)
    label = f"distance in {study.unit}s, log scale" if recall else "length in tokens, log scale"
    drawing.length_ticks(axes, sorted(places), label)
    drawing.name_lines(axes)
    return figure


def task_table(study: Study) -> Table | None:
    """The shares by length, for each task at its worst depth or distance."""
    grids = {task: found for task in TITLES if (found := tested(study, task))}
    lengths = sorted({length for found in grids.values() for _, grid in found for length, _ in grid})
    blocks = []
    for task, found in grids.items():
        rows = [series_row(series, [_worst(grid, length) for length in lengths]) for series, grid in found]
        blocks.append(Block(TITLES[task], rows))
    return Table([f"{length:,.0f}" for length in lengths], blocks) if blocks else None


def describe(study: Study, task: str) -> str:
    """Every series with its highest share, for readers who cannot see the picture."""
    title = {"passkey": "Passkey by length and depth", "recall": "Recall by distance"}.get(task, TITLES[task])
    found = [f"{series.label} finds up to {100 * max(grid.values()):.0f} %" for series, grid in tested(study, task)]
    return f"{title}. {'; '.join(found)}."


def _passkey_grid(grids: Grids) -> Figure:
    """One picture per series: length to the right, depth down, with the share of numbers found in every cell."""
    lengths, depths = (sorted({place[axis] for _, grid in grids for place in grid}) for axis in (0, 1))
    rows, high = math.ceil(len(grids) / _COLUMNS), 0.21 * len(depths)
    each = 0.55 + high
    figure = Figure(figsize=(4.1, rows * each))
    for number, (series, grid) in enumerate(grids):
        row, column = divmod(number, _COLUMNS)
        corner = 0.075 + column * 0.485, 1 - (row * each + 0.24 + high) / (rows * each)
        axes = figure.add_axes((*corner, 0.42, high / (rows * each)))
        color = drawing.color_of(series.method, series.look)
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
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths] if column == 0 else [], fontsize=7)
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_visible(False)
    return figure


def _worst(grid: Shares, length: float) -> Cell:
    found = [share for (at, _), share in grid.items() if at == length]
    return Cell(f"{100 * min(found):.0f} %", min(found)) if found else NOTHING


def _short(length: float) -> str:
    return f"{length / 1024:g}k" if length >= 1024 and length % 1024 == 0 else f"{length:,.0f}"
