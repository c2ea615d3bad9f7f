"""The scale "gpu": its plan, its compiled layers, and a whole run of a tiny model through the same code on a CPU."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.lab import run as one_run
from alibi_lab.lab.config import ConfigError, ModelConfig
from alibi_lab.lab.config_io import from_json
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.training import parallel
from alibi_lab.lab.training.flops import matrix_flops_per_second
from alibi_lab.lab.training.train import train
from alibi_lab.recipes import index, plan
from alibi_lab.recipes.paper import studies
from alibi_lab.recipes.paper.cells import select
from alibi_lab.recipes.paper.items import ITEMS

METHODS = ("sinusoidal", "rotary", "t5", "alibi")
TINY = {
    "model.num_layers": "2",
    "model.num_heads": "2",
    "model.embed_dim": "16",
    "model.ffn_dim": "32",
    "data.tokenizer": "bytes",
    "train.length": "16",
    "train.steps": "4",
    "train.batch_tokens": "64",
    "train.warmup_steps": "1",
    "eval.tokens": "612",
}
quiet = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler
RATE = 1e9  # FLOPs per second of a made-up GPU


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Overrides for a tiny model on a short text, tested at two lengths; layers are traced but not made into C++."""
    monkeypatch.setattr(parallel, "COMPILER", "aot_eager")
    monkeypatch.setitem(studies._STEPS, "gpu", (0, 100))
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be, that is the question. " * 1000)
    AcceleratorState._reset_state()  # accelerate keeps one precision per process
    yield {**TINY, "data.text": str(text), "data.corpus": "text"}
    AcceleratorState._reset_state()


@pytest.mark.parametrize("name", ["quick", "table-3", "paper"])
def test_other_recipes_refuse_the_scale(name: str, tmp_path: Path) -> None:
    refused = "has no scale 'gpu'; pass one of smoke, small, medium, paper"
    with pytest.raises(ConfigError, match=refused):
        index.check(name, scale="gpu")
    with pytest.raises(ConfigError, match=refused):
        index.run(name, scale="gpu", out=tmp_path)


@quiet
@pytest.mark.parametrize("method", METHODS)
def test_all_layers_and_steps_share_one_graph_without_breaks(method: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    config = ModelConfig(method=method, architecture="baevski-auli", num_layers=9, embed_dim=16, ffn_dim=8, dropout=0.1)
    model, tokens = LanguageModel(config, trained_length=8), torch.arange(18).view(2, 9)
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True, dynamic=False)
    for step in range(3):
        model.progress = step / 3
        model(tokens[:, :-1], targets=tokens[:, 1:]).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


@quiet
def test_a_tiny_run_records_its_utilization(tiny, tmp_path, monkeypatch, capsys) -> None:
    assert matrix_flops_per_second(torch.device("cpu"), "bf16") is None
    monkeypatch.setattr(one_run, "matrix_flops_per_second", lambda *_: RATE)
    given = {"scale": "gpu", "overrides": tiny, "methods": ["alibi", "rotary"], "out": tmp_path / "out"}
    paths = index.run("table-2", **given, console=one_run.Console(force_terminal=False, width=200))
    assert re.search(r"tokens/s, \d+% MFU, 0 min left", capsys.readouterr().out)
    found = [records.load(path) for path in paths]
    assert [record.kind for record in found] == ["training", "evaluation"] * 2 + ["paper-item"]
    for record in found[:4]:
        assert record.config["train"]["compile"] is True
        assert from_json(record.config).train.precision == "bf16" if record.kind == "evaluation" else True
    flops = 6 * (2 * 16 * (4 * 16 + 2 * 32) + 256 * 16) + 12 * 2 * 16 * 17 / 2  # per token
    for record in (found[0], found[2]):
        assert record.metrics["matrix_flops_per_second"] == RATE
        assert record.metrics["utilization"] > record.metrics["tokens_per_second"] * flops / RATE, "the first compiles"
    assert set(found[-1].curves) == {"ALiBi, L = 512", "Rotary, L = 512"}
    assert found[-1].curves["ALiBi, L = 512"]["length"] == [512, 612]
    assert index.run("table-2", **given) == paths, "nothing runs twice"


@quiet
def test_a_compiled_training_resumes_with_the_same_losses(tiny, tmp_path) -> None:
    (config,) = select(ITEMS["table-2"], scale="gpu", overrides=tiny, methods=["alibi"]).runs
    corpus = load_corpus(config.data)
    uncut = train(config, corpus, tmp_path / "uncut")

    def interrupted(progress) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    cut = dataclasses.replace(config, train=dataclasses.replace(config.train, checkpoint_every=1))
    with pytest.raises(KeyboardInterrupt):
        train(cut, corpus, tmp_path / "cut", on_step=interrupted)
    resumed = train(cut, corpus, tmp_path / "cut")
    assert resumed.loss_nats == uncut.loss_nats


@quiet
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.long
def test_compiled_layers_have_the_losses_of_eager_ones(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "COMPILER", "inductor")
    for method in METHODS:
        overrides = {**tiny, "model.dropout": "0", "train.precision": "no"}
        losses = {}
        for compiled in ("true", "false"):
            runs = select(ITEMS["table-2"], scale="gpu", overrides={**overrides, "train.compile": compiled}).runs
            (config,) = (run for run in runs if run.model.method == method)
            losses[compiled] = train(config, load_corpus(config.data), tmp_path / method / compiled).loss_nats
        assert losses["true"] == pytest.approx(losses["false"], rel=1e-5)


def test_without_a_gpu_the_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["run", "figure-1", "--scale", "gpu"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "torch finds no CUDA device here" in result.output


def test_minutes_set_the_steps_by_the_slowest_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"alibi": 0.5, "rotary": 2.0}
    monkeypatch.setattr(plan, "_seconds_per_step", lambda config: rates[config.model.method])
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    command = ["run", "--scale", "smoke", "--text", str(text), "--methods", "alibi,rotary", "--no-report"]
    command += ["--out", str(tmp_path / "out"), "--minutes", "0.2"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert "0.2 min per training: --set train.steps=6 --set train.warmup_steps=2; pass these" in result.output
    steps = [records.load(path).config["train"]["steps"] for path in (tmp_path / "out" / "records").iterdir()]
    assert steps == [6] * 4
    for more in (["--shard", "0/2"], ["--set", "train.steps=5"]):
        refused = CliRunner().invoke(app, [*command, *more], env={"COLUMNS": "300"})
        assert refused.exit_code == 2
        assert "--minutes measures the steps of one process" in refused.output
