"""Every recipe states its question, cost and expectation; its runs differ only in what the question is about."""

import dataclasses

import pytest

from alibi_lab import records
from alibi_lab.lab.config import ConfigError
from alibi_lab.lab.config_io import from_json
from alibi_lab.lab.experiment import run
from alibi_lab.lab.model.method_checks import imported_method
from alibi_lab.lab.planning import configs_of
from alibi_lab.recipes.index import RECIPES, items_of
from alibi_lab.report.page import report_html

every_recipe = pytest.mark.parametrize("name", RECIPES)


@every_recipe
def test_a_recipe_states_its_question_cost_and_expectation(name):
    recipe = RECIPES[name]
    for field in dataclasses.fields(recipe):
        assert getattr(recipe, field.name) or field.name == "study"  # only recipes that share trainings set it
    assert recipe.question.endswith("?")
    assert recipe.command.startswith("alibi run ")


@every_recipe
def test_a_recipe_has_runs_at_each_of_its_scales(name):
    assert {"smoke", "small", "medium", "paper"} <= set(RECIPES[name].scales)
    for scale in RECIPES[name].scales:
        assert RECIPES[name].runs(scale) or name == "figure-3"  # figure 3 draws slopes and trains nothing


def test_given_methods_run_the_stretches_of_a_recipe_that_they_have():
    runs = configs_of(RECIPES["methods"], scale="smoke", methods=["alibi", "rotary", "fire"])
    found = {
        name: {run.eval.stretch for run in runs if run.model.method == name} for name in ("alibi", "rotary", "fire")
    }
    assert found == {"alibi": {"none", "linear", "ntk"}, "rotary": {"none", "linear", "ntk", "yarn"}, "fire": {"none"}}
    with pytest.raises(ConfigError, match="'yarn' but model\\.method 'alibi' has only none, linear, ntk"):
        configs_of(RECIPES["methods"], scale="smoke", overrides={"eval.stretch": "yarn"}, methods=["alibi"])


@pytest.mark.parametrize("scale", RECIPES["quick"].scales)
def test_the_runs_of_quick_differ_only_in_the_method(scale):
    runs = RECIPES["quick"].runs(scale)
    assert [config.model.method for config in runs] == ["sinusoidal", "rotary", "t5", "alibi"]
    same = {dataclasses.replace(config, model=dataclasses.replace(config.model, method="none")) for config in runs}
    assert len(same) == 1


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "referee" and not items_of(name)])
def test_a_recipe_runs_at_smoke_scale_and_is_drawn(name, tmp_path):
    """The curves of each way to test are compared with loops in tests/lab/evaluation; others run the referee and the paper."""
    found = [records.load(path) for path in run(RECIPES[name], out=tmp_path, scale="smoke")]
    evaluations = [record for record in found if record.kind == "evaluation"]
    tested = [from_json(record.config) for record in evaluations]
    assert {*tested} == {*RECIPES[name].runs("smoke")}
    assert len({record.config["corpus"]["sha256"] for record in found}) == 1
    for record, config in zip(evaluations, tested, strict=True):
        for nats in record.curves["by_length"]["nonoverlapping_nats"]:
            assert 3 < nats < 7 if nats is not None else config.model.method == "learned"
        asked = [config.eval.tasks, config.eval.memory or config.eval.sinks]
        assert [bool(record.curves.keys() & {"recall", "passkey"}), "streams" in record.curves] == list(
            map(bool, asked)
        )
    page = report_html(found)
    assert "Other records" not in page
    for method in {config.model.method for config in tested if ":" in config.model.method}:
        assert f"var(--own-{imported_method(method).look.light[1:]})" in page
