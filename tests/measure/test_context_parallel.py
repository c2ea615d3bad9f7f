"""`alibi bench context-parallel`: the record counts the rows sent; lengths that ranks cannot share evenly raise."""

from pathlib import Path

import pytest

from alibi_lab import records
from alibi_lab.measure.context_parallel import context_parallel


@pytest.mark.long
def test_a_record_has_times_and_rows_of_both(tmp_path: Path) -> None:
    messages: list[str] = []
    (path,) = context_parallel(tmp_path, lengths=(4096,), ranks=(2,), repeats=1, say=messages.append)
    record = records.load(path)
    assert record.name == "context-parallel/ranks-2"
    ours, gather = record.curves["ours"], record.curves["all-gather"]
    assert gather["rows_received"] == [2 * 2048 * 8]
    assert gather["bytes_received"] == [2 * 2 * 2048 * 8 * 2 * 64 * 4]
    assert 0 < ours["rows_received"][0] < gather["rows_received"][0] / 2
    assert ours["bytes_received"][0] == 2 * ours["rows_received"][0] * 2 * 64 * 4  # rows, and their gradients back
    assert ours["relative_error"][0] < 1e-5
    assert record.metrics["rows of an all-gather over ours"] > 2
    assert "context-parallel/ranks-2 ours" in messages[0]
    with pytest.raises(FileExistsError):
        context_parallel(tmp_path, lengths=(4096,), ranks=(2,), repeats=1)


def test_shards_of_unequal_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"4 ranks cannot share \[4098\] tokens"):
        context_parallel(tmp_path, lengths=(4098,), ranks=(2, 4))
