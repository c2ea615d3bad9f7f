"""Records: reading returns exactly what was written, writes are atomic, and duplicates are detected."""

import contextlib
import dataclasses
import json
import math
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import alibi_attn
from alibi_lab import provenance, records
from alibi_lab.records import Record, RecordError

CONFIG = {"model": {"method": "alibi"}, "train": {"length": 128, "seed": 0}}


@pytest.fixture
def record() -> Record:
    return records.make(
        "training",
        "quick/alibi-128/seed-0",
        config=CONFIG,
        metrics={"loss_nats": 1.25, "peak_memory_bytes": None},
        curves={"training": {"step": [1, 2], "loss_nats": [2.5, 1.25]}},
    )


def test_a_loaded_model_equals_the_saved_one(record: Record, tmp_path: Path) -> None:
    path = records.save(record, tmp_path / "deep" / "records")
    assert records.load(path) == record
    assert path.name.startswith("training-quick-alibi-128-seed-0-")


def test_a_record_says_where_with_what_and_when(record: Record) -> None:
    assert record.machine["processor"]
    assert record.versions["numpy"]
    assert record.started.endswith("+00:00")
    assert "pytest" in record.command or record.command


def test_a_record_of_a_command_whose_words_are_not_utf_8_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["alibi", "generate", "--prompt", os.fsdecode(b"caf\xe9")])
    made = records.make("training", "a", config={}, metrics={})
    assert records.load(records.save(made, tmp_path)).command == r"alibi generate --prompt 'caf\udce9'"


def test_records_are_never_overwritten(record: Record, tmp_path: Path) -> None:
    path = records.save(record, tmp_path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="never overwritten"):
        records.save(dataclasses.replace(record, metrics={"loss_nats": 9.0}), tmp_path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_record_grows_with_its_measurement_and_no_other(record: Record, tmp_path: Path) -> None:
    path = records.grow(record, tmp_path)
    longer = dataclasses.replace(record, metrics={"loss_nats": 9.0})
    assert records.grow(longer, tmp_path) == path
    assert records.load(path) == longer
    with pytest.raises(FileExistsError, match="never overwritten"):
        records.grow(dataclasses.replace(record, started="2000-01-01T00:00:00+00:00"), tmp_path)
    assert records.load(path) == longer
    assert os.listdir(tmp_path) == [path.name]


def test_nan_infinity_and_what_is_too_large_to_be_read_become_null(record: Record, tmp_path: Path) -> None:
    odd = dataclasses.replace(
        record,
        metrics={"loss_nats": math.nan, "perplexity": 1e200},
        curves={"training": {"step": (1, 2), "loss_nats": [math.inf, 1.0]}},
    )
    path = records.save(odd, tmp_path)
    assert "NaN" not in path.read_text()
    read = records.load(path)
    assert read.metrics == {"loss_nats": None, "perplexity": None}
    assert read.curves == {"training": {"step": [1, 2], "loss_nats": [None, 1.0]}}


def test_identity_is_of_the_question_and_not_of_the_answer() -> None:
    known = records.identity("training", "a", CONFIG)
    assert len(known) == 12
    assert known == records.identity("training", "a", json.loads(json.dumps(CONFIG)))
    assert known == records.identity("training", "a", dict(reversed(CONFIG.items())))
    assert known == records.identity("training", "a", {**CONFIG, "train": {"seed": 0, "length": 128}})
    assert records.identity("e", "a", {"lengths": (1, 2)}) == records.identity("e", "a", {"lengths": [1, 2]})
    for other in (("evaluation", "a", CONFIG), ("training", "b", CONFIG), ("training", "a", {**CONFIG, "x": 1})):
        assert known != records.identity(*other)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: '{"a": 1}', "it has no schema"),
        (
            lambda text: text.replace('"schema": 1', '"schema": 99'),
            "has schema 99 but this version reads 1; read it with",
        ),
        (lambda text: text.replace('"metrics"', '"metrix"'), "has no metrics"),
        (lambda text: text.replace("1.25,", '"low",', 1), "damaged: metrics has loss_nats = 'low'|columns"),
        (lambda text: text.replace('"kind": "training"', '"kind": 7'), "damaged: kind is 7 but must be text"),
        (
            lambda text: '{"schema": 1, "schema": 2}',
            "is not JSON .the name 'schema' comes twice.*; a record is written by",
        ),
        (
            lambda text: text.replace("1.25", "1.24"),
            "is not what was written: .*edited.*; restore it, or measure it again",
        ),
    ],
)
def test_a_damaged_record_is_refused_with_its_path(damage, words, record: Record, tmp_path: Path) -> None:
    path = records.save(dataclasses.replace(record, curves={}), tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError, match=words) as caught:
        records.load(path)
    assert str(path) in str(caught.value)


