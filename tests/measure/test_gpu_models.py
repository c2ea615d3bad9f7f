"""`alibi bench gpu-models` without a GPU or Triton: its records where a part fails, is wrong or has no time."""

from pathlib import Path

import pytest
import torch

from alibi_attn import alibi_attention
from alibi_lab import records
from alibi_lab.measure import gpu_jax
from alibi_lab.measure import gpu_models as module
from alibi_lab.measure.gpu_kernels import of_step
from alibi_lab.measure.gpu_models import PARTS, gpu_models
from alibi_lab.measure.gpu_parts import Calls, Case, Part, drawn
from alibi_lab.measure.gpu_steps import padding
from alibi_lab.measure.gpu_truth import Truth, with_gates, with_slope
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.peers import Peer, dot_product_attention

CPU = torch.device("cpu")
CASES = {"smoke": (Case(2, 20, 2, 8), Case(1, 30, 2, 8))}


def silent(line: str) -> None:
    pass


def rows(record: records.Record) -> dict[str, dict[str, object]]:
    """The last row of every peer."""
    return {peer: {name: values[-1] for name, values in columns.items()} for peer, columns in record.curves.items()}


def test_what_needs_no_kernel_is_right_and_timed_and_the_rest_has_its_reason(tmp_path: Path) -> None:
    parts = [part for part in PARTS if not part.name.startswith("jax")]  # which takes longest to compile
    found = {
        record.name.removeprefix("gpu-smoke/models-"): rows(record)
        for record in map(records.load, gpu_models(tmp_path, parts=[x.name for x in parts], scale="smoke", say=silent))
    }
    assert list(found) == [part.name for part in parts]
    without = ("ours", "ours, graph")  # in these parts, on a CPU without Triton's interpreter
    for part in parts:
        for peer, row in found[part.name].items():
            if (
                part.name == "kernels"
                or "cuDNN" in peer
                or (part.name in ("graphs", "gates", "masked") and peer in without)
            ):
                assert row["why_not"]
                assert row.get("right") is None
            else:
                assert row["right"] is True, (part.name, peer, row)
                assert 0 <= row["relative_error"] <= row["allowed_error"] < 1e-5
                assert row["forward_ms"] > 0
                assert row["host_us"] > 0


@pytest.mark.long  # XLA compiles for seconds
def test_attention_in_jax_is_right_and_timed(tmp_path: Path) -> None:
    first, other = gpu_models(tmp_path, parts=["jax", "jax-triton"], scale="smoke", say=silent)
    found = rows(records.load(first))
    assert found.pop(gpu_jax.CUDNN)["why_not"] == "cuDNN is not detected."
    assert "it runs on CUDA devices" in rows(records.load(other))[gpu_jax.FUSED]["why_not"]
    assert set(found) == {"ours", "JAX + dense bias", "ours, dense"}
    for row in found.values():
        assert row["right"] is True
        assert 0 <= row["relative_error"] <= row["allowed_error"] < 1e-5
        assert row["forward_ms"] > 0
        assert row["host_us"] > 0


def test_steps_in_jax_are_judged_and_left_out_where_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    def linear(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return query + key + value

    peers = [
        Peer("wrong", lambda q, k, v, slopes: dot_product_attention.bound(linear), "", longest=70),
        Peer("slow", dot_product_attention.causal, ""),
    ]
    monkeypatch.setattr(gpu_jax, "_peers", lambda: peers)
    steps = gpu_jax.Steps("wrong", "slow")
    steps._pace["slow"] = 1.0
    calls = steps(Case(2, 70, 2, 16), CPU)
    row = calls["wrong"]()
    assert row["right"] is False
    assert row["why_not"].startswith("it is wrong")
    assert "forward_ms" not in row
    assert calls["slow"]() == {"why_not": f"a step would take {2 * 70 * 70 * 2} s"}
    assert steps(Case(1, 71, 2, 16), CPU)["wrong"]() == {"why_not": "not tried beyond 70 tokens"}


def test_a_long_step_in_jax_is_judged_by_its_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_jax, "LONGEST_TRUTH", 69)
    case = Case(2, 70, 2, 16)
    *inputs, grad = drawn(case, CPU)
    slopes = published_slopes(2)
    with torch.no_grad():  # as in `gpu_models.measured`
        judge = gpu_jax._judge(case, inputs, grad, slopes, (True,))
    leaves = [x.requires_grad_() for x in inputs]
    for right in (True, False):
        output = alibi_attention(*leaves, slopes if right else slopes[[1, 0]], backend="dense")
        row = judge(Peer("ours", lambda: None, ""), [output.detach(), *torch.autograd.grad(output, leaves, grad)])
        assert row["right"] is right


