"""A comparison of position methods: a heat map with numbers, changes with length, ranks, and all lengths."""

import math
from collections.abc import Sequence

from alibi_lab.report import answers
from alibi_lab.report import method_comparison as comparison
from alibi_lab.report.method_comparison import Task, measured, rank, score_text
from alibi_lab.report.plots import retrieval
from alibi_lab.report.plots import study as study_plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.sections.study import seed_counts
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.cost import model_sizes
from alibi_lab.report.tables.table import NOTHING, Cell, series_row


def find(archive: Archive) -> list[list[Task]]:
    """The tasks of each comparison."""
    named = answers.named_studies(archive.records)
    return comparison.comparisons(study for study in archive.studies if study.recipe not in named)


def draw(tasks: Sequence[Task], number: int, archive: Archive) -> Section:
    """All methods on all tasks that at least one method has learned."""
    learned = [task for task in tasks if comparison.is_learned(task)]
    (trained, longest), methods, records = tasks[0].lengths, comparison.methods(tasks), comparison.records(tasks)
    title = f"{len(methods)} position methods at {trained:,} and at {longest:,} tokens"
    places = [(task, at) for task in learned for at in task.lengths]
    tables_of = [retrieval.task_table(one.study) if one.name else tables.by_length(one.study) for one in tasks]
    changes = [(task.title, table) for task in tasks if not task.name and (table := tables.changes(task.study))]
    body = html(
        "method_comparison",
        sizes=model_sizes(records),
        seeds=seed_counts([series for task in tasks for series in task.study.series]),
        lengths=tasks[0].lengths,
        learned=learned,
        heat=[series_row(one, [_cell(task, one.method, at) for task, at in places]) for one in methods],
        claim=comparison.dropped_beats_alibi(tasks),
        left_out=[(task.title, *comparison.best_at_trained(task)) for task in tasks if task not in learned],
        changes=changes,
        ranks=[series_row(one, [_rank_cell(task, one.method) for task in learned]) for one in methods],
        by_length=[(task.title, table) for task, table in zip(tasks, tables_of, strict=True)],
        fields=tables.fields(tasks[0].study),
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
        lead=_lead(tasks[0]),
    )


def _lead(task: Task) -> Plot | None:
    """The perplexity with a sliding window, for a text."""
    figure = None if task.name else study_plots.perplexity_by_length(task.study, "sliding")
    text = f"Perplexity of every method on {task.title} by length, with a sliding window."
    return Plot(figure, text) if figure else None


def _cell(task: Task, method: str, length: int) -> Cell:
    found, place = measured(task, method, length), rank(task, method, length)
    share = (found.value - task.chance) / (1 - task.chance) if task.name else 2 - found.value
    text, bounds = score_text(task, found.value), found.interval
    spread = f"{score_text(task, bounds.low)} – {score_text(task, bounds.high)}" if bounds else ""
    if comparison.says_nothing(task, found):
        return Cell(text, spread=spread, css="unknown")
    heat = round(min(max(share, 0.0), 1.0), 3) if math.isfinite(share) else 0.0
    return Cell(text, spread=spread, heat=heat, best=place is not None and place[0] == 1)


def _rank_cell(task: Task, method: str) -> Cell:
    longest = task.lengths[1]
    place = rank(task, method, longest)
    if place is None:
        return NOTHING
    level = comparison.level(measured(task, method, longest)) if task.name else ""
    return Cell(" – ".join(map(str, dict.fromkeys(place))), spread=level)
