"""Late chunking: a vector is the mean over a span's tokens in a full pass, exact in blocks; bad spans raise."""

import numpy as np
import pytest
import torch
from encoder_oracle import config, encode, random_state, small_encoder, write_folder, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_attn.hf import late_chunks, sentence_transformer
from alibi_attn.hf.embedding import chunking
from alibi_attn.hf.embedding.late_chunking import Document, Windows
from alibi_attn.hf.embedding.sentence_encoder import load
from alibi_attn.hf.readers.encoder import layers

TEXT = "a b c. d e  f!\n\n g h? i j k l m\n \nn o p a b c d e f g h i j k l m n o p"


@pytest.fixture
def folder(tmp_path):
    return write_tokenizer(write_folder(tmp_path / "jina", random_state("jina"), config("jina")))


def by_hand(folder, text, spans):
    """Means over tokens, from the formulas in fp64 and the tokenizer's offsets; a loop over tokens and characters."""
    encoded = load(folder).tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    ids = torch.tensor(encoded["input_ids"])[None]
    states = encode(random_state("jina"), "jina", ids, torch.ones_like(ids))[0]
    vectors = []
    for start, end in spans:
        rows = [
            states[at]
            for at, (low, high) in enumerate(encoded["offset_mapping"])
            if not encoded["special_tokens_mask"][at] and set(range(low, high)) & set(range(start, end))
        ]
        vectors.append(torch.stack(rows).mean(0))
    return torch.stack(vectors).numpy()


def assert_close(actual, expected):
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() <= 3e-6 * np.abs(expected).max()


SPLITS = [
    1,
    3,
    7,
    1000,
    "sentences",
    "paragraphs",
    [[(0, 6), (6, 20), (30, 31)]],
    lambda text: [(2, 5), (len(text) - 4, len(text))],
]


@pytest.mark.parametrize("chunks", SPLITS, ids=lambda chunks: str(chunks)[:12])
def test_vectors_are_means_of_one_pass_over_the_whole_text(chunks, folder):
    (found,) = late_chunks(folder, [TEXT], chunks=chunks)
    assert found.spans.dtype == np.int64
    assert_close(found.vectors, by_hand(folder, TEXT, found.spans))


def test_each_kind_of_chunk_has_the_spans_that_it_promises(folder):
    def parts(chunks):
        (found,) = late_chunks(folder, [TEXT], chunks=chunks)
        return [TEXT[start:end] for start, end in found.spans]

    assert parts("sentences") == ["a b c.", "d e  f!", "g h?", "i j k l m", TEXT[TEXT.index("n o") :]]
    assert parts("paragraphs") == ["a b c. d e  f!", "g h? i j k l m", TEXT[TEXT.index("n o") :]]
    assert parts(7)[:2] == ["a b c. d e  f", "!\n\n g h? i j k"]
    assert parts(1000) == [TEXT]


def test_a_long_paragraph_is_split_at_its_lines_with_a_warning(folder, monkeypatch):
    monkeypatch.setattr(chunking, "LONGEST", 12)
    text = "a b c\nd e f\ng h i\n\nj k l\n\n" + "m" * 30
    with pytest.warns(UserWarning, match="text 0 has a paragraph of 30 characters; paragraphs beyond 12 are split"):
        (found,) = late_chunks(folder, [text], chunks="paragraphs")
    parts = [text[start:end] for start, end in found.spans]
    assert parts == ["a b c\nd e f", "g h i", "j k l", "m" * 12, "m" * 12, "m" * 6]


def test_progress_counts_texts_and_a_result_has_a_short_repr(folder):
    calls = []
    found = late_chunks(
        folder, ["a b c", TEXT, "d e"], chunks=2, batch_tokens=10, progress=lambda *at: calls.append(at)
    )
    assert calls[-1] == (3, 3)
    assert calls == sorted(set(calls))
    assert len(calls) > 1
    assert repr(found[0]) == "<LateChunks: 2 vectors of 48 numbers>"


def test_a_model_object_a_batch_and_normalization_change_nothing_else(folder):
    texts = ["a b c", TEXT, "d e f g h. i j", "a"]
    alone = [late_chunks(folder, [text], chunks=2)[0] for text in texts]
    model = sentence_transformer(folder, device="cpu")
    for batch_tokens in (1, 20, 16384):
        for one, other in zip(alone, late_chunks(model, texts, chunks=2, batch_tokens=batch_tokens), strict=True):
            assert np.array_equal(one.spans, other.spans)
            assert_close(other.vectors, one.vectors)
    for one, other in zip(alone, late_chunks(model, texts, chunks=2, normalize=True), strict=True):
        assert np.allclose(other.vectors, one.vectors / np.linalg.norm(one.vectors, axis=1, keepdims=True), atol=3e-6)
    assert late_chunks(model, []) == []


def test_blocks_keep_hidden_states_and_gradients_of_every_family(monkeypatch):
    ids = torch.randint(50, (2, 37), generator=torch.Generator().manual_seed(0))
    for options in ({}, {"gate": "second", "qk_norm": True, "extra_norm": True}):
        model = small_encoder(vocab_size=50, **options)
        expected = model(ids).last_hidden_state
        monkeypatch.setattr(layers, "ROWS", 9)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(model(ids).last_hidden_state, expected)  # with gradients nothing is divided
        monkeypatch.undo()


