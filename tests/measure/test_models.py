"""`alibi bench models`: programs are compared with the truth and then timed; wrong ones are rows without times."""

import dataclasses
from pathlib import Path

import pytest
import torch

from alibi_lab import records
from alibi_lab.measure import models as module
from alibi_lab.measure.model_programs import OURS, PROGRAMS, Program, Setting
from alibi_lab.measure.models import models
from alibi_lab.measure.peers import llama_cpp
from alibi_lab.measure.peers.dense_encoder import Sizes

TINY = {"layers": 1, "width": 64, "vocabulary": 40, "rounds": 1, "seconds": 0.1, "say": lambda line: None}
SETTING = Setting(model="encoder", sizes=Sizes(1, 64, 2, 96, 40), batch=(40,), seconds=0.1)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.timing, "in_fresh_process", lambda function, *arguments: function(*arguments))


def test_decoders_and_encoders_pass_and_equal_the_originals(tmp_path: Path) -> None:
    chosen = ["bloom", "mpt", "falcon", "t5", "encoder"]
    found = [
        records.load(path)
        for path in models(tmp_path, models=chosen, precisions=["float32", "bfloat16"], lengths=(40, 70), **TINY)
    ]
    assert [record.name for record in found[::2]] == [f"models/{name}-pass-float32" for name in chosen]
    for record in found:
        assert record.curves[OURS]["length"] == [40, 70]
        assert record.curves[OURS]["right"] == [True, True]
        most = 1e-4 if record.config["precision"] == "float32" else 5e-2
        errors = {name: columns["error"] for name, columns in record.curves.items() if "error" in columns}
        rounds_its_bias = record.name == "models/falcon-pass-bfloat16"  # so in fp32 too, where a copy does not
        assert len(errors) >= 2 - rounds_its_bias, "ours and the original"
        assert all(error < most for of_one in errors.values() for error in of_one), errors
        assert all(0 < share < 1 for share in record.curves[OURS]["attention_share"])
    assert "llama_cpp" in found[0].curves["llama.cpp, BLOOM"]["why_not"][0]


def test_the_truth_of_a_falcon_does_not_round_its_bias() -> None:
    rows = module.passes(Setting(model="falcon", sizes=Sizes.of(1, 256, 40), batch=(600,), seconds=0.1))
    assert rows[OURS].error < 1e-5
    assert (rows["transformers"].error, rows["transformers"].right) == (None, None)


def test_a_batch_of_texts_is_compared_at_its_tokens_only(tmp_path: Path) -> None:
    (path,) = models(tmp_path, models=["encoder"], precisions=["float32"], texts=(40, 9, 1), **TINY)
    record = records.load(path)
    assert record.name == "models/encoder-pass-mixed-float32"
    assert record.curves[OURS]["tokens"] == [50]
    assert record.curves["original: dense bias, eager"]["right"] == [True]


def test_cached_steps_equal_those_of_transformers_also_after_padding(tmp_path: Path) -> None:
    (path,) = models(tmp_path, parts=["step"], precisions=["float32"], lengths=(48,), **TINY)
    rows = records.load(path).curves
    assert rows.keys() >= {OURS, "ours, static cache", "transformers, StaticCache", "ours, two padded rows"}
    for name, columns in rows.items():
        assert columns["right"] == [True], (name, columns)
        assert columns["forward_ms"][0] > 0


def test_tokens_after_a_prompt_name_the_programs_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(name: str, setting: Setting) -> object:
        raise llama_cpp.Crash("it ended its process")

    monkeypatch.setattr(module.programs, "opened", opened)
    monkeypatch.setattr(module.programs, "BLOOMS", {"made up": (), "other": ("no_such_package",)})
    (path,) = models(tmp_path, parts=["prompt"], precisions=["bfloat16"], lengths=(48,), tokens=2, **TINY)
    rows = records.load(path).curves
    assert rows[OURS]["forward_ms"][0] > 0
    assert 0 < rows[OURS]["error"][0] < 5e-2
    assert rows["made up"]["why_not"] == ["it ended its process"]
    assert "no_such_package cannot be imported" in rows["other"]["why_not"][0]


def test_wrong_outputs_are_not_timed_and_ours_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PROGRAMS[OURS].open

    def off(setting: Setting) -> object:
        run = right(setting)
        return lambda ids, mask: run(ids, mask) * 1.01

    peers = {**PROGRAMS, "wrong": Program(open=off, models=("encoder",))}
    monkeypatch.setattr(module.programs, "PROGRAMS", peers)
    rows = module.passes(SETTING)
    assert (rows[OURS].right, rows["wrong"].right, rows["wrong"].forward_ms) == (True, False, None)
    monkeypatch.setattr(module.programs, "PROGRAMS", {**PROGRAMS, OURS: dataclasses.replace(PROGRAMS[OURS], open=off)})
    with pytest.raises(RuntimeError, match="encoder-pass-float32, ours: at 40 tokens it is off by"):
        models(tmp_path, models=["encoder"], precisions=["float32"], lengths=(40,), **TINY)


def test_every_model_has_its_own_default_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "keep", lambda out, configs, steps, say: configs)
    configs = models(tmp_path, models=["bloom", "encoder"], precisions=["float32"])
    assert [(one["width"], one["heads"], one["inner"]) for one in configs.values()] == [
        (1024, 16, 4096),
        (768, 12, 3072),
    ]


def test_a_program_that_needs_more_memory_than_there_is_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.timing, "too_large", lambda needed: "it may need too much" if needed > 0 else None)
    rows = module.passes(SETTING)
    assert rows["original: dense bias, eager"].why_not == "it may need too much"
    assert rows[OURS].forward_ms is not None
    assert rows[OURS].error == 0, "nothing else is left to compare with"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": ["gpt"]}, "models is 'gpt'.*; pass one of bloom"),
        ({"parts": ["all"]}, "parts is 'all'; pass one of pass"),
        ({"precisions": ["int4"]}, "precisions is 'int4'"),
        ({"precisions": ["float32", "float8"]}, "float8 needs"),
        ({"models": ["mpt"], "parts": ["step"]}, "part step measures bloom, not mpt"),
    ],
)
def test_wrong_options_are_refused(options: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        models(tmp_path, **options, **TINY)


def test_linear_layers_in_int8_cost_an_error_that_the_row_has() -> None:
    try:
        rows = module.passes(dataclasses.replace(SETTING, precision="int8"))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    if rows[OURS].right is None or torch.isnan(torch.tensor(float(rows[OURS].error or 0))):
        pytest.skip(str(rows[OURS].why_not))
    assert 1e-4 < rows[OURS].error < 1e-1
