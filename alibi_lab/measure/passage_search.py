"""`alibi bench passages`: train small encoders on books, and search passages of other books: late chunking, or chunks embedded
alone; also int8.

Does late chunking find the right passage more often than chunks embedded alone?

A small encoder is trained on books and tested on others (`passage_encoder.py`). Sentences are removed from stretches of the
books; each is the query for the chunk from which it was removed, among the chunks of all stretches. No text contains the
query, so a chunk can only be found if it, or the text around it, is about the same things. Also measured: vectors in int8
and from windows, compared with one pass in fp32.

Cost: small, about half an hour on one idle core; smoke, seconds.
Expected: late chunks are found more often than chunks alone, clearly so where the encoder was trained on late chunks.
"""

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from alibi_attn.hf.embedding.late_chunking import Document, Windows, computed, prepared
from alibi_attn.hf.embedding.sentence_encoder import Sentences, load
from alibi_attn.nn import quantized
from alibi_lab import records
from alibi_lab.measure.harness import Columns, Say, append, figures_of
from alibi_lab.measure.passage_encoder import Question, Setup, Trained, questions, trained_encoder

Vectors = NDArray[np.float32]
TRAINED: tuple[Trained, ...] = ("alone", "late")
RANKS = (1, 10)
NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+")  # a capital inside a sentence
WHOLE = Windows()
NO_LIMIT = 2**29
DRAWS = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Sizes of the test.

    Args:
        stretches: number of stretches of text per held-out book.
        size: characters of a stretch.
        removed: sentences removed from each stretch.
        windows: (max_length, overlap) of the windows that are compared with one pass; the first is also searched.
    """

    stretches: int = 4
    size: int = 8000
    removed: int = 12
    windows: tuple[tuple[int, int], ...] = ((256, 64), (512, 128), (1024, 256))


SCALES = {
    "smoke": (
        Setup(width=32, layers=1, heads=2, inner=32, vocabulary=400, batch=2, masked_steps=2, pair_steps=3),
        Trial(stretches=2, removed=4, size=4000, windows=((256, 64),)),
    ),
    "small": (Setup(), Trial()),
}


@dataclasses.dataclass(frozen=True)
class Search:
    """The chunks of all stretches, the questions, and which chunks are right.

    Args:
        documents: the stretches as tokens and chunks.
        texts: of the chunks.
        places: for each chunk the number of its document.
        right: for each question its right chunks.
        groups: for each question the number of its book.
        elsewhere: for each question, whether a name in it is in its document, but not in its right chunks.
    """

    documents: list[Document]
    texts: list[str]
    places: NDArray[np.int64]
    questions: list[Question]
    right: list[NDArray[np.int64]]
    groups: NDArray[np.int64]
    elsewhere: NDArray[np.bool_]


def passages(
    out: Path,
    *,
    text: Sequence[Path] = (),
    scale: str = "small",
    run: Path = Path("runs/passages"),
    say: Say = print,
) -> list[Path]:
    """Trains two encoders or resumes, tests both, saves one record for each, and returns their paths.

    Args:
        text: folder with one .txt file per book, at least five; can be repeated. The last fifth, in order of paths, is only
            tested on.
        scale: "smoke" or "small".
        run: folder for the trainings, which resume.

    Raises:
        ValueError: an unknown scale, fewer than five books, or two of one name.
        FileExistsError: one of the records already exists; nothing is trained.
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r} but must be {' or '.join(map(repr, SCALES))}")
    setup, test = SCALES[scale]
    train, held_out = split(read_books(text))
    shared: dict[str, records.Json] = {
        "setup": dataclasses.asdict(setup),
        "test": dataclasses.asdict(test),
        "books": len(train),
        "held_out_books": len(held_out),
        "held_out": list(held_out),
        "characters": sum(map(len, train.values())),
    }
    for trained in TRAINED:
        records.expect_new(out, "search", f"passages/trained-{trained}", {"trained": trained, **shared})
    paths = []
    for trained in TRAINED:
        started = datetime.datetime.now(datetime.UTC)
        folder = trained_encoder(list(train.values()), setup, trained, run, say=say)
        metrics, curves = tested(folder, list(held_out.values()), setup, test)
        for row in zip(*curves["recall"].values(), strict=True):
            say(figures_of(dict(zip(curves["recall"], row, strict=True))))
        name, config = f"passages/trained-{trained}", {"trained": trained, **shared}
        record = records.make("search", name, config=config, metrics=metrics, curves=curves, started=started)
        paths.append(records.save(record, out))
    return paths


