"""The benchmark of a GPU, without one and without Triton: what it keeps when a peer fails, is wrong, is slow or too late."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from alibi_attn import records
from alibi_attn.bench import gpu as module
from alibi_attn.bench.peers import Attention, Peer, causal, decoding_peers, eager, gpu_peers
from alibi_attn.cli.main import app
from alibi_attn.report import benchmarks
from alibi_attn.report.page import report_html

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

RIGHT = {"case": "{}", "dtype": "torch.float32", "error": 1.0, "allowed": 2.0}
THEIRS = [peer for peer in gpu_peers(compiled=False) if not peer.is_ours]


def measure(out: Path, monkeypatch: pytest.MonkeyPatch, peers: list[Peer], **options: object) -> list[records.Record]:
    """The records of the benchmark with these peers, without the kernels' own check."""
    monkeypatch.setattr(module, "_all_checked", lambda *_: [RIGHT])
    monkeypatch.setattr(module, "_peers", lambda decoding, device: decoding_peers() if decoding else peers)
    asked = {
        "lengths": (16, 32),
        "heads": ((2, 8),),
        "kinds": ("noise", "peaked"),
        "smoke": True,
        "say": lambda _: None,
    }
    return [records.load(path) for path in module.gpu(out, **(asked | options))]


def test_every_peer_has_its_errors_and_times_or_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(tmp_path, monkeypatch, THEIRS)
    names = ["noise-2x8", "decoding-noise-2x8", "peaked-2x8", "decoding-peaked-2x8"]
    assert [record.name for record in found] == [f"gpu-smoke/{name}" for name in names]
    for record in found:
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
            if "decoding" not in record.name:
                trains = name != "FlexAttention"  # not on a CPU
                assert (row["gradient_error"] is not None) == (row["backward_ms"] is not None) == trains


def test_a_wrong_peer_is_not_timed_and_an_error_once_the_records_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        return eager(query, key, value, slopes.roll(1))

    wrong = Peer("eager", shifted, "with the slope of another head")
    with pytest.raises(RuntimeError, match="noise-2x8: at 16 tokens eager is wrong: its output is off"):
        measure(tmp_path, monkeypatch, [wrong, *THEIRS[:1]])
    found = [record for record in records.find(tmp_path) if "decoding" not in record.name]
    assert len(found) == 2
    for record in found:
        assert record.curves["eager"]["right"] == [False, False]
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


def test_what_would_take_too_long_or_comes_too_late_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    record, step, *_ = measure(tmp_path / "slow", monkeypatch, [Peer("slow", causal, "", biased=False)])
    first, second = record.curves["slow"]["why_not"]
    assert first is None
    assert second == "forward and backward would take 0 s"
    assert step.curves["eager"]["why_not"] == [None, None]
    for late in measure(tmp_path / "late", monkeypatch, THEIRS, budget_s=-1.0):
        for name in late.config["peers"]:
            assert late.curves[name]["why_not"] == ["no time was left"] * 2


def test_what_was_measured_is_kept_when_the_benchmark_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        if key.shape[2] > 16:
            raise KeyboardInterrupt
        return causal(query, key, value, slopes)

    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, monkeypatch, [Peer("cut", cut, "", biased=False)])
    found = list(records.find(tmp_path))
    assert len(found) == 4
    assert all(curve.get("length", [16]) == [16] for record in found for curve in record.curves.values())
    with pytest.raises(FileExistsError, match="never overwritten"):
        measure(tmp_path, monkeypatch, [Peer("cut", cut, "", biased=False)])


def test_the_report_draws_what_was_timed_and_says_what_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    [(("--heads", "16"), "as in 16x128"), (("--heads", "x8"), "as in 16x128"), (("--kinds", "sink"), "noise, peaked")],
)
def test_what_is_no_shape_or_kind_is_refused(arguments: tuple[str, str], words: str) -> None:
    refused = CliRunner().invoke(app, ["bench", "gpu", "--smoke", *arguments])
    assert words in refused.output + str(refused.exception)
