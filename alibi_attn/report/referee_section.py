"""What the template shows of a referee: a heat map with numbers, ranks, a paragraph a method, and every length below."""

import dataclasses
import math
from collections.abc import Sequence

from alibi_attn.report import referee, referee_words, retrieval, tables
from alibi_attn.report.drawing import variable_of
from alibi_attn.report.referee import Task
from alibi_attn.report.tables import Table
from alibi_attn.report.verdicts import size


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeatCell:
    """A number, its interval, and how much of the color it gets, from 0 to 1; `best` where no other method is surely better."""

    text: str
    between: str
    heat: float
    best: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefereeSection:
    """All of one referee; rows are (label, method, …), a pair of cells or one rank a task."""

    anchor: str
    title: str
    trained: str
    longest: str
    size: str
    intervals: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, str, Sequence[HeatCell]]]
    ranks: Table
    left_out: Sequence[str]
    paragraphs: Sequence[tuple[str, str, str]]
    lengths: Sequence[tuple[str, Table]]
    fields: Sequence[tuple[str, str]]


def referee_section(tasks: Sequence[Task], anchor: str) -> RefereeSection:
    """What the template shows of the tasks that one comparison is made of."""
    learned = [task for task in tasks if referee.is_learned(task)]
    every = referee.methods(tasks)
    names = [series.method for series in every]
    trained, longest = tasks[0].lengths
    return RefereeSection(
        anchor=anchor,
        title=f"{len(every)} position methods at {trained:,} and at {longest:,} tokens",
        trained=f"{trained:,}",
        longest=f"{longest:,}",
        size=_size(tasks),
        intervals=_intervals(tasks),
        columns=[(task.title, _legend(task)) for task in learned],
        rows=[
            (
                series.label,
                variable_of(series.method),
                [_cell(task, series.method, at, names) for task in learned for at in task.lengths],
            )
            for series in every
        ],
        ranks=_ranks(learned, names, {series.method: series.label for series in every}),
        left_out=[_why_not(task) for task in tasks if task not in learned],
        paragraphs=[
            (series.label, variable_of(series.method), referee_words.paragraph(learned, series.method))
            for series in every
        ],
        lengths=[(task.title, table) for task in tasks for table in [_by_length(task)] if table],
        fields=[(name, value) for task in tasks[:1] for name, value in tables.fields(task.study)],
    )


def _cell(task: Task, method: str, length: int, names: Sequence[str]) -> HeatCell:
    found = referee.measured(task, method, length)
    place = referee.rank(task, method, length, names)
    share = (found.value - task.chance) / (1 - task.chance) if task.name else 2 - found.value
    return HeatCell(
        text=referee_words.number(task, found),
        between=referee_words.between(task, found),
        heat=round(min(max(share, 0.0), 1.0), 3) if math.isfinite(share) else 0.0,
        best=place is not None and place[0] == 1,
    )


def _ranks(tasks: Sequence[Task], names: Sequence[str], labels: dict[str, str]) -> Table:
    rows = []
    for name in names:
        places = [referee.rank(task, name, task.lengths[1], names) for task in tasks]
        cells = [
            tables.Cell("—")
            if place is None
            else tables.Cell(f"{place[0]}" if place[0] == place[1] else f"{place[0]} – {place[1]}")
            for place in places
        ]
        rows.append((labels[name], variable_of(name), tuple(cells)))
    title = f"Rank at {tasks[0].lengths[1]:,} tokens" if tasks else "Rank"
    return Table(tuple(task.title for task in tasks), (tables.Block(title, tuple(rows)),))


def _legend(task: Task) -> str:
    return f"% right; chance {100 * task.chance:.0f}" if task.name else "perplexity, over the lowest at L"


def _why_not(task: Task) -> str:
    label, share = referee.best_at_trained(task)
    best = (
        f"the best, {label}, is right for {100 * share:.0f} %" if math.isfinite(share) else "nothing was measured there"
    )
    return (
        f"Left out: {task.title}. No method reaches {100 * referee.SOLVED:.0f} % of the answers at the trained "
        f"{task.lengths[0]:,} tokens ({best}), so what becomes of it at longer ones says nothing."
    )


def _by_length(task: Task) -> Table | None:
    return retrieval.task_table(task.study) if task.name else tables.by_length(task.study)


def _intervals(tasks: Sequence[Task]) -> str:
    """What the intervals are over: a single seed says nothing about another."""
    several = [series.seeds > 1 for task in tasks for series in task.study.series]
    if all(several):
        return "over seeds and over parts of what was scored, what lies in either"
    start = "where there are several seeds over these and over" if any(several) else "over"
    return f"{start} parts of what was scored; one seed says nothing about another training"


def _size(tasks: Sequence[Task]) -> str:
    """At which size the statements were made, in words."""
    weights, tokens = size(referee.records(tasks))
    seeds = sorted({series.seeds for task in tasks for series in task.study.series})
    counted = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    parts = [
        f"{weights} weights" if weights else "",
        f"{tokens} training tokens each" if tokens else "",
        f"{counted} seed{'' if seeds == [1] else 's'}",
        f"trained at {tasks[0].lengths[0]:,} tokens",
    ]
    return ", ".join(part for part in parts if part)
