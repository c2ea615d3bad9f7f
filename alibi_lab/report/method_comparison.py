"""Compares position methods on the results of `alibi run referee`, with an interval for each number.

    task      the data for training and testing: a text, or a task of symbols with a known chance level
    score     for a task, the share of correct answers; for a text, the perplexity with a sliding window, divided by the lowest
              perplexity of any method at the trained length on the same tokens
    solved    the whole interval of a share is at or above 90 %; not solved: all of it is below; open: neither

Intervals are computed as in `verdicts.py`: 95 %, over seeds and over parts of the documents, covering both. The
interval of a share is at least ±3/n for n documents, which also holds if all documents agree (the rule of three). A
method is significantly better than another if the interval of their difference, paired by seed and part, excludes zero.
Next: `sections/method_comparison.py`, which draws it.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from alibi_lab.records import Record, flat
from alibi_lab.report.intervals import Interval, Paired, as_ratio, exp, mean_interval, word_of
from alibi_lab.report.series import Array, Series, Study, column_by, numbers, seed_of, sequence

RECIPE = "referee"
SOLVED = 0.9
# The share of correct guesses among the symbols that can be an answer.
CHANCE = {"mqar": 1 / 16, "needles": 1 / 16, "copy": 1 / 63, "flip-flop": 1 / 2}
TITLES = {"mqar": "associative recall", "needles": "needles", "copy": "copying", "flip-flop": "one bit (flip-flop)"}
_TEXT = ("by_length", "by_part", "sliding_nats", "tokens", -1.0)  # its curves and columns, and the sign of losses


Level = Literal["solved", "not solved", "open"]


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one method at one length: shares, or negative losses in nats, so that more is better.

    Args:
        seeds: by seed.
        parts: by seed, [P], one per part of the documents.
        weights: [P], each part's share of the scored tokens or answers.
        least: the smallest half-width of an interval.
    """

    seeds: Mapping[int, float]
    parts: Mapping[int, Array]
    weights: Array
    least: float

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.seeds.values()))) if self.seeds else math.nan


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """One task or text.

    Args:
        name: the name of the task; "" for a text.
        scores: by (method, length), for the trained and the longest length.
        best: the method with the lowest perplexity at the trained length, by which perplexities are divided; "" for a task.
    """

    name: str
    title: str
    study: Study
    scores: Mapping[tuple[str, int], Scores]
    best: str = ""

    @property
    def lengths(self) -> tuple[int, int]:
        """The trained length and the longest tested length."""
        return self.study.trained[0], max(self.study.lengths)

    @property
    def chance(self) -> float:
        return CHANCE.get(self.name, math.nan)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A number and its interval, None if there is none."""

    value: float
    interval: Interval | None


def comparisons(studies: Iterable[Study]) -> list[list[Task]]:
    """The tasks of each comparison: studies of the recipe with equal models, trainings and lengths; texts first."""
    found: dict[str, list[Task]] = {}
    for study in filter(is_compared, studies):
        by_shape: dict[str, list[Series]] = {}
        for series in study.series:
            by_shape.setdefault(_shape(series), []).append(series)
        for shape, own in by_shape.items():
            task = _task(dataclasses.replace(study, series=tuple(own)))
            found.setdefault(f"{shape} {study.lengths}", []).append(task)
    for tasks in found.values():
        tasks.sort(key=lambda task: (list(TITLES).index(task.name) if task.name else -1, task.title))
    return list(found.values())


def is_compared(study: Study) -> bool:
    """Whether a study belongs to a comparison."""
    return study.recipe == RECIPE and bool(study.lengths)


def methods(tasks: Sequence[Task]) -> list[Series]:
    """One series per method, in the order of the studies."""
    plain = (series for task in tasks for series in task.study.series if series.stretch == "none")
    return list({series.method: series for series in plain}.values())


def is_learned(task: Task) -> bool:
    """Whether the best method has at least 90 % correct answers at the trained length (mean over seeds); true for a text."""
    return not task.name or best_at_trained(task)[1] >= SOLVED


def best_at_trained(task: Task) -> tuple[str, float]:
    """The label of the method with the largest share at the trained length, and that share."""
    shares = [(series.label, scores(task, series.method, task.lengths[0]).mean) for series in task.study.series]
    return max(shares, key=lambda one: one[1] if math.isfinite(one[1]) else -1.0)


def scores(task: Task, method: str, length: int) -> Scores:
    """The scores of a method at the trained or the longest length; empty if it was not measured."""
    return task.scores.get((method, length), Scores({}, {}, np.empty(0), 0.0))


def compared(own: Scores, other: Scores | None = None) -> Measured:
    """The mean of the scores, or of their differences from other scores, paired by seed and part."""
    found = _differences(own, other) if other else own
    if not found.seeds:
        return Measured(math.nan, None)
    pairs = Paired(logs=np.array([*found.seeds.values()]))
    if {part.size for part in found.parts.values()} == {own.weights.size} and own.weights.sum() > 0:
        parts = np.mean([*found.parts.values()], axis=0)
        pairs = dataclasses.replace(pairs, parts=parts, weights=own.weights / own.weights.sum())
    value, bounds = float(pairs.logs.mean()), mean_interval(pairs, parts="parts of the documents")
    if bounds is not None:
        bounds = bounds.to(min(bounds.low, value - own.least), max(bounds.high, value + own.least))
    return Measured(value, bounds)


def _differences(own: Scores, other: Scores) -> Scores:
    """The differences from the other scores of the same seed; without parts where their numbers differ."""
    seeds = sorted(own.seeds.keys() & other.seeds.keys())
    alike = len({side.parts[seed].size for side in (own, other) for seed in seeds}) == 1
    parts = {seed: own.parts[seed] - other.parts[seed] for seed in seeds if alike}
    return dataclasses.replace(own, seeds={seed: own.seeds[seed] - other.seeds[seed] for seed in seeds}, parts=parts)


def measured(task: Task, method: str, length: int) -> Measured:
    """The share of correct answers, or the perplexity divided by the lowest one at the trained length (on the same tokens)."""
    return _shown(task, compared(_relative(task, method, length)))


def by_seed(task: Task, method: str, length: int) -> list[Measured]:
    """`measured` for each seed, without intervals."""
    return [_shown(task, Measured(value, None)) for value in _relative(task, method, length).seeds.values()]


def _relative(task: Task, method: str, length: int) -> Scores:
    """The shares of a method, or its losses' differences from the lowest at the trained length."""
    own = scores(task, method, length)
    return own if task.name else _differences(own, scores(task, task.best, task.lengths[0]))