def read_books(text: Sequence[Path]) -> dict[str, str]:
    """The texts in files and folders by name without suffix, in order of paths, with single spaces for all white space.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: fewer than five texts, or two files of one name.
    """
    for path in text:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; pass a folder with books as .txt files")
    files = {file for path in text for file in (path.rglob("*.txt") if path.is_dir() else [path])}
    if len(files) < 5:
        raise ValueError(f"text has {len(files)} files but must be a folder with at least five books as .txt files")
    books: dict[str, str] = {}
    for file in sorted(files):
        if file.stem in books:
            raise ValueError(f"two books are named {file.stem}; rename {file}")
        books[file.stem] = " ".join(file.read_text(encoding="utf-8").split())
    return books


def split(books: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(the books to train on, the last fifth, to test on)."""
    items, first = list(books.items()), len(books) - len(books) // 5
    return dict(items[:first]), dict(items[first:])


def tested(folder: Path, books: Sequence[str], setup: Setup, test: Trial) -> tuple[dict[str, float | None], Columns]:
    """Metrics and curves of an encoder: recall by method, and how far int8 and windows are from one pass in fp32."""
    encoder = load(folder, max_seq_length=NO_LIMIT)
    search = prepared_search(encoder, books, setup, test)
    sentences = [question.text for question in search.questions]
    queries, late = _alone(encoder, sentences), _late(encoder, search.documents, WHOLE)
    alone = _alone(encoder, search.texts)
    windows = {size: _late(encoder, search.documents, Windows(*size)) for size in test.windows}
    vectors = {
        "alone": alone,
        "alone, with neighbors": _with_neighbors(alone, search.places),
        "late": late,
        f"late, windows of {test.windows[0][0]}": windows[test.windows[0]],
    }
    ranks = {method: _ranks(queries, rows, search.right) for method, rows in vectors.items()}
    close = {f"windows of {size} tokens, {overlap} shared": rows for (size, overlap), rows in windows.items()}
    cosines = {name: _cosines(rows, late) for name, rows in close.items()}
    if supports_int8():
        small = load(folder, max_seq_length=NO_LIMIT, dtype="int8")
        small_queries, small_late = _alone(small, sentences), _late(small, search.documents, WHOLE)
        cosines["int8, sentences"] = _cosines(small_queries, queries)
        cosines["int8, late chunks"] = _cosines(small_late, late)
        ranks["late, int8"] = _ranks(small_queries, small_late, search.right)
    columns: Columns = {"recall": _recall(ranks, search)}
    for name, found in cosines.items():
        append(columns, "cosines", {"vectors": name, "mean": float(found.mean()), "worst": float(found.min())})
    elsewhere = int(search.elsewhere.sum())
    return {"questions": len(search.questions), "chunks": len(search.texts), "questions_elsewhere": elsewhere}, columns


def prepared_search(encoder: Sentences, books: Sequence[str], setup: Setup, test: Trial) -> Search:
    """The stretches of the books with their chunks and questions. They depend on the tokenizer and the seed only."""
    stretches: list[str] = []
    every: list[Question] = []
    owners: list[tuple[int, int]] = []
    for number, book in enumerate(books):
        random = np.random.default_rng((setup.seed, 2, number))
        for start in random.integers(0, max(1, len(book) - test.size), test.stretches).tolist():
            rest, found = questions(book[start : start + test.size], test.removed, random)
            owners += [(len(stretches), number)] * len(found)
            every += found
            stretches.append(rest)
    documents = prepared(encoder, stretches, setup.chunk, WHOLE)
    places = np.repeat(np.arange(len(documents)), [len(document.spans) for document in documents])
    spans = np.concatenate([document.spans for document in documents])
    texts = [stretches[at][start:end] for at, (start, end) in zip(places, spans, strict=True)]
    # The sentence was between two characters. If they are in two chunks, both are right.
    right = [
        np.flatnonzero((places == at) & (spans[:, 0] <= question.place) & (spans[:, 1] >= question.place - 1))
        for question, (at, _) in zip(every, owners, strict=True)
    ]
    elsewhere = [
        any(
            name in stretches[at] and not any(name in texts[chunk] for chunk in chunks) for name in NAME.findall(q.text)
        )
        for q, (at, _), chunks in zip(every, owners, right, strict=True)
    ]
    groups = np.array([number for _, number in owners])
    return Search(documents, texts, places, every, right, groups, np.array(elsewhere))


def supports_int8() -> bool:
    """Whether linear layers can run in int8 here."""
    try:
        quantized.check_supported()
    except ValueError:
        return False
    return True


def _recall(ranks: Mapping[str, NDArray[np.int64]], search: Search) -> dict[str, list[records.Json]]:
    """Recall by set of questions, method and rank; its gain over chunks embedded alone; and 95 % intervals of both over books."""
    columns: Columns = {}
    for some, chosen in (("all", np.ones(len(search.questions), bool)), ("name elsewhere", search.elsewhere)):
        groups = search.groups[chosen]
        for rank in RANKS:
            alone = (ranks["alone"][chosen] <= rank).astype(float)
            for method, found in ranks.items():
                hits = (found[chosen] <= rank).astype(float)
                recall = dict(zip(("recall", "low", "high"), _interval(hits, groups), strict=True))
                gain = dict(zip(("gain", "gain_low", "gain_high"), _interval(hits - alone, groups), strict=True))
                append(columns, "recall", {"questions": some, "method": method, "rank": rank, **recall, **gain})
    return columns["recall"]


def _alone(encoder: Sentences, texts: Sequence[str]) -> Vectors:
    """Each text is read alone; the mean over the same tokens as in late chunking."""
    return _late(encoder, prepared(encoder, texts, NO_LIMIT, WHOLE), WHOLE)


def _late(encoder: Sentences, documents: Sequence[Document], windows: Windows) -> Vectors:
    """Unit vectors of all chunks."""
    found: dict[int, Vectors] = {}
    for indices, rows in computed(encoder.model, documents, windows, batch_tokens=16384, normalize=True):
        found |= dict(zip(indices, rows, strict=True))
    return np.concatenate([found[at] for at in range(len(documents))])


def _with_neighbors(vectors: Vectors, places: NDArray[np.int64]) -> Vectors:
    """A chunk's vector plus those of the chunks before and after it in its document, without late chunking, as a control."""
    same = (places[1:] == places[:-1])[:, None]
    total = vectors.copy()
    total[1:] += vectors[:-1] * same
    total[:-1] += vectors[1:] * same
    return total / np.linalg.norm(total, axis=1, keepdims=True)


def _ranks(queries: Vectors, vectors: Vectors, right: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """For each query the rank of its best right chunk, from 1."""
    scores = queries @ vectors.T
    best = np.array([row[chunks].max() for row, chunks in zip(scores, right, strict=True)])
    return 1 + (scores > best[:, None]).sum(1)


def _cosines(rows: Vectors, others: Vectors) -> NDArray[np.float64]:
    """Of unit vectors, in fp64."""
    one, other = rows.astype(np.float64), others.astype(np.float64)
    return (one * other).sum(1) / (np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1))


def _interval(values: NDArray[np.float64], groups: NDArray[np.int64]) -> tuple[float, float, float]:
    """(mean, 2.5 % and 97.5 % quantiles of the means over books drawn with replacement)."""
    random = np.random.default_rng(0)
    sums, counts = np.bincount(groups, values), np.bincount(groups)
    picked = random.integers(0, len(sums), (DRAWS, len(sums)))
    averages = sums[picked].sum(1) / np.maximum(counts[picked].sum(1), 1)
    low, high = np.quantile(averages, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)