def test_windows_are_passes_over_their_own_tokens(folder):
    (found,) = late_chunks(folder, [TEXT], chunks=1, max_length=12, overlap=4)
    tokens = load(folder).tokenizer(TEXT, return_offsets_mapping=True)
    ids, offsets = tokens["input_ids"], tokens["offset_mapping"][1:-1]
    length, room = len(offsets), 10
    expected = np.zeros((length, 48))
    starts = [*range(0, length - room, 6), length - room]
    for number, start in enumerate(starts):
        row = torch.tensor([[ids[0], *ids[1 + start : 1 + start + room], ids[-1]]])
        states = encode(random_state("jina"), "jina", row, torch.ones_like(row))[0, 1:-1].numpy()
        # A later window replaces the second half of the overlap.
        first = 0 if number == 0 else (start + starts[number - 1] + room) // 2
        expected[first : start + room] = states[first - start :]
    assert_close(found.vectors, expected)
    (whole,) = late_chunks(folder, [TEXT], chunks=1, max_length=1000)
    assert_close(whole.vectors, by_hand(folder, TEXT, whole.spans))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 300), room=st.integers(1, 60), overlap=st.integers(0, 59))
def test_windows_cover_every_token_once_with_half_the_overlap_around(length, room, overlap):
    overlap = min(overlap, room - 1)
    document = Document(np.zeros(length + 2, np.int32), 1, length + 1, *[np.zeros((0, 2), np.int64)] * 2)
    parts = Windows(room + 2, overlap).split(document)
    assert [part[2] for part in parts] == [0, *(part[3] for part in parts[:-1])]
    assert parts[-1][3] == length
    for start, stop, first, end in parts:
        assert 0 <= start <= first < end <= stop <= length
        assert stop - start == min(room, length)
        assert start == 0 or first - start >= overlap // 2
        assert stop == length or stop - end >= overlap // 2


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab .!?\n\t”。é", max_size=60), st.sampled_from(["sentences", "paragraphs"]))
def test_sentences_and_paragraphs_hold_all_text_but_white_space_in_order(text, kind):
    offsets = np.array([(at, at + 1) for at, x in enumerate(text) if not x.isspace()], dtype=np.int64).reshape(-1, 2)
    spans, tokens = chunking.spans_of(text, kind, offsets, number=0)
    assert [text[start:end].strip() for start, end in spans] == [text[start:end] for start, end in spans]
    covered = [at for start, end in spans for at in range(start, end)]
    assert covered == sorted(set(covered))
    assert {at for at in range(len(text)) if not text[at].isspace()} <= set(covered)
    assert [at for low, high in tokens for at in range(low, high)] == list(range(len(offsets)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9))
def test_chunks_of_tokens_have_each_token_once_and_divide_no_character(widths, size):
    """Here tokens of 0 characters are the further bytes of a character: they have its position."""
    offsets, at = [], 0
    for width in widths:
        offsets.append((max(at - 1, 0), max(at, 1)) if width == 0 else (at, at + width))
        at = max(at + width, 1)
    spans, tokens = chunking.spans_of("x" * at, size, np.array(offsets, dtype=np.int64), number=0)
    assert [index for low, high in tokens for index in range(low, high)] == list(range(len(offsets)))
    assert (spans[1:, 0] >= spans[:-1, 1]).all()


BAD = [
    ([[(0, 3), (2, 5)]], r"the span \(2, 5\) of text 0 starts before the end of the one before it, 3"),
    ([[(4, 6), (0, 3)]], r"the span \(0, 3\) of text 0 starts before"),
    ([[(5, 3)]], r"the span \(5, 3\) of text 0 is empty"),
    ([[(3, 3)]], r"the span \(3, 3\) of text 0 is empty"),
    ([[(-1, 3)]], r"the span \(-1, 3\) of text 0 is outside its 7 characters"),
    ([[(0, 8)]], r"the span \(0, 8\) of text 0 is outside its 7 characters"),
    ([[(1, 2)]], r"the span \(1, 2\) of text 0 holds no token"),
    ([[]], "the spans of text 0 must be pairs of integers"),
    ([[(0, 1), (2,)]], "must be pairs of integers"),
    ([[(0.0, 1.0)]], "must be pairs of integers"),
    ([[1, 2]], "must be pairs of integers"),
    (lambda text: text.split(), r"must be pairs of integers \(start, end\), in characters, but are \['a', 'b'"),
    (lambda text: [(0, 10**30)], "must be pairs of integers"),
    ([[(0, 1)], [(0, 1)]], "chunks has spans for 2 texts but there are 1"),
    (0, "chunks is 0 but a chunk needs at least 1 token"),
    ("words", "must be a number of tokens, 'paragraphs' or 'sentences'"),
    (1.5, "chunks is 1.5 but must be"),
    (True, "chunks is True but must be"),
]


@pytest.mark.parametrize(("chunks", "message"), BAD, ids=[str(at) for at in range(len(BAD))])
def test_spans_and_chunkers_that_make_no_sense_are_refused(chunks, message, folder):
    with pytest.raises((TypeError, ValueError), match=message):
        late_chunks(folder, ["a b c d"], chunks=chunks)


def test_texts_models_and_windows_that_cannot_work_are_refused(folder, tmp_path):
    for texts, message in (
        ("a b", "must be a list of strings"),
        ([3], "must be a list of strings"),
        (["a", " "], "text 1 has no tokens"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            late_chunks(folder, texts)
    for windows in ({"max_length": 5, "overlap": 3}, {"max_length": 2, "overlap": 0}, {"max_length": 9, "overlap": -1}):
        with pytest.raises(ValueError, match="a window must have room for 2 special tokens and more than the overlap"):
            late_chunks(folder, ["a b"], **windows)
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        late_chunks(folder, ["a b"], batch_tokens=0)
    with pytest.raises(TypeError, match="model is a Linear but must be a folder"):
        late_chunks(torch.nn.Linear(1, 1), ["a"])
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    for model in (folder, sentence_transformer(folder, device="cpu")):
        with pytest.raises(ValueError, match="pools by 'cls' but late chunking is a mean"):
            late_chunks(model, ["a b"])
