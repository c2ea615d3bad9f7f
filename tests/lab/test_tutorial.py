"""The tutorial of docs/lab.md, run as written, with smaller trainings."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.main import app

DOCUMENT = Path(__file__).parents[2] / "docs" / "lab.md"


def test_your_own_method_in_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = DOCUMENT.read_text("utf-8").partition("## Your own method in ten minutes")[2].partition("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    commands = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert code
    assert commands
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(code[1], encoding="utf-8")
    Path("novel.txt").write_text("It was the best of times, it was the worst of times. " * 200)
    run, evaluate = (line.partition("#")[0].split()[1:] for line in commands[1].splitlines())
    trained = CliRunner().invoke(app, [*run, "--scale", "smoke", "--text", "novel.txt"])
    assert trained.exit_code == 0, trained.output
    page = Path("runs/mine/report.html").read_text("utf-8")
    assert "square root" in page
    assert "--own-7b1fa2: #7b1fa2" in page
    assert "var(--own-7b1fa2)" in page
    names = {record.config["model"]["method"] for record in records.find(Path("runs/mine/records"))}
    assert names == {"alibi", "rotary", "mine.py:SquareRoot"}
    tested = CliRunner().invoke(app, [*evaluate, "--lengths", "16,32", "--tokens", "64"])
    assert tested.exit_code == 0, tested.output
    assert "square root" in tested.output
