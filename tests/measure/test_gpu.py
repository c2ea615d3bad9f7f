"""`alibi bench gpu` without a GPU or Triton: its records when a peer fails, is wrong, is slow or runs out of time."""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from alibi_attn import alibi_attention
from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.measure import gpu as module
from alibi_lab.measure import gpu_checks as checks
from alibi_lab.measure.decoding import peers_of_one_query
from alibi_lab.measure.gpu import gpu_peers
from alibi_lab.measure.peers import Attention, Peer
from alibi_lab.measure.peers.eager import eager
from alibi_lab.measure.peers.sdpa_causal import causal
from alibi_lab.report.page import report_html
from alibi_lab.report.plots import benchmark as benchmarks

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

RIGHT = {"case": "{}", "dtype": "torch.float32", "error": 1.0, "allowed": 2.0}
THEIRS = [peer for peer in gpu_peers(compiled=False) if not peer.is_ours]


def measure(out: Path, monkeypatch: pytest.MonkeyPatch, peers: list[Peer], **options: object) -> list[records.Record]:
    """The benchmark's records with these peers, skipping the check of the kernels."""
    monkeypatch.setattr(module, "all_checked", lambda *_, **__: [RIGHT])
    monkeypatch.setattr(module, "_peers", lambda decoding, device: peers_of_one_query() if decoding else peers)
    defaults = {
        "lengths": (16, 32),
        "shapes": ((2, 8),),
        "kinds": ("noise", "peaked"),
        "scale": "smoke",
        "say": lambda _: None,
    }
    return [records.load(path) for path in module.gpu(out, **(defaults | options))]


def test_every_peer_has_its_errors_and_times_or_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = measure(tmp_path, monkeypatch, THEIRS)
    names = ["noise-2x8", "decoding-noise-2x8", "peaked-2x8", "decoding-peaked-2x8"]
    assert [record.name for record in loaded] == [f"gpu-smoke/{name}" for name in names]
    for record in loaded:
        assert record.metrics == {"worst_error_share": 0.5}
        assert benchmarks.is_drawn(record)
        for name, note in record.config["peers"].items():
            row = {column: values[-1] for column, values in record.curves[name].items()}
            assert note
            assert record.curves[name]["length"] == [16, 32]
            if "cuDNN" in name:
                assert "No viable backend" in row["why_not"]
                assert row["right"] is row["relative_error"] is row["forward_ms"] is None
                continue
            assert row["why_not"] is None
            assert row["right"] is True
            assert row["relative_error"] < 1e-5
            assert row["forward_ms"] > 0
            assert row["host_us"] > 0
            if "decoding" not in record.name:
                trains = name != "FlexAttention"  # not on a CPU
                assert (row["gradient_error"] is not None) == (row["backward_ms"] is not None) == trains


def test_a_wrong_peer_is_a_row_without_times_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        return eager(query, key, value, slopes.roll(1))

    wrong = Peer("eager", shifted, "with the slope of another head")
    measure(tmp_path, monkeypatch, [wrong, *THEIRS[:1]])
    loaded = [record for record in records.find(tmp_path) if "decoding" not in record.name]
    assert len(loaded) == 2
    for record in loaded:
        assert record.curves["eager"]["right"] == [False, False]
        assert str(record.curves["eager"]["why_not"][0]).startswith("eager is wrong: its output is off")
        assert record.curves["eager"]["forward_ms"] == [None, None]
        assert min(record.curves["eager"]["relative_error"]) > 1e-3
        assert min(record.curves["causal, no bias"]["forward_ms"]) > 0


def test_ours_that_cannot_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Attention:
        raise torch.OutOfMemoryError("out of memory")

    broken = Peer("ours", refused, "")
    with pytest.raises(RuntimeError, match="at 32 tokens out of memory"):
        measure(tmp_path, monkeypatch, [broken])
    theirs = dataclasses.replace(broken, name="theirs")
    record, *_ = measure(tmp_path / "theirs", monkeypatch, [theirs])
    assert record.curves["theirs"]["why_not"] == ["out of memory"] * 2


def test_peers_that_are_too_slow_or_too_late_have_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    record, step, *_ = measure(tmp_path / "slow", monkeypatch, [Peer("slow", causal, "", biased=False)])
    first, second = record.curves["slow"]["why_not"]
    assert first is None
    assert second == "forward and backward would take 0 s"
    assert step.curves["eager"]["why_not"] == [None, None]
    for late in measure(tmp_path / "late", monkeypatch, THEIRS, seconds=-1.0):
        for name in late.config["peers"]:
            assert late.curves[name]["why_not"] == ["no time was left"] * 2


