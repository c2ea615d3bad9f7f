"""Tokens on disk: equal to those in memory, written once, verified, and never incomplete."""

import errno
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from alibi_attn.strict_json import sealed
from alibi_lab.lab.config import DataConfig
from alibi_lab.lab.data import corpus as token_store
from alibi_lab.lab.data import tokenizing
from alibi_lab.lab.data.corpus import CorpusError, load_corpus
from alibi_lab.lab.training.train import batches

PARTS = ("train", "valid", "test")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    for number in range(30):
        lines = (f"line {line} of text {number} says ünïcode {line * number}\n" for line in range(40))
        (path / f"{number}.txt").write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def store(tmp_path):
    return tmp_path / "runs" / "tokens"


def asked(folder, tokenizer: str = "bytes", **data: object) -> DataConfig:
    return DataConfig(text=(str(folder),), tokenizer=tokenizer, valid_share=0.2, test_share=0.2, **data)


def folders(store) -> list[str]:
    return sorted(path.name for path in store.iterdir() if path.name != ".lock")


def the_folder(store):
    (name,) = folders(store)
    return store / name


def assert_equal_corpora(first, second):
    assert first.facts == second.facts
    assert first.tokenizer.dump() == second.tokenizer.dump()
    for part in PARTS:
        assert torch.equal(getattr(first, part), getattr(second, part))
        assert torch.equal(first.starts[part], second.starts[part])


@pytest.mark.parametrize("tokenizer", ["bytes", "words", "bpe:300"])
def test_stored_tokens_are_those_in_memory(folder, store, tokenizer):
    config = asked(folder, tokenizer)
    made, opened, plain = load_corpus(config, store), load_corpus(config, store), load_corpus(config)
    assert_equal_corpora(made, plain)
    assert_equal_corpora(opened, plain)
    assert opened.train.dtype == plain.train.dtype == tokenizing.token_dtype(plain.facts["vocab_size"])
    ours, theirs = (batches(corpus.train, length=32, batch_size=4, seed=0) for corpus in (opened, plain))
    assert all(torch.equal(a, b) for (a,), (b,) in itertools.islice(zip(ours, theirs, strict=True), 5))


def test_a_text_is_tokenized_once(folder, store, monkeypatch):
    first = load_corpus(asked(folder), store)
    monkeypatch.setattr(token_store, "file_sha256", lambda path: pytest.fail(f"{path} is hashed again"))
    monkeypatch.setattr("alibi_lab.lab.sealed_folder.verify", lambda *_, **__: None)
    assert_equal_corpora(load_corpus(asked(folder), store), first)


def test_a_touched_text_is_known_by_its_content(folder, store, monkeypatch):
    first = load_corpus(asked(folder), store)
    os.utime(folder / "3.txt", (1, 1))
    monkeypatch.setattr(token_store, "_write", lambda *_: pytest.fail("tokenized again"))
    assert_equal_corpora(load_corpus(asked(folder), store), first)
    manifest = json.loads((the_folder(store) / "manifest.json").read_bytes())
    assert 1_000_000_000 in {source["mtime_ns"] for source in manifest["sources"]}  # noted: not hashed a third time


def test_a_changed_text_another_tokenizer_and_another_split_are_other_folders(folder, store):
    first = load_corpus(asked(folder), store)
    changed = (folder / "3.txt").read_bytes().replace(b"says", b"sags")
    (folder / "3.txt").write_bytes(changed)
    second = load_corpus(asked(folder), store)
    assert second.facts["sha256"] != first.facts["sha256"] or second.facts["test_sha256"] != first.facts["test_sha256"]
    load_corpus(asked(folder, "words"), store)
    load_corpus(DataConfig(text=(str(folder),), valid_share=0.1), store)
    assert len(folders(store)) == 4
    assert_equal_corpora(load_corpus(asked(folder), store), second)


def test_a_corpus_of_the_hub_is_needed_once(hub, store, monkeypatch):
    hub({"train": {"text": [f"row {number}" for number in range(5000)]}})
    config = DataConfig(corpus="hub:some/name", tokenizer="words")
    first = load_corpus(config, store)
    assert first.facts["train_parts"] == 4750
    assert first.tokenizer.decode(first.valid[:6]) == b"row <unk>\nrow <unk>\n"  # each number is in one row
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert load_corpus(config, store).facts == first.facts


def _shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _with(**fields):
    """Changes fields and updates the hash, as if the file had been written with them."""

    def damage(path):
        about = json.loads(path.read_text()) | {"sources": None} | fields
        del about["sha256"]
        path.write_bytes(sealed(about))

    return damage


def _without_hash(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sources": None, "parts": ["train", "valid"]}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train.bin", _shorten, r"train.bin has \d+ bytes instead of \d+"),
        ("valid.bin", _flip, "valid.bin is not what was written"),
        ("tokenizer.json", _flip, "tokenizer.json is not what was written"),
        ("train.bin", os.unlink, "train.bin cannot be read: No such file"),
        ("manifest.json", lambda path: path.write_text('{"schema": 1}'), "manifest.json has missing entries"),
        ("manifest.json", _with(schema=99), "has schema 99, but this version reads schema 2; delete the folder"),
        ("manifest.json", _without_hash, "manifest.json is not what was written"),
        ("manifest.json", _with(parts=["train", "other"]), "other.bin cannot be read: No such file"),
        (
            "manifest.json",
            lambda path: path.write_bytes(b'{"schema": 1, "schema": 2}'),
            "is not JSON: the name 'schema' comes twice",
        ),
    ],
)
def test_damaged_tokens_are_refused_until_their_folder_is_deleted(folder, store, name, damage, message):
    config = asked(folder)
    load_corpus(config, store)
    damage(the_folder(store) / name)
    with pytest.raises(CorpusError, match=message) as error:
        load_corpus(config, store)
    assert "delete the folder and run again: the text is tokenized again" in str(error.value)
    assert str(the_folder(store)) in str(error.value)
    for path in the_folder(store).iterdir():
        path.unlink()
    the_folder(store).rmdir()
    assert_equal_corpora(load_corpus(config, store), load_corpus(config))


