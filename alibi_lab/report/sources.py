"""Sources: the records that an answer to an item of the paper was computed from, read number by number.

Next: `verdicts.py`, which decides the paper's claims from them.
"""

import math
from collections.abc import Mapping, Sequence

from alibi_lab.records import Json, Record
from alibi_lab.report import answers
from alibi_lab.report.answers import item_name, recorded
from alibi_lab.report.claims import Number
from alibi_lab.report.published import method_of, trained_length
from alibi_lab.report.series import column_by, numbers, section, seed_of, sequence

# The metric that a column of speed or memory is read from, by kind of record.
METRICS = {
    "train_tokens_per_second": {"speed": "train_tokens_per_second", "training": "tokens_per_second"},
    "evaluation_tokens_per_second": {"speed": "evaluation_tokens_per_second"},
    "memory_bytes": {"speed": "memory_bytes", "training": "peak_memory_bytes"},
}
_EQUAL_TIME = ("figure-5", "table-11")  # perplexities when ALiBi's training ended, from validations during training


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
        self._factor = self._scale_factor()

    def by_seed(self, number: Number) -> dict[int, Record]:
        """The records that a number is read from, by seed: evaluations, trainings or measurements of speed."""
        metrics = METRICS.get(number.column)
        if metrics is None and not self.equal_time:
            return self.evaluations(number)
        models = self._of_model(number)
        found = (x for x in models if (metrics.get(x.kind) in x.metrics if metrics else "validation" in x.curves))
        return {seed_of(record): record for record in found}

    @property
    def equal_time(self) -> bool:
        """Whether the item compares models after equal training time."""
        return item_name(self.record) in _EQUAL_TIME

    def evaluations(self, number: Number) -> dict[int, Record]:
        """By seed, the evaluations of a number's model on its split of the text at its length."""
        tested = self.our_length(number)
        split = "test" if number.column.startswith("test") else "valid"
        return {
            seed_of(one): one
            for one in self._of_model(number)
            if one.kind == "evaluation"
            and section(one, "eval").get("split") == split
            and tested in numbers(one, "by_length", "length")
        }

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

    def _scale_factor(self) -> float:
        """The paper's lengths divided by ours; from the trainings if the answer has no lengths."""
        lengths = [length for one in self.records if isinstance(length := _lengths(one)[0], int) and length > 0]
        theirs = [length for label in self.record.curves if (length := trained_length(label))]
        factor = answers.scale_factor(self.record)
        return min(theirs) / min(lengths) if factor == 1 and lengths and theirs else factor


def _lengths(record: Record) -> tuple[Json, Json]:
    """The trained length, and the shorter one that a staged training began with."""
    train = section(record, "train")
    return train.get("length"), train.get("first_length")


def _log(value: float | None) -> float:
    return math.log(value) if value is not None and value > 0 else math.nan
