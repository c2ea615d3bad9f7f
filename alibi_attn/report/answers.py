"""Answers: what a record of kind "paper-item" says beside the paper's own numbers, both read in one way.

A `Column` is a function from a label and a name to numbers, NaN where there are none: `recorded` makes one of an answer of ours,
`published` one of the paper's item. An answer's curves are its series, labeled as the paper labels them (see `published.py`).
Perplexities of bytes or byte pairs of another text are not those of WikiText-103's words: heights never
share an axis, changes do.
Next: `verdicts.py`, what follows from an answer, and `paper.py`, how it is drawn.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from alibi_attn.records import Json, Record
from alibi_attn.report.published import PUBLISHED, PublishedItem, trained_length
from alibi_attn.report.series import numbers

KIND = "paper-item"

Column = Callable[[str, str], NDArray[np.float64]]


def is_drawn(record: Record) -> bool:
    """Answers to an item that the paper has."""
    return record.kind == KIND and item_name(record) in PUBLISHED


def sorted_items(records: Iterable[Record]) -> list[Record]:
    """The answers among the records in the paper's order, figures first; several answers to one item by their scale."""
    order = list(PUBLISHED)
    drawn = [record for record in records if is_drawn(record)]
    return sorted(drawn, key=lambda record: (order.index(item_name(record)), scale_of(record), record.name))


def unanswered(records: Iterable[Record]) -> list[str]:
    """The figures and tables of the paper without an answer among the records; an empty list if none has one."""
    answered = {item_name(record) for record in records if is_drawn(record)}
    return [name.replace("-", " ") for name in PUBLISHED if name not in answered] if answered else []


def named_studies(records: Iterable[Record]) -> set[object]:
    """The recipes whose trainings and tests the answers were read from."""
    return {record.config.get("study") for record in records if is_drawn(record)}


def item_name(record: Record) -> str:
    """The figure or table that a record answers: "figure-1"."""
    return record.name.split("/")[0]


def item_of(record: Record) -> PublishedItem:
    """What the paper says about the item that a record answers."""
    return PUBLISHED[item_name(record)]


def recorded(record: Record) -> Column:
    """Our numbers; `paper_length` follows from our length and the scale where it was not recorded."""
    factor = scale_factor(record)

    def column(label: str, name: str) -> NDArray[np.float64]:
        values = np.array(numbers(record, label, name), dtype=np.float64)
        if name != "paper_length":
            return values
        lengths = np.array(numbers(record, label, "length"), dtype=np.float64)
        return np.where(np.isfinite(values), values, np.round(lengths * factor))

    return column


def published(item: PublishedItem) -> Column:
    """The paper's numbers; its lengths are `length` and `paper_length` alike."""

    def column(label: str, name: str) -> NDArray[np.float64]:
        columns = item.series.get(label, {})
        values = columns.get("length" if name == "paper_length" else name)
        empty = (None,) * len(next(iter(columns.values()), ()))
        return np.array([math.nan if value is None else value for value in values or empty], dtype=np.float64)

    return column


def way_of(item: PublishedItem) -> str:
    """How the paper cut the text: "sliding" or "nonoverlapping"."""
    return "sliding" if "sliding" in item.evaluation else "nonoverlapping"


def scale_factor(record: Record) -> float:
    """How many times the paper's lengths are longer than ours."""
    for label in record.curves:
        for ours, theirs in zip(numbers(record, label, "length"), numbers(record, label, "paper_length"), strict=True):
            if ours > 0 and theirs > 0:
                return theirs / ours
    lengths = record.config.get("lengths")
    for theirs_text, ours_value in (lengths if isinstance(lengths, Mapping) else {}).items():
        if isinstance(ours_value, int | float) and ours_value > 0 and theirs_text.isdecimal():
            return float(theirs_text) / ours_value
    return 1.0


def scale_of(record: Record) -> str:
    """The scale that an answer was made at, "small"; "" where it does not say."""
    scale = record.config.get("scale")
    return scale if isinstance(scale, str) else ""


def unit_of(record: Record) -> str:
    """What our perplexity is per: "byte" or "token"."""
    unit = record.config.get("unit")
    if isinstance(unit, str):
        return unit
    sizes = [corpus.get("bytes_per_token") for corpus in _corpora(record)]
    return "byte" if sizes and all(size == 1 for size in sizes) else "token"


def corpus_of(record: Record) -> str:
    """The names of the texts that ours are measured on."""
    name = record.config.get("corpus")
    if isinstance(name, str):
        return name
    names = dict.fromkeys(str(corpus.get("name")) for corpus in _corpora(record) if corpus.get("name"))
    return " and ".join(names) or "another text"


def spread_sentence(record: Record) -> str:
    """How many tokens were scored and how many seeds stand behind a number."""
    tokens = _range(record, "tokens", "valid_tokens", "test_tokens")
    seeds = _range(record, "seeds")
    said = []
    if tokens:
        said.append(f"{_between(tokens)} tokens are scored for every number of ours.")
    if seeds and seeds[1] == 1:
        said.append("There is one seed, so nothing shows how much chance does.")
    elif seeds:
        said.append(f"Bands and small numbers go from the lowest to the highest of {_between(seeds)} seeds.")
    return " ".join(said)


def scale_sentence(record: Record) -> str:
    """How our lengths stand to the paper's, and that the units differ."""
    item, factor = item_of(record), scale_factor(record)
    said = []
    if factor != 1:
        lengths = sorted({length for label in item.series if (length := trained_length(label))})
        example = lengths[0] if lengths else 512
        said.append(
            f"Our lengths are the paper's divided by {factor:g}: L = {example / factor:,.0f} stands for L = {example:,}."
        )
    slopes = _slopes(record, item)
    if slopes:
        equal = sum(ours == theirs for ours, theirs in slopes)
        said.append(f"{equal} of the paper's {len(slopes)} slopes are ours to the last bit.")
    elif item.corpus and any("perplexity" in column for column in item.columns):
        ours, theirs = f"{unit_of(record)} of {corpus_of(record)}", f"token of {item.corpus}"
        said.append(f"Ours is per {ours}, the paper's per {theirs}: compare changes, not heights.")
    elif item.corpus:
        said.append(f"The machines differ (the paper's: {item.evaluation}), and so do the tokens: compare shapes.")
    return " ".join(said)


def _corpora(record: Record) -> Sequence[Mapping[str, Json]]:
    found = record.config.get("corpora")
    return [corpus for corpus in found if isinstance(corpus, Mapping)] if isinstance(found, list | tuple) else []


def _slopes(record: Record, item: PublishedItem) -> list[tuple[float, float | None]]:
    """(ours, the paper's) slope of every head of both."""
    if "slope" not in item.columns:
        return []
    return [
        pair
        for label, columns in item.series.items()
        for pair in zip(numbers(record, label, "slope"), columns["slope"], strict=False)
    ]


def _range(record: Record, *columns: str) -> tuple[float, float] | None:
    cells = (value for label in record.curves for column in columns for value in numbers(record, label, column))
    found = [value for value in cells if math.isfinite(value)]
    return (min(found), max(found)) if found else None


def _between(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
