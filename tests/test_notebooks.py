"""The notebooks run from the first cell to the last, offline, and every figure they end a cell with can be drawn."""

import ast
import json
import types
from pathlib import Path

import pytest
from matplotlib.figure import Figure

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))


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
