"""Differences of logarithms, paired by seed and by part of the scored text: what intervals are computed from.

A term is a number with a sign: ln of the product of numbers divided by the product of others is the sum of terms.
Next: `verdicts.py` for the paper's claims; `intervals.py` for the intervals.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from alibi_lab.records import Record
from alibi_lab.report.intervals import LEAST_PARTS, Array, Paired, joined, mean_interval
from alibi_lab.report.series import Mode, Series, column_by, numbers, section, seed_of, sequence


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


def _parts(record: Record, length: float | None, name: str) -> Array:
    columns = (numbers(record, "by_part", column) for column in ("length", name))
    return np.array([value for at, value in zip(*columns, strict=True) if at == length], dtype=np.float64)


def _scored(record: Record) -> tuple[str, ...]:
    """The settings that determine the scored tokens: the text, its split, their number, and the longest length."""
    test, corpus = section(record, "eval"), section(record, "corpus")
    tested = [str(test.get(name)) for name in ("split", "tokens")]
    longest = str(sequence(test.get("lengths"))[-1:])
    return (*tested, longest, str(corpus.get("test_sha256")), str(corpus.get("sha256")))
