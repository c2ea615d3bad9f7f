"""Verdicts: whether each claim of the paper is confirmed, contradicted or open at the size of our models, with its interval.

A claim is about a ratio; its logarithm is a difference, paired by seed and by part of the text (`intervals.py`). Confirmed: the
whole interval is on the claim's side of the threshold. Contradicted: all of it is on the other side. Everything else is open,
with the reason (`why`).

* A claim that compares two trainings (ALiBi against sinusoidal, L = 512 against L = 3072), or speeds, is about training: it
  needs an interval over seeds, because one training of each says nothing about others, however long the text. Two measured
  speeds without an interval leave a claim open too.
* A claim about how one model's perplexity changes with length can be decided over text with a single seed, for that model.
* A definition (slopes, forward passes) involves no chance and is compared exactly.

`reasons.json` explains the contradictions of our own results, by scale and claim; it is written by hand.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from alibi_lab.records import Record, age
from alibi_lab.report import answers, intervals
from alibi_lab.report.answers import METRICS, Column, Sources, item_name, item_of, published, recorded
from alibi_lab.report.intervals import Columns, Interval, Paired, Term, Word, as_ratio, by_part, union, word_of
from alibi_lab.report.published import CLAIMS, Claim, Number

CONTRADICTED_BECAUSE: Mapping[str, Mapping[str, str]] = json.loads(
    Path(__file__).with_name("reasons.json").read_text(encoding="utf-8")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim compared with one answer.

    Args:
        paper, ours: the ratios; NaN if unknown.
        seeds, text: the intervals over seeds and over text; None if there is none.
        pairs: the differences that the intervals are of; None if none were needed.
        aged: why measured speeds do not describe the present kernels; "" for other claims.
    """

    claim: Claim
    paper: float
    ours: float
    word: Word
    seeds: Interval | None = None
    text: Interval | None = None
    pairs: Paired | None = None
    aged: str = ""

    @property
    def interval(self) -> Interval | None:
        """The interval of the ratio, over seeds and over text."""
        return union(self.seeds, self.text)


def verdicts(record: Record, by_identity: Mapping[str, Record]) -> list[Verdict]:
    """The verdicts on all claims of the paper about the item that a record answers."""
    sources = Sources(record, by_identity)
    return [_verdict(claim, sources) for claim in CLAIMS if claim.item == item_name(record)]


def all_verdicts(records: Sequence[Record], by_identity: Mapping[str, Record]) -> list[tuple[Record, Verdict]]:
    """All verdicts on the answers among the records, each with its answer: contradicted claims first, then confirmed, then open
    ones, each in the paper's order."""
    judged = [(record, one) for record in answers.sorted_items(records) for one in verdicts(record, by_identity)]
    return sorted(judged, key=lambda one: get_args(Word).index(one[1].word))


def paired(sources: Sources, over: Sequence[Number], under: Sequence[Number], *, way: str) -> Paired:
    """ln of (the product of `over` / the product of `under`), by seed and by part of the text; `way` as in `answers.way_of`."""
    named, signs = (*over, *under), [1.0] * len(over) + [-1.0] * len(under)
    terms = [Term(sign, sources.by_seed(one), sources.our_length(one)) for sign, one in zip(signs, named, strict=True)]
    seeds = sorted(set.intersection(*(set(term.records) for term in terms)))
    if not seeds:
        where = "are not among these records" if sources.missing else "are not named by the answer"
        return Paired(why_not=f"its evaluations {where}")
    read = {seed: [(one, term.records[seed]) for one, term in zip(named, terms, strict=True)] for seed in seeds}
    logs = {seed: float(np.dot(signs, sources.logs(pairs, way))) for seed, pairs in read.items()}
    if any("perplexity" not in number.column for number in named):
        why_not = "measured once, so the influence of chance is unknown"
    elif sources.equal_time:
        why_not = "validations during training keep no losses by part of the text"
    else:
        return by_part(terms, logs, Columns(f"{way}_nats"))
    return Paired(logs=np.array([*logs.values()]), why_not=why_not)


