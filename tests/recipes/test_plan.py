"""The plan of a recipe: everything that it runs, what of it is recorded, and the time of the rest."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from alibi_lab.lab.config import EvalConfig, ModelConfig, RunConfig, TrainConfig
from alibi_lab.lab.experiment import run
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.recipes import plan as plans
from alibi_lab.recipes.index import RECIPES
from alibi_lab.recipes.index import run as run_recipe
from alibi_lab.recipes.plan import Planned, evaluation_flops, plan, training_flops

CONFIG = RunConfig(
    model=ModelConfig(num_layers=1, num_heads=2, embed_dim=8, ffn_dim=16, vocab_size=32),
    train=TrainConfig(length=4, steps=10, batch_tokens=8, warmup_steps=1),
    eval=EvalConfig(lengths=(4,), tokens=100, stride=2),
)


def test_flops_are_those_counted_by_hand() -> None:
    parameters = 4 * 8 * 8 + 3 * 8 * 16 + 8 * 32  # q, k, v, output; SwiGLU; the vocabulary
    pairs = 2 * (1 + 2 + 3 + 4)  # of a step: two examples of four tokens
    assert training_flops(CONFIG) == 10 * (6 * parameters * 8 + 12 * 8 * pairs)
    read = 100 + 2 * 100  # each token once, and twice with windows of 4 that slide by 2
    assert evaluation_flops(CONFIG) == 2 * parameters * read + 4 * 8 * read / 4 * 10
    slow = dataclasses.replace(CONFIG, eval=dataclasses.replace(CONFIG.eval, stride=1))
    assert evaluation_flops(slow) == pytest.approx(evaluation_flops(CONFIG) * 5 / 3)
    pieces, longer = (
        dataclasses.replace(CONFIG, eval=dataclasses.replace(CONFIG.eval, stride=stride)) for stride in (4, 64)
    )
    assert evaluation_flops(pieces) == evaluation_flops(longer)  # no window slides further than its length


def missing(*arguments: Any, **options: Any) -> list[Planned]:
    return [one for one in plan(*arguments, **options) if one.missing]


def test_times_follow_from_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(plans, "flops_per_second", lambda config: measured.append(config) or training_flops(CONFIG) / 5)
    monkeypatch.setitem(RECIPES, "quick", dataclasses.replace(RECIPES["quick"], runs=lambda scale: (CONFIG,)))
    tests = 5 * evaluation_flops(CONFIG) / training_flops(CONFIG)
    (one,) = plan("quick", out=tmp_path)
    assert one.seconds == pytest.approx(5 + tests)
    for in_bf16 in plan("quick", out=tmp_path, overrides={"train.precision": "bf16"}, seeds=(0, 1)):
        assert in_bf16.seconds == pytest.approx(5 + 2 * tests), "tests are in fp32"
    assert len(measured) == 2, "two seeds share a rate, two precisions do not"


def test_a_plan_makes_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "prepare", None)
    monkeypatch.setattr(LanguageModel, "__init__", None)
    assert all(0 < one.seconds < math.inf for one in plan("quick", out=tmp_path, scale="paper"))


def test_shards_divide_the_trainings(tmp_path: Path) -> None:
    whole = [one.title for one in plan("quick", out=tmp_path, scale="smoke")]
    parts = [plan("quick", out=tmp_path, scale="smoke", shard=(index, 3)) for index in range(3)]
    assert [one.title for part in parts for one in part] == [whole[index] for index in (0, 3, 1, 2)]


def test_everything_is_missing_at_first_and_nothing_at_the_end(tmp_path: Path) -> None:
    first = plan("quick", out=tmp_path, scale="smoke")
    assert [one.title for one in first] == [
        f"quick/{method}-16/seed-0" for method in ("sinusoidal", "rotary", "t5", "alibi")
    ]
    assert {one.missing for one in first} == {("training", "evaluation")}
    assert all(one.seconds > 0 for one in first)
    assert len(plan("quick", out=tmp_path, scale="smoke", seeds=(0, 1))) == 8
    assert [one.title for one in plan("quick", out=tmp_path, scale="smoke", methods=("kerple",))] == [
        "quick/kerple-16/seed-0"
    ]
    paths = run(RECIPES["quick"], out=tmp_path, scale="smoke")
    done = plan("quick", out=tmp_path, scale="smoke")
    assert [(one.missing, one.seconds) for one in done] == [((), 0.0)] * 4
    next(path for path in paths if path.name.startswith("evaluation-quick-t5")).unlink()
    (left,) = missing("quick", out=tmp_path, scale="smoke")
    assert (left.title, left.missing) == ("quick/t5-16/seed-0", ("evaluation",))
    shutil.rmtree(tmp_path / "checkpoints")
    (left,) = missing("quick", out=tmp_path, scale="smoke")
    assert left.missing == ("training", "evaluation"), "without its model it is trained again"


@pytest.mark.long
def test_items_of_the_paper_list_shared_trainings_once_and_speeds(tmp_path: Path) -> None:
    found = plan("paper", out=tmp_path, scale="smoke")
    parts = [one for index in range(2) for one in plan("paper", out=tmp_path, scale="smoke", shard=(index, 2))]
    assert sorted(one.title for one in parts) == sorted(one.title for one in found if one.study != "speed")
    items = [recipe for recipe in RECIPES.values() if recipe.study and recipe.study != "speed"]
    trainings = {(recipe.study, run.model, run.data, run.train) for recipe in items for run in recipe.runs("smoke")}
    assert sum(one.missing == ("training", "evaluation") for one in found) == len(trainings) == 36
    assert sum(one.missing == ("speed",) for one in found) == 22
    assert len(found) == 36 + 22
    run_recipe("table-1", out=tmp_path, scale="smoke")
    assert missing("table-1", out=tmp_path, scale="smoke") == []
