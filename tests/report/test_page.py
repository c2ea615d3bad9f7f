"""The page contains every number, all its text is computed, and nothing is loaded from elsewhere."""

import dataclasses
import html
import math
import os
import re
from pathlib import Path

import pytest
from made_up_records import changed

from alibi_lab.records import Record
from alibi_lab.report.page import QUESTION, report_html, write_report
from alibi_lab.report.series import studies
from alibi_lab.report.tables import study as tables


def _text(page: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)))


def test_the_table_holds_every_perplexity(made_up) -> None:
    page = report_html(made_up())
    values = [float(value) for value in re.findall(r'<data value="([^"]*)">', page)]
    for start, growth in ((2.22, 0.16), (1.87, 0.30), (1.93, 0.07), (2.0, -0.012)):
        for doublings in range(5):
            nats = start + growth * doublings
            for expected in (math.exp(nats), math.exp(nats - 0.05), nats / math.log(2), (nats - 0.05) / math.log(2)):
                assert any(value == pytest.approx(expected) for value in values)


def _changes(found: list[Record], block: int = 0) -> dict[str, list[str]]:
    (study,) = studies(found)
    rows = tables.changes(study).blocks[block].rows
    return {
        label: [text.replace("\N{NO-BREAK SPACE}", " ") for cell in cells for text in [cell.text]]
        for label, _, cells in rows
    }


def test_the_change_with_length_is_computed_for_both_kinds_of_windows(made_up) -> None:
    found = _changes(made_up())
    assert found["ALiBi"] == ["128 to 2,048", "7.389", "7.043", "−4.7 %", "—", "—", "+5.1 %"]  # exp(0.05) above sliding
    assert [found[label][3] for label in ("T5 bias", "sinusoidal", "rotary")] == ["+32 %", "+90 %", "+232 %"]
    assert _changes(made_up(), 1)["ALiBi"] == ["128 to 2,048", "7.029", "6.699", "−4.7 %", "—", "—", "—"]
    learned = _changes(made_up(methods=("learned", "alibi")))["learned"]
    assert (learned[0], learned[3]) == ("128 to 128", "—")


def test_the_interval_of_a_change_is_students_over_paired_seeds(made_up) -> None:
    """Seeds differ in level by 0.01 nats; the changes of three seeds are −0.048 + (0, 0.01, 0.02)."""
    records = made_up(methods=("alibi",), seeds=3)
    for seed, at in enumerate((1, 3, 5)):
        nats = records[at].curves["by_length"]["nonoverlapping_nats"]
        records[at] = changed(
            records[at], "curves", "by_length", nonoverlapping_nats=[*nats[:-1], nats[-1] + 0.01 * seed]
        )
    low, high = (math.expm1(-0.038 + sign * 4.30265273 * 0.01 / math.sqrt(3)) for sign in (-1, 1))
    lengths, _, _, change, interval, seeds, _ = _changes(records)["ALiBi"]
    assert (lengths, change) == ("128 to 2,048", "−3.7 %")
    assert interval == f"{100 * low:+.1f} % to {100 * high:+.1f} %".replace("-", "−")
    assert seeds == "0.040"


def test_a_seed_with_missing_values_leaves_the_numbers_whole(made_up) -> None:
    """The second of three seeds was not evaluated at the longest length, or at the last position."""
    records = made_up(methods=("alibi",), seeds=3)
    nats = records[3].curves["by_length"]["nonoverlapping_nats"]
    records[3] = changed(records[3], "curves", "by_length", nonoverlapping_nats=[*nats[:-1], None])
    for at, counts in ((1, [50] * 12), (3, [20] * 11 + [None])):
        records[at] = changed(records[at], "curves", "by_position", tokens=counts)
    assert _changes(records)["ALiBi"][3:6:2] == ["−4.7 %", "0.020"]
    assert "fewest bytes at a position 20" in _text(report_html(records))


def test_the_page_says_what_was_run(made_up) -> None:
    records = [dataclasses.replace(r, commit="0123456789ab", command="alibi run quick") for r in made_up(seeds=2)]
    text = _text(report_html(records, title="A title"))
    facts = ("ab" * 32, "train.steps 40", "train.seed 0 · 1", "0123456789ab", "alibi run quick")
    for words in ("A title", QUESTION, *facts):
        assert words in text
    assert f"Python {records[0].machine['python']}" in text


def test_the_page_is_self_contained(made_up) -> None:
    page = report_html(made_up())
    assert page.count("<script") == 1, "which shows the numbers of a point"
    assert not re.search(r'(src|href)="(?!#|data:|https://arxiv\.org)', page)
    assert "@import" not in page
    assert not re.search(r"url\((?!#|data:)", page)


def test_text_from_records_is_escaped() -> None:
    record = Record(kind="benchmark", name="<script>alert(1)</script>", config={}, metrics={"a_ms": 1.0, "b": None})
    page = report_html([record], title="<b>bold</b>")
    assert "<script>alert" not in page
    assert "<b>bold" not in page
    assert "&lt;script&gt;" in page


def test_no_records_give_a_page_that_says_so() -> None:
    text = _text(report_html([]))
    assert "There are no records yet" in text
    assert "alibi run quick" in text


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_parts_without_records_are_left_out(made_up, kind: str) -> None:
    text = _text(report_html([record for record in made_up() if record.kind == kind]))
    assert ("Perplexity against length" in text) == (kind == "evaluation")
    assert ("as logged, not smoothed" in text) == (kind == "training")


def test_equal_records_give_equal_pages(made_up) -> None:
    records = made_up()
    assert report_html(records) == report_html(records[::-1])


def test_a_method_from_a_file_has_its_own_color_in_light_and_dark(made_up, contrast) -> None:
    look = {"label": "mine", "light": "#1d6b4c", "dark": "#7fe0b0", "marker": "o"}
    own = [
        dataclasses.replace(
            record,
            name=record.name.replace("alibi", "Mine"),
            config={**record.config, "model": {"method": "mine.py:Mine"}, "method": look},
        )
        for record in made_up(methods=("alibi",))
    ]
    page = report_html([*made_up(), *own])
    style, body = page.split("</style>", 1)
    assert style.count("--own-1d6b4c: #1d6b4c;") == 2, "on the screen and in print"
    assert "--own-1d6b4c: #7fe0b0;" in style
    assert re.findall(r".{4}#1d6b4c", body) == ["<td>#1d6b4c"], "only the config names it"
    assert body.count("var(--own-1d6b4c)") > 10
    assert re.search(r'class="?cards.*?var\(--own-1d6b4c\)', body, flags=re.DOTALL)
    dark = tuple(int(look["dark"][at : at + 2], 16) for at in (1, 3, 5))
    assert contrast(dark, (0x15, 0x18, 0x1D)) > 4.5


def test_progress_counts_the_sections(made_up) -> None:
    calls: list[tuple[int, int]] = []
    report_html(made_up(), progress=lambda *at: calls.append(at))
    assert [at for at, _ in calls] == [*range(1, len(calls) + 1)]
    assert calls[-1] == (len(calls), len(calls))


def test_the_file_is_written_whole_or_not_at_all(made_up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(made_up(), tmp_path / "new" / "report.html")
    before = path.read_bytes()
    assert before.endswith(b"</html>")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_report([], path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["report.html"]
