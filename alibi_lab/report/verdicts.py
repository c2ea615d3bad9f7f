"""Verdicts: whether each claim of the paper is confirmed, contradicted or open at the size of our models, with its interval.

A claim is about a ratio; its logarithm is a difference, paired by seed and by part of the text (`intervals.py`). Confirmed: the
whole interval is on the claim's side of the threshold. Contradicted: all of it is on the other side. Everything else is open,
with the reason.

* A claim that compares two trainings (ALiBi against sinusoidal, L = 512 against L = 3072), or speeds, is about training: it
  needs an interval over seeds, because one training of each says nothing about others, however long the text. Two measured
  speeds without an interval leave a claim open too.
* A claim about how one model's perplexity changes with length can be decided over text with a single seed, for that model.
* A definition (slopes, forward passes) involves no chance and is compared exactly.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from alibi_lab.records import Json, Record, age
from alibi_lab.report import answers, intervals
from alibi_lab.report.answers import Column, item_name, item_of, published, recorded
from alibi_lab.report.claims import CLAIMS, Claim, Number
from alibi_lab.report.intervals import LEAST_PARTS, Array, Interval, Paired, as_ratio, joined, union
from alibi_lab.report.published import method_of, trained_length
from alibi_lab.report.series import numbers, section, seed_of, sequence

Word = Literal["contradicted", "confirmed", "open"]

# The metric that a column of speed or memory is read from, by kind of record.
_METRICS = {
    "train_tokens_per_second": {"speed": "train_tokens_per_second", "training": "tokens_per_second"},
    "evaluation_tokens_per_second": {"speed": "evaluation_tokens_per_second"},
    "memory_bytes": {"speed": "memory_bytes", "training": "peak_memory_bytes"},
}
_EQUAL_TIME = ("figure-5", "table-11")  # perplexities when ALiBi's training ended, from validations during training
_EXACT = ("slope", "pass")  # columns that are defined, not measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim compared with one answer.

    Args:
        paper, ours: the ratios; NaN if unknown.
        seeds, text: the intervals over seeds and over text; None if there is none.
        word, why: the verdict and its reason.
    """

    claim: Claim
    paper: float
    ours: float
    word: Word
    why: str
    seeds: Interval | None = None
    text: Interval | None = None

    @property
    def interval(self) -> Interval | None:
        """The interval of the ratio, over seeds and over text."""
        return union(self.seeds, self.text)


class Evidence:
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
        metrics = _METRICS.get(number.column)
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
        return [self._log(number, record, way, min(ends, default=math.inf)) for number, record in terms]

    def _log(self, number: Number, record: Record, way: str, end: float) -> float:
        if number.column in _METRICS:
            return _log(record.metrics.get(_METRICS[number.column][record.kind]))
        if self.equal_time:
            points = zip(numbers(record, "validation", "seconds"), numbers(record, "validation", "nats"), strict=True)
            return next((nats for seconds, nats in reversed(list(points)) if seconds <= end), math.nan)
        speed = number.column == "tokens_per_second"
        columns = (numbers(record, "by_length", name) for name in ("length", number.column if speed else f"{way}_nats"))
        value = dict(zip(*columns, strict=True)).get(self.our_length(number) or 0.0, math.nan)
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


def verdicts(record: Record, by_identity: Mapping[str, Record]) -> list[Verdict]:
    """The verdicts on all claims of the paper about the item that a record answers."""
    evidence = Evidence(record, by_identity)
    return [_verdict(claim, evidence) for claim in CLAIMS if claim.item == item_name(record)]


def counted(judged: Sequence[Verdict]) -> str:
    """The number of claims by verdict: "1 contradicted, 2 confirmed, 3 open"."""
    counts = {word: sum(verdict.word == word for verdict in judged) for word in get_args(Word)}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def in_order(judged: Iterable[tuple[Record, Verdict]]) -> list[tuple[Record, Verdict]]:
    """Contradicted claims first, then confirmed, then open ones; each group in the paper's order."""
    return sorted(judged, key=lambda one: get_args(Word).index(one[1].word))


def all_verdicts(records: Sequence[Record], by_identity: Mapping[str, Record]) -> list[tuple[Record, Verdict]]:
    """All verdicts on the answers among the records, each with its answer, in the paper's order."""
    return [(record, one) for record in answers.sorted_items(records) for one in verdicts(record, by_identity)]


def ratio_text(value: float) -> str:
    """A ratio with four digits; "—" for NaN."""
    if not math.isfinite(value):
        return "—"
    return f"{value:.4f}" if value < 2 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def paired(evidence: Evidence, over: Sequence[Number], under: Sequence[Number], *, way: str) -> Paired:
    """ln of (the product of `over` / the product of `under`), by seed and by part of the text; `way` as in `answers.way_of`."""
    found = [evidence.by_seed(number) for number in (*over, *under)]
    seeds = sorted(set.intersection(*map(set, found)))
    if not seeds:
        where = "are not among these records" if evidence.missing else "are not named by the answer"
        return _nothing(f"its evaluations {where}")
    signs = [1.0] * len(over) + [-1.0] * len(under)
    terms = list(zip(signs, (*over, *under), found, strict=True))
    by_seed = ([(number, of[seed]) for _, number, of in terms] for seed in seeds)
    logs = np.array([float(np.dot(signs, evidence.logs(numbers_of_seed, way))) for numbers_of_seed in by_seed])
    if any("perplexity" not in number.column for number in (*over, *under)):
        return _nothing("measured once, so the influence of chance is unknown", logs)
    if evidence.equal_time:
        return _nothing("validations during training keep no losses by part of the text", logs)
    return _by_part(evidence, terms, seeds, logs, way)


