"""Figures show exactly the recorded numbers, and the SVG fits any page."""

import html
import json
import math
import re

import numpy as np
import pytest
from made_up_records import changed
from matplotlib.colors import to_hex

from alibi_attn.slopes import alibi_slopes
from alibi_lab.report import plot_alibi_bias
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots import study as figures
from alibi_lab.report.series import studies
from alibi_lab.report.tables.table import fraction, half_life, number


def _line(figure, color):
    (axes,) = figure.axes
    return next(line for line in axes.lines if line.get_color() == color and len(line.get_xdata()) > 2)


def test_perplexity_is_exp_of_the_recorded_loss(made_up) -> None:
    (study,) = studies(made_up())
    for mode, less in (("nonoverlapping", 0.0), ("sliding", 0.05)):
        line = _line(figures.figure_of(study, mode), drawing.color_of("alibi"))
        expected = [math.exp(2.0 - 0.012 * doublings - less) for doublings in range(5)]
        np.testing.assert_array_equal(line.get_xdata(), [128, 256, 512, 1024, 2048])
        np.testing.assert_allclose(line.get_ydata(), expected)


def test_several_seeds_are_drawn_as_mean_and_full_band(made_up) -> None:
    (study,) = studies(made_up(methods=("alibi",), seeds=3))
    figure = figures.figure_of(study, "nonoverlapping")
    seeds = np.exp([2.0, 2.01, 2.02])
    assert _line(figure, drawing.color_of("alibi")).get_ydata()[0] == pytest.approx(seeds.mean())
    (band,) = figure.axes[0].collections
    at_first = [y for path in band.get_paths() for x, y in path.vertices if x == 128]
    assert min(at_first) == pytest.approx(seeds[0])
    assert max(at_first) == pytest.approx(seeds[2])


def test_nothing_is_smoothed_or_left_out(made_up) -> None:
    (study,) = studies(made_up(methods=("t5",)))
    np.testing.assert_allclose(
        _line(figures.figure_of(study, "training"), drawing.color_of("t5")).get_ydata() * math.log(2),
        [1.93 + 60 / step for step in (10, 20, 30, 40)],
    )
    line = _line(figures.figure_of(study, "position"), drawing.color_of("t5"))
    assert line.get_xdata().tolist() == [2**power for power in range(12)]


def test_positions_with_few_tokens_are_joined(made_up) -> None:
    """Of twelve positions the first three have 4, 12 and 20 tokens, and the last has too few to stand alone."""
    (found,) = (record for record in made_up(methods=("t5",)) if record.kind == "evaluation")
    curve = found.curves["by_position"]
    counts = np.array([4, 12, 20] + [64] * 8 + [3])
    (study,) = studies([changed(found, "curves", "by_position", tokens=counts.tolist())])
    line = _line(figures.figure_of(study, "position"), drawing.color_of("t5"))
    at, losses = (np.array(curve[name]) for name in ("position", "loss_nats"))
    parts = [slice(0, 3), *(slice(k, k + 1) for k in range(3, 10)), slice(10, 12)]
    for values, drawn in ((at, line.get_xdata()), (losses / math.log(2), line.get_ydata())):
        np.testing.assert_allclose(drawn, [np.average(values[part], weights=counts[part]) for part in parts])


def test_losses_are_nats_where_a_token_is_no_byte(made_up) -> None:
    (study,) = studies(made_up(methods=("t5",), bytes_per_token=4.2))
    figure = figures.figure_of(study, "training")
    assert figure.axes[0].get_title("left") == "nats per token"
    assert _line(figure, drawing.color_of("t5")).get_ydata()[0] == pytest.approx(1.93 + 6)


def test_memory_begins_at_zero(made_up) -> None:
    (study,) = studies(made_up())
    assert figures.figure_of(study, "memory").axes[0].get_ylim()[0] == 0


def test_values_can_be_read_at_every_point_of_a_line(made_up) -> None:
    (study,) = studies(made_up(methods=("alibi",)))
    figure = figures.figure_of(study, "nonoverlapping")
    text = drawing.svg(figure, "p", "")
    (given,) = re.findall(r"data-readings='([^']*)'", text)
    readings = json.loads(html.unescape(given))
    assert [title for _, _, title in readings] == [
        f"ALiBi: {math.exp(2.0 - 0.012 * doublings):.4g} at {128 * 2**doublings:,}" for doublings in range(5)
    ]
    markers = re.findall(r'<use xlink:href="#p-[^"]*" x="([^"]*)" y="([^"]*)" style="fill: var\(--alibi\)', text)
    assert len(markers) == 6  # five points, at which the readings are, and the legend's
    for (*place, _), marker in zip(readings, markers, strict=False):
        assert place == pytest.approx(list(map(float, marker)), abs=0.1)


def test_the_heads_picture_fades_with_the_bias() -> None:
    figure = plot_alibi_bias(8, 64)
    assert len(figure.axes) == 9
    for axes, slope in zip(figure.axes, alibi_slopes(8), strict=False):
        assert axes.get_title("center") == f"m = {fraction(slope)}"
        picture = np.asarray(axes.images[0].get_array())
        assert to_hex(picture[0, 0, :3]) == drawing.color_of("alibi")
        expected = 1 + slope * 10 / math.log(1e-6)
        assert picture[40, 30, 3] == pytest.approx(max(expected, 0))
        assert picture[40, 40, 3] == 1
        assert picture[30, 40, 3] == 0  # the future


@pytest.mark.parametrize("num_heads", [1, 3, 6, 12, 16, 71])
def test_any_number_of_heads_can_be_drawn(num_heads: int) -> None:
    assert len(plot_alibi_bias(num_heads, 1).axes) == num_heads + 1
    assert len(plot_alibi_bias(num_heads, 300).axes) == num_heads + 1


def test_bad_head_counts_and_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="seq_len is 0"):
        plot_alibi_bias(8, 0)
    with pytest.raises(ValueError, match="at least 1 head"):
        plot_alibi_bias(0, 8)


def test_numbers_of_any_size_are_short() -> None:
    assert [fraction(slope) for slope in (0.5, 1.0, 2**-8, 2**-0.5, 0)] == ["1/2", "1", "1/256", "0.707", "0"]
    values = (7.02, 17.23, 2345.6, 999_999.0, 2_725_764.0, 9.999e9, math.inf)
    assert list(map(number, values)) == ["7.020", "17.23", "2,346", "999,999", "2.73·10⁶", "1.00·10¹⁰", "∞"]
    assert math.exp(-0.125 * half_life(0.125)) == pytest.approx(0.5)
    assert half_life(0.0) == math.inf
