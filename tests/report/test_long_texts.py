"""The section of long texts: the numbers of its record, and llama.cpp's next to ours if they were measured."""

import re

from alibi_lab.records import Record
from alibi_lab.report.page import report_html

ROWS = {
    "length": [100 * tenth for tenth in range(1, 11)],
    "token_seconds": [0.002] * 10,
    "token_cpu_seconds": [0.001] * 9 + [0.0011],
    "added_bytes": [2**20] * 9 + [3 * 2**20],
}
METRICS = {
    "peak_added_bytes": 3 * 2**20,
    "cold_bytes_read": 2**20,
    "stored_bytes": 8 * 2**20,
    "open_and_first_token_ms": 21.0,
    "warm_token_ms": 5.0,
    "cold_open_and_first_token_ms": 60.0,
    "pss_of_one_bytes": 2**20,
    "pss_of_all_bytes": 2**21,
    "last_to_second_tenth": 1.1,
    "warm_token_page_faults": 0.5,
    "compared_tokens": 1000.0,
    "largest_loss_difference": 0.0,
}
PEER = {"open_and_first_token_ms": 400.0, "cold_bytes_read": 9 * 2**20, "stored_bytes": 9 * 2**20}


def record(**changes) -> Record:
    metrics = METRICS | changes
    return Record(
        kind="benchmark", name="long-texts", config={"processes": 3}, metrics=metrics, curves={"ours": dict(ROWS)}
    )


def cells(page: str, label: str) -> list[str]:
    row = re.search(rf'<th scope="row">{label}</th>(.*?)</tr>', page.replace("\n", ""))
    return re.findall("<td>(.*?)</td>", row[1]) if row else []


def test_a_long_text_has_its_numbers_and_no_line_in_another_benchmark() -> None:
    page = report_html([record()])
    assert cells(page, "ours") == ["21 ms", "5 ms", "60 ms", "1 of 8 MiB"]
    assert cells(page, "llama.cpp, saved state") == []
    assert "the first 1,000; largest difference 0 nats" in page
    assert "2 MiB of it in memory; one process 1 MiB" in page
    assert "Benchmark long-texts" not in page


def test_llama_cpp_is_shown_next_to_ours() -> None:
    page = report_html([record(**{f"llama_cpp_{name}": value for name, value in PEER.items()})])
    assert cells(page, "llama.cpp, saved state") == ["400 ms", "–", "–", "9 of 9 MiB"]
