"""The streaming recipe: every way of reading scores the same tokens at every length and appears in the report."""

import html

import pytest

from alibi_lab import records
from alibi_lab.lab.experiment import run
from alibi_lab.recipes.streams import COMPARED, RECIPE
from alibi_lab.report.page import report_html


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[records.Record]:
    return [records.load(path) for path in run(RECIPE, out=tmp_path_factory.mktemp("streams"), scale="smoke")]


def test_streams_runs_at_smoke_scale_in_every_way_that_a_method_supports(found) -> None:
    evaluations = [record for record in found if record.kind == "evaluation"]
    assert [record.config["model"]["method"] for record in evaluations] == list(COMPARED)
    for record in evaluations:
        curve = record.curves["streams"]
        assert curve["way"] == ["cached segments", "attention sinks", "attention sinks"] * 2
        assert curve["kept"] == [16, 0, 4] * 2
        assert curve["length"] == [16] * 3 + [64] * 3
        sinks_work = record.config["model"]["method"] == "alibi"
        assert [nats is not None for nats in curve["nats"]] == [True, sinks_work, sinks_work] * 2
        assert {tokens for tokens in curve["tokens"] if tokens} == set(
            record.curves["by_length"]["nonoverlapping_tokens"]
        )
        pieces = dict(zip((16, 64), record.curves["by_length"]["nonoverlapping_nats"], strict=True))
        for length, nats in zip(curve["length"], curve["nats"], strict=True):
            # the model is untrained, so that the ways hardly differ
            assert nats is None or nats == pytest.approx(pieces[length], abs=0.3)


def test_every_way_has_a_block_in_the_report(found) -> None:
    page = html.unescape(report_html(found))
    for title in (
        "cached segments, 16 tokens of memory",
        "attention sinks, 0 first tokens",
        "attention sinks, 4 first tokens",
    ):
        assert f"Perplexity per byte, {title}" in page