def test_a_wrong_part_raises_after_the_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(case: Case, device: torch.device) -> Calls:
        return {
            "ours": lambda: {"right": False, "why_not": "it is wrong"},
            "peer": lambda: {"right": case.length == 20},
        }

    monkeypatch.setattr(module, "PARTS", (Part("a", 1.0, {"ours": "", "peer": ""}, CASES, calls),))
    with pytest.raises(
        RuntimeError, match=r"models-a, ours: at 20 tokens it is wrong; [^;]*models-a, ours: at 30 [^;]*$"
    ):
        gpu_models(tmp_path, scale="smoke", say=silent)
    (record,) = records.find(tmp_path)
    assert record.curves["ours"]["length"] == [20, 30]
    assert record.curves["peer"]["right"] == [True, False]  # and is not in the error


def test_failures_and_a_lack_of_time_are_reasons_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> dict[str, object]:
        raise torch.OutOfMemoryError("too much\nof it")

    def calls(case: Case, device: torch.device) -> Calls:
        if case.length == 30:
            raise ImportError("no transformers")
        return {"ours": fails, "peer": lambda: {"right": True}}

    peers = {"ours": "", "peer": ""}
    known = (Part("a", 1.0, peers, CASES, calls), Part("b", 0.0, peers, CASES, calls))
    monkeypatch.setattr(module, "PARTS", known)
    first, _ = (records.load(path) for path in gpu_models(tmp_path / "1", scale="smoke", say=silent))
    assert first.curves["ours"]["why_not"] == ["too much", "no transformers"]
    assert first.curves["peer"]["why_not"] == [None, "no transformers"]
    late = [records.load(path) for path in gpu_models(tmp_path / "2", scale="smoke", seconds=-1.0, say=silent)]
    assert {x for record in late for x in record.curves["ours"]["why_not"]} == {"no time was left"}


def test_truth_tells_other_slopes_and_gates() -> None:
    case = CASES["smoke"][0]
    *inputs, grad = drawn(case, CPU)
    slopes, gates = published_slopes(2), -torch.rand(2, 2, 20)
    truth = Truth.of(with_slope(slopes, 20), inputs, grad)
    assert truth.row([x[None, None] for x in truth.plain])["right"]
    other = Truth.of(with_slope(slopes * 1.001, 20), inputs, grad)
    assert not truth.row([x[None, None] for x in other.plain])["right"]
    gated = Truth.of(with_gates, [*inputs, gates], grad)
    assert len(gated.true) == 5
    assert not gated.row([x[None, None] for x in Truth.of(with_gates, [*inputs, gates * 1.001], grad).plain])["right"]
    assert not truth.row([x[None, None] * torch.nan for x in truth.plain])["right"]


def test_padding_fills_one_text_and_a_third_of_each_at_least() -> None:
    shown = padding(Case(6, 90, 1, 8), CPU).sum(1)
    assert shown.max() == shown[0] == 90
    assert 30 <= shown.min() < 90


def test_operations_of_a_step_are_counted_per_step() -> None:
    x = torch.ones(50, 50)
    found = of_step(lambda: (x @ x).exp(), CPU)
    assert found["aten::mm"]["calls"] == found["aten::exp"]["calls"] == 1
    assert found["aten::mm"]["ms"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [({"scale": "small"}, "must be 'full' or 'smoke'"), ({"parts": ["bert"]}, "bert but must be of graphs, decoding")],
)
def test_unknown_scales_and_parts_are_refused(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gpu_models(tmp_path, **options)
