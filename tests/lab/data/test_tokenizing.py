"""Bytes, WikiText's words and byte-level BPE: their tokens, and exact decoding."""

import json

import numpy as np
import pytest
import tokenizers
import torch

from alibi_lab.lab.config import RunConfig
from alibi_lab.lab.config_io import override
from alibi_lab.lab.data import tokenizing
from alibi_lab.lab.data.sources import CorpusError
from alibi_lab.lab.data.tokenizing import (
    bpe_tokenizer,
    byte_tokenizer,
    load_tokenizer,
    make_tokenizer,
    token_dtype,
    word_tokenizer,
)

# As the validation text of WikiText-103 begins, but for the words that its authors left out.
WIKITEXT = b" \n = Homarus gammarus = \n \n Homarus gammarus , known as the European lobster , is a <unk> . \n"
ODD = "naïve · 日本語 \N{GRINNING FACE}\r\n\tdef f(x):\n\n\n    return x  # …\x85\u2028 end "


def made(name: str, text: bytes = WIKITEXT) -> tokenizing.Tokenizer:
    return make_tokenizer(name, lambda: iter([text[:40], text[40:]] if name == "words" else [text]), len(text))


def test_white_space_separates_words_and_each_line_ends_in_one():
    tokenizer = made("words")
    words = [tokenizer.content["words"][index] for index in tokenizer.encode(WIKITEXT)]
    sentence = "Homarus gammarus , known as the European lobster , is a <unk> ."
    assert " ".join(words) == f"<eos> = Homarus gammarus = <eos> <eos> {sentence} <eos>"
    assert len(words) == len(WIKITEXT.split()) + WIKITEXT.count(b"\n")  # as WikiText's published counts count


def test_words_are_ordered_by_frequency():
    words = made("words", b"b b b a a c a d\n" + b"\n" * 5).content["words"]
    assert words == ["<eos>", "a", "b", "c", "d", "<unk>"]  # equal counts by name; nothing is unknown in this text


def test_a_word_that_is_not_in_the_training_text_is_unknown():
    tokenizer = made("words", b"to be or not\n")
    assert tokenizer.decode(tokenizer.encode("to be seen\nor not")) == b"to be <unk>\nor not"


def test_a_prompt_gets_no_end_of_line():
    tokenizer = made("words")
    assert len(tokenizer.encode("the European")) == 2
    assert len(tokenizer.encode("")) == 0


@pytest.mark.parametrize("name", ["bytes", "bpe:256", "bpe:300"])
def test_any_text_comes_back_byte_for_byte(name):
    tokenizer = made(name)
    for text in (ODD, WIKITEXT.decode(), "", " ", "a", "\N{COMBINING ACUTE ACCENT}"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.encode()
        assert torch.equal(ids, tokenizer.encode(text.encode()))
        assert torch.equal(ids, tokenizer.encode_all([text.encode()])[0])


def test_bpe_finds_the_most_frequent_merges():
    tokenizer = made("bpe:258", b"abab abab abab abab")
    assert tokenizer.vocab_size == 258
    assert [tokenizer.decode([index]) for index in (256, 257)] == [b"ab", b"abab"]
    assert [tokenizer.decode([index]) for index in tokenizer.encode("ababx")] == [b"abab", b"x"]


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(CorpusError, match=r"'bpe:100' but byte-level BPE begins with 256 tokens.*pass bpe:256 or more"):
        made("bpe:100")


@pytest.mark.parametrize("name", ["bytes", "words", "bpe:300"])
def test_a_tokenizer_is_saved_and_loaded(tmp_path, name):
    tokenizer = made(name)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.dump())
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.name, loaded.vocab_size, loaded.dump()) == (name, tokenizer.vocab_size, tokenizer.dump())
    assert torch.equal(loaded.encode(WIKITEXT), tokenizer.encode(WIKITEXT))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "not a tokenizer, or damaged .*: delete the folder"),
        (b"[]", "not a tokenizer, or damaged"),
        (b'{"schema": 1, "tokenizer": "words", "words": ["a"]}', "not a tokenizer, or damaged"),
        (b'{"schema": 1, "tokenizer": "bpe:300", "model": "{}", "sha256": "0"}', "not a tokenizer, or damaged"),
        (b'{"schema": 7, "tokenizer": "bytes"}', "has schema 7, but this version reads schema 1"),
    ],
)
def test_invalid_tokenizers_are_refused(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "tokenizer",
    [byte_tokenizer(), word_tokenizer(["a", "<eos>", "<unk>"]), made("bpe:260")],
    ids=["bytes", "words", "bpe"],
)
def test_an_id_that_only_the_model_has_is_shown_as_unknown(tokenizer):
    assert tokenizer.decode([5000]).decode() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_are_no_text_are_refused_where_text_is_needed():
    assert byte_tokenizer().encode(b"caf\xe9").tolist() == [99, 97, 102, 0xE9]
    for name in ("words", "bpe:300"):
        with pytest.raises(CorpusError, match=r"not UTF-8 \(byte 3 is not\)"):
            made(name).encode(b"caf\xe9")


def test_tokens_are_as_small_as_the_vocabulary_allows():
    for size, dtype in ((256, np.uint8), (257, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.int32)):
        assert torch.empty(0, dtype=token_dtype(size)).numpy().dtype == dtype
    assert bpe_tokenizer("bpe:300", json.loads(made("bpe:300").dump())["model"]).encode("a").dtype == torch.uint16


def test_a_tokenizer_file_of_hugging_face_encodes_as_the_library_does(tmp_path):
    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    for name in (str(tmp_path / "tokenizer.json"), str(tmp_path)):
        tokenizer = make_tokenizer(name, lambda: iter([b"unused"]), 6)
        assert tokenizer.encode("to be or naught").tolist() == [1, 2, 3, 0]
        assert tokenizer.decode([1, 2, 4]) == b"to be not"
        (tmp_path / "saved.json").write_bytes(tokenizer.dump())
        again = load_tokenizer(tmp_path / "saved.json")
        assert (again.name, again.vocab_size, again.encode("not").tolist()) == (name, 5, [4])
        assert override(RunConfig(), {"data.tokenizer": name}).model.vocab_size == 5


def test_a_byte_level_tokenizer_file_decodes_exactly_with_its_special_tokens(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=alphabet, special_tokens=["<|end|>"]
    )
    library.train_from_iterator(["to be or not to be ünï"] * 9, trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make_tokenizer(str(tmp_path / "tokenizer.json"), lambda: iter([]), 0)
    text = "ünï cödé <|end|> to be"
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode()
    assert (
        tokenizer.decode(tokenizer.encode("ü")[:1]) == "ü".encode()[: len(tokenizer.decode(tokenizer.encode("ü")[:1]))]
    )


@pytest.mark.parametrize("name", ["words", "bpe:300"])
def test_the_text_of_a_beginning_is_the_beginning_of_the_text(name):
    tokenizer = made(name)
    ids = tokenizer.encode(WIKITEXT).tolist()
    whole = tokenizer.decode(ids)
    assert all(whole.startswith(tokenizer.decode(ids[:count])) for count in range(len(ids)))


def test_a_file_that_is_no_tokenizer_is_one_sentence(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    for name, reason in (("bad.json", "is not a tokenizer that can be read"), ("missing.json", "No such file")):
        with pytest.raises(CorpusError, match=reason):
            make_tokenizer(str(tmp_path / name), lambda: iter([]), 0)
