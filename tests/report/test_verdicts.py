"""The verdict on a claim of the paper depends only on an interval."""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.records import Record
from alibi_lab.report import verdicts
from alibi_lab.report.answers import Sources, published
from alibi_lab.report.intervals import Paired, first_worse, interval
from alibi_lab.report.page import report_html
from alibi_lab.report.published import CLAIMS, PUBLISHED, Claim, Number
from alibi_lab.report.section import Archive
from alibi_lab.report.series import studies
from alibi_lab.report.tables.study import changes
from alibi_lab.report.verdicts import paired, why

Answer = tuple[Record, Mapping[str, Record]]  # with its evidence by identity

CORPUS = {"name": "made-up", "sha256": "ab" * 32, "test_sha256": None}
PARTS = 16
OF_FIGURE_1 = sum(claim.item == "figure-1" for claim in CLAIMS)


def evaluation(
    method: str,
    trained: int,
    nats: dict[int, float],
    *,
    seed: int = 0,
    noise: float | None = 0.0,
    tokens_per_part: int = 128,
    **test: object,
) -> Record:
    """Losses at two lengths; with `noise` also by part, alternately above and below the mean at the longer length."""
    lengths = sorted(nats)
    curves = {"by_length": {"length": lengths, "nonoverlapping_nats": [nats[at] for at in lengths]}}
    if noise is not None:
        places = [(at, part) for at in lengths for part in range(PARTS)]
        curves["by_part"] = {
            "length": [at for at, _ in places],
            "tokens": [tokens_per_part] * len(places),
            "nonoverlapping_nats": [nats[at] + (noise if part % 2 else -noise) * (at > trained) for at, part in places],
        }
    config = {
        "model": {"method": method},
        "train": {"length": trained, "seed": seed, "first_length": None},
        "eval": {"lengths": lengths, "tokens": 2048, "split": "valid", **test},
        "corpus": CORPUS,
    }
    return records.make(
        "evaluation", f"wikitext/{method}/{seed}", config=config, metrics={"parameters": 1.1e6}, curves=curves
    )


def item(name: str, curves: dict[str, object], found: list[Record]) -> Answer:
    """An answer with these curves, and its evidence by identity."""
    by_identity = Archive(found).by_identity
    config = {"scale": "small", "evidence": [f"{one.kind}-any-{key}.json" for key, one in by_identity.items()]}
    return records.make("paper-item", name, config=config, metrics={}, curves=curves), by_identity


def answer(found: list[Record], *, longest: int = 1012, **perplexities: tuple[float, float]) -> Answer:
    """Figure 1 at an eighth of the paper's lengths, L = 512 and about 2 L (or another length), and its evidence."""
    labels = {"sinusoidal": "Sinusoidal, L = 512", "rotary": "Rotary, L = 512", "alibi": "ALiBi, L = 512"}
    curves = {
        labels[method]: {"length": [64, 127], "paper_length": [512, longest], "perplexity": list(values)}
        for method, values in perplexities.items()
    }
    return item("figure-1", curves, found)


def _judged(record: Record, by_identity: Mapping[str, Record], says: str) -> verdicts.Verdict:
    return next(one for one in verdicts.verdicts(record, by_identity) if says in one.claim.says)


SINUSOIDAL, ALIBI = "sinusoidal, L = 512, is worse at about 2 L", "ALiBi, L = 512, gains from reading about 2 L"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.says)
def test_the_papers_own_numbers_uphold_every_claim(claim: Claim) -> None:
    ratio = verdicts._ratio(claim, published(PUBLISHED[claim.item]))
    assert math.isfinite(ratio)
    if claim.relation == "equal":
        assert ratio == pytest.approx(claim.threshold)
    else:
        assert ratio != claim.threshold
        assert (ratio < claim.threshold) == (claim.relation == "below")


def test_a_ratio_is_made_of_the_papers_numbers() -> None:
    (claim,) = (one for one in CLAIMS if one.says.startswith("up to 20 L ALiBi loses less than T5"))
    paper = verdicts._ratio(claim, published(PUBLISHED["figure-1"]))
    assert paper == pytest.approx((18.32 / 19.73) / (52.95 / 19.65))


