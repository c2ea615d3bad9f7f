"""Answers: our records of kind "paper-item" and the paper's own numbers, through one interface.

A `Column` is a function from a label and a column name to numbers, NaN where there are none. `recorded` returns one for our
record, `published` one for the paper's item. The curves of a record are its series, with the paper's labels (`published.py`).
Our perplexities are per byte or token of another text than the paper's WikiText-103, so levels never share an axis; only
changes do. `Sources` has the records that an answer was computed from, and reads them number by number.
Next: `verdicts.py` compares an answer with the claims, and `plots/paper.py` draws it.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from alibi_lab.records import Json, Record
from alibi_lab.report.published import PUBLISHED, Number, PublishedItem, method_of, trained_length
from alibi_lab.report.series import Array, by_seed, column_by, floats, numbers, section, sequence

Column = Callable[[str, str], Array]
Curves = Mapping[str, Mapping[str, Sequence[Json]]]

# The metric that a column of speed or memory is read from, by kind of record.
METRICS = {
    "train_tokens_per_second": {"speed": "train_tokens_per_second", "training": "tokens_per_second"},
    "evaluation_tokens_per_second": {"speed": "evaluation_tokens_per_second"},
    "memory_bytes": {"speed": "memory_bytes", "training": "peak_memory_bytes"},
}
_EQUAL_TIME = ("figure-5", "table-11")  # perplexities when ALiBi's training ended, from validations during training


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


def facts(record: Record) -> list[tuple[str, str]]:
    """How our lengths, units, slopes and samples relate to the paper's, as names and values."""
    item, factor = item_of(record), scale_factor(record)
    slopes = _slopes(record, item)
    equal = sum(ours == theirs for ours, theirs in slopes)
    texts = (
        " and ".join(dict.fromkeys(str(one["name"]) for one in _corpora(record) if one.get("name"))) or "another text"
    )
    units = f"{unit_of(record)} of {texts}; the paper's: token of {item.corpus}" if item.corpus else ""
    found = {
        "the paper's lengths / ours": f"{factor:g}" if factor != 1 else "",
        "slopes equal to the paper's, to the last bit": f"{equal} of {len(slopes)}" if slopes else "",
        "perplexity per": units if any("perplexity" in column for column in item.columns) else "",
        "the paper's machine": item.evaluation if any("per_second" in column for column in item.columns) else "",
        "tokens per number": _range(record, "tokens", "valid_tokens", "test_tokens"),
        "seeds per number": _range(record, "seeds"),
    }
    return [(name, value) for name, value in found.items() if value]


class Sources:
    """The available records among those that an answer names as its sources.

    Args:
        record: an answer.
        by_identity: the available records, by identity.
    """

    def __init__(self, record: Record, by_identity: Mapping[str, Record]) -> None:
        names = record.config.get("evidence")
        digits = [str(name).removesuffix(".json").rpartition("-")[2] for name in sequence(names)]
        self.record = record
        self.records = [by_identity[key] for key in digits if key in by_identity]
        self.missing = len(digits) - len(self.records)
        # From the trainings if the answer has no lengths.
        lengths = [length for one in self.records if isinstance(length := _lengths(one)[0], int) and length > 0]
        theirs = [length for label in record.curves if (length := trained_length(label))]
        factor = scale_factor(record)  # the paper's lengths divided by ours
        self._factor = min(theirs) / min(lengths) if factor == 1 and lengths and theirs else factor

    def by_seed(self, number: Number) -> dict[int, Record]:
        """The records that a number is read from, by seed: measurements of speed, trainings, or evaluations of its model on its
        split of the text at its length."""
        models = self._of_model(number)
        if metrics := METRICS.get(number.column):
            return by_seed(one for one in models if metrics.get(one.kind) in one.metrics)
        if self.equal_time:
            return by_seed(one for one in models if "validation" in one.curves)
        tested, split = self.our_length(number), "test" if number.column.startswith("test") else "valid"
        evaluations = (one for one in models if one.kind == "evaluation" and section(one, "eval").get("split") == split)
        return by_seed(one for one in evaluations if tested in numbers(one, "by_length", "length"))

    @property
    def equal_time(self) -> bool:
        """Whether the item compares models after equal training time."""
        return item_name(self.record) in _EQUAL_TIME

    def our_length(self, number: Number) -> float | None:
        """Our length that corresponds to the paper's; None if it was not tested."""
        column = recorded(self.record)
        lengths = column(number.label, "length")
        if number.tested is None:
            return float(lengths[-1]) if lengths.size else None
        ours = lengths[column(number.label, "paper_length") == number.tested]
        if number.length is None and not ours.size:  # the length is in the column's name
            return float(round(number.tested / self._factor))
        return float(ours[0]) if ours.size else None

    def logs(self, terms: Sequence[tuple[Number, Record]], way: str) -> list[float]:
        """The logarithms of the numbers, each read from its record; all records have the same seed."""
        ends = [one.metrics.get("seconds") or math.inf for number, one in terms if method_of(number.label) == "alibi"]
        return [self._read(number, record, way, min(ends, default=math.inf)) for number, record in terms]

    def _read(self, number: Number, record: Record, way: str, end: float) -> float:
        if number.column in METRICS:
            return _log(record.metrics.get(METRICS[number.column][record.kind]))
        if self.equal_time:
            points = column_by(record, "validation", "seconds", "nats").items()
            return next((nats for seconds, nats in reversed(points) if seconds <= end), math.nan)
        speed = number.column == "tokens_per_second"
        column = column_by(record, "by_length", "length", number.column if speed else f"{way}_nats")
        value = column.get(self.our_length(number) or 0.0, math.nan)
        return _log(value) if speed else value

    def _of_model(self, number: Number) -> list[Record]:
        trained = trained_length(number.label) or number.length
        if trained is None:
            return []
        wanted = method_of(number.label), round(trained / self._factor), None
        return [one for one in self.records if (section(one, "model").get("method"), *_lengths(one)) == wanted]


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


def _lengths(record: Record) -> tuple[Json, Json]:
    """The trained length, and the shorter one that a staged training began with."""
    train = section(record, "train")
    return train.get("length"), train.get("first_length")


def _log(value: float | None) -> float:
    return math.log(value) if value is not None and value > 0 else math.nan