def _shown(task: Task, found: Measured) -> Measured:
    """A share with its interval between 0 and 1, or the ratio of perplexities from a difference of negative losses."""
    bounds = found.interval
    if task.name:
        return Measured(found.value, bounds and bounds.to(max(bounds.low, 0.0), min(bounds.high, 1.0)))
    return Measured(exp(-found.value), as_ratio(bounds and bounds.to(-bounds.high, -bounds.low)))


def level(found: Measured) -> Level:
    """Whether a task is solved, according to the interval of its share."""
    if found.interval is None:
        return "open"
    return "solved" if found.interval.low >= SOLVED else "not solved" if found.interval.high < SOLVED else "open"


def score_text(task: Task, value: float) -> str:
    """A share in percent, a ratio with two decimals; "—" if it was not measured."""
    if not math.isfinite(value):
        return "—"
    if task.name:
        return f"{100 * value:.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def says_nothing(task: Task, found: Measured) -> bool:
    """Whether a share may be anything from chance to solved."""
    bounds = found.interval
    return bool(task.name) and (bounds is None or (bounds.low <= task.chance and bounds.high >= SOLVED))


def rank(task: Task, method: str, length: int) -> tuple[int, int] | None:
    """The best and the worst possible rank: after all significantly better and before all significantly worse methods."""
    own = scores(task, method, length)
    others = (one for (other, at), one in task.scores.items() if at == length and other != method and one.seeds)
    found = [compared(own, other).interval for other in others]
    better = sum(bounds is not None and bounds.high < 0 for bounds in found)
    worse = sum(bounds is not None and bounds.low > 0 for bounds in found)
    return (1 + better, 1 + len(found) - worse) if own.seeds else None


def dropped_beats_alibi(tasks: Sequence[Task]) -> str:
    """The verdict on DroPE's claim (Gelberg et al. 2025, arXiv:2512.12167) in a sentence; "" if it was not measured.

    The claim: beyond the trained length, rotary positions that are dropped find more needles than ALiBi.
    """
    for task in tasks:
        longest = task.lengths[1]
        found = compared(*(scores(task, method, longest) for method in ("drope", "alibi")))
        bounds = found.interval
        if task.name == "needles" and bounds:
            word = word_of(bounds, "above", 0.0)
            points = [f"{100 * share:.0f}".replace("-", "−") for share in (found.value, bounds.low, bounds.high)]
            return (
                f"Rotary positions that are dropped find more needles than ALiBi (Gelberg et al. 2025): {word}. "
                f"At {longest:,} tokens {points[0]} percentage points more, 95 % interval {points[1]} to {points[2]}, over "
                f"{bounds.over}."
            )
    return ""


def records(tasks: Sequence[Task]) -> list[Record]:
    """All records of the tasks."""
    return [record for task in tasks for record in task.study.records]


def _task(study: Study) -> Task:
    names = map(str, sequence(study.evaluation.get("tasks")))
    name = next((task for task in names if task in CHANCE), "")
    corpus = str(study.corpus.get("name", "text"))
    title = TITLES[name] if name else "text" if corpus == "text" else f"text ({corpus})"
    trials = study.evaluation.get("trials")
    documents = trials if isinstance(trials, int) and trials > 0 else 16  # the default, which is not recorded
    ends = study.trained[0], max(study.lengths)
    plain = [series for series in study.series if series.stretch == "none"]
    least = 3 / documents if name else 0.0
    found = {(series.method, at): _scores(series, name, at, least) for series in plain for at in ends}
    means = {series.method: found[series.method, ends[0]].mean for series in plain if not name}
    known = [method for method, mean in means.items() if math.isfinite(mean)]
    return Task(name, title, study, found, max(known, key=means.__getitem__, default=""))


def _scores(series: Series, task: str, length: int, least: float) -> Scores:
    by_length, by_part, column, count, sign = (task, f"{task}_by_part", "accuracy", "answers", 1.0) if task else _TEXT
    seeds: dict[int, float] = {}
    parts: dict[int, Array] = {}
    weights: Array = np.empty(0)
    for record in series.evaluations:
        seed, value = seed_of(record), column_by(record, by_length, "length", column).get(length, math.nan)
        if math.isfinite(value):
            at, shares, counts = (np.array(numbers(record, by_part, name)) for name in ("length", column, count))
            seeds[seed] = sign * value
            parts[seed], weights = sign * shares[at == length], counts[at == length]
    return Scores(seeds, parts, weights, least)


def _shape(series: Series) -> str:
    """A key for the model and training that all series of one comparison share."""
    config = flat(series.records[0].config)
    may_differ = ("model.method", "model.vocab_size", "train.seed")
    names = (name for name in config if name.startswith(("model.", "train.")) and name not in may_differ)
    return repr([(name, config[name]) for name in sorted(names)])
