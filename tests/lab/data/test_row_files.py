"""Texts in JSON, JSON Lines, CSV and Parquet: only the field's text is read, without markup."""

import csv
import json
from pathlib import Path

import pytest

from alibi_lab.lab.config import DataConfig
from alibi_lab.lab.data.corpus import CorpusError, load_corpus, whole_text
from alibi_lab.lab.data.sources import texts

ROWS = [{"id": n, "body": f'row {n} says "café", and {{braces}}\nand a second line {n}' * 3} for n in range(50)]
TEXTS = [row["body"] for row in ROWS]


def written(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n", encoding="utf-8")
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is in the extra hub")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ("id", "body"), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "tsv", "parquet"])
def test_the_rows_of_a_file_are_documents_of_the_field(kind: str, tmp_path: Path) -> None:
    config = DataConfig(text=(str(written(tmp_path, kind)),), text_field="body", valid_share=0.2)
    corpus, stored = load_corpus(config), load_corpus(config, tmp_path / "tokens")
    expected = ["\n".join(TEXTS[:40]), "\n".join(TEXTS[40:])]
    for one in (corpus, stored):
        assert [one.tokenizer.decode(part).decode() for part in (one.train, one.valid)] == expected
        assert one.facts == corpus.facts
    starts = [sum(len(text.encode()) + 1 for text in TEXTS[:n]) for n in range(40)]
    assert corpus.starts["train"].tolist() == starts
    (whole,) = {bytes(whole_text([Path(config.text[0])], text_field="body").valid.tolist()).decode()}
    assert whole == "\n".join(TEXTS)


def test_a_folder_may_mix_tables_and_plain_text(tmp_path: Path) -> None:
    written(tmp_path, "jsonl")
    for n in range(5):
        (tmp_path / f"{n}.txt").write_text(f"plain text {n}\n" * 40)
    corpus = load_corpus(DataConfig(text=(str(tmp_path),), text_field="body", valid_share=0.2))
    assert corpus.facts["train_parts"] + corpus.facts["valid_parts"] == 55


@pytest.mark.parametrize(
    ("name", "content", "field", "message"),
    [
        (
            "a.jsonl",
            '{"id": 1, "body": "x"}',
            "",
            r"row 1 of .* has no field 'text', but id, body; pass .*--text-field",
        ),
        ("a.json", '[{"body": 3}]', "body", "row 1 of .* has int in the field 'body', not text"),
        ("a.json", '["only text"]', "", "has no field 'text', but no fields"),
        ("a.json", '{"body": ', "body", "a.json is not JSON in UTF-8"),
        ("a.jsonl", '{"body": ' + "[" * 100_000 + "]" * 100_000 + "}", "body", "a.jsonl is not JSONL in UTF-8"),
        ("a.jsonl", '{"body": "\\ud800"}', "body", r"row 1 of .*a.jsonl has \\ud800, half of a surrogate pair"),
        ("a.csv", "id,body\n1,x\n", "txt", "has no field 'txt', but id, body"),
        ("a.parquet", "not parquet", "body", "a.parquet is not Parquet"),
    ],
)
def test_a_table_without_the_field_asks_for_it(
    name: str, content: str, field: str, message: str, tmp_path: Path
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is in the extra hub")
    (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match=message):
        load_corpus(DataConfig(text=(str(tmp_path / name),), text_field=field))


def test_a_damaged_parquet_file_is_refused_with_its_path(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is in the extra hub")
    from pyarrow import parquet

    table, path = pyarrow.Table.from_pylist([{"text": "in the beginning"}]), tmp_path / "a.parquet"
    options = {"use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(table, path, compression="none", **options)
    sound = path.read_bytes()
    assert list(texts(path, "")) == [b"in the beginning"]
    path.write_bytes(sound.replace(b"in the beginning", b"in the bEginning"))
    with pytest.raises(CorpusError, match=r"a.parquet is not Parquet, or damaged \(.*CRC"):
        list(texts(path, ""))
    path.write_bytes(sound[:4] + b"\xff" * 16 + sound[20:])
    with pytest.raises(CorpusError, match=r"a.parquet is not Parquet, or damaged \("):
        list(texts(path, ""))


@pytest.mark.parametrize(("name", "content"), [("a.csv", "body\n{}\n"), ("a.jsonl", '{{"body": "{}"}}')])
def test_a_long_text_and_a_byte_order_mark_are_read(name: str, content: str, tmp_path: Path) -> None:
    long = "word " * 40_000
    (tmp_path / name).write_text(content.format(long), encoding="utf-8-sig")
    assert bytes(whole_text([tmp_path / name], text_field="body").valid.tolist()) == long.encode()


@pytest.mark.parametrize(("name", "content"), [("a.csv", "text\n"), ("a.jsonl", "\n\n"), ("b.jsonl", '{"text": ""}')])
def test_a_table_without_text_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match=r"the text to test on has no tokens \(0 bytes\); pass files with text"):
        whole_text([tmp_path / name])
