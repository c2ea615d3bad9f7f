"""Verdicts: each claim of the paper confirmed, contradicted or not decided at the size of an answer, with the interval behind it.

The quantity of a claim is a ratio; its logarithm is a difference of losses in nats, d. Two intervals of 95 % are made of d:

    over seeds   d of each seed, trained in pairs (equal data, equal order): mean ± t · s / √S, Student's t with S − 1 degrees
    over text    d of each part of the scored text ("by_part" of the evaluations, the same tokens on both sides), in the same way;
                 neighbors may depend on each other, so it is made of a quarter as many larger parts too, and the wider counts

Where both are known, what lies in either counts as possible. Confirmed: all of it is on the claim's side. Contradicted: all of it
on the other. With one seed the interval speaks of these trained models on other text, and not of other trainings; without any
of the two there is no verdict, however far apart two numbers are.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alibi_attn.records import Json, Record
from alibi_attn.report.answers import Column, item_name, item_of, published, recorded, scale_factor, way_of
from alibi_attn.report.claims import CLAIMS, Claim, Number
from alibi_attn.report.published import method_of, trained_length
from alibi_attn.report.series import numbers

Word = Literal["confirmed", "contradicted", "not decided"]
Array = NDArray[np.float64]

# Student's t for two-sided 95 %, by degrees of freedom; between two of them the smaller number of degrees is taken.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 15: 2.131,
        20: 2.086, 30: 2.042, 60: 2.0}  # fmt: skip
_LEAST_PARTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
    """The logarithm of a ratio (or a difference of shares), [S] by seed, and of one part of the text (or of the documents) after
    the other, the mean over seeds, [P].

    `weights` [P] are the parts' shares of the tokens; where no interval over text can be made, both are empty and `why_not`
    says why.
    """

    logs: Array
    parts: Array
    weights: Array
    why_not: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """What the ratio (or difference) may be, 95 %; `over` is what it was estimated from: "2 seeds and 32 parts of the text"."""

    low: float
    high: float
    over: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim held against one answer; `ours` and `paper` are the ratio, NaN where it is not known."""

    claim: Claim
    paper: float
    ours: float
    interval: Interval | None
    word: Word
    why: str


class Evidence:
    """The evaluations that an answer names as what it was read from, as far as they are at hand.

    Args:
        record: an answer.
        by_identity: any records by their identity, among them perhaps those.
    """

    def __init__(self, record: Record, by_identity: Mapping[str, Record]) -> None:
        names = record.config.get("evidence")
        digits = [str(name).removesuffix(".json").rpartition("-")[2] for name in _sequence(names)]
        self.record = record
        self.records = [by_identity[key] for key in digits if key in by_identity]
        self.missing = len(digits) - len(self.records)
        self._factor = scale_factor(record)

    def evaluations(self, number: Number) -> dict[int, Record]:
        """By seed, the evaluations of a number's model on its part of the text that have its length."""
        tested = self.our_length(number)
        trained = trained_length(number.label) or number.length
        if tested is None or trained is None:
            return {}
        wanted = method_of(number.label), round(trained / self._factor), None
        split = "test" if number.column.startswith("test") else "valid"
        return {
            _integer(_section(one, "train").get("seed")): one
            for one in self.records
            if one.kind == "evaluation"
            and _section(one, "eval").get("split") == split
            and (_section(one, "model").get("method"), *_lengths(one)) == wanted
            and tested in numbers(one, "by_length", "length")
        }

    def our_length(self, number: Number) -> float | None:
        """The length of ours that stands for the paper's; None where nothing was tested there."""
        column = recorded(self.record)
        ours = column(number.label, "length")[column(number.label, "paper_length") == number.length]
        return float(ours[0]) if ours.size else None


def verdicts(record: Record, by_identity: Mapping[str, Record]) -> list[Verdict]:
    """Every claim of the paper about the item that a record answers."""
    evidence = Evidence(record, by_identity)
    return [_verdict(claim, evidence) for claim in CLAIMS if claim.item == item_name(record)]