def size(records: Sequence[Record]) -> tuple[str, str]:
    """The number of weights and of training tokens of the models of an answer, in words; "" if not recorded."""
    weights = [value for one in records if (value := one.metrics.get("parameters"))]
    tokens = [value for one in records if one.kind == "training" and (value := one.metrics.get("tokens"))]
    return _millions(weights) if weights else "", _millions(tokens) if tokens else ""


def _by_part(
    evidence: Evidence, terms: Sequence[tuple[float, Number, Mapping[int, Record]]], seeds: Sequence[int], logs: Array, way: str
) -> Paired:  # fmt: skip
    """The differences by part, with neighbors joined until a part is as long as the longest compared context."""
    ran = [of[seed] for _, _, of in terms for seed in seeds]
    if len({_scored(one) for one in ran}) > 1:
        return _nothing("the models were not tested on the same tokens", logs)
    places = [evidence.our_length(number) for _, number, _ in terms]
    parts = [
        [sign * _parts(of[seed], at, f"{way}_nats") for (sign, _, of), at in zip(terms, places, strict=True)]
        for seed in seeds
    ]
    tokens, longest = _parts(ran[0], places[0], "tokens"), max(at or 0.0 for at in places)
    if len({part.size for of_seed in parts for part in of_seed} | {tokens.size}) > 1 or not tokens.sum() > 0:
        return _nothing("the evaluations keep no losses by part of the text", logs)
    differences = np.mean([np.sum(of_seed, axis=0) for of_seed in parts], axis=0)
    values, weights = joined(differences, tokens, longest)
    if values.size < LEAST_PARTS:
        reason = f"the {tokens.sum():,.0f} scored tokens have fewer than three parts as long as the context of {longest:,.0f}"
        return _nothing(reason, logs)
    return Paired(logs=logs, parts=values, weights=weights)


def _verdict(claim: Claim, evidence: Evidence) -> Verdict:
    item = item_of(evidence.record)
    paper, ours = (_ratio(claim, column) for column in (published(item), recorded(evidence.record)))
    verdict = functools.partial(Verdict, claim=claim, paper=paper, ours=ours)
    if not math.isfinite(ours):
        return verdict(word="open", why="not measured at this size")
    if claim.over[0].column in _EXACT:
        exact = Interval(low=ours, high=ours, over="its definition")
        return verdict(word=_word(claim, exact), why="exact, by definition", text=exact)
    found = paired(evidence, claim.over, claim.under, way=answers.way_of(item))
    seeds, text = as_ratio(intervals.seed_interval(found)), as_ratio(intervals.text_interval(found))
    bounds = union(seeds, text)
    word: Word = "open"
    if bounds is None:
        single = "one seed, and " if len(found.logs) == 1 else ""
        why = f"no interval: {single}{found.why_not or 'a loss is not finite'}"
    elif claim.about_training and seeds is None:
        why = f"one training of each, but a claim about training needs two seeds (the interval is over {bounds.over} only)"
    else:
        word = _word(claim, bounds)
        why = f"over {bounds.over}" + (", one training" if len(found.logs) == 1 else "")
        if word == "open":
            why += ": the interval includes the threshold"
    if old := _age(claim, evidence):
        why += f"; {old}"
    return verdict(word=word, why=why, seeds=seeds, text=text)


def _age(claim: Claim, evidence: Evidence) -> str:
    """Why the measured speeds do not describe the present kernels; "" for other claims."""
    speeds = (number for number in (*claim.over, *claim.under) if number.column in _METRICS)
    return next((old for number in speeds for record in evidence.by_seed(number).values() if (old := age(record))), "")


def _word(claim: Claim, bounds: Interval) -> Word:
    if claim.relation == "equal":
        return "confirmed" if math.isclose(bounds.low, claim.threshold) else "contradicted"
    sides = bounds.high < claim.threshold, bounds.low > claim.threshold
    holds, fails = sides if claim.relation == "below" else sides[::-1]
    return "confirmed" if holds else "contradicted" if fails else "open"


def _ratio(claim: Claim, column: Column) -> float:
    products = [math.prod(_value(column, number) for number in side) for side in (claim.over, claim.under)]
    return products[0] / products[1] if products[1] else math.nan


def _value(column: Column, number: Number) -> float:
    values, lengths = column(number.label, number.column), column(number.label, "paper_length")
    if number.length is not None and lengths.size == values.size and np.isfinite(lengths).any():
        values = values[lengths == number.length]
    return float(values[-1]) if values.size else math.nan


def _parts(record: Record, length: float | None, name: str) -> Array:
    columns = (numbers(record, "by_part", column) for column in ("length", name))
    return np.array([value for at, value in zip(*columns, strict=True) if at == length], dtype=np.float64)


def _scored(record: Record) -> tuple[str, ...]:
    """The settings that determine the scored tokens: the text, its split, their number, and the longest length."""
    test, corpus = section(record, "eval"), section(record, "corpus")
    lengths = sequence(test.get("lengths"))
    return (*(str(test.get(name)) for name in ("split", "tokens")), str(lengths[-1:]), str(corpus.get("test_sha256")),
            str(corpus.get("sha256")))  # fmt: skip


def _nothing(why_not: str, logs: Array | None = None) -> Paired:
    empty = np.empty(0)
    return Paired(logs=empty if logs is None else logs, parts=empty, weights=empty, why_not=why_not)


def _lengths(record: Record) -> tuple[Json, Json]:
    """The trained length, and the shorter one that a staged training began with."""
    train = section(record, "train")
    return train.get("length"), train.get("first_length")


def _log(value: float | None) -> float:
    return math.log(value) if value is not None and value > 0 else math.nan


def _millions(values: Sequence[float]) -> str:
    low, high = (f"{bound / 1e6:.2g}" for bound in (min(values), max(values)))
    return f"{low} M" if low == high else f"{low} to {high} M"
