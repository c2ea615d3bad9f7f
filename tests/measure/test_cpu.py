"""`alibi bench cpu` checks its peers, keeps records, and is drawn by the report. Speeds are not tested."""

import dataclasses
import functools
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.measure import cpu as bench
from alibi_lab.measure import timing
from alibi_lab.measure.correctness import Reference
from alibi_lab.measure.harness import checked
from alibi_lab.measure.inputs import Case, draw
from alibi_lab.measure.peers.ours import ours_dropping
from alibi_lab.measure.timing import medians_ms, peak_memory_bytes
from alibi_lab.report.page import report_html
from alibi_lab.report.plots import benchmark as benchmarks

QUIET = [
    peer for peer in bench.PEERS["float32"] if peer.name != "FlexAttention"
]  # compiling takes longer than the rest together
SLOPES = torch.tensor([2.0**-h for h in range(1, 9)])


def measured(out: Path, **options: object) -> records.Record:
    """The record of one kind of input, measured once."""
    (path,) = bench.cpu(out, **{"repeats": 1, "memory": False, "say": lambda _: None, **options})
    return records.load(path)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> records.Record:
    out = tmp_path_factory.mktemp("records")
    shorter = [dataclasses.replace(peer, longest=100) if peer.name == "eager" else peer for peer in QUIET]
    messages: list[str] = []
    made = measured(out, lengths=(64, 200), peers=shorter, say=messages.append)
    assert any("cpu/noise ours: length 200" in line for line in messages)
    assert "cpu/noise eager: not tried beyond 100 tokens" in messages
    return made


def test_a_record_has_every_peer_checked_and_timed(record: records.Record) -> None:
    assert record.kind == "benchmark"
    for peer in QUIET:
        columns = record.curves[peer.name]
        assert columns["length"] == [64, 200]
        assert record.config["peers"][peer.name] == peer.note
        if peer.name == "eager":
            assert columns["why_not"] == [None, "not tried beyond 100 tokens"]
            assert columns["forward_ms"][1] is columns["relative_error"][1] is None
            columns = {name: column[:1] for name, column in columns.items()}
        assert columns["why_not"] == [None] * len(columns["length"])
        assert all(time > 0 for name in ("forward_ms", "backward_ms") for time in columns[name])
        assert all(error < 1e-5 for name in ("relative_error", "gradient_error") for error in columns[name])
    reach = record.curves["reach"]
    assert all(0 < share <= 1 for share in reach["scores_asked_share"])
    required = [
        share * 8 * n * (n + 1) / 2 for share, n in zip(reach["scores_asked_share"], reach["length"], strict=True)
    ]
    for way, products in (("forward", 4), ("backward", 10)):
        spent = record.curves["ours"][f"{way}_ms"]
        rates = [products * 64 * n / ms / 1e6 for n, ms in zip(required, spent, strict=True)]
        shares = [rate / matrix for rate, matrix in zip(rates, reach[f"{way}_matrix_gflops"], strict=True)]
        assert reach[f"{way}_rate_share"] == pytest.approx(shares)


def test_a_wrong_peer_is_not_timed() -> None:
    query, key, value, grad = draw(Case("noise", 100))
    reference = Reference.of(query, key, value, grad, SLOPES)
    for peer in QUIET:
        if not peer.biased:
            continue
        wrong = dataclasses.replace(peer, prepare=lambda q, k, v, m, right=peer: right.prepare(q, k, v, m.roll(1)))
        with pytest.raises(RuntimeError, match="is wrong"):
            checked(wrong, reference, query, key, value, grad, SLOPES)


def test_dropout_is_checked_by_its_mask_and_timed(tmp_path: Path) -> None:
    columns = measured(tmp_path, lengths=(150,), dropout=0.1, peers=[bench.OURS]).curves["ours, dropout"]
    assert columns["forward_ms"][0] > 0
    assert columns["backward_ms"][0] > 0
    assert max(columns["relative_error"][0], columns["gradient_error"][0]) < 1e-5
    query, key, value, grad = draw(Case("noise", 150))
    reference = Reference.of(query, key, value, grad, SLOPES, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="is wrong"):
        checked(ours_dropping(0.11), reference, query, key, value, grad, SLOPES)
    with pytest.raises(ValueError, match="dropout is 1"):
        bench.cpu(tmp_path, dropout=1.0)


def test_batches_have_their_own_record(tmp_path: Path) -> None:
    one, three = (measured(tmp_path, lengths=(150,), batch=batch, peers=[bench.OURS]) for batch in (1, 3))
    assert [one.name, three.name] == ["cpu/noise", "cpu-batch-3/noise"]
    assert three.config["batch"] == 3
    reaches = [record.curves["reach"] for record in (one, three)]
    assert reaches[0]["scores_computed_share"] == pytest.approx(reaches[1]["scores_computed_share"], rel=0.1)
    assert reaches[1]["scores_asked_share"][0] <= reaches[1]["scores_computed_share"][0]
    assert all(
        x <= y for x, y in zip(reaches[1]["scores_of_backward_share"], reaches[1]["scores_computed_share"], strict=True)
    )


def test_bf16_is_measured_next_to_fp32_of_the_same_numbers(tmp_path: Path) -> None:
    record = measured(tmp_path, lengths=(64, 150), dtype="bfloat16")
    assert record.config["dtype"] == "bfloat16"
    ours, wide, dense = (record.curves[name] for name in ("ours", "ours, fp32", "SDPA + dense bias"))
    assert max(wide["relative_error"]) < 1e-6 < max(ours["relative_error"]) < 2 * max(dense["relative_error"])
    assert min(*ours["backward_ms"], *wide["forward_ms"], *dense["backward_ms"]) > 0
    with pytest.raises(ValueError, match="dtype is 'float16' but must be one of float32, bfloat16"):
        bench.cpu(tmp_path, dtype="float16")