def paired(evidence: Evidence, over: Sequence[Number], under: Sequence[Number], *, way: str) -> Paired:
    """ln of (the product of `over` / the product of `under`), seed by seed and part by part; `way` as in `answers.way_of`."""
    found = [evidence.evaluations(number) for number in (*over, *under)]
    seeds = sorted(set.intersection(*map(set, found)))
    if not seeds:
        where = "are not among these records" if evidence.missing else "are not named by the answer"
        return _nothing(f"the evaluations that it would be read from {where}")
    signs = [1.0] * len(over) + [-1.0] * len(under)
    terms = [
        (sign, by_seed, evidence.our_length(number))
        for sign, by_seed, number in zip(signs, found, (*over, *under), strict=True)
    ]
    logs = np.array([sum(sign * _nats(by_seed[seed], at, way) for sign, by_seed, at in terms) for seed in seeds])
    ran = [by_seed[seed] for _, by_seed, _ in terms for seed in seeds]
    if len({_scored(one) for one in ran}) > 1:
        return _nothing("the models were not tested on the same tokens", logs)
    parts = [[sign * _parts(by_seed[seed], at, f"{way}_nats") for sign, by_seed, at in terms] for seed in seeds]
    tokens = _parts(ran[0], terms[0][2], "tokens")
    if len({part.size for of_seed in parts for part in of_seed} | {tokens.size}) > 1 or tokens.size < _LEAST_PARTS:
        kept = "fewer than four parts" if tokens.size else "no losses by part"
        return _nothing(f"the evaluations keep {kept} of the text", logs)
    differences = np.mean([np.sum(of_seed, axis=0) for of_seed in parts], axis=0)
    return Paired(logs=logs, parts=differences, weights=tokens / tokens.sum())


def interval(found: Paired) -> Interval | None:
    """95 % of the ratio over seeds and over text, what lies in either; None where there is neither."""
    bounds = mean_interval(found)
    return bounds and dataclasses.replace(bounds, low=_exp(bounds.low), high=_exp(bounds.high))


def mean_interval(found: Paired, *, parts: str = "parts of the text") -> Interval | None:
    """The same of the mean itself, which is not taken for a logarithm."""
    bounds, over = [], []
    if len(found.logs) > 1:
        bounds.append(_mean_bounds(found.logs, np.full(len(found.logs), 1 / len(found.logs))))
        over.append(f"{len(found.logs)} seeds")
    if found.parts.size:
        sizes = [1, 4] if found.parts.size >= 4 * _LEAST_PARTS else [1]
        bounds += [_mean_bounds(*_merged(found, size)) for size in sizes]
        over.append(f"{found.parts.size} {parts}")
    if not bounds or not np.isfinite(bounds).all():
        return None
    low, high = min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)
    return Interval(low=low, high=high, over=" and ".join(over))


def student_t(degrees: int) -> float:
    """The half-width of a 95 % interval in standard errors, for the next smaller number of degrees that is tabled."""
    return T_95[max(known for known in T_95 if known <= degrees)]


def size(records: Sequence[Record]) -> tuple[str, str]:
    """How many weights the models behind an answer have, and how many tokens each was trained on; "" where nobody knows."""
    weights = [value for one in records if (value := one.metrics.get("parameters"))]
    tokens = [value for one in records if one.kind == "training" and (value := one.metrics.get("tokens"))]
    return _millions(weights) if weights else "", _millions(tokens) if tokens else ""


