"""The recipe that compares all methods: one model, a text and four tasks, two paired seeds."""

import html

import pytest

from alibi_lab import records
from alibi_lab.lab.config_io import override
from alibi_lab.lab.experiment import run
from alibi_lab.recipes.method_comparison import RECIPE, TASKS
from alibi_lab.report.page import report_html


def test_another_text_applies_to_the_language_models_only():
    changed = [override(config, {"data.text": "novel.txt", "data.corpus": "text"}) for config in RECIPE.runs("small")]
    assert {config.data.corpus for config in changed if not config.eval.tasks} == {"text"}
    assert [config for config in changed if config.eval.tasks] == [c for c in RECIPE.runs("small") if c.eval.tasks]
    freed = override(changed[-1], {"data.text": "novel.txt", "data.corpus": "text", "eval.tasks": ""})
    assert freed.data.text == ("novel.txt",)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return [records.load(path) for path in run(RECIPE, out=tmp_path_factory.mktemp("referee"), scale="smoke")]


def test_the_report_leaves_out_tasks_that_the_models_did_not_learn(found):
    page = html.unescape(report_html(found))
    assert "What each method is good for: 3 position methods at 32 and at 64 tokens" in page
    assert page.count("Left out: ") >= 3  # of four tasks; the bit may be right by chance
    assert "Good at both lengths: associative recall" not in page


def test_referee_runs_at_smoke_scale_and_records_the_answers_of_every_document(found):
    evaluations = [record for record in found if record.kind == "evaluation"]
    assert len(evaluations) == len(RECIPE.runs("smoke")) == 3 * len(TASKS)
    for record in evaluations:
        for task in record.config["eval"]["tasks"]:
            assert record.config["corpus"]["name"] == f"task:{task}:32"
            curve, parts = record.curves[task], record.curves[f"{task}_by_part"]
            assert curve["length"] == [32, 64]
            assert parts["part"] == [0, 1] * 2  # two documents
            for at, length in enumerate(curve["length"]):
                rows = [row for row, of in enumerate(parts["length"]) if of == length]
                right = sum(parts["accuracy"][row] * parts["answers"][row] for row in rows)
                assert right / curve["answers"][at] == pytest.approx(curve["accuracy"][at], abs=1e-5)
