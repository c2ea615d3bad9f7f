"""The lab's additions to a study: stretched positions, tasks, validation, words, heads, costs, and many records."""

import dataclasses
import hashlib
import math
import re

import numpy as np
import pytest
from made_up_records import answer, changed

from alibi_lab import records
from alibi_lab.records import Record
from alibi_lab.report.page import report_html
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots import study as figures
from alibi_lab.report.published import PUBLISHED
from alibi_lab.report.section import Archive
from alibi_lab.report.sections import heads as certificates
from alibi_lab.report.sections.study import MOST_LINES, drawable
from alibi_lab.report.series import studies
from alibi_lab.report.tables import study as tables


def test_stretched_positions_are_series_of_the_same_study(made_up) -> None:
    found = made_up(methods=("rotary", "alibi"))
    stretched = [
        changed(r, "config", "eval", stretch=mode)
        for r in found
        if r.kind == "evaluation"
        for mode in ("linear", "ntk")
    ]
    (study,) = studies([*found, *stretched])
    assert [s.label for s in study.series] == [
        "rotary",
        "rotary with NTK",
        "rotary with PI",
        "ALiBi",
        "ALiBi with NTK",
        "ALiBi with PI",
    ]
    assert [s.seeds for s in study.series] == [1] * 6
    assert all(len(s.trainings) == 1 for s in study.series)  # the weights are the same
    picture = drawing.svg(figures.figure_of(study, "sliding"), "p", "")
    drawn = re.findall(r'style="fill: none; (?:stroke-dasharray: ([^;]*);[^"]*)?stroke: var\(--alibi\)', picture)
    assert len(set(drawn)) == 3  # solid, and two kinds of dashes


def test_the_windowed_control_is_a_third_panel_and_block(made_up) -> None:
    def cut(record: Record) -> Record:
        if record.kind == "training":
            return record
        return changed(record, "curves", "by_length", windowed_nats=[1.9] * 5, windowed_tokens=[100] * 5)

    found = [cut(record) for record in made_up(methods=("alibi",))]
    (study,) = studies(found)
    line = figures.figure_of(study, "windowed").axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), [math.exp(1.9)] * 5)
    assert "Perplexity per byte, context cut at the trained length" in [
        b.title for b in tables.in_other_units(study).blocks
    ]
    assert "Context cut at the trained length" in report_html(found)
    assert "Context cut" not in report_html(made_up(methods=("alibi",)))


def test_words_and_bytes_are_converted_from_nats(made_up) -> None:
    found = [
        changed(r, "config", "corpus", words_per_token=0.25) for r in made_up(methods=("alibi",), bytes_per_token=1.5)
    ]
    (study,) = studies(found)
    blocks = {block.title: block.rows[0][2][0].value for block in tables.in_other_units(study).blocks}
    assert blocks["Perplexity per word, nonoverlapping windows"] == pytest.approx(math.exp(2.0 / 0.25))
    assert blocks["Bits per byte, nonoverlapping windows"] == pytest.approx(2.0 / 1.5 / math.log(2))
    assert [block.title for block in tables.by_length(study).blocks] == [
        "Perplexity per token, nonoverlapping windows",
        "Perplexity per token, sliding window",
    ]


def test_source_code_has_no_perplexity_per_word(made_up) -> None:
    found = [
        changed(r, "config", "corpus", words_per_token=0.1, name="python-source") for r in made_up(methods=("alibi",))
    ]
    (study,) = studies(found)
    assert not [block for block in tables.in_other_units(study).blocks if "word" in block.title]


def test_validation_is_drawn_against_seconds_and_steps(made_up) -> None:
    curve = {"step": [10, 20, 40], "seconds": [1.5, 3.0, 6.0], "nats": [3.0, 2.5, 2.2], "tokens": [512] * 3}
    found = [
        changed(r, "curves", validation=curve) if r.kind == "training" else r
        for r in made_up(methods=("alibi",), seeds=2)
    ]
    (study,) = studies(found)
    by_step = figures.figure_of(study, "step").axes[0].lines
    assert by_step[0].get_xdata().tolist() == [10, 20, 40]
    np.testing.assert_allclose(by_step[0].get_ydata(), np.exp([3.0, 2.5, 2.2]))
    assert figures.figure_of(study, "seconds").axes[0].lines[0].get_xdata().tolist() == [1.5, 3.0, 6.0]
    assert figures.figure_of(studies(made_up())[0], "step") is None


def _tasked(record: Record, share: float) -> Record:
    if record.kind == "training":
        return record
    passkey = {
        "length": [128, 128, 256, 256],
        "depth": [0.0, 1.0, 0.0, 1.0],
        "accuracy": [1.0, share, None, None],
        "trials": [16, 16, None, None],
    }
    recall = {"length": [128, 128], "distance": [8, 64], "accuracy": [share, 0.125], "tokens": [7, 7]}
    return changed(record, "curves", passkey=passkey, recall=recall)