def test_an_interval_over_seeds_is_students() -> None:
    empty = np.empty(0)
    found = interval(Paired(logs=np.array([0.1, 0.3]), parts=empty, weights=empty))
    assert (found.low, found.high) == (
        pytest.approx(math.exp(0.2 - 1.27062047)),
        pytest.approx(math.exp(0.2 + 1.27062047)),
    )
    three = interval(Paired(logs=np.array([1.0, 2.0, 3.0]), parts=empty, weights=empty))
    assert math.log(three.high) - 2 == pytest.approx(4.30265273 / math.sqrt(3))
    assert interval(Paired(logs=np.array([0.1]), parts=empty, weights=empty)) is None


def test_an_interval_over_text_grows_where_neighbors_are_alike() -> None:
    same = np.full(16, 1 / 16)
    alternating, in_runs = np.tile([1.0, -1.0], 8), np.repeat([1.0, -1.0, 1.0, -1.0], 4)
    narrow, wide = (interval(Paired(logs=np.zeros(1), parts=parts, weights=same)) for parts in (alternating, in_runs))
    assert math.log(narrow.high) == pytest.approx(
        2.13144955 / math.sqrt(15)
    )  # t of 15 degrees times s / √16, s² = 16 / 15
    assert math.log(wide.high) == pytest.approx(
        3.18244631 / math.sqrt(3)
    )  # four parts of four: t of 3 degrees, s² = 4 / 3
    assert narrow.over == "16 parts of the text"


def test_a_value_in_either_interval_is_possible() -> None:
    parts = np.full(16, 0.2)
    found = interval(Paired(logs=np.array([0.1, 0.3]), parts=parts, weights=np.full(16, 1 / 16)))
    assert found.over == "2 seeds and 16 parts of the text"
    assert math.log(found.low) == pytest.approx(0.2 - 1.27062047)


def test_intervals_have_the_stated_coverage() -> None:
    """Of 400 made-up texts with independent parts, about 95 % of the intervals contain the true ratio."""
    draw = np.random.default_rng(0).normal(0.05, 0.3, (400, 32))
    same = np.full(32, 1 / 32)
    inside = 0
    for parts in draw:
        found = interval(Paired(logs=np.zeros(1), parts=parts, weights=same))
        inside += found.low <= math.exp(0.05) <= found.high
    assert 0.93 <= inside / 400 <= 1


@pytest.mark.parametrize(
    ("further", "noise", "word"),
    [(1.2, 0.05, "confirmed"), (0.9, 0.05, "contradicted"), (1.02, 0.2, "open")],
)
def test_one_seed_is_decided_by_its_text(further: float, noise: float, word: str) -> None:
    found = [evaluation("sinusoidal", 64, {64: 4.0, 127: 4.0 + math.log(further)}, noise=noise)]
    verdict = _judged(*answer(found, sinusoidal=(50.0, 50.0 * further)), SINUSOIDAL)
    assert (verdict.word, verdict.ours) == (word, pytest.approx(further))
    assert verdict.interval.low < further < verdict.interval.high
    assert why(verdict) == "over 16 parts of the text, one training" + (
        ": the interval includes the threshold" if word == "open" else ""
    )


def test_seeds_are_paired() -> None:
    """Each seed rises by nearly the same amount from very different levels: the levels do not matter."""
    found = [
        evaluation("sinusoidal", 64, {64: level, 127: level + rise}, seed=seed, noise=None)
        for seed, (level, rise) in enumerate([(3.0, 0.100), (5.0, 0.102)])
    ]
    record, by_identity = answer(found, sinusoidal=(54.6, 60.4))
    over, under = [Number("Sinusoidal, L = 512", 1012)], [Number("Sinusoidal, L = 512", 512)]
    np.testing.assert_allclose(
        paired(Sources(record, by_identity), over, under, way="nonoverlapping").logs, [0.100, 0.102]
    )
    assert _judged(record, by_identity, SINUSOIDAL).word == "confirmed"
    wide = dataclasses.replace(found[1], curves={"by_length": {"length": [64, 127], "nonoverlapping_nats": [5.0, 5.3]}})
    record, by_identity = answer([found[0], wide], sinusoidal=(54.6, 60.4))
    assert _judged(record, by_identity, SINUSOIDAL).word == "open"


