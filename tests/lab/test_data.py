"""Where text comes from, how it is split, in which order it is read, and what is said when it cannot be."""

import itertools
import sys
import sysconfig
import types

import pytest
import torch

from alibi_attn.lab.config import DataConfig
from alibi_attn.lab.data import CorpusError, batches, load_corpus, read_text


def decoded(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode()


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        path = tmp_path / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{number}>" * 20)
    return tmp_path


def test_a_folder_is_split_by_whole_files(folder):
    corpus = load_corpus(DataConfig(text=(str(folder),), valid_share=0.2))
    train, valid = decoded(corpus.train), decoded(corpus.valid)
    for number in range(40):
        counts = (train.count(f"<{number}>"), valid.count(f"<{number}>"))
        assert counts in {(20, 0), (0, 20)}
    assert corpus.facts["train_parts"] + corpus.facts["valid_parts"] == 40
    assert 0.1 < len(valid) / (len(train) + len(valid)) <= 0.2


def test_the_split_is_the_same_each_time_and_its_hash_follows_the_text(folder):
    first, again = (load_corpus(DataConfig(text=(str(folder),))) for _ in range(2))
    assert torch.equal(first.valid, again.valid)
    assert first.facts == again.facts
    (folder / "part0" / "0.txt").write_text("<0>" * 19 + "<1>")
    assert load_corpus(DataConfig(text=(str(folder),))).facts["sha256"] != first.facts["sha256"]


def test_two_files_are_split_by_whole_files_too(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "b.txt").write_text("b" * 60)
    corpus = load_corpus(DataConfig(text=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))))
    assert (decoded(corpus.train), decoded(corpus.valid)) == ("a" * 100, "b" * 60)


def test_a_single_file_gives_its_end_cut_at_a_line(text_file):
    corpus = load_corpus(DataConfig(text=(str(text_file),), valid_share=0.1))
    assert decoded(corpus.train) + decoded(corpus.valid) == text_file.read_text()
    assert decoded(corpus.train).endswith("\n")
    assert 0.1 <= len(corpus.valid) / text_file.stat().st_size < 0.11
    assert corpus.facts["split"] == "the end of the only file"


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


def test_python_source_of_this_python_is_megabytes():
    facts = load_corpus(DataConfig()).facts
    assert facts["train_tokens"] > 5_000_000
    assert 0.03 < facts["valid_tokens"] / facts["train_tokens"] < 0.06
    assert facts["bytes_per_token"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text inside .0 bytes."),
        (b"text\0more", "binary file"),
        (b"caf\xe9 au lait", r"not UTF-8 text \(byte 3"),
        (b"a", "no text to test on"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, content, message):
    path = tmp_path / "some.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        load_corpus(DataConfig(text=(str(path),)))


def test_text_can_be_read_whole(folder, text_file):
    assert decoded(read_text([text_file])) == text_file.read_text()
    assert (
        len(read_text([folder / "part0", text_file])) == len(read_text([folder / "part0"])) + text_file.stat().st_size
    )
    with pytest.raises(CorpusError, match="does not exist"):
        read_text([folder / "absent"])


def test_missing_files_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"absent.txt does not exist; pass text files"):
        load_corpus(DataConfig(text=(str(tmp_path / "absent.txt"),)))
    with pytest.raises(CorpusError, match="folder without files"):
        load_corpus(DataConfig(text=(str(tmp_path),)))


def test_the_hub_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r'pip install "alibi-attn\[hub\]"'):
        load_corpus(DataConfig(corpus="hub:some/name"))


class Rows:
    """As much of datasets.Dataset as is used: read in batches, never whole."""

    def __init__(self, **columns):
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def iter(self, batch_size):
        for begin in range(0, len(self), batch_size):
            yield {name: column[begin : begin + batch_size] for name, column in self.columns.items()}


@pytest.fixture
def hub(monkeypatch):
    calls = []

    def install(answer):
        def load_dataset(*arguments):
            calls.append(arguments)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        return calls

    return install


def test_the_hub_gives_its_own_split(hub):
    calls = hub({"train": Rows(text=["one", "two"]), "validation": Rows(text=["three"])})
    corpus = load_corpus(DataConfig(corpus="hub:some/name:part"))
    assert calls == [("some/name", "part")]
    assert (decoded(corpus.train), decoded(corpus.valid)) == ("one\ntwo", "three")
    assert corpus.facts["name"] == "hub:some/name:part"


def test_the_hub_without_a_split_gives_its_last_rows(hub):
    hub({"train": Rows(text=[str(number) for number in range(10)])})
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
    hub({"train": Rows(image=[1])})
    with pytest.raises(CorpusError, match='no split "train" with a column "text"'):
        load_corpus(DataConfig(corpus="hub:some/name"))


def test_every_epoch_reads_every_piece_once_in_a_new_order():
    tokens = torch.arange(41, dtype=torch.uint8)  # ten pieces of four, and the token after the last
    rows = [
        row.tolist() for batch in itertools.islice(batches(tokens, length=4, batch_size=5, seed=0), 4) for row in batch
    ]
    pieces = [[*range(begin, begin + 5)] for begin in range(0, 40, 4)]
    assert sorted(rows[:10]) == pieces
    assert sorted(rows[10:]) == pieces
    assert rows[:10] != rows[10:]
    other = next(batches(tokens, length=4, batch_size=5, seed=1)).tolist()
    assert other != rows[:5]


def test_batches_start_where_they_are_told_to():
    tokens = torch.arange(41, dtype=torch.uint8)
    uncut = list(itertools.islice(batches(tokens, length=4, batch_size=3, seed=7), 9))
    resumed = list(itertools.islice(batches(tokens, length=4, batch_size=3, seed=7, start=5), 4))
    assert all(torch.equal(a, b) for a, b in zip(uncut[5:], resumed, strict=True))


def test_a_text_shorter_than_one_example_is_refused():
    with pytest.raises(
        CorpusError, match=r"has 16 tokens but one training example has 17; pass more text or a smaller train.length"
    ):
        batches(torch.zeros(16, dtype=torch.uint8), length=16, batch_size=1, seed=0)