def test_tasks_are_means_over_seeds_and_worst_places(made_up) -> None:
    first, second = ([_tasked(r, share) for r in made_up(methods=("alibi",), seeds=2)] for share in (0.5, 0.75))
    found = [*first[:2], *second[2:]]
    (study,) = studies(found)
    assert tables.shares(study.series[0], "passkey") == {(128, 0.0): 1.0, (128, 1.0): 0.625}
    blocks = {block.title: [cell.text for cell in block.rows[0][2]] for block in tables.task_table(study).blocks}
    assert [cells[0] for cells in blocks.values()] == ["62 %", "12 %"]
    grid = figures.figure_of(study, "passkey").axes[0]
    assert sorted(artist.get_text() for artist in grid.texts if artist.get_text()) == ["100", "62"]
    line = figures.figure_of(study, "recall").axes[0].lines[0]
    assert line.get_ydata().tolist() == [0.625, 0.125]
    assert "Finding distant information" in report_html(found)
    assert figures.figure_of(studies(made_up())[0], "passkey") is None


def _heads(layer: int, certified: list[int]) -> Record:
    curves = {"heads": {"slope": [0.5, 0.0625, 1 / 256], "certified": certified, "true": [30, 300, 4096]}}
    config = {"scale": "small", "layer": f"layer-{layer}", "length": 4096, "trained": 512}
    return records.make("certificate", f"trained-reach/layer-{layer}", config=config, metrics={}, curves=curves)


def test_trained_heads_show_certified_and_true_reach() -> None:
    found = [_heads(layer, [60, 600, 4096]) for layer in (10, 2, 0)]
    (model,) = certificates.find(Archive([*found, found[0]]))
    assert [certificates.layer_of(record) for record in model.records] == ["layer-0", "layer-2", "layer-10"]
    axes = certificates.reach_figure(model).axes
    assert len(axes) == 3
    certified, true = (line.get_ydata().tolist() for line in axes[0].lines if len(line.get_xdata()) == 3)
    assert (list(certified), list(true)) == ([60, 600, 4096], [30, 300, 4096])
    assert axes[0].get_yscale() == "log"
    assert certificates.head_table(model)[0] == ("layer-0", "1/2", "60", "30", "2.00")
    page = report_html(found)
    assert "Reach of trained heads: trained-reach" in page
    assert "Other records" not in page
    assert "Where the attention is" not in page
    mass = {"head": [0, 0, 1, 1, 2, 2], "distance": [1, 2] * 3, "share": [0.9, 1.0, 0.5, 0.75, 0.25, 0.5]}
    (whole,) = certificates.find(Archive(changed(record, "curves", mass=mass) for record in found))
    line = certificates.mass_figure(whole).axes[0].lines[1]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2], [0.5, 0.75])
    attack = records.make("certificate", "attack", config={}, metrics={"draws": 10.0})
    assert not certificates.is_drawn(attack)


def test_costs_count_a_training_once(made_up) -> None:
    found = made_up(methods=("alibi", "rotary"), seeds=2)
    again = [
        changed(r, "config", "eval", stride=1) for r in found if r.kind == "evaluation"
    ]  # another study of the same trainings
    table = tables.cost_table(studies([*found, *again]))
    (row,) = table.blocks[0].rows
    assert [cell.text for cell in row[2]][:4] == ["4", "800,000", "3.2 M", "2.67 min"]
    assert tables.cost_table([]) is None
    assert tables.duration(48) == "48 s"
    assert tables.duration(3 * 3600) == "3 h"


def test_a_study_with_many_lines_is_drawn_length_by_length(made_up) -> None:
    (study,) = studies(made_up(trained=(128, 256, 512)))
    assert len(study.series) > MOST_LINES
    assert [part.trained for part in drawable(study)] == [[128], [256], [512]]


def test_a_training_with_two_tests_is_counted_once(made_up) -> None:
    item = records.make("paper-item", "table-2", config={"study": "quick"}, metrics={})
    found = made_up()
    tests = [record for record in found if record.kind == "evaluation"]
    found += [changed(record, "config", "eval", stride=1) for record in tests]
    page = report_html([*found, item])
    assert len(found) == len(set(map(id, found))) == 3 * len(tests)
    assert re.search(rf'"#evidence">Trainings and tests</a>\s*<[^>]*>{len(found)} records', page)


def test_hundreds_of_records_make_a_small_page_at_the_cost_of_its_pictures(made_up, monkeypatch) -> None:
    """Drawing dominates the time, and each picture is drawn once; no work is done for every pair of records."""
    found = [answer(item, study="wikitext") for item in PUBLISHED]
    for recipe, lengths, seeds in (("wikitext", (64, 128, 256, 512), 4), ("quick", (128,), 6), ("more", (128, 256), 6)):
        for record in made_up(trained=lengths, seeds=seeds):
            found.append(dataclasses.replace(record, name=recipe + record.name[5:]))
    assert len(found) >= 290
    drawn, identified = [], []
    save, digest = drawing.Figure.savefig, hashlib.sha256
    monkeypatch.setattr(drawing.Figure, "savefig", lambda *given, **options: (drawn.append(1), save(*given, **options)))
    # An identity is the hash of a whole config; matplotlib's ids are hashes that begin empty.
    monkeypatch.setattr(hashlib, "sha256", lambda *given: (identified.extend(given), digest(*given))[1])
    page = report_html(found)
    assert len(drawn) == page.count("<svg") < 100
    assert len(found) <= len(identified) <= 10 * len(found)
    assert len(page) < 6e6
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    linked = set(re.findall(r'<a href="#([^"]*)"', page))
    assert linked <= set(ids)
    assert {f"p{number}" for number in range(26)} | {"records", "evidence", "s0"} <= linked
    assert "These records do not answer" not in page
