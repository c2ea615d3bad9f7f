"""A new backend is a file and a table row: it then runs by name, is explained, and passes the conformance cases."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import alibi_attn

PACKAGE = Path(alibi_attn.__file__).parent
BACKEND = '''
"""Plain torch in fp64, for calls without a bias per key, a table or dropout."""

import torch
from torch import Tensor

from alibi_attn.attention.backends.protocol import TooSmall
from alibi_attn.attention.call.reads import MASKS
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import distances, per_query_head, visible

name = "made-up"
READS = MASKS - {"right_slopes"}  # it has one slope per head


def why_not(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> str | None:
    return None


def too_small(spec: AttentionSpec[Tensor]) -> TooSmall | None:
    return None


def visits(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor | None) -> None:
    return None


def run(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, query.device)
    hidden = ~visible(spec, distance)
    k, v = (per_query_head(spec, x.double()) for x in (key, value))
    slopes = spec.slopes.double().reshape(-1, spec.num_heads, 1, 1)
    scores = spec.scale * (query.double() @ k.mT) - slopes * distance.abs()[:, None]
    scores = scores.masked_fill(hidden, -1e300)
    blind = hidden.all(-1)
    output = (scores.softmax(-1).masked_fill(hidden, 0.0) @ v).to(query.dtype)
    lse = scores.logsumexp(-1).masked_fill(blind, -torch.inf)
    return output, lse if query.dtype == torch.float64 else lse.float()
'''
PROGRAM = """
import sys
from pathlib import Path
import torch
import alibi_attn
from attention_cases import CASES
from attention_checks import answer, assert_exact
from alibi_attn import alibi_attention, explain
assert Path(sys.argv[1]) in Path(alibi_attn.__file__).parents
cases = [case for case in CASES if case.mask != "nan"]
count = 0
for case in cases:
    try:
        answered = answer(case, torch.float32, backend="made-up")
    except ValueError as error:
        assert "backend 'made-up' cannot run this: it does not compute" in str(error)
        continue
    count += 1
    assert_exact(case, torch.float32, answered, tolerance=2.0**-28)
assert count >= 10, count
q = torch.randn(1, 2, 40, 8)
lines = str(explain(q, q, q, backend="made-up")).splitlines()
assert any(line.split(maxsplit=1) == ["made-up", "runs (named by the caller)"] for line in lines), lines
"""


def add(path: Path, before: str, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count(before) == 1, f"{path.name} has {source.count(before)} times {before!r}"
    path.write_text(source.replace(before, text + before), encoding="utf-8")


def test_a_made_up_backend_passes_the_conformance_cases(tmp_path: Path) -> None:
    """In a copy of the package: one new file, and the import and the row in dispatch.py."""
    shutil.copytree(PACKAGE, tmp_path / "alibi_attn", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "alibi_attn/attention/backends/made_up.py").write_text(BACKEND.lstrip(), encoding="utf-8")
    dispatch = tmp_path / "alibi_attn/attention/run/dispatch.py"
    add(
        dispatch,
        "from alibi_attn.attention.backends.native import build\n",
        "from alibi_attn.attention.backends import made_up\n",
    )
    add(dispatch, "reference, dense, banded, native, fused, flex)\n", "made_up, ")
    oracles = Path(__file__).parents[1] / "support" / "oracles"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(oracles)])}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr


def test_without_its_row_a_name_is_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="backend is 'made-up' but must be 'auto' or one of 'reference'"):
        alibi_attn.alibi_attention(q, q, q, backend="made-up")
