"""A new benchmark needs one file and one table entry, a new peer one function and one entry; nothing else changes."""

import sys
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.bench import _option, commands
from alibi_lab.measure.benchmarks import BENCHMARKS, Benchmark, Option, lengths
from alibi_lab.report.page import report_html

ROW = Benchmark(
    "Ours compared with a loop over queries.",
    "alibi bench made-up --lengths 8,16",
    (lengths("Tokens, as in 8,16."), Option("peer", "by query", "Which loop.")),
    function="made_up_benchmark:made_up",
)
APP = commands({**BENCHMARKS, "made-up": ROW})
RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the benchmark's file, which is next to this one, importable."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


def test_a_file_and_a_table_entry_make_a_command_whose_records_are_drawn(tmp_path: Path) -> None:
    assert "made-up" in RUNNER.invoke(APP, ["--help"]).output
    assert "Tokens, as in 8,16." in RUNNER.invoke(APP, ["made-up", "--help"]).output
    result = RUNNER.invoke(APP, ["made-up", "--lengths", "8,16", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (record,) = records.find(tmp_path)
    assert (record.kind, record.name) == ("benchmark", "made-up/noise")
    *rows, saved = result.output.splitlines()
    assert [line.partition(",")[0] for line in rows] == [
        f"made-up/noise {peer}: length {length}" for length in (8, 16) for peer in ("ours", "by query")
    ]
    assert saved == f"record {next(tmp_path.iterdir())}"
    for name in ("ours", "by query"):
        assert record.curves[name]["length"] == [8, 16]
        assert all(ms > 0 for way in ("forward_ms", "backward_ms") for ms in record.curves[name][way])
        assert all(error < 1e-5 for error in record.curves[name]["relative_error"])
    assert "Benchmark made-up/noise" in report_html([record])


def test_an_option_has_the_type_of_its_default_and_a_path_is_a_path_on_every_system() -> None:
    made = [_option(Option("made", default, "Made up.")) for default in (Path("runs"), 8, "by query")]
    assert [get_args(parameter.annotation)[0] for parameter in made] == [Path, int, str]


def test_a_wrong_peer_is_reported_and_not_recorded(tmp_path: Path) -> None:
    result = RUNNER.invoke(APP, ["made-up", "--peer", "shifted", "--out", str(tmp_path)])
    assert "at 16 tokens by query is wrong: its output is off" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured() -> None:
    result = RUNNER.invoke(APP, ["made-up", "--out", "/proc/self/records"])
    assert result.exit_code == 1
    assert "cannot be written" in str(result.exception)
    assert "length" not in result.output
