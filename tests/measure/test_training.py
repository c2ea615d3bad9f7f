"""`alibi bench training`: attention is recognized, and the record is complete."""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from alibi_attn.attention.api import alibi_attention
from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.lab.config import ConfigError, ModelConfig, RunConfig, Scale, TrainConfig
from alibi_lab.lab.training.flops import attention_flops, linear_flops
from alibi_lab.measure import training
from alibi_lab.measure.training import expect_agreement, profiled_shares, time_shares, utilization_row
from alibi_lab.recipes import quick

LENGTH, ROWS = 16, 3
MODEL = ModelConfig(method="sinusoidal", num_layers=2, num_heads=2, embed_dim=32, ffn_dim=48, vocab_size=64)


@pytest.mark.parametrize("scale", training.TRAININGS)
def test_the_trainings_are_those_of_the_recipe_quick(scale: Scale) -> None:
    model, train = training.TRAININGS[scale].model, training.TRAININGS[scale].train
    run = next(run for run in quick.RECIPE.runs(scale) if run.model.method == "alibi")
    assert (run.model, run.train) == (dataclasses.replace(model, method="alibi"), train)


def test_utilization_is_the_achieved_share_of_the_matrix_rate() -> None:
    config = RunConfig(model=MODEL, train=TrainConfig(length=LENGTH, batch_tokens=ROWS * LENGTH))
    flops = linear_flops(config) + attention_flops(config)
    row = utilization_row(config, step_ms=2.0, product_ms=2 * 2048**3 / 1e9)  # a rate of 1,000 GFLOP/s
    assert row["matrix_gflops"] == pytest.approx(1000)
    assert row["achieved_gflops"] == pytest.approx(flops / 2e6)
    assert row["utilization"] == pytest.approx(flops / 2e9)
    assert row["tokens_per_second"] == ROWS * LENGTH * 500


@dataclasses.dataclass
class Timed:
    name: str
    self_cpu_time_total: float
    cpu_parent: "Timed | None" = None


def test_operators_called_by_attention_count_as_attention() -> None:
    step = Timed("step", 1.0)
    linear = Timed("aten::linear", 2.0, step)
    ours, theirs = Timed("_AttentionBackward", 4.0, step), Timed("aten::scaled_dot_product_attention", 8.0, step)
    inside = [Timed("aten::aminmax", 16.0, ours), Timed("aten::bmm", 32.0, Timed("aten::matmul", 0.0, theirs))]
    shares = time_shares([step, linear, ours, theirs, *inside, Timed("aten::mm", 64.0, linear)])
    assert {name: share * 127 for name, share in shares.items()} == pytest.approx(
        {"matrix_time_share": 64, "attention_time_share": 60, "other_time_share": 3}
    )


def test_our_and_torchs_attention_are_recognized_by_their_operators() -> None:
    """Forward and backward, at a size for which "auto" does not choose `dense`, which runs ordinary operators."""
    q = torch.randn(2, 8, 128, 8, requires_grad=True)
    attentions: list[Callable[..., torch.Tensor]] = [
        alibi_attention,
        lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True),
    ]
    for attention in attentions:
        forward = profiled_shares(lambda attention=attention: attention(q, q, q))
        out = attention(q, q, q).sum()
        backward = profiled_shares(out.backward)
        assert forward["attention_time_share"] > 0
        assert backward["attention_time_share"] > 0
        assert forward["matrix_time_share"] == backward["matrix_time_share"] == 0


@pytest.mark.parametrize("step", [(8.1, 1.0), (8.0, 1.1), (math.nan, 1.0), (8.0, math.inf)])
def test_precisions_that_disagree_are_not_timed(step: tuple[float, float]) -> None:
    expect_agreement("alibi-128", [(8.0, 1.0), (8.0, 1.0)], [(8.0, 1.0), (8.05, 1.05)])
    with pytest.raises(RuntimeError, match="alibi-128 is wrong: at step 2 the"):
        expect_agreement("alibi-128", [(8.0, 1.0), (8.0, 1.0)], [(8.0, 1.0), step])


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both precisions become fp32, as two trainings that differ in a field that steps do not read, because both run in this
    process, where accelerate supports only one precision.
    """

    def at(config: RunConfig, precision: str) -> RunConfig:
        every = 5 if precision == "no" else 6
        return dataclasses.replace(config, train=dataclasses.replace(config.train, checkpoint_every=every))

    monkeypatch.setattr(training, "_at", at)
    monkeypatch.setattr(training.timing, "fresh_process", lambda threads: ThreadPoolExecutor(1))
    monkeypatch.setattr(training, "MATRIX_SIZE", 64)  # its cost does not matter here
    for cached in (training._training, training.product_in):
        cached.cache_clear()


@pytest.mark.usefixtures("in_fp32")
def test_a_record_has_every_method_and_precision(tmp_path: Path) -> None:
    messages: list[str] = []

    def measure() -> list[Path]:
        return training.training(
            tmp_path, scale="smoke", methods=["sinusoidal", "alibi"], lengths=(8,), repeats=1, say=messages.append
        )

    record = records.load(*measure())
    assert record.name == "training/smoke"
    assert (record.config["methods"], record.config["lengths"]) == (["sinusoidal", "alibi"], [8])
    assert record.config["threads"] == 1
    assert set(record.curves) == {
        f"{method}, {word}" for method in ("sinusoidal", "alibi") for word in ("fp32", "bf16")
    }
    for columns in record.curves.values():
        assert columns["length"] == [8]
        assert columns["linear_flops"] == [6 * record.config["parameters"] * 256]
        assert columns["attention_flops"] == [12 * 2 * 32 * 256 * (8 + 1) // 2]
        assert sum(columns[f"{name}_time_share"][0] for name in ("matrix", "attention", "other")) == pytest.approx(1)
        assert all(x > 0 for name in ("step_ms", "utilization", "matrix_gflops", "loss_nats") for x in columns[name])
    assert record.metrics.keys() == {f"{method}-8, fp32 / bf16" for method in ("sinusoidal", "alibi")}
    assert len(messages) == 4 + 1
    with pytest.raises(FileExistsError, match="never overwritten"):
        measure()


def refused(out: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["bench", "training", "--scale", "smoke", "--out", str(out), *options])
    assert result.exit_code != 0
    assert not list(out.iterdir())
    return result.output + str(result.exception)


def test_bad_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    assert "did you mean 'rotary'?" in refused(tmp_path, "--methods", "alibi,rotery")
    assert "train.batch_tokens is 256 but must be a multiple of train.length, 100" in refused(
        tmp_path, "--lengths", "100"
    )
    assert "must be whole numbers" in refused(tmp_path, "--lengths", "x")
    with pytest.raises(ConfigError, match="scale is 'paper'; pass one of smoke, small, medium"):
        training.training(tmp_path, scale="paper")
    with pytest.raises(ValueError, match="threads is 0 but must be 1 or more"):
        training.training(tmp_path, threads=0)


@pytest.mark.long
def test_the_command_trains_in_both_precisions(tmp_path: Path) -> None:
    options = ["--scale", "smoke", "--methods", "alibi,t5", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "training", *options])
    assert result.exit_code == 0, result.output
    (record,) = records.find(tmp_path, kind="benchmark")
    wide, half = (record.curves[f"t5, {word}"]["loss_nats"][0] for word in ("fp32", "bf16"))
    assert 0 < abs(wide - half) < 2**-7 * wide