def _verdict(claim: Claim, evidence: Evidence) -> Verdict:
    item = item_of(evidence.record)
    paper, ours = (_ratio(claim, column) for column in (published(item), recorded(evidence.record)))
    if not math.isfinite(ours):
        return Verdict(
            claim=claim, paper=paper, ours=ours, interval=None, word="not decided", why="not measured at this size"
        )
    if claim.over[0].length is None:
        why = "measured once, with no losses by part of the text: nothing shows how much chance is in it"
        return Verdict(claim=claim, paper=paper, ours=ours, interval=None, word="not decided", why=why)
    found = paired(evidence, claim.over, claim.under, way=way_of(item))
    bounds = interval(found)
    if bounds is None:
        seeds = "one seed, and " if len(found.logs) == 1 else ""
        why = f"no interval: {seeds}{found.why_not or 'a loss is no number'}"
        return Verdict(claim=claim, paper=paper, ours=ours, interval=None, word="not decided", why=why)
    sides = bounds.high < claim.threshold, bounds.low > claim.threshold
    holds, fails = sides if claim.relation == "below" else sides[::-1]
    word: Word = "confirmed" if holds else "contradicted" if fails else "not decided"
    why = f"over {bounds.over}"
    if len(found.logs) == 1:
        why += ", one training each"
    return Verdict(claim=claim, paper=paper, ours=ours, interval=bounds, word=word, why=why)


def _ratio(claim: Claim, column: Column) -> float:
    products = [math.prod(_value(column, number) for number in side) for side in (claim.over, claim.under)]
    return products[0] / products[1] if products[1] else math.nan


def _value(column: Column, number: Number) -> float:
    values, lengths = column(number.label, number.column), column(number.label, "paper_length")
    if number.length is not None and lengths.size == values.size and np.isfinite(lengths).any():
        values = values[lengths == number.length]
    return float(values[-1]) if values.size else math.nan


def _nats(record: Record, length: float | None, way: str) -> float:
    columns = (numbers(record, "by_length", name) for name in ("length", f"{way}_nats"))
    return next((nats for at, nats in zip(*columns, strict=True) if at == length), math.nan)


def _parts(record: Record, length: float | None, name: str) -> Array:
    columns = (numbers(record, "by_part", column) for column in ("length", name))
    return np.array([value for at, value in zip(*columns, strict=True) if at == length], dtype=np.float64)


def _scored(record: Record) -> tuple[str, ...]:
    """What decides which tokens are scored: the text, its part, how many, and the longest length."""
    test, corpus = _section(record, "eval"), _section(record, "corpus")
    lengths = _sequence(test.get("lengths"))
    return (*(str(test.get(name)) for name in ("split", "tokens")), str(lengths[-1:]), str(corpus.get("test_sha256")),
            str(corpus.get("sha256")))  # fmt: skip


def _mean_bounds(values: Array, weights: Array) -> tuple[float, float]:
    """Student's interval of the weighted mean of independent values."""
    count, mean = len(values), float(weights @ values)
    variance = count / (count - 1) * float(weights**2 @ (values - mean) ** 2)
    half = student_t(count - 1) * math.sqrt(variance)
    return mean - half, mean + half


def _merged(found: Paired, size: int) -> tuple[Array, Array]:
    """Parts and their shares, `size` neighbors as one."""
    groups = np.arange(found.parts.size) * (found.parts.size // size) // found.parts.size
    weights = np.bincount(groups, weights=found.weights).astype(np.float64)
    return np.bincount(groups, weights=found.weights * found.parts) / weights, weights


def _nothing(why_not: str, logs: Array | None = None) -> Paired:
    empty = np.empty(0)
    return Paired(logs=empty if logs is None else logs, parts=empty, weights=empty, why_not=why_not)


def _lengths(record: Record) -> tuple[Json, Json]:
    """The trained length, and the shorter one that a staged training began with."""
    train = _section(record, "train")
    return train.get("length"), train.get("first_length")


def _section(record: Record, name: str) -> Mapping[str, Json]:
    found = record.config.get(name)
    return found if isinstance(found, Mapping) else {}


def _sequence(value: Json) -> Sequence[Json]:
    return value if isinstance(value, list | tuple) else ()


def _integer(value: Json) -> int:
    return value if isinstance(value, int) else 0


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _millions(values: Sequence[float]) -> str:
    low, high = (f"{bound / 1e6:.2g}" for bound in (min(values), max(values)))
    return f"{low} M" if low == high else f"{low} to {high} M"