def decided(claim: Claim, ours: float, pairs: Paired) -> Verdict:
    """The verdict on a claim from the differences of its logarithms, without the paper's ratio."""
    seeds, text = as_ratio(intervals.seed_interval(pairs)), as_ratio(intervals.text_interval(pairs))
    bounds = union(seeds, text) if seeds or not claim.about_training else None
    word = _word(claim, bounds) if bounds else "open"
    return Verdict(claim=claim, paper=math.nan, ours=ours, word=word, seeds=seeds, text=text, pairs=pairs)


def counted(judged: Sequence[Verdict]) -> str:
    """The number of claims by verdict: "1 contradicted, 2 confirmed, 3 open"."""
    counts = {word: sum(verdict.word == word for verdict in judged) for word in get_args(Word)}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def why(verdict: Verdict) -> str:
    """The reason for a verdict."""
    return "; ".join(filter(None, (_reason(verdict), verdict.aged)))


def because(verdict: Verdict, scale: str) -> str:
    """Our explanation of a contradiction at this scale; "" if there is none."""
    return CONTRADICTED_BECAUSE.get(scale, {}).get(verdict.claim.says, "") if verdict.word == "contradicted" else ""


def ratio_text(value: float) -> str:
    """A ratio with four digits; "—" for NaN."""
    if not math.isfinite(value):
        return "—"
    return f"{value:.4f}" if value < 2 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def interval_text(bounds: Interval | None) -> str:
    """The ends of an interval of a ratio; "—" if there is none."""
    return f"{ratio_text(bounds.low)} to {ratio_text(bounds.high)}" if bounds else "—"


def _verdict(claim: Claim, sources: Sources) -> Verdict:
    item = item_of(sources.record)
    paper, ours = (_ratio(claim, column) for column in (published(item), recorded(sources.record)))
    speeds = (number for number in (*claim.over, *claim.under) if number.column in METRICS)
    aged = next((old for number in speeds for record in sources.by_seed(number).values() if (old := age(record))), "")
    if not math.isfinite(ours):
        return Verdict(claim=claim, paper=paper, ours=ours, word="open", aged=aged)
    if claim.over[0].column in ("slope", "pass"):  # defined, not measured
        exact = Interval(low=ours, high=ours, over="its definition")
        return Verdict(claim=claim, paper=paper, ours=ours, word=_word(claim, exact), text=exact)
    found = paired(sources, claim.over, claim.under, way=answers.way_of(item))
    return dataclasses.replace(decided(claim, ours, found), paper=paper, aged=aged)


def _word(claim: Claim, bounds: Interval) -> Word:
    if claim.relation == "equal":
        return "confirmed" if math.isclose(bounds.low, claim.threshold) else "contradicted"
    return word_of(bounds, claim.relation, claim.threshold)


def _ratio(claim: Claim, column: Column) -> float:
    products = [math.prod(_value(column, number) for number in side) for side in (claim.over, claim.under)]
    return products[0] / products[1] if products[1] else math.nan


def _value(column: Column, number: Number) -> float:
    values, lengths = column(number.label, number.column), column(number.label, "paper_length")
    if number.length is not None and lengths.size == values.size and np.isfinite(lengths).any():
        values = values[lengths == number.length]
    return float(values[-1]) if values.size else math.nan


def _reason(verdict: Verdict) -> str:
    bounds, pairs = verdict.interval, verdict.pairs
    if pairs is None:
        return "exact, by definition" if bounds else "not measured at this size"
    single = len(pairs.logs) == 1
    if bounds is None:
        return f"no interval: {'one seed, and ' if single else ''}{pairs.why_not or 'a loss is not finite'}"
    if verdict.claim.about_training and verdict.seeds is None:
        return f"one training of each, but a claim about training needs two seeds (the interval is over {bounds.over} only)"
    includes = ": the interval includes the threshold" if verdict.word == "open" else ""
    return f"over {bounds.over}{', one training' if single else ''}{includes}"
