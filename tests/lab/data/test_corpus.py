"""Corpora: sources, splits, reading order, and errors."""

import itertools
import sys
import sysconfig
import tracemalloc

import pytest
import torch

from alibi_lab.lab.config import DataConfig
from alibi_lab.lab.data import sources
from alibi_lab.lab.data.corpus import CorpusError, load_corpus, whole_text
from alibi_lab.lab.data.sources import TextFile, file_chunks
from alibi_lab.lab.data.tokenizing import word_tokenizer
from alibi_lab.lab.training.train import batches, document_ids


def decoded(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode()


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        path = tmp_path / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{number}>" * 20)
    return tmp_path


def test_a_test_text_is_split_off_by_whole_files(folder):
    corpus = load_corpus(DataConfig(text=(str(folder),), valid_share=0.2, test_share=0.1))
    texts = [decoded(part) for part in (corpus.train, corpus.valid, corpus.test)]
    for number in range(40):
        assert sorted(text.count(f"<{number}>") for text in texts) == [0, 0, 20]
    total = sum(map(len, texts))
    assert 0.1 < len(texts[1]) / total <= 0.2
    assert 0.05 < len(texts[2]) / total <= 0.1
    assert corpus.facts["test_tokens"] == len(texts[2])
    assert len(str(corpus.facts["test_sha256"])) == 64


def test_the_validation_text_is_the_same_with_a_test_text(folder):
    plain, tested = (load_corpus(DataConfig(text=(str(folder),), test_share=share)) for share in (0.0, 0.2))
    assert torch.equal(plain.valid, tested.valid)
    assert plain.test is None
    assert "test_tokens" not in plain.facts


def test_a_single_file_gives_its_two_ends_cut_at_lines(text_file):
    corpus = load_corpus(DataConfig(text=(str(text_file),), valid_share=0.1, test_share=0.3))
    parts = [decoded(part) for part in (corpus.train, corpus.valid, corpus.test)]
    assert "".join(parts) == text_file.read_text()
    assert all(part.endswith("\n") for part in parts)
    assert 0.3 <= len(parts[2]) / text_file.stat().st_size < 0.31
    assert 0.1 <= len(parts[1]) / text_file.stat().st_size < 0.11


def test_a_file_without_lines_is_cut_between_two_characters(tmp_path):
    (tmp_path / "a.txt").write_text("日本語" * 101, encoding="utf-8")
    corpus = load_corpus(DataConfig(text=(str(tmp_path / "a.txt"),), valid_share=0.1))
    assert decoded(corpus.train) + decoded(corpus.valid) == "日本語" * 101


def written(folder, **texts: str) -> DataConfig:
    for name, text in texts.items():
        (folder / f"{name.replace('__', '.')}.tokens").write_text(text)
    return DataConfig(text=(str(folder),))


@pytest.mark.parametrize(
    ("texts", "parts", "split"),
    [
        ({"wiki__train": "a", "wiki__valid": "b", "wiki__test": "c"}, ["a", "b", "c"], "own (train, valid, test)"),
        ({"train_0": "a", "train_1": "b", "test": "c"}, ["ab", "c", ""], "own (train, test)"),  # validated on the test
        ({"training_day": "a" * 30, "latest_news": "b" * 30, "trainspotting": "c" * 30}, None, "whole files"),
    ],
)
def test_files_named_after_the_parts_bring_their_own_split(texts, parts, split, tmp_path):
    corpus = load_corpus(written(tmp_path, **texts))
    assert corpus.facts["split"].removeprefix("the files' ") == split
    found = [corpus.train, corpus.valid, torch.empty(0) if corpus.test is None else corpus.test]
    assert parts is None or [decoded(part) for part in found] == parts


def test_files_of_which_only_some_are_named_after_the_parts_are_refused(tmp_path):
    with pytest.raises(
        CorpusError, match=r"named train and valid \(train.tokens, valid.tokens\) but notes.tokens is n"
    ):
        load_corpus(written(tmp_path, train="a", valid="b", notes="c"))


def test_chunks_end_with_lines_words_or_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 8)
    monkeypatch.setattr(sources, "LINE_BYTES", 16)
    path = tmp_path / "a.txt"

    def chunks(text: str) -> list[str]:
        path.write_text(text, encoding="utf-8")
        found = [chunk.decode() for chunk in file_chunks(TextFile("a", path, len(text.encode())))]
        assert "".join(found) == text
        return found

    assert chunks("one\ntwo\nthree\nfour") == ["one\ntwo\n", "three\n", "four"]
    assert chunks("a line of some words that has no end") == ["a line of some ", "words that has ", "no end"]
    assert chunks("語" * 9) == ["語" * 5, "語" * 4]


def test_python_source_is_the_library_without_its_tests(tmp_path, monkeypatch):
    for name in (
        "os.py",
        "json/decoder.py",
        "test/test_os.py",
        "unittest/test/t.py",
        "site-packages/torch.py",
        "lib.so",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = load_corpus(DataConfig())
    assert sorted((decoded(corpus.train) + decoded(corpus.valid)).splitlines()) == ["# json/decoder.py", "# os.py"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text inside .0 bytes."),
        (b"text\0more", "binary file"),
        (b"caf\xe9 au lait", r"not UTF-8 text \(byte 3"),
        (
            b"a",
            r"has 1 bytes of text, and .*none to test on; pass more text \(a test at n tokens needs about 40·n tokens",
        ),
    ],
)
def test_files_that_are_not_text_are_refused(tmp_path, content, message):
    path = tmp_path / "some.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        load_corpus(DataConfig(text=(str(path),)))


