"""A new benchmark needs one file and one table entry, a new peer one function and one entry; nothing else changes."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.bench import commands
from alibi_lab.measure.benchmarks import BENCHMARKS, Benchmark
from alibi_lab.measure.inputs import GATES, KINDS
from alibi_lab.report.page import report_html

EXAMPLES = Path(__file__).parents[2] / "examples/extending"
ROW = Benchmark("--lengths 8,16", function="benchmark:made_up")
TYPED = Benchmark("--count 3", function=f"{__name__}:typed")
APP = commands({**BENCHMARKS, "made-up": ROW, "typed": TYPED})
RUNNER = CliRunner()


def typed(
    out: Path,
    *,
    count: int = 8,
    share: float = 0.5,
    folder: Path = Path("runs"),
    texts: Sequence[Path] = (),
    heads: Sequence[tuple[int, int]] = (),
    flag: bool = False,
    unlisted: str = "",
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Says its arguments.

    Args:
        count: a whole number.
        share: a number.
        folder: a path.
        texts: paths.
        heads: pairs.
        flag: whether.
    """
    say(repr((count, share, folder, texts, heads, flag)))
    return []


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the example importable, and this file by its name."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), str(Path(__file__).parent), *sys.path])


def test_a_file_and_a_table_entry_make_a_command_whose_records_are_drawn(tmp_path: Path) -> None:
    words = " ".join(RUNNER.invoke(APP, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert "made-up Ours compared with a loop over queries." in words
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
        forward, backward = (record.curves[name][way] for way in ("forward_ms", "backward_ms"))
        # Backward is a step less its forward, which noise may exceed in so short a call.
        assert all(ms > 0 and ms + more > 0 for ms, more in zip(forward, backward, strict=True))
        assert all(error < 1e-5 for error in record.curves[name]["relative_error"])
    assert "Benchmark made-up/noise" in report_html([record])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_argument_of_a_benchmark_is_an_option_with_a_help(name: str) -> None:
    """An argument that is documented in another form has no option, which nothing else would tell."""
    shown = " ".join(RUNNER.invoke(APP, [name, "--help"], env={"COLUMNS": "200"}).output.split())
    place = BENCHMARKS[name].function or f"alibi_lab.measure.{name}:{name}".replace("-", "_")
    module, _, function = place.partition(":")
    arguments = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    for argument in arguments.keys() - {"out", "say"}:
        assert re.search(rf"--{argument.replace('_', '-')}( --no-{argument})? <?[\w-]+", shown), (name, argument)
    assert f"Example: alibi bench {name} {BENCHMARKS[name].example}" in shown
    assert "--out <path> Folder for the records. [default: results]" in shown


def test_the_help_names_every_kind_of_input() -> None:
    shown = " ".join(RUNNER.invoke(APP, ["attention", "--help"], env={"COLUMNS": "200"}).output.split())
    for kind in KINDS.keys() - GATES.keys():
        assert re.search(rf"[ (]{kind}[ ,(;.]", shown), kind


def test_options_arrive_as_the_types_of_the_arguments(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    given = "--count 3 --share 1 --folder x --texts a --texts b --heads 16x128,32x64 --flag"
    for options, arguments in (
        (given, (3, 1.0, Path("x"), [Path("a"), Path("b")], [(16, 128), (32, 64)], True)),
        ("", (8, 0.5, Path("runs"), (), (), False)),
    ):
        assert RUNNER.invoke(APP, ["typed", *options.split(), *out]).output == f"{arguments}\n"
    assert "16y128" in str(RUNNER.invoke(APP, ["typed", "--heads", "16y128", *out]).exception)
    assert RUNNER.invoke(APP, ["typed", "--count", "0"]).exit_code == 2
    assert RUNNER.invoke(APP, ["typed", "--unlisted", "x"]).exit_code == 2


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured() -> None:
    result = RUNNER.invoke(APP, ["made-up", "--out", "/proc/self/records"])
    assert result.exit_code == 1
    assert "cannot be written" in str(result.exception)
    assert "length" not in result.output