BY_LENGTH = {
    "length": [128, 256],
    "nonoverlapping_nats": [2.0, None],
    "tokens_per_second": [9.0, 8.0],
    "word": ["a", "b"],
}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("seconds",), "long", "seconds is 'long' but must be a number of seconds"),
        (("seconds",), 1e300, r"seconds is 1e\+300 but must be"),
        (("commit",), 7, "commit is 7 but must be text or None"),
        (("metrics", "loss_nats"), -1, "metrics.loss_nats has -1 but must be null or a number from 0"),
        (("metrics", "other"), -1e308, "metrics.other has -1e\\+308, more than can be measured"),
        (("curves", "by_length", "length", 0), 0, "curves.by_length.length has 0 but must be null or a number from 1"),
        (("curves", "by_length", "length", 0), "128", "curves.by_length.length has '128' but must be null or a number"),
        (("curves", "by_length", "nonoverlapping_nats", 1), 1e308, r"nonoverlapping_nats has 1e\+308"),
        (("curves", "by_length", "tokens_per_second", 0), [1], r"tokens_per_second has \[1\] but a column holds"),
    ],
)
def test_impossible_measurements_are_refused_with_their_path(place, value, words, record, tmp_path) -> None:
    path = records.save(dataclasses.replace(record, curves={"by_length": BY_LENGTH}), tmp_path)
    assert records.load(path).curves == {"by_length": BY_LENGTH}  # with the rounding of sums
    data = json.loads(path.read_text())
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=rf"^{path} is damaged: .*{words}"):
        records.load(path)


def test_a_flipped_bit_changes_no_figure_in_silence(record: Record, tmp_path: Path) -> None:
    path = records.save(record, tmp_path)
    content, rng = path.read_bytes(), random.Random(0)
    for _ in range(400):
        at = rng.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
        with contextlib.suppress(RecordError):
            assert records.load(path) == record  # the flip is in white space


def test_every_committed_record_is_what_was_written() -> None:
    assert sum(1 for _ in records.find(Path(__file__).parent.parent / "results")) > 1400


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metrics": {"loss_nats": "low"}}, "a metric is a number or None"),
        ({"curves": {"c": {"x": [1, 2], "y": [1]}}}, "must have equal lengths but have: x 2, y 1"),
        ({"curves": {"c": [1, 2]}}, "maps names to columns"),
        ({"config": []}, "must map names to values"),
    ],
)
def test_a_record_is_checked_when_it_is_made(record: Record, fields, words) -> None:
    with pytest.raises(RecordError, match=words):
        dataclasses.replace(record, **fields)


def test_a_packed_file_has_one_order_whatever_was_packed_first(record, tmp_path) -> None:
    every = [dataclasses.replace(record, name=f"quick/{name}") for name in "bcad"]
    paths = [records.save(one, tmp_path / "runs") for one in every]
    packed = tmp_path / "results" / "quick.jsonl"
    assert records.pack(paths[:2], packed) == 2
    assert records.pack([paths[2], tmp_path / "runs", packed], packed) == 4
    at_once = tmp_path / "at-once.jsonl"
    records.pack([tmp_path / "runs"], at_once)
    assert packed.read_bytes() == at_once.read_bytes()
    lines = [json.loads(line) for line in packed.read_text().splitlines()]
    assert [line["key"] for line in lines] == sorted(path.stem for path in paths)
    of_files = {path.stem: json.loads(path.read_text()) for path in paths}
    assert {line.pop("key"): line for line in lines} == of_files, "values and checksums stay"
    assert list(records.find(packed)) == sorted(every, key=records.key)


def test_a_packed_record_is_found_loaded_and_not_written_again(record: Record, tmp_path: Path) -> None:
    path = records.save(record, tmp_path / "runs")
    records.pack([path], tmp_path / "quick.jsonl")
    place = records.recorded(tmp_path, record.kind, record.name, record.config)
    assert place == tmp_path / f"quick.jsonl#{path.stem}"
    assert records.load(place) == records.load(str(place)) == record
    assert list(records.find(place)) == [record]
    assert records.recorded(tmp_path, record.kind, record.name, {}) is None
    for write in (records.save, records.grow):
        with pytest.raises(FileExistsError, match=r"quick\.jsonl#.* exists; records are never overwritten"):
            write(record, tmp_path)
    with pytest.raises(RecordError, match=r"quick\.jsonl has no record 'training-x'"):
        records.load(tmp_path / "quick.jsonl#training-x")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        list(records.find(tmp_path / "other.jsonl#training-x"))


