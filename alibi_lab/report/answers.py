"""Answers: our records of kind "paper-item" and the paper's own numbers, through one interface.

A `Column` is a function from a label and a column name to numbers, NaN where there are none. `recorded` returns one for our
record, `published` one for the paper's item. The curves of a record are its series, with the paper's labels (`published.py`).
Our perplexities are per byte or token of another text than the paper's WikiText-103, so levels never share an axis; only
changes do.
Next: `verdicts.py` compares an answer with the claims, and `plots/paper.py` draws it.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from alibi_lab.records import Json, Record
from alibi_lab.report.published import PUBLISHED, PublishedItem
from alibi_lab.report.series import Array, floats, numbers, sequence

Column = Callable[[str, str], Array]
Curves = Mapping[str, Mapping[str, Sequence[Json]]]


def is_drawn(record: Record) -> bool:
    """Whether the record answers a figure or table of the paper."""
    return record.kind == "paper-item" and item_name(record) in PUBLISHED


def sorted_items(records: Iterable[Record]) -> list[Record]:
    """The answers among the records in the paper's order, figures first; several answers to one item are sorted by scale."""
    order = list(PUBLISHED)
    drawn = [record for record in records if is_drawn(record)]
    return sorted(drawn, key=lambda record: (order.index(item_name(record)), scale_of(record), record.name))


def unanswered(records: Iterable[Record]) -> list[str]:
    """The figures and tables of the paper that the records do not answer; an empty list if they answer none."""
    answered = {item_name(record) for record in records if is_drawn(record)}
    return [name.replace("-", " ") for name in PUBLISHED if answered and name not in answered]


def named_studies(records: Iterable[Record]) -> set[object]:
    """The recipes whose trainings and tests the answers are computed from."""
    return {record.config.get("study") for record in records if is_drawn(record)}


def item_name(record: Record) -> str:
    """The figure or table that a record answers: "figure-1"."""
    return record.name.split("/")[0]


def item_of(record: Record) -> PublishedItem:
    """The paper's numbers for the item that a record answers."""
    return PUBLISHED[item_name(record)]


def recorded(record: Record) -> Column:
    """Our numbers. A `paper_length` that was not recorded is computed from our length and the scale."""
    return functools.partial(_column, record.curves, scale_factor(record))


def published(item: PublishedItem) -> Column:
    """The paper's numbers; `length` and `paper_length` are the same."""
    return functools.partial(_column, item.series, 1.0)


def _column(curves: Curves, factor: float, label: str, name: str) -> Array:
    columns = curves.get(label, {})
    values = np.array(floats(columns, name), dtype=np.float64)
    if name != "paper_length":
        return values
    return np.where(np.isfinite(values), values, np.round(np.array(floats(columns, "length")) * factor))


def labels_of(record: Record) -> list[str]:
    """The labels of an item: the paper's, then those of position methods that only our answer has."""
    series = item_of(record).series
    return [*series, *(label for label in record.curves if label not in series)]


def way_of(item: PublishedItem) -> str:
    """How the paper split the text: "sliding" or "nonoverlapping"."""
    return "sliding" if "sliding" in item.evaluation else "nonoverlapping"


def scale_factor(record: Record) -> float:
    """The paper's lengths divided by ours."""
    for label in record.curves:
        for ours, theirs in zip(numbers(record, label, "length"), numbers(record, label, "paper_length"), strict=True):
            if ours > 0 and theirs > 0:
                return theirs / ours
    return 1.0


def scale_of(record: Record) -> str:
    """The scale at which an answer was made, for example "small"; "" if it was not recorded."""
    scale = record.config.get("scale")
    return scale if isinstance(scale, str) else ""


def unit_of(record: Record) -> str:
    """The unit of our perplexity: "byte" or "token"."""
    sizes = {corpus.get("bytes_per_token") for corpus in _corpora(record)}
    return "byte" if sizes == {1} else "token"


def corpus_of(record: Record) -> str:
    """The names of the texts that we measured on."""
    names = dict.fromkeys(str(corpus.get("name")) for corpus in _corpora(record) if corpus.get("name"))
    return " and ".join(names) or "another text"


def facts(record: Record) -> list[tuple[str, str]]:
    """How our lengths, units, slopes and samples relate to the paper's, as names and values."""
    item, factor = item_of(record), scale_factor(record)
    slopes = _slopes(record, item)
    equal = sum(ours == theirs for ours, theirs in slopes)
    units = f"{unit_of(record)} of {corpus_of(record)}; the paper's: token of {item.corpus}" if item.corpus else ""
    found = {
        "the paper's lengths / ours": f"{factor:g}" if factor != 1 else "",
        "slopes equal to the paper's, to the last bit": f"{equal} of {len(slopes)}" if slopes else "",
        "perplexity per": units if any("perplexity" in column for column in item.columns) else "",
        "the paper's machine": item.evaluation if any("per_second" in column for column in item.columns) else "",
        "tokens per number": _range(record, "tokens", "valid_tokens", "test_tokens"),
        "seeds per number": _range(record, "seeds"),
    }
    return [(name, value) for name, value in found.items() if value]


def _corpora(record: Record) -> Sequence[Mapping[str, Json]]:
    return [corpus for corpus in sequence(record.config.get("corpora")) if isinstance(corpus, Mapping)]


def _slopes(record: Record, item: PublishedItem) -> list[tuple[float, float | None]]:
    """(our slope, the paper's slope) of every head."""
    series = item.series if "slope" in item.columns else {}
    return [pair for one in series for pair in zip(numbers(record, one, "slope"), series[one]["slope"], strict=False)]


def _range(record: Record, *columns: str) -> str:
    cells = (value for label in record.curves for column in columns for value in numbers(record, label, column))
    return between([value for value in cells if math.isfinite(value)])


def between(values: Sequence[float], show: Callable[[float], str] = "{:,.0f}".format, word: str = " to ") -> str:
    """The lowest and the highest as in "2 to 3", or one number if both look the same; "" without values."""
    return word.join(dict.fromkeys(show(end) for end in (min(values), max(values)))) if values else ""
