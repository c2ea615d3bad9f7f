"""Benchmark figures match their records: one line per peer, times and memory."""

from alibi_lab.records import Record
from alibi_lab.report.page import report_html
from alibi_lab.report.sections.benchmark import facts, memory_by_length, ratio_table, times_by_length

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


def test_times_below_a_millisecond_are_not_zero() -> None:
    quick = record(ours={"length": [1024, 2048, 4096], "forward_ms": [0.312, 4.0, 1234.5]})
    assert ratio_table(quick)[1] == [("ours", ["0.31 ms", "4 ms", "1,234 ms"])]


def test_memory_that_was_measured_separately_is_ours() -> None:
    apart = record(
        ours={"length": [512], "forward_ms": [1.0]}, memory={"length": [512], "peak_memory_bytes": [3 * 2**20]}
    )
    assert lines(memory_by_length(apart)) == [[[512], [3]]]
    assert "Peak memory" in report_html([apart])


def test_errors_are_reported_and_why_a_peer_was_not_run() -> None:
    theirs = {
        "length": [1024, 2048, 4096],
        "forward_ms": [3.0, None, None],
        "relative_error": [1e-3, 2e-3, None],
        "why_not": [None, "out of memory", "out of memory"],
    }
    never = {"length": [1024], "forward_ms": [None], "relative_error": [None], "why_not": ["no kernel"]}
    both = record(ours=OURS, theirs=theirs, never=never)
    assert dict(facts(both)[1:]) == {
        "error of theirs": "2.0e-03 of max‖v‖",
        "theirs, not at 2,048, 4,096": "out of memory",
        "never, not at 1,024": "no kernel",
    }
    assert len(lines(times_by_length(both))) == 2
    assert ratio_table(both)[1][2][1] == ["–", "–", "–"]
