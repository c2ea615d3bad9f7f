"""A new backend is a file and a table row: it then runs by name, is explained, and passes the conformance cases."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from programs import printed

import alibi_attn

PACKAGE = Path(alibi_attn.__file__).parent
EXAMPLE = Path(__file__).parents[2] / "examples/extending/attention_backend.py"
PROGRAM = """
import sys
from pathlib import Path
import torch
import alibi_attn
from attention_cases import CASES
from attention_checks import answer, assert_exact
from alibi_attn import alibi_attention, explain
assert Path(sys.argv[1]) in Path(alibi_attn.__file__).parents
for case in CASES:
    assert_exact(case, torch.float32, answer(case, torch.float32, backend="made-up"), tolerance=2.0**-28)
q = torch.randn(1, 2, 40, 8)
lines = str(explain(q, q, q, backend="made-up")).splitlines()
assert any(line.split(maxsplit=1) == ["made-up", "runs (named by the caller)"] for line in lines), lines
try:
    alibi_attention(q, q, q, dropout_p=0.1, backend="made-up")
    raise AssertionError("dropout was ignored")
except ValueError as error:
    assert "backend 'made-up' cannot run this: it does not compute dropout_p" in str(error)
"""


def add(path: Path, before: str, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count(before) == 1, f"{path.name} has {source.count(before)} times {before!r}"
    path.write_text(source.replace(before, text + before), encoding="utf-8")


def test_a_made_up_backend_passes_the_conformance_cases(tmp_path: Path) -> None:
    """In a copy of the package: one new file, and the import and the row in dispatch.py."""
    shutil.copytree(PACKAGE, tmp_path / "alibi_attn", ignore=shutil.ignore_patterns("__pycache__"))
    backend = EXAMPLE.read_text(encoding="utf-8").split("\n\nif __name__")[0]
    (tmp_path / "alibi_attn/attention/backends/made_up.py").write_text(backend, encoding="utf-8")
    dispatch = tmp_path / "alibi_attn/attention/run/dispatch.py"
    add(
        dispatch,
        "from alibi_attn.attention.backends.native import build\n",
        "from alibi_attn.attention.backends import made_up\n",
    )
    add(dispatch, "reference, dense", "made_up, ")
    oracles = Path(__file__).parents[1] / "support" / "oracles"
    printed("-c", PROGRAM, tmp_path, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(oracles)]))


def test_the_example_runs_as_its_first_lines_say() -> None:
    said = printed(EXAMPLE)
    assert float(said.splitlines()[0].split(":")[1]) < 1e-5
    assert "does not compute dropout_p" in said
    assert "made-up    runs (named by the caller)" in said


def test_without_its_row_a_name_is_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="backend is 'made-up' but must be 'auto' or one of 'reference'"):
        alibi_attn.alibi_attention(q, q, q, backend="made-up")
