"""A comparison of position methods on the results of `alibi run referee`: a heat map with numbers, changes with length, ranks,
and all lengths.

    task      the data for training and testing: a text, or a task of symbols with a known chance level
    score     for a task, the share of correct answers; for a text, the perplexity with a sliding window, divided by the lowest
              perplexity of any method at the trained length on the same tokens
    solved    the whole interval of a share is at or above 90 %; not solved: all of it is below; open: neither

Intervals are computed as in `intervals.py`: 95 %, over seeds and over parts of the documents, covering both. The
interval of a share is at least ±3/n for n documents, which also holds if all documents agree (the rule of three). A
method is significantly better than another if the interval of their difference, paired by seed and part, excludes zero.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from alibi_lab.records import Record, flat
from alibi_lab.report import answers, intervals
from alibi_lab.report.intervals import Columns, Interval, Paired, Term, as_ratio, exp, mean_interval, word_of
from alibi_lab.report.plots import study as study_plots
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.series import Series, Study, by_seed, grouped, sequence
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.table import NOTHING, Cell, series_row

RECIPE = "referee"
SOLVED = 0.9
# The share of correct guesses among the symbols that can be an answer.
CHANCE = {"mqar": 1 / 16, "needles": 1 / 16, "copy": 1 / 63, "flip-flop": 1 / 2}
TITLES = {"mqar": "associative recall", "needles": "needles", "copy": "copying", "flip-flop": "one bit (flip-flop)"}

Level = Literal["solved", "not solved", "open"]
Place = tuple[str, int]  # a method, and the trained or the longest length


@dataclasses.dataclass(frozen=True)
class Measured:
    """A number and its interval, None if there is none."""

    value: float
    interval: Interval | None


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """One task or text; the name of a text is ""."""

    name: str
    title: str
    study: Study

    @property
    def lengths(self) -> tuple[int, int]:
        """The trained length and the longest tested length."""
        return self.study.trained[0], max(self.study.lengths)

    @property
    def chance(self) -> float:
        return CHANCE.get(self.name, math.nan)

    @property
    def columns(self) -> Columns:
        """Where its shares or losses are recorded."""
        return (
            Columns("accuracy", self.name, f"{self.name}_by_part", "answers") if self.name else Columns("sliding_nats")
        )

    @functools.cached_property
    def evaluations(self) -> Mapping[Place, Mapping[int, Record]]:
        """The evaluations of every method that was measured at a length, by seed."""
        found: dict[Place, dict[int, Record]] = {}
        for series in plain(self.study.series):
            for length, (seed, record) in itertools.product(self.lengths, by_seed(series.evaluations).items()):
                if math.isfinite(intervals.value_of(record, length, self.columns)):
                    found.setdefault((series.method, length), {})[seed] = record
        return found

    @functools.cached_property
    def least(self) -> float:
        """The smallest half-width of an interval."""
        trials = self.study.evaluation.get("trials")
        documents = trials if isinstance(trials, int) and trials > 0 else 16  # the default, which is not recorded
        return 3 / documents if self.name else 0.0

    @functools.cached_property
    def base(self) -> Sequence[Place]:
        """The method with the lowest perplexity at the trained length, by which perplexities are divided; none for a task."""
        losses = {one: compared(self, one).value for one in self.evaluations if one[1] == self.lengths[0]}
        return [] if self.name or not losses else [min(losses, key=losses.__getitem__)]


def find(archive: Archive) -> list[list[Task]]:
    """The tasks of each comparison."""
    named = answers.named_studies(archive.records)
    return comparisons(study for study in archive.studies if study.recipe not in named)


def draw(tasks: Sequence[Task], number: int, archive: Archive) -> Section:
    """All methods on all tasks that at least one method has learned."""
    learned = [task for task in tasks if is_learned(task)]
    (trained, longest), methods_ = tasks[0].lengths, methods(tasks)
    records = [record for task in tasks for record in task.study.records]
    title = f"{len(methods_)} position methods at {trained:,} and at {longest:,} tokens"
    places = [(task, at) for task in learned for at in task.lengths]
    heat = [series_row(one, [_cell(task, one.method, at) for task, at in places]) for one in methods_]
    ranks = [series_row(one, [_rank_cell(task, one.method) for task in learned]) for one in methods_]
    left_out = [(task.title, *best_at_trained(task)) for task in tasks if task not in learned]
    body = html(
        "method_comparison",
        tasks=tasks,
        learned=learned,
        tables=tables,
        heat=heat,
        claim=dropped_beats_alibi(tasks),
        left_out=left_out,
        ranks=ranks,
    )
    return Section(
        f"r{number}",
        "Position methods",
        title,
        body,
        heading=f"What each method is good for: {title}",
        about=count_of(records),
        records=records,
        css="recipe",
        finding="The shares and perplexities of every method, with their intervals.",
        lead=None if tasks[0].name else study_plots.figure_of(tasks[0].study, "sliding"),
    )


def comparisons(studies: Iterable[Study]) -> list[list[Task]]:
    """The tasks of each comparison: studies of the recipe with equal models, trainings and lengths; texts first."""
    found: dict[str, list[Task]] = {}
    for study in filter(is_compared, studies):
        name = next((task for task in map(str, sequence(study.evaluation.get("tasks"))) if task in CHANCE), "")
        corpus = str(study.corpus.get("name", "text"))
        title = TITLES[name] if name else "text" if corpus == "text" else f"text ({corpus})"
        for shape, own in grouped(study.series, _shape).items():
            task = Task(name, title, dataclasses.replace(study, series=tuple(own)))
            found.setdefault(f"{shape} {study.lengths}", []).append(task)
    for tasks in found.values():
        tasks.sort(key=lambda task: (list(TITLES).index(task.name) if task.name else -1, task.title))
    return list(found.values())


def is_compared(study: Study) -> bool:
    """Whether a study belongs to a comparison."""
    return study.recipe == RECIPE and bool(study.lengths)


def plain(series: Iterable[Series]) -> list[Series]:
    """The series whose positions are not stretched."""
    return [one for one in series if one.stretch == "none"]


def methods(tasks: Sequence[Task]) -> list[Series]:
    """One series per method, in the order of the studies."""
    return list({series.method: series for task in tasks for series in plain(task.study.series)}.values())


def is_learned(task: Task) -> bool:
    """Whether the best method has at least 90 % correct answers at the trained length (mean over seeds); true for a text."""
    return not task.name or best_at_trained(task)[1] >= SOLVED


def best_at_trained(task: Task) -> tuple[str, float]:
    """The label of the method with the largest share at the trained length, and that share."""
    shares = [(series.label, compared(task, (series.method, task.lengths[0])).value) for series in task.study.series]
    return max(shares, key=lambda one: one[1] if math.isfinite(one[1]) else -1.0)


def compared(task: Task, *places: Place) -> Measured:
    """The mean share or loss at a place, or its difference from that at another, paired by seed and part."""
    pairs = _paired(task, *places)
    if pairs is None:
        return Measured(math.nan, None)
    value, bounds = float(pairs.logs.mean()), mean_interval(pairs, parts="parts of the documents")
    if bounds is not None:
        bounds = bounds.to(min(bounds.low, value - task.least), max(bounds.high, value + task.least))
    return Measured(value, bounds)


def measured(task: Task, method: str, length: int) -> Measured:
    """The share of correct answers, or the perplexity divided by the lowest one at the trained length (on the same tokens)."""
    found = compared(task, (method, length), *task.base)
    bounds = found.interval
    if task.name:
        return Measured(found.value, bounds and bounds.to(max(bounds.low, 0.0), min(bounds.high, 1.0)))
    return Measured(exp(found.value), as_ratio(bounds))


def by_seed_of(task: Task, method: str, length: int) -> list[float]:
    """The value of `measured` for each seed."""
    pairs = _paired(task, (method, length), *task.base)
    return [] if pairs is None else [value if task.name else exp(value) for value in pairs.logs.tolist()]


def _paired(task: Task, *places: Place) -> Paired | None:
    signed = zip((1.0, -1.0), places, strict=False)
    terms = [Term(sign, task.evaluations.get(place, {}), place[1]) for sign, place in signed]
    return intervals.paired(terms, task.columns, joins=False)


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


def rank(task: Task, method: str, length: int) -> tuple[int, int] | None:
    """The best and the worst possible rank: after all significantly better and before all significantly worse methods."""
    own = method, length
    others = (place for place in task.evaluations if place[1] == length and place != own)
    found = [compared(task, own, other).interval for other in others]
    words = [bounds and word_of(bounds, "below" if task.name else "above", 0.0) for bounds in found]
    better, worse = words.count("confirmed"), words.count("contradicted")
    return (1 + better, 1 + len(found) - worse) if own in task.evaluations else None


def dropped_beats_alibi(tasks: Sequence[Task]) -> str:
    """The verdict on DroPE's claim (Gelberg et al. 2025, arXiv:2512.12167) in a sentence; "" if it was not measured.

    The claim: beyond the trained length, rotary positions that are dropped find more needles than ALiBi.
    """
    for task in tasks:
        longest = task.lengths[1]
        found = compared(task, ("drope", longest), ("alibi", longest))
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


def _cell(task: Task, method: str, length: int) -> Cell:
    found, place = measured(task, method, length), rank(task, method, length)
    share = (found.value - task.chance) / (1 - task.chance) if task.name else 2 - found.value
    text, bounds = score_text(task, found.value), found.interval
    spread = f"{score_text(task, bounds.low)} – {score_text(task, bounds.high)}" if bounds else ""
    if task.name and (bounds is None or (bounds.low <= task.chance and bounds.high >= SOLVED)):  # from chance to solved
        return Cell(text, spread=spread, css="unknown")
    heat = round(min(max(share, 0.0), 1.0), 3) if math.isfinite(share) else 0.0
    return Cell(text, spread=spread, heat=heat, best=place is not None and place[0] == 1)


def _rank_cell(task: Task, method: str) -> Cell:
    longest = task.lengths[1]
    place = rank(task, method, longest)
    if place is None:
        return NOTHING
    text = level(measured(task, method, longest)) if task.name else ""
    return Cell(" – ".join(map(str, dict.fromkeys(place))), spread=text)


def _shape(series: Series) -> str:
    """A key for the model and training that all series of one comparison share."""
    config = flat(series.records[0].config)
    may_differ = ("model.method", "model.vocab_size", "train.seed")
    names = (name for name in config if name.startswith(("model.", "train.")) and name not in may_differ)
    return repr([(name, config[name]) for name in sorted(names)])
