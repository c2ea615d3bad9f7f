"""The command line's listings: details of a recipe, the fields of the config, and a plan."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import alibi
from programs import printed

from alibi_attn.cli.console import console
from alibi_lab.lab import experiment
from alibi_lab.lab.config_io import field_names
from alibi_lab.recipes import plan

SMALLER = ["--set", "train.steps=4", "--set", "eval.lengths=8,16", "--set", "eval.tokens=32", "--no-report"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 250)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be, that is the question. " * 200)
    return path


def test_config_shows_every_field_with_its_value_and_a_meaning() -> None:
    output = alibi("config", "quick")
    rows = {line.split()[0]: line for line in output.splitlines() if "." in line.split()[0]}
    assert set(rows) == set(field_names())
    assert "sinusoidal, rotary, t5, alibi" in rows["model.method"]
    assert re.search(r"200 +updates of the weights", rows["train.steps"])


def test_a_dry_run_lists_the_trainings_and_what_is_recorded_and_writes_nothing(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["run", "--scale", "smoke", "--text", str(text), "--out", str(out), *SMALLER, "--methods", "alibi,t5"]
    planned = alibi(*command, "--dry-run")
    assert "2 of 2 trainings left, 2,048 tokens" in planned
    assert not out.exists()
    alibi(*command[:-1], "alibi")
    files = sorted(out.rglob("*"))
    again = alibi(*command, "--dry-run")
    assert "1 of 2 trainings left, 1,024 tokens" in again
    (recorded,) = (line for line in again.splitlines() if "recorded already" in line)
    assert "alibi-16" in recorded
    assert sorted(out.rglob("*")) == files
    (out / "records").joinpath(*(path.name for path in files if path.name.startswith("evaluation-"))).unlink()
    untested = alibi(*command, "--dry-run")
    assert "1 of 2 trainings left, 1,024 tokens" in untested
    assert re.search(r"alibi-16\S+ +1,024 +0.0 +trained already, not tested", untested)
    assert "0 of 1 trainings left, 0 tokens" in alibi(*command, "--shard", "0/2", "--dry-run")
    shutil.rmtree(out / "checkpoints")
    assert "2 of 2 trainings left" in alibi(*command, "--dry-run")


def test_a_dry_run_knows_what_speeds_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["run", "table-1", "--scale", "smoke", "--out", tmp_path, "--dry-run"]
    assert "12 of 12 measurements of speed left; about 0 minutes" in alibi(*command)
    monkeypatch.setattr(plan, "recorded_speed", lambda config, *_, **__: config.model.method != "alibi" or None)
    assert "\n3 of 12 measurements" in alibi(*command)


def test_of_a_launchers_processes_the_first_one_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    monkeypatch.setattr(plan, "plan", lambda recipe, **_: measured.append(recipe) or [])
    monkeypatch.setattr(experiment, "processes", lambda: SimpleNamespace(is_main_process=False))
    assert alibi("run", "--scale", "smoke", "--out", tmp_path, "--dry-run") == ""
    assert measured == ["quick"], "it measures with the others"


@pytest.mark.long
def test_missing_runs_are_listed_by_a_launched_group(text: Path, tmp_path: Path) -> None:
    """Measuring a step takes all processes: the group waited forever when only the first one listed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "alibi_lab", "run", "--scale", "smoke", "--text", text, *SMALLER]
    command += ["--methods", "alibi", "--out", tmp_path / "out", "--missing"]
    assert printed(*launcher, *command, timeout=100).count("1 of 1 trainings left") == 1