def test_large_files_are_hashed_where_their_time_of_change_differs(folder, store, monkeypatch):
    monkeypatch.setattr(token_store, "HASHED_BYTES", 100)
    load_corpus(asked(folder), store)
    path = the_folder(store) / "train.bin"
    os.utime(path, (1, 1))
    load_corpus(asked(folder), store)
    _flip(path)
    with pytest.raises(CorpusError, match=r"train.bin is not what was written"):
        load_corpus(asked(folder), store)


def test_a_full_disk_leaves_nothing_and_says_how_much_room_is_needed(folder, store):
    store.mkdir(parents=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CorpusError, match=r"no room on the disk .* needs up to 0\.\d MB; make room") as error:
            load_corpus(asked(folder), store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(store) in str(error.value)
    assert folders(store) == []
    load_corpus(asked(folder), store)


def test_text_that_turns_out_to_be_none_leaves_nothing(folder, store):
    (folder / "7.txt").write_bytes(b"a good line\n" * 10_000 + b"and caf\xe9\n")
    with pytest.raises(CorpusError, match=r"7.txt is not UTF-8 text .byte 120007 is not.; convert it"):
        load_corpus(asked(folder), store)
    assert folders(store) == []


def test_a_text_that_changes_while_it_is_read_is_refused(folder, store, monkeypatch):
    write = token_store._write

    def change_first(*arguments):
        os.utime(folder / "7.txt", (1, 1))
        write(*arguments)

    monkeypatch.setattr(token_store, "_write", change_first)
    with pytest.raises(CorpusError, match=r"7.txt changed while it was read; run again when no process writes to it"):
        load_corpus(asked(folder), store)
    assert folders(store) == []


def test_two_processes_at_once_share_the_work(folder, store, monkeypatch):
    entered, writes, write = threading.Event(), [], token_store._write

    def slow_write(*arguments):
        writes.append(threading.get_ident())
        entered.set()
        assert not second.is_alive() or second.join(0.2) is None
        write(*arguments)

    found = []
    monkeypatch.setattr(token_store, "_write", slow_write)
    second = threading.Thread(target=lambda: entered.wait(60) and found.append(load_corpus(asked(folder), store)))
    second.start()
    found.append(load_corpus(asked(folder), store))
    second.join()
    assert len(writes) == 1
    assert_equal_corpora(*found)


KILLED = """
import os, signal, sys
from pathlib import Path
from alibi_lab.lab.data import corpus as tokens
from alibi_lab.lab.config import DataConfig
from alibi_lab.lab.data.corpus import load_corpus

groups = tokens._groups
def cut(documents, end):
    for number, group in enumerate(groups(documents, end)):
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield group
tokens._GROUP_CHUNKS = 10
tokens._groups = cut
load_corpus(DataConfig(text=(sys.argv[1],), valid_share=0.2, test_share=0.2), Path(sys.argv[2]))
"""


def test_a_killed_tokenization_begins_again(folder, store):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(store)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = folders(store)
    assert left.endswith(".partial")
    assert (store / left / "tokenizer.json").exists()
    assert_equal_corpora(load_corpus(asked(folder), store), load_corpus(asked(folder)))
    assert folders(store) == [left.split(".")[1]]


MEASURED = """
import sys
from pathlib import Path
import torch
from alibi_lab.lab.config import DataConfig
from alibi_lab.lab.data.corpus import load_corpus
from alibi_attn.nn.allocator import peak_memory_bytes

peak = lambda: peak_memory_bytes(torch.device("cpu"))
text, store = sys.argv[1:]
load_corpus(DataConfig(text=(str(Path(text).parent / "small.txt"),)), Path(store))
before = peak()
corpus = load_corpus(DataConfig(text=(text,)), Path(store))
mapped = peak() - before
load_corpus(DataConfig(text=(text,)))
print(len(corpus.train), mapped, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process's own peak memory")
def test_a_large_text_is_never_in_memory_whole(tmp_path, store):
    line = b"a line of a large text that is written again and again, sixty-four\n"
    (tmp_path / "large.txt").write_bytes(line * 400_000)
    (tmp_path / "small.txt").write_bytes(line * 40_000)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "large.txt"), str(store)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    tokens, mapped_bytes, in_memory_bytes = map(int, found)
    assert tokens > 25_000_000
    assert mapped_bytes < 8_000_000  # a group is 1 MiB
    assert in_memory_bytes > tokens  # so the measure would notice


def test_a_store_that_cannot_be_made_is_an_error_of_one_sentence(folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        CorpusError, match=r"tokenized into .*file/tokens .*Not a directory.*; pass a folder that you may write to"
    ):
        load_corpus(asked(folder), tmp_path / "file" / "tokens")


def test_a_text_on_a_failing_disk_is_named(folder, store, monkeypatch):
    def failing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # as read() does, without a name

    monkeypatch.setattr(token_store, "file_sha256", failing)
    with pytest.raises(
        CorpusError, match=r"/0\.txt cannot be read .Input/output error.; pass a file that you may read"
    ):
        load_corpus(asked(folder), store)
