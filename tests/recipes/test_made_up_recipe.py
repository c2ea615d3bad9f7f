"""A new recipe needs a file and a row in the table; it is then checked, trained, evaluated, recorded and drawn."""

import runpy
from pathlib import Path

import pytest

from alibi_lab import records
from alibi_lab.lab.config import ConfigError
from alibi_lab.recipes import index
from alibi_lab.recipes.index import RECIPES
from alibi_lab.report.page import report_html

RECIPE = runpy.run_path(str(Path(__file__).parents[2] / "examples/extending/recipe.py"))["RECIPE"]


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "made-up", RECIPE)


@pytest.mark.usefixtures("row")
def test_a_recipe_of_one_file_and_one_row_is_run_and_drawn(tmp_path: Path) -> None:
    paths = index.run("made-up", out=tmp_path, scale="smoke", overrides={"train.steps": "1"})
    written = [records.load(path) for path in paths]
    assert [(record.kind, record.name) for record in written] == [
        (kind, "made-up/alibi-16/seed-0") for kind in ("training", "evaluation") * 2
    ]
    assert "made-up" in report_html(written)


@pytest.mark.usefixtures("row")
def test_its_fields_are_checked_before_anything_is_written() -> None:
    index.check("made-up", scale="smoke", overrides={"train.steps": "1"})
    with pytest.raises(ConfigError, match=r"there is no field 'train.stepz'"):
        index.check("made-up", scale="smoke", overrides={"train.stepz": "1"})


def test_every_row_of_the_table_is_named_after_its_recipe() -> None:
    assert {name: recipe.name for name, recipe in RECIPES.items()} == {name: name for name in RECIPES}