def test_a_whole_text_has_the_facts_that_convert_losses(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat\non the mat\n")
    (tmp_path / "b.txt").write_text("the end")
    corpus = whole_text([tmp_path], word_tokenizer(["the", "<eos>", "cat", "<unk>"]))
    assert corpus.valid.tolist() == [0, 2, 3, 1, 3, 0, 3, 1, 0, 3, 1]
    assert corpus.starts["valid"].tolist() == [0, 8]
    facts = corpus.facts
    assert (facts["valid_tokens"], facts["valid_words"], facts["valid_lines"], facts["vocab_size"]) == (11, 8, 2, 4)
    assert facts["words_per_token"] == 8 / 11
    assert facts["bytes_per_token"] == 30 / 11


def test_the_hub_gives_its_test_text_and_one_line_end_a_row(hub):
    calls = hub({name: {"text": [" = One = \n", "", name]} for name in ("train", "validation", "test")})
    corpus = load_corpus(DataConfig(corpus="hub:some/name:part", tokenizer="words"))
    assert (calls, corpus.facts["name"]) == ([("some/name", "part")], "hub:some/name:part")
    assert decoded(torch.tensor(list(corpus.tokenizer.decode(corpus.train)))) == "= One =\n\ntrain\n"
    assert corpus.facts["train_parts"] == 3
    assert corpus.starts["train"].tolist() == [0, 4, 5]
    assert len(corpus.test) == len(corpus.valid) == len(corpus.train) == 7


def test_the_hub_without_a_split_gives_its_last_rows(hub):
    hub({"train": {"text": [str(number) for number in range(10)]}})
    corpus = load_corpus(DataConfig(corpus="hub:some/name", valid_share=0.2))
    assert (decoded(corpus.train), decoded(corpus.valid)) == ("0\n1\n2\n3\n4\n5\n6\n7", "8\n9")


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), FileNotFoundError("no such set"), ValueError("odd name")]
)
def test_a_hub_that_does_not_answer_is_an_error_of_one_sentence(hub, error):
    hub(error)
    with pytest.raises(
        CorpusError, match=f"hub:some/name cannot be loaded .{error}.; check the name .* and the network"
    ):
        load_corpus(DataConfig(corpus="hub:some/name"))


def test_a_hub_set_without_text_is_refused(hub):
    hub({"train": {"image": [1]}})
    with pytest.raises(CorpusError, match='no split "train" with a column "text"'):
        load_corpus(DataConfig(corpus="hub:some/name"))


def test_every_epoch_reads_every_piece_once_in_a_new_order():
    tokens = torch.arange(41, dtype=torch.uint8)  # ten pieces of four, and the token after the last
    rows = [
        row.tolist()
        for (batch,) in itertools.islice(batches(tokens, length=4, batch_size=5, seed=0), 4)
        for row in batch
    ]
    pieces = [[*range(begin, begin + 5)] for begin in range(0, 40, 4)]
    assert sorted(rows[:10]) == pieces
    assert sorted(rows[10:]) == pieces
    assert rows[:10] != rows[10:]
    other = next(batches(tokens, length=4, batch_size=5, seed=1))[0].tolist()
    assert other != rows[:5]


def test_the_order_of_an_epoch_takes_the_memory_of_its_tensor_alone():
    places = batches(torch.zeros(100_001, dtype=torch.uint8), length=1, batch_size=1, seed=0)
    tracemalloc.start()  # which sees Python's numbers, 36 bytes each in a list, and no tensor
    next(places)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_packed_batches_are_the_same_batches_with_the_documents_of_their_tokens():
    starts = torch.tensor([0, 3, 10, 11, 30])
    tokens = torch.cat(
        [torch.full((count,), document, dtype=torch.uint8) for document, count in enumerate([3, 7, 1, 19, 11])]
    )
    plain = batches(tokens, length=4, batch_size=3, seed=1, start=2)
    packed = batches(tokens, starts, length=4, batch_size=3, seed=1, start=2)
    for (batch,), (again, documents) in itertools.islice(zip(plain, packed, strict=True), 9):
        assert torch.equal(batch, again)
        assert torch.equal(batch, documents)  # each token is its document's number


def test_a_document_never_sees_another():
    """A token's visible keys, by the segments that attention reads, and its target are in its own document."""
    starts = torch.tensor([0, 3, 10, 11, 30])
    owner = sum((torch.arange(41) >= start).long() for start in starts) - 1
    for tokens, documents in itertools.islice(batches(torch.arange(41), starts, length=8, batch_size=2, seed=0), 10):
        for row, ids in zip(tokens, documents, strict=True):
            for i, j in itertools.product(range(8), range(8)):
                assert (ids[i] == ids[j]) == (owner[row[i]] == owner[row[j]])
            for i in range(8):
                assert (ids[i + 1] == ids[i]) == (owner[row[i + 1]] == owner[row[i]])


def test_document_ids_count_from_the_beginning_of_the_text():
    assert document_ids(torch.tensor([0, 3, 5]), 2, 4).tolist() == [0, 1, 1, 2]


def test_a_text_shorter_than_one_example_is_refused():
    with pytest.raises(
        CorpusError, match=r"has 16 tokens but one training example has 17; pass more text or a smaller train.length"
    ):
        batches(torch.zeros(16, dtype=torch.uint8), length=16, batch_size=1, seed=0)


def test_missing_files_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"absent.txt does not exist; pass text files"):
        load_corpus(DataConfig(text=(str(tmp_path / "absent.txt"),)))
    with pytest.raises(CorpusError, match="folder without files"):
        load_corpus(DataConfig(text=(str(tmp_path),)))


def test_the_hub_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r'pip install "\.\[hub\]"'):
        load_corpus(DataConfig(corpus="hub:some/name"))
