"""Splits texts into chunks, spans of characters: by tokens, sentences or paragraphs, or from a list or a function.

Spans are [C, 2] int64, (start, end), in order and without overlaps; `tokens_of` finds the tokens of each. Read next:
`late_chunking.py`.
"""

import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Spans: TypeAlias = NDArray[np.int64]
Splitter: TypeAlias = Callable[[str], Iterable[Sequence[int]]]
Chunks: TypeAlias = int | Literal["sentences", "paragraphs"] | Sequence[Iterable[Sequence[int]]] | Splitter

# Where a chunk may end: at a blank line; for sentences also after a mark with its closing quotes and white space.
BORDERS = {
    "paragraphs": re.compile(r"\n[^\S\n]*\n"),
    "sentences": re.compile(r"\n[^\S\n]*\n|(?<=[.!?…])[\"')\]”’»]*\s+|(?<=[。！？])"),
}
LONGEST = 20_000  # characters of a paragraph; a longer one is split at its lines
_NAMES = " or ".join(map(repr, BORDERS))


def check(chunks: Chunks, num_texts: int) -> None:
    """Raises TypeError or ValueError unless `chunks` is one of the allowed kinds."""
    if isinstance(chunks, bool) or not (isinstance(chunks, int | str | Sequence) or callable(chunks)):
        raise TypeError(
            f"chunks is {chunks!r} but must be a number of tokens, {_NAMES}, a list of (start, end) spans for each text, or a "
            "function from a text to spans"
        )
    if isinstance(chunks, int) and chunks < 1:
        raise ValueError(f"chunks is {chunks} but a chunk needs at least 1 token")
    if isinstance(chunks, str) and chunks not in BORDERS:
        raise ValueError(f"chunks is {chunks!r} but must be a number of tokens, {_NAMES}, spans, or a function")
    if not isinstance(chunks, int | str) and isinstance(chunks, Sequence) and len(chunks) != num_texts:
        raise ValueError(f"chunks has spans for {len(chunks)} texts but there are {num_texts}; pass one list per text")


def spans_of(text: str, chunks: Chunks, offsets: Spans, *, number: int) -> tuple[Spans, Spans]:
    """The spans of one text in characters, and the half-open ranges of their tokens.

    Args:
        offsets: [N, 2] the characters of each token, without special ones.
        number: of the text.

    Raises:
        TypeError: given spans that are not pairs of integers.
        ValueError: given spans that are empty, overlap, are not in order, lie outside the text, or hold no token.
    """
    if isinstance(chunks, int | str):
        spans = _of_tokens(offsets, chunks) if isinstance(chunks, int) else _between(text, BORDERS[chunks])
        if chunks == "paragraphs":
            spans = _split_long(spans, text, number)
        tokens = tokens_of(spans, offsets)
        some = tokens[:, 0] < tokens[:, 1]
        return spans[some], tokens[some]
    spans = _checked(chunks(text) if callable(chunks) else chunks[number], text, f"text {number}")
    tokens = tokens_of(spans, offsets)
    if len(empty := np.flatnonzero(tokens[:, 0] >= tokens[:, 1])):
        raise ValueError(f"the span {_pair(spans[empty[0]])} of text {number} holds no token; leave it out")
    return spans, tokens


def tokens_of(spans: Spans, offsets: Spans) -> Spans:
    """[C, 2] the half-open range of the tokens that share a character with each span.

    >>> tokens_of(np.array([[0, 4], [4, 9]]), np.array([[0, 3], [3, 6], [6, 9]]))
    array([[0, 2],
           [1, 3]])
    """
    starts, ends = offsets.T
    return np.stack([np.searchsorted(ends, spans[:, 0], "right"), np.searchsorted(starts, spans[:, 1], "left")], axis=1)


def _of_tokens(offsets: Spans, size: int) -> Spans:
    """Spans of `size` tokens. All tokens of a character belong to its first chunk, so no character is divided."""
    first = np.arange(0, len(offsets), size)
    spans = np.stack([offsets[first, 0], offsets[np.minimum(first + size, len(offsets)) - 1, 1]], axis=1)
    spans[1:, 0] = np.maximum(spans[1:, 0], spans[:-1, 1])
    return spans[spans[:, 0] < spans[:, 1]]


def _between(text: str, border: re.Pattern[str]) -> Spans:
    """The spans between borders, without white space around them."""
    return _stripped(text, itertools.pairwise([0, *(match.end() for match in border.finditer(text)), len(text)]))


def _stripped(text: str, spans: Iterable[tuple[int, int]]) -> Spans:
    """The spans without white space around them; those of white space alone are left out."""
    parts = ((start, text[start:end]) for start, end in spans)
    inner = [(start + len(x) - len(x.lstrip()), start + len(x.rstrip())) for start, x in parts if x.strip()]
    return np.array(inner, dtype=np.int64).reshape(-1, 2)


def _split_long(spans: Spans, text: str, number: int) -> Spans:
    """The spans, with each longer than LONGEST in parts of at most that many characters, cut at line ends where it has any."""
    longest = int((spans[:, 1] - spans[:, 0]).max(initial=0))
    if longest <= LONGEST:
        return spans
    warnings.warn(
        f"text {number} has a paragraph of {longest:,} characters; paragraphs beyond {LONGEST:,} are split at their lines",
        stacklevel=2,
    )
    parts = []
    for start, end in spans.tolist():
        while end - start > LONGEST:
            cut = text.rfind("\n", start, start + LONGEST) + 1 or start + LONGEST
            parts.append((start, cut))
            start = cut
        parts.append((start, end))
    return _stripped(text, parts)


def _checked(given: Iterable[Sequence[int]], text: str, where: str) -> Spans:
    try:
        spans = np.array([tuple(span) for span in given])
    except (TypeError, ValueError):  # not iterable, or of different lengths
        spans = np.array(None)
    if spans.ndim != 2 or spans.shape[1] != 2 or spans.dtype.kind not in "iu":
        raise TypeError(
            f"the spans of {where} must be pairs of integers (start, end), in characters, but are {short(given)}"
        )
    spans = spans.astype(np.int64)
    before = 0
    for span in spans:
        start, end = span
        if start >= end:
            raise ValueError(f"the span {_pair(span)} of {where} is empty; pass start < end")
        if start < 0 or end > len(text):
            raise ValueError(f"the span {_pair(span)} of {where} is outside its {len(text):,} characters")
        if start < before:
            raise ValueError(
                f"the span {_pair(span)} of {where} starts before the end of the one before it, {before}; sort "
                "the spans, without overlaps"
            )
        before = end
    return spans


def _pair(span: NDArray[np.int64]) -> str:
    return f"({span[0]}, {span[1]})"


def short(given: object) -> str:
    """The start of a value's repr, for errors."""
    shown = repr(given)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