def test_a_peer_that_cannot_run_has_the_reason_and_ours_raises() -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("no kernel\nfor this")

    tensors = draw(Case("noise", 8))
    reference = Reference.of(*tensors, SLOPES)
    for name in ("eager", "ours"):
        peer = dataclasses.replace(QUIET[0], name=name, prepare=refused)
        if name == "ours":
            with pytest.raises(RuntimeError, match="no kernel"):
                checked(peer, reference, *tensors, SLOPES)
            continue
        candidate = checked(peer, reference, *tensors, SLOPES)
        assert candidate.forward is candidate.backward is None
        assert candidate.row["why_not"] == "no kernel"


def test_the_report_draws_a_benchmark(record: records.Record) -> None:
    lengths, rows = benchmarks.ratio_table(record)
    assert lengths == ["64", "200"]
    assert rows[0][0] == "ours"
    times = {peer.name: peer.times for peer in benchmarks.peer_times(record)}
    eager = dict(rows)["eager"]
    assert eager == [f"{times['eager'][64] / times['ours'][64]:.2f}×", "–"]
    page = report_html([record])
    assert "Benchmark cpu/noise" in page
    assert "Other records" not in page


def test_a_peer_without_backward_is_compared_by_forward() -> None:
    made = records.make(
        "benchmark",
        "x",
        config={},
        metrics={},
        curves={
            "flex": {"length": [8], "forward_ms": [6.0], "backward_ms": [None]},
            "ours": {"length": [8], "forward_ms": [2.0], "backward_ms": [4.0]},
        },
    )
    assert benchmarks.ratio_table(made)[1] == [("ours", ["6 ms"]), ("flex (forward)", ["3.00×"])]
    assert not math.isnan(benchmarks.peer_times(made)[1].times[8])


def test_calls_take_turns_in_a_changing_but_reproducible_order() -> None:
    def order() -> list[str]:
        calls: list[str] = []
        medians = medians_ms({x: functools.partial(calls.append, x) for x in "abc"}, repeats=9, seconds=10)
        assert medians.keys() == {"a", "b", "c"}
        return calls

    calls = order()
    turns = [tuple(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(turns) == 1 + 9
    assert len(set(turns)) > 2
    assert order() == order()


def _fill(mebibytes: int) -> None:
    bytearray(b"x" * (mebibytes * 2**20))


def test_peak_memory_is_measured_in_a_fresh_process() -> None:
    assert 100 * 2**20 < peak_memory_bytes(_fill, 64) < 200 * 2**20


def test_timing_loads_where_python_has_no_resource_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows: without it every benchmark ended with the advice to install "resource"."""
    monkeypatch.setitem(sys.modules, "resource", None)
    spec = importlib.util.spec_from_file_location("timing_without_resource", timing.__file__)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert loaded.medians_ms({"nothing": dict}, repeats=1, seconds=1.0)["nothing"] >= 0


def test_unknown_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="'noise', 'peaked' or 'sink'"):
        draw(Case("quiet", 8))


@pytest.mark.parametrize("lengths", ["x", "1024;2048", "1024,", "-5", "0", "1e3"])
@pytest.mark.parametrize("what", ["cpu", "decoding"])
def test_bad_lengths_are_refused_with_an_example(what: str, lengths: str) -> None:
    refused = CliRunner().invoke(app, ["bench", what, "--lengths", lengths])
    assert refused.exit_code != 0
    assert isinstance(refused.exception, ValueError | SystemExit)
    assert "as in 1024,8192" in refused.output + str(refused.exception)


def test_an_existing_record_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured(tmp_path, lengths=(64,), peers=[bench.OURS])

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("it was measured first")

    monkeypatch.setattr(bench.harness, "measured", too_late)
    with pytest.raises(FileExistsError, match="never overwritten"):
        measured(tmp_path, lengths=(64,), peers=[bench.OURS])


def test_an_interrupted_benchmark_keeps_its_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = bench.harness.measured

    def cut(peers: object, inputs: list[torch.Tensor], *rest: object, **options: object) -> object:
        if inputs[0].shape[2] > 64:
            raise KeyboardInterrupt
        return whole(peers, inputs, *rest, **options)

    monkeypatch.setattr(bench.harness, "measured", cut)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, lengths=(64, 128), peers=[bench.OURS])
    (record,) = records.find(tmp_path)
    assert record.curves["ours"]["length"] == [64]


def test_bench_trained_compares_certified_with_true_reach(tmp_path: Path) -> None:
    arguments = ["bench", "trained", "--scale", "smoke", "--out", str(tmp_path / "out"), "--run", str(tmp_path / "run")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    loaded = list(records.find(tmp_path / "out", kind="certificate"))
    assert len(loaded) == 2
    for record in loaded:
        heads = record.curves["heads"]
        assert all(true <= certified for true, certified in zip(heads["true"], heads["certified"], strict=True))
        assert heads["certified"][0] < 128
    captured = load_file(tmp_path / "run" / "captured.safetensors")
    assert captured.keys() == {f"layer-{layer}.{name}" for layer in (0, 1) for name in ("query", "key", "value")}
