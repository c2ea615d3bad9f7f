"""The benchmark checks before it times, and leaves a record that can be read."""

import dataclasses
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
    assert record.curves["causal, no bias"]["relative_error"][0] < 1e-6
    assert record.curves["PyTorch"]["relative_error"][0] < 1e-6
    assert record.metrics["dense bias over ours at 24"] > 0


def test_a_wrong_peer_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = next(peer for peer in jax_attention.peers() if peer.name == "dense bias")
    causal = next(peer for peer in jax_attention.peers() if peer.name == "causal, no bias")
    for run in (
        lambda q, k, v, bias: dense.run(q, k, v, jnp.roll(bias, 1, 1)),
        lambda q, k, v, bias: causal.run(q, k, v),
    ):
        wrong = dataclasses.replace(dense, name="wrong", run=run)
        monkeypatch.setattr(jax_attention, "peers", lambda peer=wrong: [peer])
        with pytest.raises(RuntimeError, match="wrong is wrong at 24"):
            measure(tmp_path)


def test_a_peer_that_is_not_tried_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [dataclasses.replace(p, longest=8) if p.name != "ours" else p for p in jax_attention.peers()]
    monkeypatch.setattr(jax_attention, "peers", lambda: short)
    (path,) = measure(tmp_path)
    record = records.load(path)
    assert record.curves["dense bias"]["why_not"] == ["not tried beyond 8 tokens"]
    assert record.curves["dense bias"]["forward_ms"] == [None]
    assert record.metrics == {}
