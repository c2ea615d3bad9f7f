"""The benchmark checks before it times, and leaves a record that can be read."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from alibi_attn import records
from alibi_attn.bench import jax_attention


def measure(out: Path) -> list[Path]:
    return jax_attention.jax_attention(
        out, lengths=(24,), kinds=("sink",), repeats=1, memory=False, say=lambda line: None
    )


def test_a_record_is_written(tmp_path: Path) -> None:
    (path,) = measure(tmp_path)
    record = records.load(path)
    assert (record.kind, record.name) == ("benchmark", "jax/cpu/sink")
    assert record.curves["ours"]["length"] == [24]
    assert record.curves["dense bias"]["relative_error"][0] < 1e-6
    assert record.curves["causal, no bias"]["relative_error"] == [None]
    assert record.metrics["dense bias over ours at 24"] > 0


def test_a_wrong_peer_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = jax_attention.Peer("wrong", lambda q, k, v: jnp.zeros_like(q), 100)
    monkeypatch.setattr(jax_attention, "peers", lambda: [wrong])
    with pytest.raises(RuntimeError, match="wrong is wrong at 24"):
        measure(tmp_path)
