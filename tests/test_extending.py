"""Every example of extending/ runs, and the guide names it."""

import copy
import runpy
import sys
from pathlib import Path

import pytest

from alibi_attn.attention.run import dispatch
from alibi_lab.recipes import index
from alibi_lab.report import verdicts

ROOT = Path(__file__).parents[1]
TABLES = {verdicts: ["CLAIMS"], index: ["RECIPES"], dispatch: ["BACKENDS", "RUNS"]}
EXAMPLES = sorted((ROOT / "examples/extending").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_the_guide_names_it(path: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    assert f"`{path.relative_to(ROOT)}`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"python {path.relative_to(ROOT)}" in path.read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", [path.name, str(page)])
    for place, tables in TABLES.items():
        for table in tables:  # an example adds its row to a copy
            monkeypatch.setattr(place, table, copy.copy(getattr(place, table)))
    runpy.run_path(str(path), run_name="__main__")
    assert capfd.readouterr().out or page.stat().st_size > 0
