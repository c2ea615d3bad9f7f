"""Perplexities as CSV, Markdown and LaTeX, and two methods compared, against the formulas of the made-up records."""

import csv
import io
import math

import pytest
from made_up_records import changed
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.records import Record
from alibi_lab.report.exports import compared, exported, rows


def true_perplexity(method: str, length: int, seeds: int = 1) -> float:
    """As in conftest: nats at 128, and what every doubling adds; the mean over seeds, which differ by 0.01 nats."""
    start, growth = {"alibi": (2.00, -0.012), "rotary": (1.87, 0.30)}[method]
    nats = [start + 0.01 * seed + growth * math.log2(length / 128) for seed in range(seeds)]
    return sum(map(math.exp, nats)) / seeds


def noisy(record: Record, by: float) -> Record:
    """The evaluation with losses that are higher by this number of nats."""
    higher = [nats + by for nats in record.curves["by_length"]["nonoverlapping_nats"]]
    return changed(record, "curves", "by_length", nonoverlapping_nats=higher)


def test_csv_has_one_row_per_perplexity_with_the_range_of_the_seeds(made_up) -> None:
    found = list(csv.DictReader(io.StringIO(exported(made_up(seeds=3), "csv"))))
    assert len(found) == len(list(rows(made_up(seeds=3))))
    [one] = [
        row for row in found if (row["method"], row["window"], row["length"]) == ("rotary", "nonoverlapping", "512")
    ]
    assert float(one["perplexity"]) == pytest.approx(true_perplexity("rotary", 512, seeds=3))
    assert float(one["lowest"]) == pytest.approx(true_perplexity("rotary", 512))
    assert (one["trained"], one["seeds"]) == ("128", "3")


def test_markdown_and_latex_have_a_cell_per_length_and_the_lowest_bold(made_up) -> None:
    made = made_up(methods=("rotary", "alibi"))
    shown = f"{true_perplexity('alibi', 512):.3f}"
    line = next(one for one in exported(made, "markdown").splitlines() if one.startswith("|ALiBi|"))
    assert line.split("|")[4] == f"**{shown}**"
    latex = exported(made, "latex")
    assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") >= 1
    row = next(one for one in latex.splitlines() if one.startswith("ALiBi & "))
    assert row.endswith(" \\\\")
    assert row.split(" & ")[3] == f"\\textbf{{{shown}}}"


def test_two_methods_are_compared_over_paired_seeds(made_up) -> None:
    made = made_up(methods=("rotary", "alibi"), seeds=3)
    alibi = [one for one in made if "alibi" in one.name and one.kind == "evaluation"]
    shaken = [
        *(one for one in made if one not in alibi),
        *(noisy(one, by) for one, by in zip(alibi, (-0.1, 0, 0.1), strict=True)),
    ]
    found = {one.length: one for one in compared(shaken, "alibi", "rotary") if one.window == "nonoverlapping"}
    for length, one in found.items():
        log = math.log(true_perplexity("alibi", length) / true_perplexity("rotary", length))
        assert one.ratio == pytest.approx(math.exp(log))
        half = 4.302653 * 0.1 / math.sqrt(3)  # Student's quantile for two degrees of freedom; s = 0.1
        assert one.bounds is not None
        assert math.log(one.bounds.low) <= log - half + 1e-6
        assert math.log(one.bounds.high) >= log + half - 1e-6
    assert found[128].word == "open"  # 0.13 nats apart, ± 0.25
    assert found[2048].word == "lower"
    other = {one.length: one.word for one in compared(shaken, "rotary", "alibi") if one.window == "nonoverlapping"}
    assert other[2048] == "higher"


def test_one_seed_decides_nothing_and_unknown_methods_are_named(made_up) -> None:
    made = made_up(methods=("rotary", "alibi"))
    assert {(one.bounds, one.word) for one in compared(made, "alibi", "rotary")} == {(None, "open")}
    with pytest.raises(
        ValueError, match="no study tested alibi and t5, trained at one length; these records have alibi, rotary"
    ):
        compared(made, "alibi", "t5")
    with pytest.raises(ValueError, match="no evaluation of a language model is among these records"):
        exported([], "csv")


def test_the_command_prints_them(made_up, tmp_path) -> None:
    for one in made_up(methods=("rotary", "alibi"), seeds=2):
        records.save(one, tmp_path)

    def report(*options: str) -> str:
        result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["report", str(tmp_path), *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert report("--csv").splitlines()[0] == "study,text,method,trained,window,length,seeds,perplexity,lowest,highest"
    assert "|ALiBi|" in report("--markdown")
    assert "\\toprule" in report("--latex")
    shown = report("--compare", "alibi,rotary")
    assert "nonoverlapping" in shown
    assert max(map(len, shown.splitlines())) <= 80
    for wrong, words in (
        (["--csv", "--latex"], "--csv and --latex print different things"),
        (["--compare", "alibi"], "must be two methods"),
    ):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", str(tmp_path), *wrong])
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
