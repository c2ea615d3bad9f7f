"""Randomly damaged records: the page is drawn, or the error names the file."""

from pathlib import Path

import pytest
from damaged_records import assert_named_or_drawn, draw, lines, places

from alibi_lab.records import RecordError


@pytest.mark.parametrize("seed", [0, 50, pytest.param(1000, marks=pytest.mark.long)])
def test_no_damage_ends_in_a_traceback(seed: int, tmp_path: Path) -> None:
    drawn = [draw(one, tmp_path) for one in range(seed, seed + (2000 if seed == 1000 else 50))]
    assert 0 < sum(drawn) < len(drawn)


def test_every_kind_of_record_is_damaged() -> None:
    assert {lines()[place]["kind"] for place in places()} == {data["kind"] for data in lines().values()}


def test_the_checker_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "a.json"
    bad.write_text("{")
    monkeypatch.setattr("alibi_lab.records.load", lambda path: _unnamed())
    with pytest.raises(AssertionError):
        assert_named_or_drawn(bad, [])


def _unnamed() -> None:
    raise RecordError("it is damaged")