def test_a_packed_record_is_replaced_only_on_request(record: Record, tmp_path: Path) -> None:
    packed, again = tmp_path / "quick.jsonl", dataclasses.replace(record, metrics={"loss_nats": 9.0})
    records.pack([records.save(record, tmp_path / "first")], packed)
    before, path = packed.read_bytes(), records.save(again, tmp_path / "second")
    with pytest.raises(FileExistsError, match="has another record training-quick"):
        records.pack([path], packed)
    assert packed.read_bytes() == before
    assert records.pack([path], packed, replace=True) == 1
    assert list(records.find(packed)) == [again]
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        records.pack([path], tmp_path / "quick.json")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda line: line.replace(b"1.25", b"1.24"), "is not what was written"),
        (
            lambda line: line.replace(b'{"key": "training', b'{"key": "evaluation'),
            "is damaged: the key of this record is",
        ),
        (lambda line: line[: len(line) // 2], "is not JSON"),
        (lambda line: b"<<<<<<< HEAD\n" + line, "line 1 of .* is not a record: it does not begin with a key"),
        (lambda line: b"{" + line.partition(b", ")[2], "does not begin with a key"),
    ],
)
def test_a_damaged_line_is_refused_with_its_place(damage, words, record: Record, tmp_path: Path) -> None:
    packed = tmp_path / "quick.jsonl"
    records.pack([records.save(record, tmp_path / "runs")], packed)
    packed.write_bytes(damage(packed.read_bytes()))
    with pytest.raises(RecordError, match=rf"quick\.jsonl.*{words}|{words}") as caught:
        list(records.find(packed))
    assert str(packed) in str(caught.value)


def test_find_reads_files_and_folders_and_filters_by_kind(record: Record, tmp_path: Path) -> None:
    first = records.save(record, tmp_path / "a")
    records.save(dataclasses.replace(record, kind="evaluation"), tmp_path / "b" / "deep")
    assert [r.kind for r in records.find(tmp_path)] == ["training", "evaluation"]
    assert [r.kind for r in records.find(first, tmp_path / "b", kind="evaluation")] == ["evaluation"]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        list(records.find(tmp_path / "c"))


def test_records_are_rows_and_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = {"by_length": {"length": [64, 128], "nats": [2.5, None]}}
    config = {"train": {"steps": 3, "lengths": [64]}}
    records.save(records.make("evaluation", "a", config=config, metrics={"loss": 2.0}, curves=curves), tmp_path)
    records.save(records.make("training", "b", config={}, metrics={}), tmp_path)
    first, second = records.rows(tmp_path)
    assert (first["name"], first["config.train.steps"], first["config.train.lengths"], first["metrics.loss"]) == (
        "a",
        3,
        [64],
        2.0,
    )
    assert list(second) == ["kind", "name", "started", "seconds"]
    points = records.rows(tmp_path, curve="by_length")
    assert [(one["name"], one["length"], one["nats"]) for one in points] == [("a", 64, 2.5), ("a", 128, None)]
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=tuple))
    assert records.table(tmp_path, curve="by_length") == tuple(points)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs pandas; run pip install pandas"):
        records.table(tmp_path)


def test_a_record_of_speed_has_a_hash_of_the_kernels_outside_its_identity() -> None:
    speed = records.make("benchmark", "cpu", config={"heads": 8}, metrics={})
    other = records.make("training", "quick", config={}, metrics={})
    assert re.fullmatch("[0-9a-f]{12}", speed.versions["kernels"])
    assert "kernels" not in other.versions
    old = dataclasses.replace(speed, versions={**speed.versions, "kernels": "0" * 12})
    older = dataclasses.replace(speed, versions={"numpy": "2.0"})
    assert len({records.identity(one.kind, one.name, one.config) for one in (speed, old, older)}) == 1
    assert [records.age(one) for one in (speed, other)] == ["", ""]
    assert records.age(old) == "measured with other kernels than the present ones"
    assert records.age(older) == "measured by an older version, which kept no hash of the kernels"


def test_the_hash_of_the_kernels_follows_code_but_not_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, program = tmp_path / "attention" / "kernel.cpp", tmp_path / "attention" / "plan.py"
    source.parent.mkdir()

    def hashed(cpp: str, python: str) -> str:
        source.write_text(cpp)
        program.write_text(python)
        provenance.kernels.cache_clear()
        return provenance.kernels()

    with monkeypatch.context() as patched:
        patched.setattr(alibi_attn, "__file__", str(tmp_path / "__init__.py"))
        first = hashed("// why\n#include <x>\nint f();\n", '"""What."""\n\ndef f():\n    # why\n    n = 1\n')
        assert (
            hashed("// because\n#include <x>\n\nint f();\n", '"""What\n\nelse."""\n# a comment\ndef f():\n    n = 1\n')
            == first
        )
        assert hashed("#include <y>\nint f();\n", "def f():\n    n = 1\n") != first
        assert hashed("#include <x>\nint f();\n", "def f():\n    n = 2\n") != first
    provenance.kernels.cache_clear()
