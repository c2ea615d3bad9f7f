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
from alibi_lab.report.series import Array, Mode, Series, column_by, numbers, section, seed_of, sequence

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


class Term(NamedTuple):
    """A number of each seed: its sign, the records that it is read from by seed, and the length at which it was tested."""

    sign: float
    records: Mapping[int, Record]
    length: float | None


def by_part(terms: Sequence[Term], logs: Mapping[int, float], column: str) -> Paired:
    """The sums of the terms by part of the text, with neighbors joined until a part is as long as the longest context.

    Args:
        logs: the same sums over the whole text, by seed.
        column: the losses of a part, in nats.
    """
    pairs = functools.partial(Paired, logs=np.array([*logs.values()]))
    ran = [term.records[seed] for term in terms for seed in logs]
    if len({_scored(one) for one in ran}) > 1:
        return pairs(why_not="the models were not tested on the same tokens")
    parts = [[term.sign * _parts(term.records[seed], term.length, column) for term in terms] for seed in logs]
    tokens, longest = _parts(ran[0], terms[0].length, "tokens"), max(term.length or 0.0 for term in terms)
    if len({part.size for of_seed in parts for part in of_seed} | {tokens.size}) > 1 or not tokens.sum() > 0:
        return pairs(why_not="the evaluations keep no losses by part of the text")
    differences = np.mean([np.sum(of_seed, axis=0) for of_seed in parts], axis=0)
    values, weights = joined(differences, tokens, longest)
    if values.size < LEAST_PARTS:
        reason = f"the {tokens.sum():,.0f} scored tokens have fewer than three parts as long as the context of {longest:,.0f}"
        return pairs(why_not=reason)
    return pairs(parts=values, weights=weights)


def change(series: Series, mode: Mode, *, to: int | None = None) -> Paired | None:
    """ln of the perplexity at `to` (by default the longest length) divided by that at the trained length; None if there are
    not two lengths."""
    ends = series.ends(mode)
    if ends is None or ends[0] == (to or ends[1]):
        return None
    start, end, column = ends[0], to or ends[1], f"{mode}_nats"
    by_seed = {seed_of(record): record for record in series.evaluations}
    losses = {seed: column_by(record, "by_length", "length", column) for seed, record in by_seed.items()}
    logs = {seed: at.get(end, math.nan) - at.get(start, math.nan) for seed, at in losses.items()}
    logs = {seed: value for seed, value in logs.items() if math.isfinite(value)}
    return by_part([Term(1.0, by_seed, end), Term(-1.0, by_seed, start)], logs, column) if logs else None


def between(one: Series, other: Series, mode: Mode, length: float) -> Paired | None:
    """ln of the perplexity of one series divided by that of another at a length, paired by seed; None without a common seed."""
    found = [{seed_of(record): record for record in series.evaluations} for series in (one, other)]
    column, logs = f"{mode}_nats", dict[int, float]()
    for seed in found[0].keys() & found[1].keys():
        nats, others = (column_by(of[seed], "by_length", "length", column).get(length, math.nan) for of in found)
        logs |= {seed: nats - others} if math.isfinite(nats - others) else {}
    terms = [Term(sign, records, length) for sign, records in zip((1.0, -1.0), found, strict=True)]
    return by_part(terms, dict(sorted(logs.items())), column) if logs else None


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


def _parts(record: Record, length: float | None, name: str) -> Array:
    columns = (numbers(record, "by_part", column) for column in ("length", name))
    return np.array([value for at, value in zip(*columns, strict=True) if at == length], dtype=np.float64)


def _scored(record: Record) -> tuple[str, ...]:
    """The settings that determine the scored tokens: the text, its split, their number, and the longest length."""
    test, corpus = section(record, "eval"), section(record, "corpus")
    tested = [str(test.get(name)) for name in ("split", "tokens")]
    longest = str(sequence(test.get("lengths"))[-1:])
    return (*tested, longest, str(corpus.get("test_sha256")), str(corpus.get("sha256")))
