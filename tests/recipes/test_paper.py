"""The 26 items of the paper: each has the paper's series and columns, and reads its own records only.

They run once per module, at smoke scale.
"""

import dataclasses
import functools
import itertools
import math
import re
from pathlib import Path

import pytest

from alibi_lab import records
from alibi_lab.lab.config import ConfigError
from alibi_lab.lab.training import train
from alibi_lab.recipes.index import RECIPES
from alibi_lab.recipes.paper import answers as answered
from alibi_lab.recipes.paper.answers import Evidence, MissingEvidenceError
from alibi_lab.recipes.paper.cells import scaled, select
from alibi_lab.recipes.paper.items import ITEMS
from alibi_lab.recipes.paper.run_items import run_items
from alibi_lab.report.answers import Sources, recorded, way_of
from alibi_lab.report.published import CLAIMS, PUBLISHED, method_of, trained_length
from alibi_lab.report.verdicts import _ratio, paired

NAMES = [f"figure-{number}" for number in range(1, 12)] + [f"table-{number}" for number in range(1, 16)]
STAGED = "Staged Training (Press et al., 2021)"  # cited by the paper, run here
every_item = pytest.mark.parametrize("name", NAMES)

# The sources of each item, typed from the paper: study, the corpus' validation share at smoke scale (which there
# distinguishes the three corpora), the division of the test text, and the sliding window's stride (None = a quarter).
FACTS = {
    **dict.fromkeys(("figure-1", "figure-4", "figure-8"), ("wikitext", 0.05, "nonoverlapping", None)),
    **{f"table-{number}": ("wikitext", 0.05, "nonoverlapping", None) for number in (2, 3, 4, 5)},
    "table-6": ("wikitext", 0.05, "nonoverlapping", 8),
    "table-7": ("wikitext", 0.05, "sliding", 8),
    "figure-10": ("wikitext", 0.05, "nonoverlapping", 1),
    **dict.fromkeys(("figure-11", "table-13", "table-14", "table-15"), ("wikitext", 0.05, "sliding", 1)),
    **dict.fromkeys(("figure-9", "table-8"), ("books", 0.1, "nonoverlapping", None)),
    "table-9": ("books", 0.1, "nonoverlapping", 8),
    "table-10": ("books", 0.1, "sliding", 8),
    **dict.fromkeys(("figure-5", "figure-6", "table-11", "table-12"), ("web", 0.15, "nonoverlapping", None)),
    **dict.fromkeys(("figure-2", "figure-7", "table-1"), ("speed", 0.05, "nonoverlapping", None)),
    "figure-3": ("method", None, None, None),
}
BY_LENGTH = [name for name in NAMES if ITEMS[name].answer.__name__ == "by_length"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every step takes a second: figure 5 and table 11 compare at equal times, and four real steps take as long as noise."""
    out = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train, "clock", lambda _: functools.partial(next, itertools.count()))
        run_items([ITEMS[name] for name in NAMES], out=out, scale="smoke")
    return out / "records"


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, records.Record]:
    return {path.name: records.load(path) for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def answers(found: dict[str, records.Record]) -> dict[str, records.Record]:
    return {record.name: record for record in found.values() if record.kind == "paper-item"}


def own_labels(name: str) -> set[str]:
    """The paper's own series, and staged training, which it cites."""
    published = PUBLISHED[name]
    return (set(published.series) - set(published.cited)) | (set(published.cited) & {STAGED})


def assert_same_series_and_columns(name: str, curves: dict) -> None:
    assert set(curves) == own_labels(name)
    for label, columns in curves.items():
        assert PUBLISHED[name].columns.keys() <= columns.keys(), (label, sorted(columns))


def test_every_item_of_the_paper_has_a_recipe_and_an_answer(answers):
    assert list(ITEMS) == NAMES == [name for name in PUBLISHED if name in NAMES]
    assert set(NAMES) <= set(RECIPES)
    assert set(answers) == set(NAMES)


@every_item
def test_an_answer_has_the_series_and_columns_of_the_paper(name, answers):
    assert_same_series_and_columns(name, answers[name].curves)


@every_item
def test_the_comparison_can_fail(name, answers):
    """No item passes as another one, except where the paper shows the same numbers twice."""
    twice = [{"figure-9", "table-8"}, {"figure-2", "table-1"}, {"figure-5", "table-11"}]
    for other in NAMES:
        if other != name and {name, other} not in twice:
            with pytest.raises(AssertionError):
                assert_same_series_and_columns(name, answers[other].curves)


@every_item
def test_every_length_is_one_of_the_paper(name, answers):
    for label, columns in answers[name].curves.items():
        published = PUBLISHED[name].series[label].get("length")
        if published is None or name in ("figure-6", "figure-7"):
            continue  # those figures have more points than are published as numbers
        assert set(columns["paper_length"]) <= set(published), label
        assert columns["length"] == [scaled(length, "smoke") for length in columns["paper_length"]]


@every_item
def test_at_paper_scale_every_published_length_is_there(name):
    tested: dict[str, set[int]] = {}
    for cell in ITEMS[name].cells("paper"):
        assert cell.length == cell.paper_length
        tested.setdefault(cell.label, set()).add(cell.paper_length)
    for label, columns in PUBLISHED[name].series.items():
        if "length" in columns and label in own_labels(name):
            assert set(columns["length"]) <= tested[label], label
            assert set(columns["length"]) == tested[label] or name in ("figure-6", "figure-7")


@every_item
def test_the_evidence_is_of_the_items_study_and_way(name, answers, found):
    study, share, _, stride = FACTS[name]
    record = answers[name]
    assert record.config["study"] == ITEMS[name].recipe.study == study
    assert bool(record.config["evidence"]) == (name != "figure-3")
    for file in record.config["evidence"]:
        evidence = found[file]
        assert evidence.name.startswith(f"{study}/")
        assert evidence.config["data"]["valid_share"] == share
        if evidence.kind == "evaluation":
            assert evidence.config["eval"]["stride"] == stride


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_perplexity_is_that_of_the_labeled_model_and_length(name, answers, found):
    """Read independently from the records, by the method and lengths in the label."""
    _, _, way, _ = FACTS[name]
    evidence = [found[file] for file in answers[name].config["evidence"] if found[file].kind == "evaluation"]
    for label, columns in answers[name].curves.items():
        for length, perplexity in zip(columns["length"], columns["perplexity"], strict=True):
            trained = length if label.endswith("L = L_valid") else scaled(trained_length(label), "smoke")
            (record,) = (
                one
                for one in evidence
                if one.config["model"]["method"] == method_of(label) and one.config["train"]["length"] == trained
            )
            curve = record.curves["by_length"]
            nats = curve[f"{way}_nats"][curve["length"].index(length)]
            assert perplexity == pytest.approx(math.exp(nats))
            other = {"nonoverlapping": "sliding", "sliding": "nonoverlapping"}[way]
            assert columns[f"{other}_perplexity"][columns["length"].index(length)] == pytest.approx(
                math.exp(curve[f"{other}_nats"][curve["length"].index(length)])
            )


def test_claims_are_checked_against_the_evaluations_of_the_answer(answers, found):
    """The ratio of a claim is the same from the answer's cells and from the losses of its evaluations."""
    by_identity = {records.identity(record.kind, record.name, record.config): record for record in found.values()}
    checked = []
    for claim in CLAIMS:
        evidence = Sources(answers[claim.item], by_identity)
        if claim.item in ("figure-3", "figure-10"):
            continue  # definitions
        pair = paired(evidence, claim.over, claim.under, way=way_of(PUBLISHED[claim.item]))
        if not pair.logs.size:
            continue  # a length that smoke leaves out
        assert math.exp(pair.logs.mean()) == pytest.approx(_ratio(claim, recorded(answers[claim.item]))), claim.says
        once = any("perplexity" not in number.column for number in (*claim.over, *claim.under))
        during = "during training" if evidence.equal_time else "scored tokens have fewer than three parts"
        assert ("measured once" if once else during) in pair.why_not
        checked.append(claim.item)
    assert len(checked) >= 50
    assert {"figure-2", "figure-5", "figure-7", "figure-8", "table-1", "table-11", "table-12"} <= set(checked)


@pytest.mark.parametrize("name", ["table-6", "table-7", "table-9", "table-10"])
def test_a_row_has_both_splits_at_the_longest_length(name, answers, found):
    _, _, way, _ = FACTS[name]
    evidence = [found[file] for file in answers[name].config["evidence"] if found[file].kind == "evaluation"]
    for label, row in answers[name].curves.items():
        staged = label == STAGED
        trained = scaled(3072 if staged else trained_length(label), "smoke")
        for split in ("valid", "test"):
            (record,) = (
                one
                for one in evidence
                if one.config["model"]["method"] == (method_of(label) or "sinusoidal")
                and one.config["train"]["length"] == trained
                and (one.config["train"]["first_length"] is not None) == staged
                and one.config["eval"]["split"] == split
            )
            assert record.curves["by_length"]["length"] == [48]
            nats = record.curves["by_length"][f"{way}_nats"][0]
            assert row[f"{split}_perplexity"] == [pytest.approx(math.exp(nats))]
        assert row["valid_perplexity"] != row["test_perplexity"]


def test_figure_5_stops_the_sinusoidal_models_when_alibi_has_finished(answers, found):
    curves = answers["figure-5"].curves
    trainings = [found[file] for file in answers["figure-5"].config["evidence"] if found[file].kind == "training"]
    for sinusoidal, alibi, rival in ((1024, 512, 8), (2048, 1024, 16)):
        (ended,) = (
            one.metrics["seconds"]
            for one in trainings
            if one.config["model"]["method"] == "alibi" and one.config["train"]["length"] == rival
        )
        assert curves[f"ALiBi, L = {alibi}"]["updates"][-1] == 4
        assert all(hours <= ended / 3600 for hours in curves[f"Sinusoidal, L = {sinusoidal}"]["hours"])
        last = answers["table-11"].curves[f"ALiBi, L = {alibi}"]
        assert last[f"perplexity_{2 * alibi}"] == curves[f"ALiBi, L = {alibi}"]["perplexity"][-1:]
        assert last["updates"] == [4]


def test_figure_3_is_the_papers_slopes(answers):
    for label, columns in PUBLISHED["figure-3"].series.items():
        assert answers["figure-3"].curves[label]["slope"] == pytest.approx(list(columns["slope"]))
    eight = answers["figure-3"].curves["ALiBi, 8 heads"]
    assert [eight[f"bias_{distance}"][0] for distance in range(5)] == [0, -0.5, -1, -1.5, -2]


def test_figure_10_is_the_papers_drawing(answers):
    for label, columns in PUBLISHED["figure-10"].series.items():
        ours = answers["figure-10"].curves[label]
        for column, values in columns.items():
            assert ours[column] == list(values), (label, column)
        assert all(2 < nats < 8 for nats in ours["loss_nats"])
    assert answers["figure-10"].curves["Sliding window"]["pass"][-1] == 5
    assert len(answered.WORDS) == 8


def test_an_answer_cannot_be_read_from_another_items_records(found):
    for name, other in (
        ("table-13", "table-15"),
        ("figure-4", "figure-11"),
        ("figure-9", "table-9"),
        ("table-2", "table-3"),
    ):
        target, source = select(ITEMS[name], scale="smoke"), select(ITEMS[other], scale="smoke")
        with pytest.raises(MissingEvidenceError, match="run the item"):
            ITEMS[name].answer(target.cells, Evidence(found, source.runs))


@pytest.mark.parametrize(
    ("kind", "item", "damage", "words"),
    [
        (
            "evaluation",
            "table-12",
            {"curves": {}},
            r"the record of evaluation .* has no nonoverlapping_nats at \d+ tokens",
        ),
        (
            "speed",
            "table-1",
            {"config": {"model": 7}},
            r"speed-.*json is damaged: a section is missing from its config; delete it",
        ),
    ],
)
def test_a_damaged_record_is_named_by_the_item_that_reads_it(kind, item, damage, words, found):
    selected = select(ITEMS[item], scale="smoke")
    damaged = {name: dataclasses.replace(r, **(damage if r.kind == kind else {})) for name, r in found.items()}
    with pytest.raises(ValueError, match=words):
        ITEMS[item].answer(selected.cells, Evidence(damaged, selected.runs))


def test_running_again_adds_nothing(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    some = [ITEMS[name] for name in ("table-14", "figure-7", "figure-3")]
    paths = run_items(some, out=folder.parent, scale="smoke")
    assert [records.load(path).name for path in paths[-3:]] == ["table-14", "figure-7", "figure-3"]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_fields_that_an_item_varies_cannot_be_changed():
    with pytest.raises(
        ConfigError, match=re.escape("figure-1 compares several values of model.method; it cannot be set")
    ):
        select(ITEMS["figure-1"], scale="smoke", overrides={"model.method": "alibi"})
    with pytest.raises(ConfigError, match=re.escape("there is no field 'train.stesp' (did you mean 'train.steps'?)")):
        select(ITEMS["figure-1"], scale="smoke", overrides={"train.stesp": "1"})
    changed = select(ITEMS["table-15"], scale="smoke", overrides={"train.steps": "7"}, seeds=(3, 5))
    assert {run.train.seed for run in changed.runs} == {3, 5}
    assert {run.train.steps for run in changed.runs} == {7}


def test_the_paper_scale_is_the_published_training():
    """The published command.

    nag, rate 1, 286,000 updates of 9,216 tokens on 8 GPUs, warm-up 16,000, cosine to 1e-4, clip 0.1
    """
    (run,) = (run for run in ITEMS["table-13"].recipe.runs("paper") if run.train.length == 3072)
    train, model = run.train, run.model
    assert (train.optimizer, train.learning_rate, train.steps, train.warmup_steps) == ("nag", 1.0, 286_000, 16_000)
    assert (train.learning_rate * train.final_share, train.clip_norm, train.precision) == (1e-4, 0.1, "fp16")
    assert (train.batch_tokens, train.accumulate) == (73_728, 3)
    assert (model.num_layers, model.embed_dim, model.num_heads, model.ffn_dim) == (16, 1024, 8, 4096)
    assert (model.dropout, model.attention_dropout, model.activation_dropout) == (0.3, 0.1, 0.1)
    assert model.cutoffs == (20_000, 60_000)
    books = ITEMS["table-9"].recipe.runs("paper")[0]
    assert (books.model.cutoffs, books.data.tokenizer) == ((), "bpe:29000")
    web = ITEMS["table-12"].recipe.runs("paper")[0]
    assert (web.model.num_layers, web.model.embed_dim, web.model.num_heads, web.train.steps) == (25, 2048, 16, 50_000)
