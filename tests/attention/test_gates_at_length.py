"""The reference gate gradients in `tests/support/oracles/gates_at_length.py` are right; wrong ones are detected."""

from pathlib import Path

import gates_at_length
import pytest
import torch

from alibi_attn import forgetting_attention
from alibi_lab import records


def test_its_truth_is_the_gradient_of_the_definition() -> None:
    inputs = gates_at_length.draw(700, 1.0, torch.float64)  # two blocks, and skipped keys
    gates = inputs[4].double().requires_grad_()
    output = forgetting_attention(*inputs[:3], gates, backend="reference", tolerance=0.0)
    (expected,) = torch.autograd.grad(output, gates, inputs[3])
    torch.testing.assert_close(gates_at_length.gate_gradient(*inputs), expected, rtol=1e-9, atol=1e-9)


def test_its_record_holds_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates_at_length, "LOGITS", (2.0,))
    gates_at_length.main(tmp_path, 1024)
    (path,) = tmp_path.iterdir()
    found = records.load(path)
    assert found.metrics["error over that of fixed slopes, worst"] < 4
    assert found.curves["gates' gradient"]["dtype"] == ["float32", "bfloat16"]
    ours, naive = (found.curves["gates' gradient"][f"{name}, rms"][1] for name in ("ours", "of key_bias"))
    assert ours < 0.01 < naive  # rows of ds do not add up to 0 in bf16
