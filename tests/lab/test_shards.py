"""Shards of a recipe: disjoint, together complete, with records that merge in one folder."""

import dataclasses
import itertools

import pytest
from filelock import FileLock
from rich.console import Console
from small_runs import recipe_of
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.lab.config import ConfigError
from alibi_lab.lab.experiment import ExperimentError, run
from alibi_lab.lab.planning import by_training, configs_of


@pytest.fixture
def recipe(text_file, run_on):
    """Five runs, two of which share a training."""
    runs = [run_on(text_file, method, steps=2) for method in ("alibi", "rotary", "none", "sinusoidal")]
    runs.insert(1, dataclasses.replace(runs[0], eval=dataclasses.replace(runs[0].eval, lengths=(16, 64))))
    return recipe_of(*runs, name="five")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_disjoint_and_together_all_runs(recipe, count):
    configs = list(recipe.runs("small"))
    parts = [list(itertools.chain(*by_training(configs, (index, count)))) for index in range(count)]
    assert sorted(configs.index(config) for part in parts for config in part) == list(range(5))
    assert any(part[:2] == configs[:2] for part in parts)  # those of one training stay together
    assert max(map(len, parts)) - min(map(len, parts)) <= 2


@pytest.mark.long
def test_records_of_all_shards_merge_in_one_folder(recipe, tmp_path):
    console = Console(record=True, width=120)
    first = run(recipe, out=tmp_path / "runs", shard=(0, 2), console=console)
    assert len(first) == 2 * 3
    said = console.export_text()
    assert said.count("is still missing") == 2
    assert "five/rotary-16/seed-0 is still missing" in said
    console = Console(record=True, width=120)
    both = run(recipe, out=tmp_path / "runs", shard=(1, 2), console=console)
    assert "missing" not in console.export_text()
    assert len(both) == 2 * len(configs_of(recipe)) == 10
    assert set(both) == set(run(recipe, out=tmp_path / "runs"))  # nothing is trained again
    one = run(recipe, out=tmp_path / "one")
    assert {path.name for path in one} == {path.name for path in both}
    losses = [{path.name: records.load(path).metrics.get("loss_nats") for path in paths} for paths in (one, both)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("running", [(0, 1), (0, 2), (1, 2), (0, 3)])
@pytest.mark.parametrize("shard", [(0, 1), (0, 2)])
def test_only_other_shards_of_the_same_count_run_at_the_same_time(recipe, tmp_path, running, shard):
    index, count = running
    with FileLock(tmp_path / (".lock" if count == 1 else f".lock-{index}-of-{count}")):
        if running == (1, 2) and shard == (0, 2):
            assert len(run(recipe, out=tmp_path, shard=shard)) == 6
            return
        name = "another experiment" if count == 1 else f"shard {index}/{count} of an experiment"
        with pytest.raises(ExperimentError, match=f"{name} is running in"):
            run(recipe, out=tmp_path, shard=shard)
        assert not (tmp_path / "records").exists()


def test_a_finished_experiment_leaves_no_lock(recipe, tmp_path):
    run(recipe, out=tmp_path, shard=(0, 2), overrides={"train.steps": "1"})
    for shard in ((0, 3), (0, 1)):
        run(recipe, out=tmp_path, shard=shard, overrides={"train.steps": "1"})


def test_an_invalid_shard_is_refused(recipe, tmp_path):
    with pytest.raises(ConfigError, match="shard is 2/2 but must be from 0/2 to 1/2"):
        run(recipe, out=tmp_path / "runs", shard=(2, 2))
    for text in ("3", "2/2", "a/3", "-1/2"):
        result = CliRunner().invoke(app, ["run", "quick", "--shard", text, "--out", str(tmp_path / "runs")])
        assert result.exit_code == 2
        assert "pass i/n" in " ".join(result.output.split()).replace("│ ", "")
    assert not (tmp_path / "runs").exists()


def test_the_page_of_a_shard_says_what_is_missing(tmp_path):
    asked = ["run", "quick", "--scale", "smoke", "--set", "train.steps=1", "--out", str(tmp_path), "--shard", "0/4"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "quick: 3 of 4 runs are still missing" in (tmp_path / "report.html").read_text(encoding="utf-8")
