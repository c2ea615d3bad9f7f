"""Randomly damaged records: the page is drawn, or the error names the file."""

import copy
import json
from pathlib import Path

import pytest
from damaged_records import assert_named_or_drawn, draw, lines, places
from typer.testing import CliRunner

from alibi_lab.cli.main import app
from alibi_lab.records import RecordError


@pytest.mark.parametrize("seed", [0, 50, pytest.param(1000, marks=pytest.mark.long)])
def test_no_damage_ends_in_a_traceback(seed: int, tmp_path: Path) -> None:
    drawn = [draw(one, tmp_path) for one in range(seed, seed + (2000 if seed == 1000 else 50))]
    assert 0 < sum(drawn) < len(drawn)


def test_every_kind_of_record_is_damaged() -> None:
    assert {lines()[place]["kind"] for place in places()} == {data["kind"] for data in lines().values()}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("curves", "by_length", "length", 0), 0, "curves.by_length.length has 0 but must be null or a number from 1"),
        (("name",), "\ud800", r"a text has \ud800, half of a surrogate pair"),
    ],
)
def test_a_length_of_0_and_a_lone_surrogate_are_refused_by_name(place, value, words: str, tmp_path: Path) -> None:
    data = copy.deepcopy(next(one for name, one in lines().items() if "paper#evaluation-wikitext-alibi-64-" in name))
    data["sha256"] = ""
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    bad = tmp_path / "evaluation.json"
    bad.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert isinstance(result.exception, RecordError)
    assert str(result.exception).startswith(str(bad))
    assert words in str(result.exception)


def test_the_checker_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "a.json"
    bad.write_text("{")
    monkeypatch.setattr("alibi_lab.records.load", lambda path: _unnamed())
    with pytest.raises(AssertionError):
        assert_named_or_drawn(bad, [])


def _unnamed() -> None:
    raise RecordError("it is damaged")
