"""Trainings on a Ray cluster: the records of trainings one by one, also if workers are killed or the command is stopped."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from small_runs import recipe_of

from alibi_lab import records
from alibi_lab.lab import experiment
from alibi_lab.lab.config import Recipe
from alibi_lab.lab.experiment import ExperimentError, run
from alibi_lab.lab.training.checkpoint import newest
from alibi_lab.lab.training.train import TrainingError

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default:.*deprecated:DeprecationWarning:ray")]
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
EAGER = {"train.checkpoint_every": "20"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.update(ENVIRONMENT)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def several(tiny_run) -> Callable[..., Recipe]:
    return lambda *methods, steps: recipe_of(*(tiny_run(method, steps=steps) for method in methods), name="several")


def answers(paths):
    found = map(records.load, paths)
    return [(record.kind, record.config, record.metrics.get("loss_nats"), losses(record)) for record in found]


def losses(record):
    return record.curves.get("by_length", {}).get("sliding_nats"), record.curves.get("training", {}).get("loss_nats")


def training_workers(parent: int) -> Iterator[psutil.Process]:
    """Ray writes a process's task into its command line."""
    for child in psutil.Process(parent).children(recursive=True):
        try:
            if "ray::_run_training" in " ".join(child.cmdline()):
                yield child
        except psutil.Error:
            continue


def saved(out: Path) -> dict[str, int]:
    """The newest saved step of each training."""
    found = {folder.name: newest(folder) for folder in out.glob("checkpoints/several/*/*")}
    return {name: int(folder.name.removeprefix("step-")) for name, folder in found.items() if folder}


def when_all_train(out: Path, count: int, act: Callable[[], None]) -> threading.Thread:
    """Calls `act` once this many trainings have saved a checkpoint."""

    def wait() -> None:
        while len(saved(out)) < count and threading.main_thread().is_alive():
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def kill_worker() -> None:
    next(training_workers(os.getpid())).kill()


def test_a_worker_killed_while_it_trains_changes_no_record(cluster, several, tmp_path):
    """Each of two workers trains a model; one is killed, and another goes on from its checkpoint."""
    recipe, out, steps = several("alibi", "rotary", steps=400), tmp_path / "killed", []

    def kill_and_watch():
        kill_worker()
        while len(list(out.glob("records/*"))) < 2:
            steps.append(saved(out))
            time.sleep(0.01)

    watching = when_all_train(out, 2, kill_and_watch)
    found = run(recipe, out=out, on_ray=True, overrides=EAGER)
    watching.join()
    for name in steps[0]:
        assert 20 <= steps[0][name] < 400
        assert [one[name] for one in steps] == sorted(one[name] for one in steps)
    assert answers(found) == answers(run(recipe, out=tmp_path / "alone", overrides=EAGER))
    assert run(recipe, out=out, on_ray=True, overrides=EAGER) == found  # nothing is trained again


def test_an_interruption_saves_every_training(cluster, several, tmp_path):
    recipe = several("alibi", "rotary", steps=100_000)
    waiting = when_all_train(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run(recipe, out=tmp_path, on_ray=True, overrides=EAGER)
    waiting.join()
    at_end = saved(tmp_path)
    assert any(step % 20 for step in at_end.values())  # saved where it was stopped
    assert not list(training_workers(os.getpid()))
    assert not list(tmp_path.glob("records/*"))


def test_a_training_that_fails_stops_the_others_and_says_why(cluster, several, tmp_path):
    fine, broken = several("alibi", "rotary", steps=100_000).runs("small")
    broken = dataclasses.replace(broken, train=dataclasses.replace(broken.train, learning_rate=1e30))
    with pytest.raises(TrainingError, match=r"train\.learning_rate"):
        run(recipe_of(fine, broken, name="several"), out=tmp_path, on_ray=True)
    assert not list(training_workers(os.getpid()))


def test_a_training_whose_workers_always_die_is_reported(cluster, several, tmp_path, monkeypatch):
    from alibi_lab.lab import ray_trainings

    monkeypatch.setattr(ray_trainings, "RETRIES", 0)
    waiting = when_all_train(tmp_path, 1, kill_worker)
    with pytest.raises(ChildProcessError, match=r"a training cannot go on .*; the same command resumes"):
        run(several("alibi", steps=100_000), out=tmp_path, on_ray=True, overrides=EAGER)
    waiting.join()


def test_a_machine_without_the_folder_is_named(cluster, several, tmp_path):
    from alibi_lab.lab import ray_trainings

    (one,) = several("alibi", steps=2).runs("small")
    with pytest.raises(
        FileNotFoundError, match=r"does not see .*; run the command in a folder that all machines share"
    ):
        ray_trainings._run_training("several", [one], tmp_path, tmp_path / "out", ".shared-x", True, "")


def test_a_launcher_and_a_cluster_exclude_each_other(several, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "processes", lambda: SimpleNamespace(num_processes=4, is_main_process=True))
    with pytest.raises(ExperimentError, match="a launcher started 4 processes"):
        run(several("alibi", steps=2), out=tmp_path / "out", on_ray=True)
    assert not (tmp_path / "out").exists()


def test_the_command_trains_on_a_cluster_of_this_machine(tmp_path):
    asked = ["run", "quick", "--scale", "smoke", "--set", "train.steps=1", "--methods", "alibi", "--ray", "local"]
    result = subprocess.run(
        [sys.executable, "-m", "alibi_lab", *asked, "--out", "runs"],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "nats per token" in result.stdout + result.stderr
    assert len(list(tmp_path.glob("runs/records/*"))) == 2
    assert (tmp_path / "runs" / "report.html").exists()
