"""Benchmarks are drawn as their records say: one line a peer, times and memory."""

from alibi_attn.records import Record
from alibi_attn.report.benchmarks import memory_by_length, ratio_table, times_by_length
from alibi_attn.report.page import report_html

OURS = {"length": [1024, 2048], "forward_ms": [10.0, 20.0], "peak_memory_bytes": [2**20, 2**21]}
THEIRS = {"length": [1024, 2048], "forward_ms": [30.0, None], "peak_memory_bytes": [2**22, None]}


def record(**curves) -> Record:
    return Record(kind="benchmark", name="serving/bloom", config={}, metrics={}, curves=curves)


def lines(figure) -> list[list[list[float]]]:
    return [[list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))] for line in figure.axes[0].lines]


def test_every_peer_has_a_line_that_ends_where_it_was_measured_last() -> None:
    both = record(transformers=THEIRS, ours=OURS)
    assert lines(times_by_length(both)) == [[[1024, 2048], [10, 20]], [[1024], [30]]]
    assert lines(memory_by_length(both)) == [[[1024, 2048], [1, 2]], [[1024], [4]]]
    assert ratio_table(both)[1] == [("ours", ["10 ms", "20 ms"]), ("transformers", ["3.00×", "–"])]


def test_memory_that_was_measured_apart_is_ours() -> None:
    apart = record(
        ours={"length": [512], "forward_ms": [1.0]}, memory={"length": [512], "peak_memory_bytes": [3 * 2**20]}
    )
    assert lines(memory_by_length(apart)) == [[[512], [3]]]
    assert "Peak memory" in report_html([apart])


def test_without_memory_nothing_is_drawn() -> None:
    plain = record(ours={"length": [512], "forward_ms": [1.0]})
    assert memory_by_length(plain) is None
    assert "Peak memory" not in report_html([plain])


def test_a_record_that_comes_twice_is_drawn_once() -> None:
    both = record(transformers=THEIRS, ours=OURS)
    assert report_html([both, both]) == report_html([both])
