"""Trainings in parallel processes: the same records as sequential trainings, also when stopped and resumed."""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from alibi_attn import records
from alibi_attn.lab import experiment
from alibi_attn.lab.config import Recipe
from alibi_attn.lab.experiment import ExperimentError, run
from alibi_attn.lab.training.train import TrainingError

TEXTS = dict.fromkeys(("question", "paper", "command", "cost", "expected"), "")


def recipe_of(*runs):
    return Recipe(name="jobs", runs=lambda scale: runs, **TEXTS)


@pytest.fixture
def recipe(text_file, run_on):
    """Four runs, two of which share a training."""
    runs = [run_on(text_file, method, steps=4) for method in ("alibi", "rotary", "none")]
    return recipe_of(*runs, dataclasses.replace(runs[0], eval=dataclasses.replace(runs[0].eval, lengths=(16, 64))))


def answers(paths):
    found = map(records.load, paths)
    return [(record.kind, record.config, record.metrics.get("loss_nats"), losses(record)) for record in found]


def losses(record):
    return record.curves.get("by_length", {}).get("sliding_nats")


def when_training(folder, count, act):
    """Calls `act` once the given number of trainings have written a checkpoint."""

    def wait():
        while len(list(folder.glob("checkpoints/jobs/*/*/step-*"))) < count:
            if not multiprocessing.active_children() and time.monotonic() - started > 60:
                return
            time.sleep(0.05)
        act()

    started = time.monotonic()
    threading.Thread(target=wait, daemon=True).start()


def test_jobs_leave_the_records_of_trainings_one_by_one(recipe, tmp_path, capfd):
    one_by_one = run(recipe, out=tmp_path / "one")
    at_once = run(recipe, out=tmp_path / "two", jobs=2, console=Console(width=120))
    assert [path.name for path in at_once] == [path.name for path in one_by_one]
    assert answers(at_once) == answers(one_by_one)
    assert "jobs/rotary-16/seed-0" in capfd.readouterr().out
    assert run(recipe, out=tmp_path / "two", jobs=2) == at_once  # nothing is trained again


@pytest.mark.long
def test_an_interruption_stops_all_and_each_resumes_where_it_stopped(text_file, run_on, tmp_path):
    recipe = recipe_of(*(run_on(text_file, method, steps=400) for method in ("alibi", "rotary")))
    folder = tmp_path / "cut"

    when_training(folder, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    eager = {"train.checkpoint_every": "20"}
    with pytest.raises(KeyboardInterrupt):
        run(recipe, out=folder, jobs=2, overrides=eager)
    assert not multiprocessing.active_children()
    assert not list(folder.glob("records/*"))
    resumed = run(recipe, out=folder, jobs=2, overrides=eager)
    assert answers(resumed) == answers(run(recipe, out=tmp_path / "uncut", overrides=eager))


@pytest.mark.long
def test_a_training_that_fails_stops_the_others_and_says_why(text_file, run_on, tmp_path):
    fine = run_on(text_file, "alibi", steps=100_000)
    broken = dataclasses.replace(
        run_on(text_file, "rotary", steps=50), train=dataclasses.replace(fine.train, steps=50, learning_rate=1e30)
    )
    with pytest.raises(TrainingError, match=r"train\.learning_rate"):
        run(recipe_of(fine, broken), out=tmp_path, jobs=2)
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_a_process_that_dies_is_reported(text_file, run_on, tmp_path):
    recipe = recipe_of(*(run_on(text_file, method, steps=100_000) for method in ("alibi", "rotary")))
    when_training(tmp_path, 1, lambda: multiprocessing.active_children()[0].kill())
    with pytest.raises(ChildProcessError, match="pass fewer jobs"):
        run(recipe, out=tmp_path, jobs=2, overrides={"train.checkpoint_every": "20"})


def test_jobs_that_cannot_be_are_refused(recipe, tmp_path, monkeypatch):
    with pytest.raises(ExperimentError, match="jobs is 0 but must be 1 or more"):
        run(recipe, out=tmp_path / "out", jobs=0)
    with monkeypatch.context() as patched:
        patched.setattr(torch.accelerator, "is_available", lambda: True)
        with pytest.raises(ExperimentError, match="one shard for each device"):
            run(recipe, out=tmp_path / "out", jobs=2)
    launched = SimpleNamespace(num_processes=4, is_main_process=True)
    monkeypatch.setattr(experiment, "processes", lambda: launched)
    with pytest.raises(ExperimentError, match="a launcher started 4 processes"):
        run(recipe, out=tmp_path / "out", jobs=2)
    assert not (tmp_path / "out").exists()
