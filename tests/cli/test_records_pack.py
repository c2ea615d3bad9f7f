"""`alibi records pack`: collects record files, and `alibi report` reads the packed file."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.main import app


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_records_are_packed_and_reported_and_never_replaced_unasked(tmp_path: Path) -> None:
    old, new = (records.make("benchmark", "mine", config={}, metrics={"ms": ms}) for ms in (1.0, 2.0))
    out = tmp_path / "mine.jsonl"
    records.save(old, tmp_path / "old")
    records.save(new, tmp_path / "new")
    assert run("records", "pack", tmp_path / "old", "--out", out).endswith("mine.jsonl: 1 records, 1 of them new")
    with pytest.raises(FileExistsError, match="pass --replace to replace it"):
        run("records", "pack", tmp_path / "new", "--out", out)
    assert run("records", "pack", tmp_path / "new", "--out", out, "--replace").endswith("1 records, 0 of them new")
    assert [one.metrics for one in records.find(out)] == [{"ms": 2.0}]
    run("report", out, "--out", tmp_path / "page.html")
    assert "mine" in (tmp_path / "page.html").read_text()