def test_a_peer_that_has_used_its_share_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    ours, slow, quick = (Peer(name, causal, "", biased=False) for name in ("ours", "slow", "quick"))
    monkeypatch.setattr(module, "measured", lambda peer, _: now.append(now.pop() + (30 if peer is not quick else 1)))
    budget = module.Budget(["ours", "slow", "quick"], end=100.0, clock=lambda: now[0])
    for peer in (ours, slow, quick):
        assert budget.why_not(peer, 0.0) is None
        budget.measured(peer, object())  # type: ignore[arg-type]
    assert budget.why_not(slow, 0.0) == "it has used 30 s, its share of the time"
    assert budget.why_not(quick, 0.0) is budget.why_not(ours, 60.0) is None
    assert budget.why_not(quick, 4.0) == "forward and backward would take 4 s"
    budget.measured(ours, object())  # type: ignore[arg-type]
    now[0] += 10
    assert {budget.why_not(peer, 0.0) for peer in (ours, slow, quick)} == {"no time was left"}


def test_the_lengths_that_matter_are_measured_first_for_all_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = module.by_importance((1024, 2048, 4096, 16384, 131072, 262144))
    assert lengths == [2048, 16384, 131072, 1024, 4096, 262144]
    monkeypatch.setattr(module, "FIRST", (32,))
    lines: list[str] = []
    shapes = ((2, 8), (1, 16))
    loaded = measure(tmp_path, monkeypatch, THEIRS[:1], shapes=shapes, kinds=("noise",), say=lines.append)
    order = [line.split()[0] for line in lines if "correctness" not in line and "causal, no bias:" in line]
    steps, others = (f"gpu-smoke/noise-{heads}x{size}" for heads, size in shapes)
    assert [name for name in order if "decoding" not in name] == [steps, others] * 2
    assert [line.split("length ")[1][:2] for line in lines if line.startswith(f"{steps} causal")] == ["32", "16"]
    assert all(record.curves["causal, no bias"]["length"] == [16, 32] for record in loaded)


def test_an_error_of_a_check_is_a_share_of_its_tensor_and_nan_is_never_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*inputs: Tensor, backend: str, **options: object) -> Tensor:
        out = alibi_attention(*inputs, backend="dense" if backend == "fused" else backend, **options)  # type: ignore[call-overload]
        return out * factor[0] if backend == "fused" else out

    monkeypatch.setattr(checks, "alibi_attention", attention)
    factor = [1.0]
    row, *_ = checks.all_checked([(torch.float32, {"causal": False})], torch.device("cpu"))
    assert row["tensor"] in checks.TENSORS
    assert 0 < row["error"] < row["allowed"] < 1e-4
    for factor[0], words in ((1.01, "is off by [0-9.]+e-02 of its largest"), (math.nan, "is off by nan")):
        with pytest.raises(RuntimeError, match=words):
            checks.all_checked([(torch.float32, {})], torch.device("cpu"))


def test_an_interrupted_benchmark_keeps_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        if key.shape[2] > 16:
            raise KeyboardInterrupt
        return causal(query, key, value, slopes)

    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, monkeypatch, [Peer("cut", cut, "", biased=False)])
    loaded = list(records.find(tmp_path))
    assert len(loaded) == 4
    assert all(curve.get("length", [16]) == [16] for record in loaded for curve in record.curves.values())
    with pytest.raises(FileExistsError, match="never overwritten"):
        measure(tmp_path, monkeypatch, [Peer("cut", cut, "", biased=False)])


def test_the_report_draws_timed_peers_and_lists_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, *_ = measure(tmp_path, monkeypatch, THEIRS)
    facts = dict(benchmarks.facts(record))
    assert facts["causal, no bias, cuDNN, not at 16, 32"].startswith("No viable backend")
    assert facts["error of eager"] == f"{max(record.curves['eager']['relative_error']):.1e} of max‖v‖"
    page = report_html([record])
    assert "causal, no bias, cuDNN, not at 16, 32" in page
    drawn = [line.get_color() for line in benchmarks.times_by_length(record).axes[0].lines]
    assert len(set(drawn)) == len(THEIRS) - 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shapes", "16"), "as in 16x128"),
        (("--shapes", "x8"), "as in 16x128"),
        (("--kinds", "sink"), "noise, peaked"),
        (("--scale", "small"), "must be 'full' or 'smoke'"),
    ],
)
def test_bad_shapes_kinds_and_scales_are_refused(arguments: tuple[str, str], words: str) -> None:
    refused = CliRunner().invoke(app, ["bench", "gpu", "--scale", "smoke", *arguments])
    assert words in refused.output + str(refused.exception)


def test_compilations_that_last_too_long_are_ended() -> None:
    executor = concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    late = executor.submit(time.sleep, 1e6)
    while not late.running():
        time.sleep(0.01)
    (process,) = executor._processes.values()
    checks.end_at_once(executor)
    assert not process.is_alive()
