"""The biases of the heads (Press et al. 2022, fig. 3), one picture per head, and the decay of their factors.

The bias −m·|i − j| is drawn in full color where it is 0 and without color where its factor e^(−m·|i − j|) is 1e-6 or less.
"""

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alibi_attn import alibi_slopes
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import STYLE, Plot, color_of
from alibi_lab.report.tables.table import NEGLIGIBLE, fraction, half_life

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
    slopes, below = alibi_slopes(num_heads).tolist(), 2.6
    with matplotlib.rc_context(STYLE):
        figure = _biases(slopes, seq_len, below=below)
        height = figure.get_figheight()
        _draw_factors(figure.add_axes((0.1, 0.4 / height, 0.85, (below - 0.85) / height)), slopes, seq_len)
    return figure


def pictures(num_heads: int, seq_len: int, furthest: int) -> tuple[Plot, Plot]:
    """The biases over `seq_len` tokens, and the factors up to the distance `furthest`."""
    slopes = alibi_slopes(num_heads).tolist()
    with matplotlib.rc_context(STYLE):
        biases, factors = _biases(slopes, seq_len), Figure(figsize=(_WIDTH, 3.1))
        _draw_factors(factors.add_axes((0.1, 0.155, 0.86, 0.745)), slopes, furthest)
    return (
        Plot(
            biases,
            "The bias of each head",
            f"Queries run down and keys to the right, {seq_len:,} each. Full color is no penalty; no color is a factor of one "
            "in a million or less.",
            f"The causal biases of {num_heads} heads over {seq_len:,} tokens: from a thin diagonal to a full triangle.",
        ),
        Plot(
            factors,
            "How fast each head forgets",
            "The factor by which the bias multiplies the weight of a key. Dots mark the half-life, labeled with the slope.",
            f"The factor of a key by distance, for each of {num_heads} heads: steep heads forget within a few tokens.",
        ),
    )


def _biases(slopes: list[float], seq_len: int, *, below: float = 0.0) -> Figure:
    """A grid with one picture per head, and empty space of this many inches below it."""
    columns = min(len(slopes), 4 if len(slopes) <= 16 else 8)
    row = _WIDTH / max(columns, 3) + 0.18
    step = 1 / columns
    box = 0.02 * step, step, 0.96 * step, 0.04, 0.78
    figure, each = drawing.grid(len(slopes), columns, row, box, below=below)
    places = np.linspace(0, seq_len - 1, min(seq_len, _PIXELS))
    distance = places[:, None] - places[None, :]
    for slope, axes in zip(slopes, each, strict=True):
        strength = np.where(distance >= 0, 1 + slope * distance / math.log(NEGLIGIBLE), 0.0)
        axes.imshow(drawing.tinted(strength), extent=(0, 1, 0, 1))
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=True, linewidth=0.6)
        title, size = (f"m = {fraction(slope)}", 8.5) if len(slopes) <= 16 else (fraction(slope), 5.5)
        axes.set_title(title, fontsize=size, pad=3, loc="center")
    return figure


def _draw_factors(axes: Axes, slopes: list[float], seq_len: int) -> None:
    furthest = max(seq_len, 2)
    distance = np.geomspace(1, furthest, 200)
    for rank, slope in enumerate(sorted(slopes, reverse=True)):
        fade = 1 - 0.6 * rank / max(len(slopes) - 1, 1)
        axes.plot(distance, np.exp(-slope * distance), color=color_of("alibi"), alpha=fade, linewidth=1.4)
        if (len(slopes) <= 8 or "/" in fraction(slope)) and 1 <= half_life(slope) <= furthest:
            axes.plot([half_life(slope)], [0.5], "o", color=color_of("alibi"), markersize=3)
            axes.annotate(fraction(slope), (half_life(slope), 0.5), (3, 3), "data", "offset points", fontsize=7.5)
    axes.set_title("factor of a key, e^(−m·distance)", pad=8, x=-0.11)
    axes.set_xscale("log", base=2)
    last = math.floor(math.log2(furthest))
    step = 2 if last > 6 else 1
    drawing.ticks(axes.xaxis, [2.0**power for power in range(last % step, last + 1, step)])
    axes.set(xlabel="distance in tokens, log scale", xlim=(1, furthest), ylim=(0, 1.04), yticks=[0, 0.5, 1])
    axes.grid(axis="y")
