"""An experiment trains what is not trained, evaluates what is not evaluated, and leaves one record of each."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys

import pytest
from filelock import FileLock
from rich.console import Console

from alibi_attn import records
from alibi_attn.lab import experiment
from alibi_attn.lab.config import ConfigError, Recipe
from alibi_attn.lab.data import CorpusError
from alibi_attn.lab.experiment import ExperimentError, run
from alibi_attn.lab.fields import to_json


@pytest.fixture
def recipe(tiny_run):
    def runs(scale):
        return tuple(tiny_run(method, steps=8) for method in ("alibi", "learned"))

    return Recipe(name="tiny", question="?", paper="", command="", cost="", expected="", runs=runs)


def trainings(monkeypatch):
    """The names of what is trained from here on."""
    seen = []
    real = experiment.train

    def counted(config, *arguments, **named):
        seen.append((config.model.method, config.train.seed))
        return real(config, *arguments, **named)

    monkeypatch.setattr(experiment, "train", counted)
    return seen


def test_every_run_leaves_a_training_and_an_evaluation(recipe, tmp_path):
    paths = run(recipe, out=tmp_path / "out")
    found = [records.load(path) for path in paths]
    assert [(record.kind, record.name) for record in found] == [
        ("training", "tiny/alibi-16/seed-0"),
        ("evaluation", "tiny/alibi-16/seed-0"),
        ("training", "tiny/learned-16/seed-0"),
        ("evaluation", "tiny/learned-16/seed-0"),
    ]
    training, evaluation, _, learned = found
    assert set(training.config) == {"model", "data", "train", "corpus"}
    assert set(evaluation.config) == {"model", "data", "train", "eval", "corpus"}
    assert training.metrics["tokens"] == 8 * 64
    assert training.metrics["parameters"] == evaluation.metrics["parameters"]
    assert training.metrics["loss_nats"] == training.curves["training"]["loss_nats"][-1]
    assert len(training.curves["training"]["step"]) == 8
    assert evaluation.curves["by_length"]["length"] == [16, 32]
    assert learned.curves["by_length"]["sliding_nats"][1] is None
    assert sorted(path.name for path in (tmp_path / "out" / "records").iterdir()) == sorted(path.name for path in paths)


def test_what_is_recorded_is_skipped(recipe, tmp_path, monkeypatch):
    first = run(recipe, out=tmp_path)
    seen = trainings(monkeypatch)
    assert run(recipe, out=tmp_path) == first
    assert seen == []


def test_another_evaluation_uses_the_trained_model(recipe, tmp_path, monkeypatch):
    first = run(recipe, out=tmp_path)
    monkeypatch.setattr("alibi_attn.lab.train._step", None)  # a step would fail
    again = run(recipe, out=tmp_path, overrides={"eval.stride": "1"})
    assert [again[0], again[2]] == [first[0], first[2]]
    assert set(again) & set(first) == {first[0], first[2]}


def test_a_lost_evaluation_without_its_checkpoint_trains_again_and_keeps_the_record(recipe, tmp_path):
    first = run(recipe, out=tmp_path)
    kept = first[0].read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    expected = records.load(first[1]).curves["by_length"]["nonoverlapping_nats"]
    first[1].unlink()
    assert run(recipe, out=tmp_path) == first
    assert first[0].read_bytes() == kept
    assert records.load(first[1]).curves["by_length"]["nonoverlapping_nats"] == expected


def test_an_interrupted_experiment_goes_on_where_it_stopped(recipe, tmp_path, monkeypatch):
    uncut = [records.load(path) for path in run(recipe, out=tmp_path / "uncut")]
    real = experiment.train

    def interrupted(config, corpus, folder, *, on_step):
        def press(progress):
            on_step(progress)
            if config.model.method == "learned" and progress.step == 3:
                signal.raise_signal(signal.SIGINT)

        return real(config, corpus, folder, on_step=press)

    with monkeypatch.context() as patched:
        patched.setattr(experiment, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, out=tmp_path / "cut")
    assert len(list((tmp_path / "cut" / "records").iterdir())) == 2
    seen = trainings(monkeypatch)
    resumed = [records.load(path) for path in run(recipe, out=tmp_path / "cut")]
    assert seen == [("learned", 0)]
    for mine, theirs in zip(resumed, uncut, strict=True):
        assert mine.config == theirs.config
        assert mine.metrics.get("loss_nats") == theirs.metrics.get("loss_nats")
        for column in ("nonoverlapping_nats", "sliding_nats"):
            assert mine.curves.get("by_length", {}).get(column) == theirs.curves.get("by_length", {}).get(column)


def test_seeds_repeat_every_run(recipe, tmp_path):
    names = [records.load(path).name for path in run(recipe, out=tmp_path, seeds=(1, 2))]
    assert names[::2] == [f"tiny/{method}-16/seed-{seed}" for seed in (1, 2) for method in ("alibi", "learned")]


def test_an_override_that_makes_runs_equal_runs_them_once(recipe, tmp_path):
    assert len(run(recipe, out=tmp_path, overrides={"model.method": "none"})) == 2


def test_two_experiments_in_one_folder_refuse_each_other(recipe, tmp_path):
    with FileLock(tmp_path / ".lock"), pytest.raises(ExperimentError, match="another experiment is running in"):
        run(recipe, out=tmp_path)
    assert len(run(recipe, out=tmp_path)) == 4


def test_a_folder_that_cannot_be_written_is_said_so(recipe, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ExperimentError, match=r"cannot be written .*; pass a folder that you may write"):
            run(recipe, out=out)


def test_what_is_wrong_is_said_before_anything_is_written(recipe, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"did you mean 'train.steps'"):
        run(recipe, out=out, overrides={"train.stepz": "1"})
    with pytest.raises(ConfigError, match="'t5' has only none; yarn is for rotary"):
        run(recipe, out=out, overrides={"model.method": "t5", "eval.stretch": "yarn"})
    with pytest.raises(ConfigError, match="'learned', whose positions count from the start of a row"):
        run(recipe, out=out, overrides={"model.method": "learned", "data.segments": "true"})
    with pytest.raises(CorpusError, match="one evaluation window of 100000"):
        run(recipe, out=out, overrides={"eval.lengths": "100000"})
    with pytest.raises(CorpusError, match="one training example has 100001"):
        run(recipe, out=out, overrides={"train.length": "100000", "train.batch_tokens": "100000"})
    mixed = dataclasses.replace(
        recipe,
        runs=lambda scale: tuple(
            dataclasses.replace(config, train=dataclasses.replace(config.train, precision=precision))
            for config, precision in zip(recipe.runs(scale), ("no", "bf16"), strict=True)
        ),
    )
    with pytest.raises(ConfigError, match=r"must share train.precision"):
        run(mixed, out=out)
    assert not out.exists()


def test_progress_is_shown_on_the_console_that_is_passed(recipe, tmp_path, capsys):
    console = Console(record=True, width=120)
    run(recipe, out=tmp_path, console=console)
    shown = console.export_text()
    assert "tiny/alibi-16/seed-0" in shown
    assert "tokens/s" in shown
    assert "32: –" in shown  # learned positions have none there
    capsys.readouterr()
    run(recipe, out=tmp_path)
    assert capsys.readouterr().out == ""


def test_two_processes_train_like_one(recipe, tiny_run, tmp_path):
    """They share every batch and average their gradients; sums in another order differ by rounding."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from alibi_attn.lab.config import Recipe\n"
        "from alibi_attn.lab.fields import from_json\n"
        "from alibi_attn.lab.experiment import run\n"
        f"config = from_json({to_json(tiny_run(steps=8))!r})\n"
        "recipe = Recipe(name='tiny', question='', paper='', command='', cost='', expected='', runs=lambda scale: (config,))\n"
        f"print(run(recipe, out=Path({str(tmp_path / 'two')!r})))\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    result = subprocess.run(launch, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    two = next(records.find(tmp_path / "two" / "records", kind="training"))
    one = records.load(run(recipe, out=tmp_path / "one")[0])
    assert two.config == one.config
    losses = [record.curves["training"]["loss_nats"] for record in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
