"""Attention accumulated over layers on the page: shares by depth, and the verdicts on two claims, from made-up records."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from alibi_lab.heads import rollout
from alibi_lab.records import Record
from alibi_lab.report import rollouts
from alibi_lab.report.page import report_html
from alibi_lab.report.section import Archive
from alibi_lab.report.sections import heads as section
from alibi_lab.report.sections.heads import rollout_figure


def made_up(method: str, seed: int, shares: Sequence[Sequence[float]]) -> Record:
    """A record with the first token's share at each depth, one per text; with the residual it is half as large."""
    rows = [
        (way, depth, text, share * part, share * part, 0.1)
        for way, part in zip(rollout.WAYS, (1.0, 0.5), strict=True)
        for depth, of_depth in enumerate(shares, start=1)
        for text, share in enumerate(of_depth)
    ]
    columns = {name: [row[at] for row in rows] for at, name in enumerate(rollout.COLUMNS)}
    config = {"method": method, "seed": seed, "length": 64, "texts": len(shares[0]), "layers": len(shares)}
    return Record(
        kind="rollout",
        name=f"{method}-64",
        config=config,
        metrics={},
        curves={"rollout": columns},
        command="alibi",
    )


PLAIN = [made_up("none", seed, [[0.01] * 3, [last, last, last]]) for seed, last in enumerate((0.4, 0.5, 0.6))]
ALIBI = [made_up("alibi", seed, [[0.001] * 3, [last, last, last]]) for seed, last in enumerate((0.1, 0.12, 0.13))]


def test_shares_are_means_over_texts_by_way_and_depth() -> None:
    record = made_up("alibi", 0, [[0.1, 0.3], [0.5, 0.9]])
    assert rollouts.is_drawn(record)
    assert rollouts.by_depth(record, "attention", "first_token") == pytest.approx({1: 0.2, 2: 0.7})
    assert rollouts.by_depth(record, "with residual", "first_token") == pytest.approx({1: 0.1, 2: 0.35})


def test_both_claims_are_judged_over_paired_seeds_and_texts() -> None:
    first, second = rollouts.claims([*PLAIN, *ALIBI])
    logs = np.log(np.array([0.4, 0.5, 0.6]) / 0.01)
    half = 4.30265273 * logs.std(ddof=1) / math.sqrt(3)
    assert first.ours == pytest.approx(math.exp(logs.mean()))
    assert (first.interval.low, first.interval.high) == pytest.approx(
        (math.exp(logs.mean() - half), math.exp(logs.mean() + half)), rel=1e-3
    )
    assert first.interval.over == "3 seeds and 3 parts of the text"
    assert (first.word, second.word) == ("confirmed", "confirmed")
    assert second.ours == pytest.approx((0.1 * 0.12 * 0.13 / (0.4 * 0.5 * 0.6)) ** (1 / 3))


def test_claims_can_be_contradicted_or_open() -> None:
    falling = [made_up("none", seed, [[0.5, 0.5, 0.5], [last] * 3]) for seed, last in enumerate((0.1, 0.11))]
    assert rollouts.claims(falling)[0].word == "contradicted"
    assert rollouts.claims(PLAIN[:1])[0].word == "open"  # one seed
    either = [made_up("none", seed, [[0.5, 0.5, 0.5], [last] * 3]) for seed, last in enumerate((0.1, 0.9))]
    assert rollouts.claims(either)[0].word == "open"
    swapped = [made_up("alibi", seed, [[0.1] * 3, [0.99] * 3]) for seed in range(3)]
    assert [claim.word for claim in rollouts.claims([*PLAIN, *swapped])] == ["confirmed", "contradicted"]


def test_models_on_other_texts_are_not_compared() -> None:
    other = [made_up("alibi", seed, [[0.001] * 4, [0.1] * 4]) for seed in range(3)]
    assert len(rollouts.claims([*PLAIN, *other])) == 1
    assert rollouts.claims([]) == []


def test_the_page_has_numbers_and_claims_and_leaves_pictures_to_the_command() -> None:
    page = report_html([*PLAIN, *ALIBI, rollout.theory(16)])
    assert "Attention accumulated over the layers" in page
    assert "Shares at the last layer" in page
    assert "<svg" not in page, "alibi heads rollout draws them"
    assert '<td class="verdict confirmed">confirmed</td>' in page
    assert "Other records" not in page
    archive = Archive([*PLAIN, *ALIBI])
    finding = section.draw_rollouts(section.find_rollouts(archive)[0], 0, archive).finding
    assert (
        finding == "Share of the first token in the attention accumulated over all layers: no positions 50%, ALiBi 12%."
    )


def test_figures_draw_the_share_of_the_first_token() -> None:
    (axes,) = rollout_figure(ALIBI[0]).axes
    (line,) = axes.get_lines()
    assert (line.get_label(), line.get_xdata().tolist()) == ("ALiBi", [1, 2])
    assert line.get_ydata().tolist() == pytest.approx([0.001, 0.1])
    (axes,) = rollout_figure(rollout.theory(16)).axes
    labels = {line.get_label() for line in axes.get_lines()}
    assert labels == {
        "no mask",
        "causal mask",
        "rotary",
        "ALiBi, 8 heads",
        *(f"ALiBi, m = 1/{m}" for m in (2, 16, 256)),
    }


def test_a_record_without_its_ways_is_listed_with_the_others() -> None:
    for ways in (None, ["attention", "other"]):
        record = made_up("alibi", 0, [[0.1, 0.3]])
        record.curves["rollout"]["way"] = ways and ways * 2
        assert not rollouts.is_drawn(record)
        assert "Other records" in report_html([record])
