"""`alibi bench attention` and `decoding`: every kind of input makes a record; what is wrong, late or too long is not timed."""

import dataclasses
import functools
import math
import time
from pathlib import Path

import pytest
import torch
from small_runs import checkpoint_of
from torch import Tensor

from alibi_attn import inspect
from alibi_lab import records
from alibi_lab.measure import attention as module
from alibi_lab.measure.attention import attention, pruned_scores, scores
from alibi_lab.measure.decoding import decoding
from alibi_lab.measure.harness import Budget, measured
from alibi_lab.measure.inputs import Case, draw
from alibi_lab.measure.peers import Peer, sdpa
from alibi_lab.measure.peers.ours import ours
from alibi_lab.report.sections.benchmark import is_drawn

QUICK = {"repeats": 1, "seconds": 0.1, "say": lambda line: None}
OURS = Peer("ours", ours("auto"))


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention, which takes seconds to compile, is tested in test_peers.py."""
    peers = {name: [peer for peer in some if peer.name != "FlexAttention"] for name, some in module.PEERS.items()}
    monkeypatch.setattr(module, "PEERS", peers)


def test_every_kind_of_input_is_a_record_with_the_peers_that_fit(tmp_path: Path) -> None:
    kinds = ["noise", "sink", "masked", "plane", "gates-4-U-8"]
    paths = attention(tmp_path, inputs=kinds, lengths=(96, 64), shape=((2, 16),), dropout=0.1, **QUICK)
    found = {record.config["kind"]: record for record in map(records.load, paths)}
    assert list(found) == kinds
    assert found["noise"].name == "attention/cpu-float32-noise-2x16"
    others = {peer.name for peer in module.PEERS["torch cpu"]}
    assert set(found["noise"].curves) == {"ours", "ours, dropout", "ours, no compiler", "scores", *others}
    assert set(found["masked"].curves) == {"ours", "SDPA + mask, no bias", "SDPA + dense bias"}
    assert set(found["plane"].curves) == {"ours", "SDPA, no bias", "SDPA + dense bias", "scores"}
    assert found["plane"].curves["scores"]["visible"] == [2 * n * n for n in (64, 96)]
    assert {"acp", "ours_at_acps"} <= found["gates-4-U-8"].curves["scores"].keys()
    for record in found.values():
        assert is_drawn(record)
        for name, columns in record.curves.items():
            assert columns["length"] == [64, 96], "sorted"
            assert name == "scores" or columns["right"] == [True, True]
            assert name == "scores" or all(x >= 0 for x in columns["forward_ms"] + columns["backward_ms"])
    assert found["noise"].curves["scores"]["visible"] == [2 * n * (n + 1) // 2 for n in (64, 96)]
    with pytest.raises(FileExistsError):
        attention(tmp_path, inputs=kinds, lengths=(96, 64), shape=((2, 16),), dropout=0.1, **QUICK)


def test_a_table_by_distance_is_timed_with_and_without_skipping_and_its_scores_are_counted(tmp_path: Path) -> None:
    options = {"inputs": ["root-distance"], "lengths": (128, 4160), "shape": ((16, 16),), "backend": "native", **QUICK}
    (record,) = map(records.load, attention(tmp_path, backward=False, **options))
    assert record.name == "attention/cpu-float32-root-distance-16x16"
    assert set(record.curves) == {"ours", "ours, all keys", "SDPA + dense bias", "scores"}
    for name in ("ours", "ours, all keys"):
        assert record.curves[name]["right"] == [True, True], name
        assert all(ms > 0 for ms in record.curves[name]["forward_ms"]), name
    assert record.curves["SDPA + dense bias"]["right"] == [True, None]
    assert record.curves["SDPA + dense bias"]["why_not"][1] == "not tried beyond 4096 tokens"
    computed, visible = (record.curves["scores"][name][1] for name in ("ours", "visible"))
    inputs = draw(Case("root-distance", 4160, heads=16, head_dim=16))
    count = functools.partial(inspect.computed_scores, inputs.query, inputs.key, inputs.value, inputs.slopes)
    assert count(backend="native", table=inputs.table) == computed
    every = count(backend="native", table=inputs.table, tolerance=0.0)
    assert every >= visible, "whole tiles"
    assert computed < every


def test_bf16_is_compared_with_ours_in_fp32_and_jax_with_our_pytorch_call(tmp_path: Path) -> None:
    options = {"lengths": (64,), "shape": ((2, 16),), **QUICK}
    (half,) = map(records.load, attention(tmp_path, dtype="bfloat16", **options))
    assert {"ours", "ours, fp32"} <= set(half.curves)
    assert half.curves["ours, fp32"]["relative_error"][0] < half.curves["ours"]["relative_error"][0]
    pytest.importorskip("jax")
    (jax,) = map(records.load, attention(tmp_path, framework="jax", **options))
    assert jax.name == "attention/jax-cpu-float32-noise-2x16"
    for name in ("ours", "ours, the loop", "dense bias", "causal, no bias", "PyTorch"):
        assert jax.curves[name]["right"] == [True], name
    assert "uDNN" in jax.curves["no bias, cuDNN"]["why_not"][0]


def test_one_query_is_decoded_and_a_stream_equals_its_full_pass(tmp_path: Path) -> None:
    (record,) = map(records.load, decoding(tmp_path, lengths=(64, 128), shape=((2, 16),), **QUICK))
    assert record.curves["ours, static"]["right"] == [True, True]
    assert all(0 < share <= 1 for share in record.curves["reach"]["keys_within_reach"])
    assert "backward_ms" not in record.curves["ours"]
    paths = decoding(tmp_path, stream=1000, say=lambda line: None)
    for stream in map(records.load, paths):
        assert stream.metrics["error_of_longest_output"] < 1e-5
        assert stream.curves["ours"]["length"][-1] == 1000
    assert [records.load(path).name for path in paths] == ["decoding/stream-reach", "decoding/stream-gated-reach"]


def test_a_wrong_call_of_ours_is_an_error_and_a_wrong_peer_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def off(x: object) -> object:
        right = ours("auto")(x)
        return lambda q, k, v: right(q, k, v) * 1.001

    case, plain = Case("noise", 64, heads=2, head_dim=16), dataclasses.replace(sdpa.PEER, prepare=off)
    rows = measured([OURS, plain], case, draw(case), Budget(repeats=1))
    assert (rows["ours"].right, rows["causal, no bias"].right) == (True, False)
    assert rows["causal, no bias"].forward_ms is None
    monkeypatch.setattr(module, "ours", lambda backend: off)
    with pytest.raises(RuntimeError, match="noise-2x16, ours: at 64 tokens ours is wrong: its output"):
        attention(tmp_path, lengths=(64,), shape=((2, 16),), backward=False, **QUICK)
    assert len(list(tmp_path.iterdir())) == 1, "the record is kept"


def test_a_peer_that_fails_is_too_long_or_comes_too_late_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: object) -> object:
        raise RuntimeError("out of memory\nin line 3")

    case = Case("noise", 64, heads=2, head_dim=16)
    peers = [Peer("broken", fails), dataclasses.replace(sdpa.PEER, longest=32), OURS]
    rows = measured(peers, case, draw(case), Budget(repeats=1))
    assert rows["broken"].why_not == "out of memory"
    assert rows["causal, no bias"].why_not == "not tried beyond 32 tokens"
    late = measured([OURS], case, draw(case), Budget(end=time.perf_counter() - 1))
    assert late["ours"].why_not == "no time was left"
    slow = Budget(patience_s=1.0, pace={"causal, no bias": 1.0, "ours": 1.0})
    assert "would take" in str(slow.why_not(sdpa.PEER, case))
    assert slow.why_not(OURS, case) is None
    failing = dataclasses.replace(OURS, prepare=fails)
    assert measured([failing], case, draw(case), Budget())["ours"].right is False


def test_memory_is_measured_in_a_fresh_process_and_graphs_are_separate_rows() -> None:
    case = Case("gates-4-U-8", 4096, heads=2, head_dim=16)
    gated = dataclasses.replace(OURS, gated=True)
    rows = measured([gated], case, draw(case), Budget(repeats=1, memory=True, graphs=True))
    arrays = 4 * 4096 * 2 * 16 * 4  # query, key, value and the gradient of the output
    assert arrays < rows["ours"].peak_memory_bytes < 2**30
    assert list(rows) == ["ours", "ours, graph"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": ["nonsense"]}, "inputs is 'nonsense'.*; pass one of noise"),
        ({"dtype": "float64"}, "dtype is 'float64'.*; pass one of float32"),
        ({"framework": "numpy"}, "framework is 'numpy'"),
        ({"dropout": 1.0}, "must be a probability"),
        ({"inputs": ["trained"]}, "need --checkpoint"),
    ],
)
def test_wrong_options_are_refused(options: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        attention(tmp_path, lengths=(64,), **options, **QUICK)


def test_gated_scores_stay_below_their_bound_and_acps_boundary_equals_its_rule() -> None:
    inputs = draw(Case("gates-2-U-8", 700, heads=2, head_dim=16))
    query, key, log_fgate = inputs.query, inputs.key, inputs.log_fgate
    assert isinstance(log_fgate, Tensor)
    assert 3 < float((query @ key.mT / 4).max()) <= 8.001
    sums, count = log_fgate[0].double().cumsum(-1), 0
    for h in range(2):
        largest = float(query[0, h].double().norm(dim=-1).max() * key[0, h].double().norm(dim=-1).max()) / 4
        delta = -(2 * largest + math.log(700)) + math.log(1e-3)
        for first in range(0, 700, 64):
            rows = min(64, 700 - first)
            for tile in range(0, first + rows, 64):
                last = min(tile + 64, 700) - 1
                if tile == first or float(sums[h, first] - sums[h, last]) >= delta:
                    count += rows * (last + 1 - tile)
    assert pruned_scores(log_fgate, query, key, 1e-3) == count
    long = scores(draw(Case("gates-2-U-8", 2048, heads=2, head_dim=16)), "native")
    assert long["ours_at_acps"] < 0.95 * long["acp_at_acps"]


def test_the_kernels_of_a_step_are_listed_with_their_time(tmp_path: Path) -> None:
    (path,) = attention(tmp_path, lengths=(64,), shape=((2, 16),), backend="dense", kernels=True, **QUICK)
    rows = {name: row for name, row in records.load(path).curves.items() if name.startswith("ours: ")}
    assert rows
    assert all(row["ms"][0] > 0 and row["calls"][0] >= 1 for row in rows.values())


def test_a_trained_model_is_a_kind_of_input(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path / "run", "alibi-fox")
    (path,) = attention(tmp_path / "out", inputs=["trained"], lengths=(64,), checkpoint=folder, **QUICK)
    record = records.load(path)
    assert record.curves["ours"]["batch"] == [2], "the layers"
    assert record.curves["ours"]["right"] == record.curves["SDPA + dense bias"]["right"] == [True]
    assert torch.isfinite(torch.tensor(record.curves["scores"]["acp"][0]))
