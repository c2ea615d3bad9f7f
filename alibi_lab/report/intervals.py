"""95 % intervals for a mean difference, over seeds and over text, which answer different questions.

    over seeds   would other trainings agree?  mean ± t · s / √S of the differences of S seeds, trained in pairs (equal data and
                 order); Student's t with S − 1 degrees of freedom. Only this interval says anything about other trainings.
    over text    would the same models agree on other text?  The same formula for P parts of the scored text, whose differences
                 are not independent:
                 * Tokens that share a context are correlated, so a part must be at least as long as the longest context that is
                   compared; neighboring parts are joined until it is (`joined`). Fewer than three such parts give no interval:
                   512 tokens scored with 768 tokens of context are one passage, however finely they are divided.
                 * Longer dependence (a chapter, an author) shows when more neighbors are joined: the interval is also computed
                   from groups of four, or of two if fours leave fewer than three groups, and the wider interval counts (batch
                   means; Schmeiser 1982, Operations Research 30:556). With three to five parts no such check is possible.

If there are both, the result is the range that covers them (`union`).

The values are differences of logarithms, paired by seed and by part. A term is a number with a sign: ln of the product of numbers
divided by the product of others is the sum of terms (`by_part`). Next: `verdicts.py` for the paper's claims.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from alibi_lab.records import Record
from alibi_lab.report.series import Array, Mode, Series, by_seed, column_by, numbers, section, sequence

Word = Literal["contradicted", "confirmed", "open"]

LEAST_PARTS = 3
_none = functools.partial(np.empty, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
    """Paired differences (logarithms of a ratio, or differences of shares).

    Args:
        logs: [S], one per seed.
        parts: [P], one per part of the text or of the documents, averaged over seeds; empty if there are none.
        weights: [P], each part's share of the scored tokens.
        why_not: the reason why there are no parts.
    """

    logs: Array = dataclasses.field(default_factory=_none)
    parts: Array = dataclasses.field(default_factory=_none)
    weights: Array = dataclasses.field(default_factory=_none)
    why_not: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """The 95 % range of a ratio or difference; `over` names the samples, as in "2 seeds and 32 parts of the text"."""

    low: float
    high: float
    over: str

    def to(self, low: float, high: float) -> "Interval":
        """Other bounds, over the same samples."""
        return dataclasses.replace(self, low=low, high=high)


def seed_interval(pairs: Paired) -> Interval | None:
    """The interval over seeds; None with fewer than two."""
    count = len(pairs.logs)
    return _interval([(pairs.logs, np.full(count, 1 / count))], f"{count} seeds") if count > 1 else None


def text_interval(pairs: Paired, *, parts: str = "parts of the text") -> Interval | None:
    """The interval over parts; None with fewer than three."""
    count = pairs.parts.size
    if count < LEAST_PARTS:
        return None
    further = next((size for size in (4, 2) if count // size >= LEAST_PARTS), 1)
    return _interval([_joined(pairs.parts, pairs.weights, size) for size in {1, further}], f"{count} {parts}")


def union(one: Interval | None, other: Interval | None) -> Interval | None:
    """The range that covers both intervals; None if there is neither."""
    if one is None or other is None:
        return one or other
    over = f"{one.over} and {other.over}"
    return Interval(low=min(one.low, other.low), high=max(one.high, other.high), over=over)


def mean_interval(pairs: Paired, *, parts: str = "parts of the text") -> Interval | None:
    """The interval of the mean, over seeds and over parts."""
    return union(seed_interval(pairs), text_interval(pairs, parts=parts))


def interval(pairs: Paired) -> Interval | None:
    """The interval of the ratio of which these are logarithms, over seeds and over text."""
    return as_ratio(mean_interval(pairs))


def as_ratio(bounds: Interval | None) -> Interval | None:
    """The interval of e to the power of the mean."""
    return bounds and bounds.to(exp(bounds.low), exp(bounds.high))


def word_of(bounds: Interval, relation: Literal["below", "above"], threshold: float) -> Word:
    """The verdict on a claim that a number is on this side of a threshold: open unless the whole interval is on one side."""
    sides = bounds.high < threshold, bounds.low > threshold
    holds, fails = sides if relation == "below" else sides[::-1]
    return "confirmed" if holds else "contradicted" if fails else "open"


def joined(parts: Array, tokens: Array, length: float) -> tuple[Array, Array]:
    """Parts and their shares, with neighbors joined until each has at least `length` tokens on average; possibly too few."""
    size = max(1, math.ceil(length * parts.size / tokens.sum()))
    return _joined(parts, tokens / tokens.sum(), size) if parts.size >= size else (_none(), _none())


def exp(value: float) -> float:
    """e to the power of a number; infinite instead of an overflow."""
    return math.exp(value) if value < 700 else math.inf


class Columns(NamedTuple):
    """The columns with a loss or a share: by length, and by part with the number of scored tokens or answers."""

    value: str
    by_length: str = "by_length"
    by_part: str = "by_part"
    weights: str = "tokens"


class Term(NamedTuple):
    """A number of each seed: its sign, the records that it is read from by seed, and the length at which it was tested."""

    sign: float
    records: Mapping[int, Record]
    length: float | None


def by_part(terms: Sequence[Term], logs: Mapping[int, float], columns: Columns, *, joins: bool = True) -> Paired:
    """The sums of the terms by part of the text.

    Args:
        logs: the same sums over the whole text, by seed.
        joins: joins neighbors until a part is as long as the longest context.
    """
    pairs = functools.partial(Paired, logs=np.array([*logs.values()]))
    ran = [term.records[seed] for term in terms for seed in logs]
    if len({_scored(one) for one in ran}) > 1:
        return pairs(why_not="the models were not tested on the same tokens")
    parts = [[term.sign * _parts(term.records[seed], term.length, columns) for term in terms] for seed in logs]
    tokens = _parts(ran[0], terms[0].length, columns, columns.weights)
    longest = max(term.length or 0.0 for term in terms) if joins else 0.0
    if len({part.size for of_seed in parts for part in of_seed} | {tokens.size}) > 1 or not tokens.sum() > 0:
        return pairs(why_not="the evaluations keep no losses by part of the text")
    differences = np.mean([np.sum(of_seed, axis=0) for of_seed in parts], axis=0)
    values, weights = joined(differences, tokens, longest)
    if values.size < LEAST_PARTS:
        reason = f"the {tokens.sum():,.0f} scored tokens have fewer than three parts as long as the context of {longest:,.0f}"
        return pairs(why_not=reason)
    return pairs(parts=values, weights=weights)


def paired(terms: Sequence[Term], columns: Columns, *, joins: bool = True) -> Paired | None:
    """The sums of the terms, by seed and `by_part`; None if no seed has all of them."""
    logs: dict[int, float] = {}
    for seed in sorted(set.intersection(*(set(term.records) for term in terms))):
        value = sum(term.sign * value_of(term.records[seed], term.length, columns) for term in terms)
        logs |= {seed: value} if math.isfinite(value) else {}
    return by_part(terms, logs, columns, joins=joins) if logs else None


def value_of(record: Record, length: float | None, columns: Columns) -> float:
    """The value at a length; NaN if it was not measured."""
    return column_by(record, columns.by_length, "length", columns.value).get(length or math.nan, math.nan)


def between(one: Series, other: Series, mode: Mode, length: float, other_length: float | None = None) -> Paired | None:
    """ln of the perplexity of one series at a length divided by that of another, by default at the same length, paired by seed;
    None without a common seed."""
    sides = ((1.0, one, length), (-1.0, other, other_length or length))
    return paired([Term(sign, by_seed(of.evaluations), at) for sign, of, at in sides], Columns(f"{mode}_nats"))


def change(series: Series, mode: Mode, *, to: int | None = None) -> Paired | None:
    """`between` a series at `to` (by default the longest length) and at the trained length; None if there are not two lengths."""
    ends = series.ends(mode)
    if ends is None or ends[0] == (to or ends[1]):
        return None
    return between(series, series, mode, to or ends[1], ends[0])


def first_worse(series: Series, mode: Mode) -> tuple[int, int | None] | None:
    """(the last tested length that is not worse, the first that is), by the whole interval of the change from the trained
    length on the same tokens. The second is None if no length is worse; the pair is None if no change has an interval."""
    ends = series.ends(mode)
    if ends is None:
        return None
    tested = [int(x) for x in series.curve("by_length", "length", f"{mode}_nats")[0] if x > ends[0]]
    bounds = [pairs and mean_interval(pairs) for pairs in (change(series, mode, to=length) for length in tested)]
    if not any(bounds):
        return None
    place = next((place for place, bound in enumerate(bounds) if bound and bound.low > 0), len(tested))
    return [ends[0], *tested][place], [*tested, None][place]


def _interval(samples: list[tuple[Array, Array]], over: str) -> Interval | None:
    """The range that covers Student's intervals of the weighted means."""
    low, high = zip(*(_mean_bounds(*sample) for sample in samples), strict=True)
    return Interval(low=min(low), high=max(high), over=over) if np.isfinite([low, high]).all() else None


