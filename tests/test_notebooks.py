"""The notebooks run from the first cell to the last, offline, and every figure they end a cell with can be drawn."""

import ast
import json
import re
import types
from pathlib import Path

import pytest
from matplotlib.figure import Figure

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))
MAX_PICTURE_CHARACTERS = 60_000  # of base64


def cells(path: Path) -> list[str]:
    """The source of the code cells, without the magic commands of IPython, at the scale of a test."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = [source.replace('SCALE = "small"', 'SCALE = "smoke"') for source in sources]
    return ["".join(line for line in source.splitlines(True) if not line.startswith("%")) for source in sources]


def run_cell(source: str, name: str, names: dict[str, object]) -> object:
    """The value of the last expression, as Jupyter shows it."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return None if last is None else eval(compile(last, name, "eval"), names)


def shown(path: Path) -> list[object]:
    module = types.ModuleType("__main__")
    return [run_cell(source, f"{path.name}, cell {n}", vars(module)) for n, source in enumerate(cells(path))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_offline(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figures = [value for value in shown(path) if isinstance(value, Figure)]
    assert figures
    for n, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{n}.png", dpi=50)
        assert (tmp_path / f"{n}.png").stat().st_size > 2000


def assert_outputs_are_small_and_portable(notebook: dict) -> None:
    """Every code cell ran in order; pictures are small; no output names a folder of a machine, a time or a warning."""
    ran = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
    outputs = [output for cell in ran for output in cell["outputs"]]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    assert all(len(picture) < MAX_PICTURE_CHARACTERS for picture in pictures)
    text = "".join(line for output in outputs for line in output.get("text", ()))
    assert "\x1b" not in text
    assert not re.findall(r"(?<!\w)/\w+/|^elapsed|Warning|Error", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_small_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert_outputs_are_small_and_portable(notebook)
    assert "%matplotlib inline" in "".join(notebook["cells"][1]["source"])


@pytest.mark.parametrize("text", ["elapsed: 0.2 s\n", "/somewhere/site-packages/a.py: Warning\n", "\x1b[1mbold"])
def test_an_output_of_one_machine_is_noticed(text):
    picture = {"output_type": "execute_result", "data": {"image/png": "abc"}}
    cell = {"cell_type": "code", "execution_count": 1, "outputs": [picture]}
    assert_outputs_are_small_and_portable({"cells": [cell]})
    printed = {"output_type": "stream", "text": ["a result\n", text]}
    with pytest.raises(AssertionError):
        assert_outputs_are_small_and_portable({"cells": [cell | {"outputs": [picture, printed]}]})


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_jupyter(path, tmp_path, monkeypatch):
    pytest.importorskip("ipykernel", reason="`make test-all` installs the extra notebooks")
    nbclient = pytest.importorskip("nbclient", reason="`make test-all` installs the extra notebooks")
    nbformat = pytest.importorskip("nbformat", reason="`make test-all` installs the extra notebooks")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('SCALE = "small"', 'SCALE = "smoke"')
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert "image/png" in kinds
