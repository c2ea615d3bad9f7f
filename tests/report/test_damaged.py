"""Numbers that no figure expects: the page is drawn without them, or the error names the file."""

import copy
import fnmatch
import functools
import math
import operator
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_records import lines
from made_up_records import changed
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.records import Record, RecordError
from alibi_lab.report.page import report_html
from alibi_lab.report.plots import paper_items as paper
from alibi_lab.report.plots import study as figures
from alibi_lab.report.published import PUBLISHED
from alibi_lab.report.sections import benchmark as benchmarks
from alibi_lab.report.series import studies


@pytest.fixture
def evaluation(made_up: Callable[..., list[Record]]) -> Record:
    (found,) = (record for record in made_up(methods=("alibi",)) if record.kind == "evaluation")
    return found


def test_a_perplexity_that_is_no_float_is_left_out_and_the_others_stay(evaluation: Record) -> None:
    nats = [2000.0, *evaluation.curves["by_length"]["nonoverlapping_nats"][1:]]
    (study,) = studies([changed(evaluation, "curves", "by_length", nonoverlapping_nats=nats)])
    line = figures.figure_of(study, "nonoverlapping").axes[0].lines[0]
    assert list(line.get_xdata()) == [256, 512, 1024, 2048]
    assert line.get_ydata()[0] == pytest.approx(math.exp(nats[1]))


TRAINED, STUDY, COMPARED, BENCHMARK = (
    "certificate#*-layer-0-*", "recall#evaluation-*-alibi-64-seed-0-*", "referee#*-alibi-64-seed-0-9731f880f7b0",
    "attention#benchmark-cpu-noise-*",
)  # fmt: skip
# A record of results/, what stands at some of its places instead (in a column: in every row), and words of its page. Random
# damage, in test_damaged_records.py, rarely finds these places.
DAMAGE = [
    (TRAINED, {"config length": 1}, "Reach of trained heads"),
    (TRAINED, {"config length": 10**30}, "Reach of trained heads"),
    (TRAINED, {"config": {}, "curves heads certified 0": None}, "Reach of trained heads"),
    (TRAINED, {"config": {}, "curves heads certified": None}, "Other records"),
    (TRAINED, {"curves heads true": 0}, "<td>—</td>"),
    (STUDY, {"config model num_heads": 0}, "Perplexity per byte"),
    (STUDY, {"config model num_heads": [4]}, "Perplexity per byte"),
    (STUDY, {"config model num_heads": 10**19}, "Perplexity per byte"),
    (STUDY, {"config train": "long"}, "Other records"),
    (STUDY, {"config train length": 10**19}, "Other records"),
    (STUDY, {"curves by_length length 0": None}, "Perplexity per byte"),
    (STUDY, {"curves by_length sliding_nats": 2000.0}, "∞"),
    (STUDY, {"curves by_length tokens_per_second": 0}, "Evaluated bytes per second"),
    (COMPARED, {"config eval trials": "many"}, "What each method is good for"),
    (COMPARED, {"config eval trials": 0}, "What each method is good for"),
    (COMPARED, {"config eval tasks": [["mqar"], 3]}, "What each method is good for"),
    (COMPARED, {"curves mqar accuracy": None}, "nothing was measured there"),
    (COMPARED, {"curves mqar_by_part answers": 0}, "What each method is good for"),
    (COMPARED, {"curves by_length length": None}, "not evaluated yet"),
    (BENCHMARK, {"curves eager length 0": None}, "Attention on a CPU: noise"),
    (BENCHMARK, {"curves ours forward_ms": 0, "curves ours backward_ms": 0}, "Attention on a CPU: noise"),
    (BENCHMARK, {"curves memory peak_memory_bytes": 0}, "Attention on a CPU: noise"),
]


@pytest.mark.parametrize(("record", "damage", "words"), DAMAGE)
def test_a_page_is_drawn_without_what_cannot_be_drawn(record: str, damage: dict[str, object], words: str) -> None:
    data = copy.deepcopy(next(line for place, line in lines().items() if fnmatch.fnmatch(place, record)))
    for place, value in damage.items():
        *outer, last = [int(name) if name.lstrip("-").isdigit() else name for name in place.split()]
        inner = functools.reduce(operator.getitem, outer, data)
        inner[last] = [value] * len(inner[last]) if outer[:1] == ["curves"] and len(outer) == 2 else value
    fields = {name: data[name] for name in ("kind", "name", "config", "metrics", "curves")}
    assert words in report_html([Record(**fields)])


def test_a_benchmark_without_a_time_is_listed_and_not_drawn() -> None:
    nothing = {"length": [512], "forward_ms": [None]}
    record = Record(kind="benchmark", name="cpu/noise", config={}, metrics={}, curves={"ours": nothing})
    assert not benchmarks.is_drawn(record)
    assert "cpu/noise" in report_html([record])


@pytest.mark.parametrize(
    ("column", "value"), [("pass", 2**40), ("pass", 4), ("context", 2**40), ("token", 0), ("pass", 0.5)]
)
def test_windows_that_cannot_be_are_not_drawn(column, value) -> None:
    labels = list(PUBLISHED["figure-10"].series)
    curves = {label: {"token": [1, 2, 3, 4], "context": [1, 2, 1, 2], "pass": [1, 1, 2, 2]} for label in labels}
    whole = Record(kind="paper-item", name="figure-10", config={}, metrics={}, curves=curves)
    damaged = changed(whole, "curves", labels[0], **{column: [*curves[labels[0]][column][:3], value]})
    drawn = [sum(len(row) for row in paper.pictures(record, {})) for record in (whole, damaged)]
    assert drawn[1] == drawn[0] - 1


@pytest.mark.parametrize("content", [b'{"schema": 1, ', b'{"schema": NaN}'])
def test_one_damaged_record_stops_the_report_and_is_named(content: bytes, made_up, tmp_path: Path) -> None:
    for record in made_up():
        records.save(record, tmp_path / "records")
    bad = tmp_path / "records" / "evaluation-damaged.json"
    bad.write_bytes(content)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert isinstance(result.exception, RecordError)
    assert str(result.exception).startswith(f"{bad} is not JSON (")
    assert not (tmp_path / "page.html").exists()