def test_missing_evidence_is_reported() -> None:
    record, _ = answer([evaluation("alibi", 64, {64: 4.0, 127: 3.9})], alibi=(54.6, 49.4))
    assert "not among these records" in why(_judged(record, {}, ALIBI))
    assert why(_judged(record, {}, SINUSOIDAL)) == "not measured at this size"
    nowhere = dataclasses.replace(record, config={"scale": "small"})
    assert "not named by the answer" in why(_judged(nowhere, {}, ALIBI))


def speeds(*measured: tuple[str, int, float]) -> Answer:
    """Figure 2 at an eighth, from measurements (method, seed, tokens per second of training at L = 1024)."""
    found = [
        records.make(
            "speed",
            f"speed/{method}-128/seed-{seed}",
            metrics={"train_tokens_per_second": value},
            config={"model": {"method": method}, "train": {"length": 128, "seed": seed}},
        )
        for method, seed, value in measured
    ]
    means = {"alibi": "ALiBi, L = 1024", "sinusoidal": "Sinusoidal, L = 1024"}
    curves = {
        label: {
            "length": [128],
            "paper_length": [1024],
            "train_tokens_per_second": [float(np.mean([value for name, _, value in measured if name == method]))],
        }
        for method, label in means.items()
    }
    return item("figure-2", curves, found)


FAST = "ALiBi trains as fast as sinusoidal, to 5 %"


def test_a_speed_that_was_measured_once_decides_nothing() -> None:
    verdict = _judged(*speeds(("alibi", 0, 50.0), ("sinusoidal", 0, 100.0)), FAST)
    assert (verdict.ours, verdict.word) == (0.5, "open")
    assert "measured once" in why(verdict)


@pytest.mark.parametrize(("slow", "word"), [(0.99, "confirmed"), (0.80, "contradicted")])
def test_speeds_are_decided_by_their_seeds(slow: float, word: str) -> None:
    """The levels differ by a third, the ratios hardly: measurements are paired like trainings."""
    measured = [
        one
        for seed, level in enumerate((100.0, 130.0))
        for one in (("sinusoidal", seed, level), ("alibi", seed, level * slow * (1 + 0.001 * seed)))
    ]
    verdict = _judged(*speeds(*measured), FAST)
    assert (verdict.word, verdict.text) == (word, None)
    assert verdict.seeds.over == "2 seeds"


def test_a_claim_about_training_needs_seeds_however_long_the_text() -> None:
    label = "at 30 L ALiBi is better than rotary"
    claim = next(one for one in CLAIMS if label in one.says)
    assert claim.about_training
    assert not next(one for one in CLAIMS if SINUSOIDAL in one.says).about_training
    found = [
        evaluation(method, 64, {64: 4.0, 127: level}, noise=0.001, seed=seed)
        for seed in (0, 1)
        for method, level in (("alibi", 3.9), ("rotary", 4.5))
    ]
    for seeds, word in ((1, "open"), (2, "confirmed")):
        judged = answer(found[: 2 * seeds], longest=15_512, alibi=(54.6, 49.4), rotary=(54.6, 90.0))
        verdict = _judged(*judged, label)
        assert (verdict.word, verdict.text is not None) == (word, True)
        assert (verdict.seeds is None) == ("needs two seeds" in why(verdict))


def test_definitions_are_compared_exactly() -> None:
    slopes = {f"ALiBi, {heads} heads": {"slope": [0.5, last]} for heads, last in ((8, 2.0**-8), (16, 2.0**-8))}
    record = records.make("paper-item", "figure-3", config={}, metrics={}, curves=slopes)
    assert [one.word for one in verdicts.verdicts(record, {})] == ["confirmed", "confirmed"]
    off = {**slopes, "ALiBi, 8 heads": {"slope": [0.5, 2.0**-7]}}
    record = dataclasses.replace(record, curves=off)
    assert [one.word for one in verdicts.verdicts(record, {})] == ["contradicted", "contradicted"]


def test_parts_shorter_than_the_context_are_joined() -> None:
    """16 parts of 32 tokens with 127 of context form four passages; of 16 tokens two, too few for an interval."""
    for tokens, parts in ((32, 4), (16, 0)):
        found = [evaluation("sinusoidal", 64, {64: 4.0, 127: 4.2}, noise=0.05, tokens_per_part=tokens)]
        record, by_identity = answer(found, sinusoidal=(54.6, 66.7))
        verdict = _judged(record, by_identity, SINUSOIDAL)
        assert (verdict.text.over if verdict.text else "") == (f"{parts} parts of the text" if parts else "")
        assert ("fewer than three parts as long as the context of 127" in why(verdict)) == (not parts)


