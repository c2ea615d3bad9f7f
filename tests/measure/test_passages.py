"""Questions are sentences of a text, their chunks those around the gap; recall is counted by hand; a training resumes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from alibi_lab import records
from alibi_lab.measure import passage_encoder, passage_search
from alibi_lab.measure.passage_encoder import Setup, questions, trained_encoder
from alibi_lab.measure.passage_search import Trial, passages, prepared_search, split

NAMES = ("Anna", "Boris", "Clara", "Dorian", "Emma", "Felix")
SMALL = Setup(
    width=16,
    layers=1,
    heads=2,
    inner=16,
    vocabulary=300,
    batch=2,
    stretch=900,
    removed=3,
    chunk=16,
    masked_steps=2,
    pair_steps=3,
)


def book(number: int) -> str:
    """Sentences of nine words, all different, each with a name."""
    random = np.random.default_rng(number)
    words = [" ".join(random.choice(["sea", "hill", "road", "tree", "bird", "song"], 6)) for _ in range(60)]
    return " ".join(
        f"The {line} {NAMES[at % 6]} {('one', 'two', 'three', 'four', 'five', 'six')[at % 6]}{at}."
        for at, line in enumerate(words)
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    for number in range(5):
        (folder / f"book-{number}.txt").write_text(book(number))
    return folder


def test_removed_sentences_put_back_give_the_text() -> None:
    text = book(0)
    rest, found = questions(text, 7, np.random.default_rng(0))
    assert len({question.text for question in found}) == 7
    for question in reversed(found):
        rest = f"{rest[: question.place]}{question.text} {rest[question.place :]}"
    inside = text[text.index(". ") + 2 : text.rindex(". ") + 2]
    assert rest == inside
    assert questions("Too short. Nothing here. The end.", 7, np.random.default_rng(0))[1] == []


def test_abbreviations_do_not_end_a_sentence() -> None:
    assert passage_encoder.SENTENCE.split('He met Mr. Brown. "Dr. Who?" She left! No.') == [
        "He met Mr. Brown.",
        '"Dr. Who?',
        "She left!",
        "No.",
    ]


@pytest.fixture(scope="module")
def folder(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    train, _ = split(passage_search.read_books([library]))
    return trained_encoder(list(train.values()), SMALL, "late", place, say=lambda _: None)


def test_right_chunks_are_those_around_the_gap(folder: Path) -> None:
    text = book(7)
    search = prepared_search(passage_search.load(folder), [text], SMALL, Trial(stretches=3, size=1500, removed=4))
    assert len(search.questions) == len(search.right) == 12
    for question, chunks, elsewhere in zip(search.questions, search.right, search.elsewhere, strict=True):
        at = text.index(question.text)
        before, after = text[:at].split()[-1], text[at + len(question.text) :].split()[0]
        around = " ".join(search.texts[chunk] for chunk in chunks)
        assert 1 <= len(chunks) <= 2
        # A neighbor may be removed too, or cut from the first or last chunk; one of both is always there.
        assert before[-2:] in around or after[:2] in around
        name = next(word for word in question.text.split() if word in NAMES)
        whole = "".join(search.texts[chunk] for chunk in np.flatnonzero(search.places == search.places[chunks[0]]))
        assert elsewhere == (name in whole and name not in around)


def test_recall_and_its_interval_are_those_of_a_loop() -> None:
    vectors = np.eye(4, dtype=np.float32)
    queries = np.array([[0.1, 0.9, 0.8, 0], [0.5, 0.4, 0.3, 0.2]], dtype=np.float32)
    ranks = passage_search._ranks(queries, vectors, [np.array([2]), np.array([0, 3])])
    assert ranks.tolist() == [2, 1]
    mean, low, high = passage_search._interval(np.array([1.0, 0, 1, 1]), np.array([0, 0, 1, 1]))
    assert (mean, low, high) == (0.75, 0.5, 1.0)  # both books, or one of them twice


def test_neighbors_are_of_the_same_document_only() -> None:
    vectors = np.eye(4, dtype=np.float32)
    total = passage_search._with_neighbors(vectors, np.array([0, 0, 0, 1]))
    expected = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=np.float32)
    np.testing.assert_allclose(total, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-6)


def test_an_interrupted_training_ends_with_the_same_weights(
    folder: Path, library: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(passage_encoder, "SAVED_EVERY", 1)
    train, _ = split(passage_search.read_books([library]))
    said: list[str] = []

    def stop(line: str) -> None:
        said.append(line)
        if len(said) in (1, 4):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trained_encoder(list(train.values()), SMALL, "late", tmp_path, say=stop)
    again = trained_encoder(list(train.values()), SMALL, "late", tmp_path, say=stop)
    assert [line.split(",")[0] for line in said] == ["masked 1/2", "masked 2/2", "late 1/3", "late 2/3", "late 3/3"]
    one, other = (passage_search.load(place).model.state_dict() for place in (folder, again))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_tests_both_trainings_and_keeps_a_record_of_each(library: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(
        passage_search.SCALES, "smoke", (SMALL, Trial(stretches=2, size=1500, removed=3, windows=((40, 8),)))
    )
    options = {"text": [library], "scale": "smoke", "run": tmp_path / "run", "say": lambda _: None}
    found = [records.load(path) for path in passages(tmp_path / "results", **options)]
    assert [record.name for record in found] == ["passages/trained-alone", "passages/trained-late"]
    for record in found:
        assert record.config["held_out"] == ["book-4"]
        assert record.metrics["questions"] == 6
        recall = record.curves["recall"]
        assert set(recall["method"]) >= {"alone", "alone, with neighbors", "late", "late, windows of 40"}
        assert all(
            low <= x <= high for low, x, high in zip(recall["low"], recall["recall"], recall["high"], strict=True)
        )
        assert recall["gain"][0] == 0
        assert record.curves["cosines"]["vectors"][0] == "windows of 40 tokens, 8 shared"
        assert 0.5 < record.curves["cosines"]["worst"][0] < record.curves["cosines"]["mean"][0] <= 1
    with pytest.raises(FileExistsError, match="never overwritten"):
        passages(tmp_path / "results", **options)


def test_too_few_books_and_unknown_scales_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(book(0))
    with pytest.raises(ValueError, match="text has 1 files but must be a folder with at least five books"):
        passages(tmp_path / "results", text=[tmp_path])
    with pytest.raises(ValueError, match="scale is 'large' but must be 'smoke' or 'small'"):
        passages(tmp_path / "results", text=[tmp_path], scale="large")
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        passages(tmp_path / "results", text=[tmp_path / "gone"])


def test_two_books_of_one_name_are_refused(library: Path, tmp_path: Path) -> None:
    (tmp_path / "book-3.txt").write_text(book(3))
    assert len(passage_search.read_books([library, library / "book-0.txt"])) == 5
    with pytest.raises(ValueError, match="two books are named book-3; rename"):
        passage_search.read_books([library, tmp_path])
