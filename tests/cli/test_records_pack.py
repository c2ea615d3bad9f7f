"""`alibi records pack`: collects record files, and `alibi report` reads the packed file."""

from pathlib import Path

from commands import alibi

from alibi_lab import records


def test_records_are_packed_and_reported_and_never_replaced_unasked(tmp_path: Path) -> None:
    old, new = (records.make("benchmark", "mine", config={}, metrics={"ms": ms}) for ms in (1.0, 2.0))
    out = tmp_path / "mine.jsonl"
    records.save(old, tmp_path / "old")
    records.save(new, tmp_path / "new")
    pack = ["records", "pack", "--out", out]
    assert alibi(*pack, tmp_path / "old").endswith("mine.jsonl: 1 records, 1 of them new\n")
    assert "pass --replace to replace it" in alibi(*pack, tmp_path / "new", code=1)
    assert alibi(*pack, tmp_path / "new", "--replace").endswith("1 records, 0 of them new\n")
    assert [one.metrics for one in records.find(out)] == [{"ms": 2.0}]
    alibi("report", out, "--out", tmp_path / "page.html")
    assert "mine" in (tmp_path / "page.html").read_text()
