"""Only missing results are listed, with their cost."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from alibi_attn.lab.config import EvalConfig, ModelConfig, RunConfig, TrainConfig
from alibi_attn.lab.experiment import run
from alibi_attn.recipes import missing as missing_runs
from alibi_attn.recipes.index import RECIPES
from alibi_attn.recipes.index import run as run_recipe
from alibi_attn.recipes.missing import evaluation_flops, missing, training_flops

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


def test_a_training_in_bf16_is_timed_by_products_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"no": 0.001, "bf16": 0.004}  # GFLOP/s
    monkeypatch.setattr(missing_runs, "_core_gflops", rates.__getitem__)
    in_bf16 = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, precision="bf16"))
    minutes = [missing_runs._core_minutes(config, "training") for config in (CONFIG, in_bf16)]
    assert minutes[0] == 4 * minutes[1] == pytest.approx(training_flops(CONFIG) / 1e6 / missing_runs.UTILIZATION / 60)
    assert missing_runs._core_minutes(in_bf16, "evaluation") == missing_runs._core_minutes(CONFIG, "evaluation")


def test_everything_is_missing_at_first_and_nothing_at_the_end(tmp_path: Path) -> None:
    first = missing("quick", out=tmp_path, scale="smoke")
    assert [one.title for one in first] == [
        f"quick/{method}-16/seed-0" for method in ("sinusoidal", "rotary", "t5", "alibi")
    ]
    assert {one.parts for one in first} == {("training", "evaluation")}
    assert all(one.core_minutes > 0 for one in first)
    assert len(missing("quick", out=tmp_path, scale="smoke", seeds=(0, 1))) == 8
    assert [one.title for one in missing("quick", out=tmp_path, scale="smoke", methods=("kerple",))] == [
        "quick/kerple-16/seed-0"
    ]
    paths = run(RECIPES["quick"], out=tmp_path, scale="smoke")
    assert missing("quick", out=tmp_path, scale="smoke") == []
    next(path for path in paths if path.name.startswith("evaluation-quick-t5")).unlink()
    (left,) = missing("quick", out=tmp_path, scale="smoke")
    assert (left.title, left.parts) == ("quick/t5-16/seed-0", ("evaluation",))
    shutil.rmtree(tmp_path / "checkpoints")
    (left,) = missing("quick", out=tmp_path, scale="smoke")
    assert left.parts == ("training", "evaluation"), "without its model it is trained again"


@pytest.mark.long
def test_items_of_the_paper_list_shared_trainings_once_and_speeds(tmp_path: Path) -> None:
    found = missing("paper", out=tmp_path, scale="smoke")
    items = [recipe for recipe in RECIPES.values() if recipe.study and recipe.study != "speed"]
    runs = [(recipe.study, run) for recipe in items for run in recipe.runs("smoke")]
    trainings = {(study, run.model, run.data, run.train) for study, run in runs}
    assert sum("training" in one.parts for one in found) == len(trainings) == 36
    assert sum("evaluation" in one.parts for one in found) == len(set(runs))
    assert sum(one.parts == ("speed",) for one in found) == 22
    run_recipe("table-1", out=tmp_path, scale="smoke")
    assert missing("table-1", out=tmp_path, scale="smoke") == []
