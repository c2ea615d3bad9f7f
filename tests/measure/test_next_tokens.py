"""`alibi bench next-tokens` compares every program before timing it, in three precisions. Durations are not tested."""

import contextlib

import pytest
import torch

from alibi_attn.nn import quantized
from alibi_lab import records
from alibi_lab.measure import next_tokens as module
from alibi_lab.measure.next_tokens import next_tokens
from alibi_lab.measure.peers import llama_cpp, programs
from alibi_lab.report.plots.benchmark import is_drawn

try:
    quantized.check_supported()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

SIZES = {"lengths": (20, 70), "width": 256, "layers": 1, "vocabulary": 50, "tokens": 2, "repeats": 1}


class Echo:
    """A program that returns the original model's logits, off by a relative error, and takes a millisecond per token."""

    def __init__(self, model, off):
        self.model, self.off = model, off

    def logits(self, tokens):
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0, -1].numpy() * (1 + self.off)

    def several(self, tokens, count):
        return lambda: 0.001


@pytest.mark.parametrize("off", [0.0, 0.01])
def test_a_program_is_timed_where_its_logits_are_right(off, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "why_not", lambda: {"CTranslate2": None, "llama.cpp": None})
    opened = lambda name, model, **_: contextlib.nullcontext(Echo(model, off))  # noqa: E731
    monkeypatch.setattr(programs, "opened", opened)
    messages = []
    record = records.load(*next_tokens(tmp_path, **SIZES, say=messages.append))
    assert is_drawn(record)
    assert record.config["layers"] == 1
    assert record.config["vocabulary"] == 50
    ours = {name: curve for name, curve in record.curves.items() if name.startswith("ours")}
    assert set(ours) == {f"ours, {precision}" for precision in module.PRECISIONS}
    for name, curve in ours.items():
        assert curve["length"] == [20, 70]
        assert max(curve["error"]) < module.PRECISIONS[name.partition(", ")[2]]
    assert "CTranslate2, bfloat16" not in record.curves
    wrong = record.curves["llama.cpp, float32"]
    assert wrong["error"] == [pytest.approx(off, abs=1e-5)] * 2
    assert wrong["forward_ms"] == [None if off else pytest.approx(1.0)] * 2
    assert record.curves["llama.cpp, int8"]["forward_ms"] == [pytest.approx(1.0)] * 2
    ratio = record.metrics["ours_over_best_int8_70"]
    assert ratio == record.metrics["ours_over_llama.cpp, int8_70"] == ours["ours, int8"]["forward_ms"][1]
    assert ("ours_over_best_float32_70" in record.metrics) is not bool(off)
    assert sum("off by 1.0e-02" in words for words in messages) == (4 if off else 0)


def test_without_other_programs_ours_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "why_not", lambda: {"llama.cpp": "gguf cannot be imported"})
    messages = []
    record = records.load(*next_tokens(tmp_path, **SIZES, say=messages.append))
    assert set(record.curves) == {f"ours, {precision}" for precision in module.PRECISIONS}
    assert "llama.cpp is left out: gguf cannot be imported" in messages
    assert not record.metrics


def test_a_program_that_crashes_in_one_precision_is_left_out_there(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "why_not", lambda: {"llama.cpp": None})
    monkeypatch.setattr(llama_cpp, "READS", "raise SystemExit(3)")

    @contextlib.contextmanager
    def opened(name, model, *, precision, **_):
        if precision == "int8":
            llama_cpp.require_that_it_survives(tmp_path / "model.gguf")
        yield Echo(model, 0.0)

    monkeypatch.setattr(programs, "opened", opened)
    messages = []
    record = records.load(*next_tokens(tmp_path, **SIZES | {"lengths": (20,)}, say=messages.append))
    why = "it ended its process with exit status 3 when it read 64 tokens"
    assert f"llama.cpp in int8 is left out: {why}" in messages
    assert {name for name in record.curves if name.startswith("llama")} == {"llama.cpp, float32", "llama.cpp, bfloat16"}
