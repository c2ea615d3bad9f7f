"""The biases of the heads (Press et al. 2022, fig. 3), one picture per head, and the decay of their factors.

The bias −m·|i − j| is drawn in full color where it is 0 and without color where its factor e^(−m·|i − j|) is 1e-6 or less.
"""

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from alibi_attn import alibi_slopes
from alibi_lab.report.plots.drawing import STYLE, Plot, color_of, ticks
from alibi_lab.report.tables.heads import NEGLIGIBLE, fraction, half_life

Slopes = np.ndarray[tuple[int], np.dtype[np.float64]]

_PIXELS = 96  # the largest side of a head's picture
_WIDTH = 4.1  # inches


def plot_alibi_bias(num_heads: int, seq_len: int) -> Figure:
    """A figure of every head's causal bias −m·(i − j), with its slope, above the factors e^(−m·d) of all heads.

    Args:
        num_heads: H ≥ 1; slopes are `alibi_slopes(H)`.
        seq_len: number of queries and of keys, ≥ 1.

    Raises:
        ValueError: a number of heads or a length below 1.

    >>> figure = plot_alibi_bias(8, 512)
    >>> len(figure.axes)
    9

    Source: Press et al. 2022, fig. 3 (arXiv:2108.12409).
    """
    if seq_len < 1:
        raise ValueError(f"seq_len is {seq_len} but a length is at least 1 token")
    slopes = alibi_slopes(num_heads)
    grid, curves = _grid_height(num_heads), 2.6
    height = grid + curves
    with matplotlib.rc_context({**STYLE, "figure.facecolor": "white"}):
        figure = Figure(figsize=(_WIDTH, height))
        _draw_biases(figure, slopes, seq_len, bottom=curves / height)
        axes = figure.add_axes((0.1, 0.4 / height, 0.85, (curves - 0.85) / height))
        _draw_factors(axes, slopes.tolist(), seq_len)
    return figure


def pictures(num_heads: int, seq_len: int, furthest: int) -> tuple[Plot, Plot]:
    """The biases over `seq_len` tokens, and the factors up to the distance `furthest`."""
    return (
        Plot(
            "The bias of each head",
            f"Queries run down and keys to the right, {seq_len:,} each. Full color is no penalty; no color is a factor of one "
            "in a million or less.",
            bias_grid(num_heads, seq_len),
            f"The causal biases of {num_heads} heads over {seq_len:,} tokens: from a thin diagonal to a full triangle.",
        ),
        Plot(
            "How fast each head forgets",
            "The factor by which the bias multiplies the weight of a key. Dots mark the half-life, labeled with the slope.",
            factor_curves(num_heads, furthest),
            f"The factor of a key by distance, for each of {num_heads} heads: steep heads forget within a few tokens.",
        ),
    )


def bias_grid(num_heads: int, seq_len: int) -> Figure:
    """The pictures of the heads alone; arguments as for `plot_alibi_bias`."""
    slopes = alibi_slopes(num_heads)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, _grid_height(num_heads)))
        _draw_biases(figure, slopes, seq_len, bottom=0.0)
    return figure


def factor_curves(num_heads: int, seq_len: int) -> Figure:
    """The factors e^(−m·d) against the distance d alone; arguments as for `plot_alibi_bias`."""
    slopes = alibi_slopes(num_heads)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, 3.1))
        _draw_factors(figure.add_axes((0.1, 0.155, 0.86, 0.745)), slopes.tolist(), seq_len)
    return figure


def _columns(num_heads: int) -> int:
    return min(num_heads, 4 if num_heads <= 16 else 8)


def _grid_height(num_heads: int) -> float:
    return math.ceil(num_heads / _columns(num_heads)) * (_WIDTH / max(_columns(num_heads), 3) + 0.18)


def _draw_biases(figure: Figure, slopes: Slopes, seq_len: int, *, bottom: float) -> None:
    """One picture per head in a grid from `bottom` to the top of the figure."""
    columns = _columns(len(slopes))
    width, height = 1 / columns, (1 - bottom) / math.ceil(len(slopes) / columns)
    for head, slope in enumerate(slopes.tolist()):
        row, column = divmod(head, columns)
        corner = column * width + 0.02 * width, 1 - (row + 1) * height + 0.04 * height
        axes = figure.add_axes((*corner, 0.96 * width, 0.78 * height))
        _draw_bias(axes, slope, seq_len, small=len(slopes) > 16)


def _draw_bias(axes: Axes, slope: float, seq_len: int, *, small: bool) -> None:
    places = np.linspace(0, seq_len - 1, min(seq_len, _PIXELS))
    distance = places[:, None] - places[None, :]
    strength = np.where(distance >= 0, 1 + slope * distance / math.log(NEGLIGIBLE), 0.0)
    picture = np.empty((*distance.shape, 4))
    picture[..., :3] = to_rgb(color_of("alibi"))
    picture[..., 3] = np.clip(strength, 0, 1)
    axes.imshow(picture, extent=(0, 1, 0, 1))
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_linewidth(0.6)
    axes.set_title(
        fraction(slope) if small else f"m = {fraction(slope)}", fontsize=5.5 if small else 8.5, pad=3, loc="center"
    )


def _draw_factors(axes: Axes, slopes: Sequence[float], seq_len: int) -> None:
    furthest = max(seq_len, 2)
    distance = np.geomspace(1, furthest, 200)
    ranked = sorted(slopes, reverse=True)
    labeled = [slope for slope in ranked if len(ranked) <= 8 or "/" in fraction(slope)]
    for rank, slope in enumerate(ranked):
        fade = 1 - 0.6 * rank / max(len(ranked) - 1, 1)
        axes.plot(distance, np.exp(-slope * distance), color=color_of("alibi"), alpha=fade, linewidth=1.4)
        if slope in labeled and 1 <= half_life(slope) <= furthest:
            axes.plot([half_life(slope)], [0.5], "o", color=color_of("alibi"), markersize=3)
            axes.annotate(fraction(slope), (half_life(slope), 0.5), (3, 3), textcoords="offset points", fontsize=7.5)
    axes.set_title("factor of a key, e^(−m·distance)", pad=8, x=-0.11)
    axes.set_xscale("log", base=2)
    last = math.floor(math.log2(furthest))
    ticks(axes.xaxis, [2.0**p for p in range(last % 2 if last > 6 else 0, last + 1, 2 if last > 6 else 1)])
    axes.set_xlabel("distance in tokens, log scale")
    axes.set_yticks([0, 0.5, 1])
    axes.set_ylim(0, 1.04)
    axes.set_xlim(1, furthest)
    axes.grid(axis="y")
