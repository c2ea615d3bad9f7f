"""The paper's items: our numbers and the paper's appear side by side and are never mixed."""

import dataclasses
import re

import numpy as np
import pytest
from made_up_records import answer
from markupsafe import Markup

from alibi_lab.records import Record
from alibi_lab.report import answers, page
from alibi_lab.report.plots import paper_items as paper
from alibi_lab.report.published import PUBLISHED
from alibi_lab.report.section import Archive, Section
from alibi_lab.report.tables import paper as paper_tables


def _cells(table, block: str, label: str) -> list[str]:
    (found,) = (b for b in table.blocks if b.title.startswith(block))
    (cells,) = (cells for name, _, cells in found.rows if name == label)
    return [cell.text for cell in cells]


def _drawn(picture, label: str = ""):
    """The named lines of a figure, or the one with this name."""
    (axes,) = picture.figure.axes
    found = [line for line in axes.lines if not line.get_label().startswith("_")]
    return next(line for line in found if line.get_label() == label) if label else found


def test_a_change_is_over_the_trained_length_against_its_multiples() -> None:
    # Our perplexities are the paper's divided by five, at an eighth of its lengths.
    nonoverlapping, sliding = paper.pictures(answer("figure-1"), {})[0]
    published = PUBLISHED["figure-1"].series["ALiBi, L = 512"]
    for name in ("ALiBi", "ALiBi, the paper"):
        line = _drawn(nonoverlapping, name)
        np.testing.assert_allclose(line.get_ydata(), np.array(published["perplexity"]) / 19.73)
        np.testing.assert_allclose(line.get_xdata(), np.array(published["length"]) / 512)
    there = _drawn(sliding, "ALiBi, the paper")
    np.testing.assert_allclose(there.get_ydata(), np.array([17.98, 17.92, 18.2, 18.28, 18.3]) / 17.98)


def test_models_of_many_lengths_are_over_the_shortest_sinusoidal_one() -> None:
    together = paper.pictures(answer("figure-4", growth=3), {})[0][0]
    for name in ("ALiBi 128", "ALiBi 1,024, the paper"):
        line = _drawn(together, name)
        np.testing.assert_allclose(line.get_xdata(), [2, 3, 4, 6])
        np.testing.assert_allclose(line.get_ydata(), np.array([18.66, 18.2, 18.05, 17.96]) / 20.05)
    assert "sinusoidal's at L = 512" in together.figure.axes[0].get_title("left")


def test_speeds_are_over_sinusoidal_or_over_the_shortest_length() -> None:
    speed = _drawn(paper.pictures(answer("figure-2"), {})[0][0], "T5 Bias, the paper")
    np.testing.assert_allclose(speed.get_ydata(), [14400 / 28500, 13000 / 26000, 4300 / 15300])
    assert speed.get_xdata().tolist() == [512, 1024, 3072]
    by_length = _drawn(paper.pictures(answer("figure-7"), {})[0][0], "ALiBi")
    np.testing.assert_allclose(by_length.get_ydata(), [1, 25800 / 28300, 15500 / 28300])


def test_figures_show_the_papers_numbers_and_ours() -> None:
    ours, _, theirs, sliding = paper.pictures(answer("figure-1"), {})[1]
    alibi = _drawn(ours, "ALiBi")
    np.testing.assert_allclose(
        alibi.get_ydata(), np.array(PUBLISHED["figure-1"].series["ALiBi, L = 512"]["perplexity"]) / 5
    )
    assert alibi.get_xdata()[0] == 64
    assert _drawn(theirs, "ALiBi, the paper").get_ydata()[-1] == 18.31
    assert _drawn(sliding, "ALiBi, the paper").get_ydata().tolist() == [17.98, 17.92, 18.2, 18.28, 18.3]


def test_rows_that_the_paper_cites_are_never_ours() -> None:
    table = paper_tables.pair_table(answer("table-7"))
    assert _cells(table, "Ours", "Transformer-XL (Dai et al., 2019)")[0] == paper_tables.CITED
    assert _cells(table, "The paper", "Transformer-XL (Dai et al., 2019), cited") == ["257,000,000", "—", "18.30"]
    assert _cells(table, "Ours", "ALiBi, L = 3072, L_valid = 3072")[1:] == ["3.394", "3.532"]


def test_the_frontier_is_over_the_sinusoidal_model() -> None:
    ((together,), (ours, *_)) = paper.pictures(answer("figure-8"), {})
    assert _drawn(together, "ALiBi 512, the paper").get_xydata()[0].tolist() == pytest.approx(
        [28300 / 15300, 18.4 / 18.67]
    )
    assert ours.figure.axes[0].get_xscale() == "log"


def test_slopes_that_differ_are_counted() -> None:
    name = "slopes equal to the paper's, to the last bit"
    assert dict(answers.facts(answer("figure-3")))[name] == "24 of 24"
    wrong = answer("figure-3")
    eight = {**wrong.curves["ALiBi, 8 heads"], "slope": [0.4] + [2.0**-n for n in range(2, 9)]}
    wrong = dataclasses.replace(wrong, curves={**wrong.curves, "ALiBi, 8 heads": eight})
    assert dict(answers.facts(wrong))[name] == "23 of 24"


def test_a_label_that_the_paper_does_not_have_is_left_out() -> None:
    odd = Record(kind="paper-item", name="figure-99", config={}, metrics={})
    assert not answers.is_drawn(odd)
    assert answers.is_drawn(answer("figure-2"))


def test_the_list_of_records_has_each_once_with_its_section() -> None:
    one, two = answer("figure-1"), answer("table-2")
    archive = Archive([two, one, one])
    section = page.record_list(
        archive, [Section("p0", "The paper", "Figure 1", Markup(), records=[archive.records[1]])]
    )
    names = re.findall(r'<th scope="row">paper-item</th><td>(.*?)</td>', section.body)
    assert names == ['<a href="#p0">figure-1</a>', "table-2"]
    assert answers.unanswered([one, dataclasses.replace(two, name="table-2/again")])[:2] == ["figure 2", "figure 3"]
    assert answers.unanswered([]) == []


def test_a_row_that_the_paper_cites_and_that_was_run_has_its_numbers() -> None:
    record, label = answer("table-7"), "Staged Training (Press et al., 2021)"
    curves = {
        **record.curves,
        label: {"parameters": [8.0], "valid_perplexity": [5.0], "test_perplexity": [6.0], "seeds": [2]},
    }
    record = dataclasses.replace(record, curves=curves)
    table = paper_tables.pair_table(record)
    assert _cells(table, "Ours", label) == ["8", "5.000", "6.000"]
    assert _cells(table, "The paper", f"{label}, cited")[2] == "17.56"
    assert dict(answers.facts(record))["seeds per number"] == "2"