def _mean_bounds(values: Array, weights: Array) -> tuple[float, float]:
    """Student's interval of the weighted mean of independent values."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # most commands need no SciPy

    count, mean = len(values), float(weights @ values)
    variance = count / (count - 1) * float(weights**2 @ (values - mean) ** 2)
    half = float(stdtrit(count - 1, 0.975)) * math.sqrt(variance)
    return mean - half, mean + half


def _joined(parts: Array, weights: Array, size: int) -> tuple[Array, Array]:
    """Parts and their shares, with `size` or more neighbors joined into one."""
    groups = np.arange(parts.size) * (parts.size // size) // parts.size
    shares = np.bincount(groups, weights=weights).astype(np.float64)
    return np.bincount(groups, weights=weights * parts) / shares, shares


def _parts(record: Record, length: float | None, columns: Columns, name: str = "") -> Array:
    at, values = (np.array(numbers(record, columns.by_part, one)) for one in ("length", name or columns.value))
    return values[at == length]


def _scored(record: Record) -> tuple[str, ...]:
    """The settings that determine the scored tokens: the text, its split, their number, and the longest length."""
    test, corpus = section(record, "eval"), section(record, "corpus")
    tested = [str(test.get(name)) for name in ("split", "tokens")]
    longest = str(sequence(test.get("lengths"))[-1:])
    return (*tested, longest, str(corpus.get("test_sha256")), str(corpus.get("sha256")))
