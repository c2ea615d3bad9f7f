"""`alibi bench jax` checks peers before it times them and writes a record."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from alibi_lab import records
from alibi_lab.measure import jax_attention
from alibi_lab.measure.peers import Peer, dot_product_attention


def measure(out: Path, peers: Sequence[Peer] = jax_attention.PEERS) -> list[Path]:
    return jax_attention.jax_attention(
        out, lengths=(24,), kinds=("sink",), repeats=1, memory=False, peers=peers, say=lambda line: None
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


def test_a_wrong_peer_is_not_timed(tmp_path: Path) -> None:
    dense = dot_product_attention.DENSE
    for prepare in (lambda q, k, v, slopes: dense.prepare(q, k, v, slopes[::-1]), dot_product_attention.causal):
        wrong = dataclasses.replace(dense, name="wrong", prepare=prepare)
        with pytest.raises(RuntimeError, match="at 24 tokens wrong is wrong"):
            measure(tmp_path, [wrong])


def test_a_peer_beyond_its_longest_input_has_the_reason(tmp_path: Path) -> None:
    (path,) = measure(
        tmp_path, [dataclasses.replace(p, longest=8) if p.name != "ours" else p for p in jax_attention.PEERS]
    )
    record = records.load(path)
    assert record.curves["dense bias"]["why_not"] == ["not tried beyond 8 tokens"]
    assert record.curves["dense bias"]["forward_ms"] == [None]
    assert record.metrics == {}
