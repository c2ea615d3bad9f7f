"""A new position method needs a file and a row; it is then trained, evaluated and drawn."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import alibi_lab

PACKAGE = Path(alibi_lab.__file__).parent
EXAMPLE = Path(__file__).parents[2] / "examples/extending/distance_squared.py"
ROW = re.search(r'^    "squared": Look\(.*\),\n', EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE)
PROGRAM = """
import sys
from pathlib import Path
import alibi_lab
from alibi_lab import records
from alibi_lab.lab.config_io import override
from alibi_lab.recipes import index
from alibi_lab.recipes.methods import RECIPE
from alibi_lab.report.page import report_html
folder = Path(sys.argv[1])
assert folder in Path(alibi_lab.__file__).parents
(run,) = (run for run in RECIPE.runs("smoke") if run.model.method == "squared")
assert override(run, {"model.method": "squared"}) == run
recipe = type(RECIPE)(**{**vars(RECIPE), "runs": lambda scale: (run,)})
index.RECIPES["m"] = recipe
found = [records.load(path) for path in index.run("m", out=folder / "out", scale="smoke")]
assert [record.kind for record in found] == ["training", "evaluation"]
assert all(nats > 0 for nats in found[1].curves["by_length"]["nonoverlapping_nats"])
(folder / "page.html").write_text(report_html(found), encoding="utf-8")
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a copy of the package that has one more method: a file and a row."""
    folder = tmp_path_factory.mktemp("made-up")
    shutil.copytree(PACKAGE, folder / "alibi_lab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(EXAMPLE, folder / "alibi_lab/lab/model")
    table, row = folder / "alibi_lab/position_methods.py", "LOOKS = {\n"
    assert ROW is not None
    table.write_text(table.read_text(encoding="utf-8").replace(row, row + ROW[0], 1), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert ran.returncode == 0, ran.stderr
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_method_of_one_file_and_one_row_is_trained_evaluated_and_drawn(page: str) -> None:
    assert "--squared: #0c5a7a;" in page
    assert "--squared: #7fd0f0;" in page
    assert "stroke: var(--squared)" in page
    readings = re.findall(r"squared distances: [\d.,]+ at (\d+)", page)
    assert {"16", "64"} <= set(readings)
    assert "<b>squared distances</b><strong>" in page
