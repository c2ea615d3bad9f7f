"""A new position method needs a class and one row in each of two tables; it is then trained, evaluated and drawn."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import alibi_lab
from alibi_lab.lab.config import ConfigError, ModelConfig
from alibi_lab.lab.model.positions import METHODS
from alibi_lab.position_methods import LOOKS

PACKAGE = Path(alibi_lab.__file__).parent
CLASS = """
class NearestFirst(PositionMethod):
    \"\"\"−d²/1000: a bias that no method of the lab has.\"\"\"

    def bias(self, at: Pass) -> Tensor | None:
        distance = torch.arange(at.key_len)[-at.query_len :, None] - torch.arange(at.key_len)
        return (-(distance**2) / 1000.0).masked_fill(distance < 0, -float("inf")).expand(2, -1, -1)
"""
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
(run,) = (run for run in RECIPE.runs("smoke") if run.model.method == "made-up")
assert override(run, {"model.method": "made-up"}) == run
recipe = type(RECIPE)(**{**vars(RECIPE), "runs": lambda scale: (run,)})
index.RECIPES["m"] = recipe
found = [records.load(path) for path in index.run("m", out=folder / "out", scale="smoke")]
assert [record.kind for record in found] == ["training", "evaluation"]
assert all(nats > 0 for nats in found[1].curves["by_length"]["nonoverlapping_nats"])
(folder / "page.html").write_text(report_html(found), encoding="utf-8")
"""


def add(path: Path, before: str, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count(before) == 1
    path.write_text(source.replace(before, text + before), encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a copy of the package that has one more method: a class, and a row in each of the two tables."""
    folder = tmp_path_factory.mktemp("made-up")
    shutil.copytree(PACKAGE, folder / "alibi_lab", ignore=shutil.ignore_patterns("__pycache__"))
    table = "METHODS: dict[Method, type[PositionMethod]] = {\n"
    positions, looks = folder / "alibi_lab/lab/model/positions.py", folder / "alibi_lab/position_methods.py"
    add(positions, table, CLASS)
    add(positions, '    "none": NoPositions,\n', '    "made-up": NearestFirst,\n')
    add(looks, '    "none": ', '    "made-up": Look("a made-up method", "#123456", "#abcdef", "4"),\n')
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert ran.returncode == 0, ran.stderr
    return (folder / "page.html").read_text(encoding="utf-8")


def test_every_method_has_a_class_and_a_row() -> None:
    assert list(METHODS) == list(LOOKS)


def test_a_name_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.method is 'made-up'.*pass one of none, sinusoidal"):
        ModelConfig(method="made-up")


def test_a_method_of_two_files_is_trained_evaluated_and_drawn(page: str) -> None:
    assert "--made-up: #123456;" in page
    assert "--made-up: #abcdef;" in page
    assert "stroke: var(--made-up)" in page
    readings = re.findall(r"a made-up method: [\d.,]+ at (\d+)", page)
    assert {"16", "64"} <= set(readings)
    assert "<b>a made-up method</b><strong>" in page