def test_models_that_were_tested_on_other_tokens_are_not_compared_by_part() -> None:
    one = evaluation("alibi", 64, {64: 4.0, 127: 3.0})
    other = evaluation("sinusoidal", 64, {64: 4.0, 127: 4.0}, tokens=4096)
    record, by_identity = answer([one, other], alibi=(54.6, 20.1), sinusoidal=(54.6, 54.6))
    numbers = [Number("ALiBi, L = 512", 1012)], [Number("Sinusoidal, L = 512", 1012)]
    found = paired(Sources(record, by_identity), *numbers, way="nonoverlapping")
    assert found.why_not == "the models were not tested on the same tokens"
    assert interval(found) is None


def test_the_page_says_verdicts_sizes_and_where_they_are_from() -> None:
    found = [
        evaluation("sinusoidal", 64, {64: 4.0, 127: 4.5}, noise=0.05),
        evaluation("alibi", 64, {64: 4.0, 127: 3.9}, noise=0.01),
    ]
    record, _ = answer(found, sinusoidal=(54.6, 90.0), alibi=(54.6, 49.4))
    page = report_html([record, *found])
    assert "At scale small" in page
    assert 'verdict confirmed">confirmed</td><td>1.6484</td><td>1.' in page  # 90 / 54.6
    assert f"2 confirmed, {OF_FIGURE_1 - 2} open" in page
    assert "Models of 1.1 M weights" in page
    assert "Bands: 95 % over 16 parts of the text, one training each." in page
    assert "The paper's claims" not in report_html(found)


def test_the_command_prints_a_line_per_claim_and_the_counts(tmp_path: Path) -> None:
    found = [evaluation("sinusoidal", 64, {64: 4.0, 127: 4.5}, noise=0.05)]
    record, _ = answer(found, sinusoidal=(54.6, 90.0))
    for one in (record, *found):
        records.save(one, tmp_path / "records")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "records"), "--verdicts"])
    lines = result.output.splitlines()
    assert lines[0].startswith(f"confirmed     figure-1 (small): {SINUSOIDAL} than at L: 1.6484 [1.6")
    assert lines[-1] == f"1 confirmed, {OF_FIGURE_1 - 1} open"
    assert len(lines) == OF_FIGURE_1 + 1
    assert os.listdir(tmp_path) == ["records"]  # no page
    nothing = CliRunner().invoke(app, ["report", str(records.save(found[0], tmp_path / "other")), "--verdicts"])
    assert "no answer to a figure or table of the paper" in str(nothing.exception)


@pytest.mark.parametrize(
    ("nats", "found"),
    [
        ({64: 4.0, 96: 3.9, 128: 4.01, 192: 4.2, 256: 4.5}, (128, 192)),  # at 128 the interval over text includes 0
        ({64: 4.0, 96: 4.2, 128: 3.9, 192: 4.2}, (64, 96)),
        ({64: 4.0, 96: 3.9, 128: 3.8}, (128, None)),
    ],
)
def test_a_method_fails_where_the_whole_interval_is_worse(
    nats: dict[int, float], found: tuple[int, int | None]
) -> None:
    (study,) = studies([evaluation("rotary", 64, nats, noise=0.05)])
    assert first_worse(study.series[0], "nonoverlapping") == found
    ((_, _, cells),) = changes(study).blocks[0].rows
    assert cells[3].spread == (f"from {found[1]}" if found[1] else "")
    (study,) = studies([evaluation("rotary", 64, nats, noise=None)])
    assert first_worse(study.series[0], "nonoverlapping") is None


def test_a_change_to_almost_nothing_is_all_of_the_perplexity() -> None:
    (study,) = studies([evaluation("rotary", 64, {64: 2000.0, 256: 4.0}, noise=0.05)])
    ((_, _, cells),) = changes(study).blocks[0].rows
    assert [cell.text.replace("\N{NO-BREAK SPACE}", " ") for cell in cells[3:5]] == ["−100 %", "−100 % to −100 %"]
