"""A comparison of position methods: a heat map with numbers, changes with length, ranks, and all lengths."""

import math
from collections.abc import Sequence

from alibi_lab.report import answers
from alibi_lab.report import method_comparison as comparison
from alibi_lab.report.method_comparison import Task, measured, rank, score_text
from alibi_lab.report.plots import retrieval
from alibi_lab.report.plots import study as study_plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Block, Facts, Folded, Numbers, Part, Section, Text, count_of
from alibi_lab.report.sections.study import CHANGES, configuration, seed_counts
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.cost import model_sizes
from alibi_lab.report.tables.table import NOTHING, Cell, Table, series_row
from alibi_lab.report.tables.table import Block as Rows

_ABOUT = (
    "All runs differ only in the position method. The numbers are about models of this size, not about larger ones."
)


def find(archive: Archive) -> list[list[Task]]:
    """The tasks of each comparison."""
    named = answers.named_studies(archive.records)
    return comparison.comparisons(study for study in archive.studies if study.recipe not in named)


def draw(tasks: Sequence[Task], number: int, archive: Archive) -> Section:
    """All methods on all tasks that at least one method has learned."""
    learned = [task for task in tasks if comparison.is_learned(task)]
    trained, longest = tasks[0].lengths
    title = f"{len(comparison.methods(tasks))} position methods at {trained:,} and at {longest:,} tokens"
    records = comparison.records(tasks)
    blocks: list[Block] = [
        Text(_ABOUT),
        _facts(tasks),
        _heat_map(tasks, learned),
        *(Text(claim) for claim in [comparison.dropped_beats_alibi(tasks)] if claim),
        *(Text(_why_not(task), "note") for task in tasks if task not in learned),
    ]
    changes = [(task.title, table) for task in tasks if not task.name and (table := tables.changes(task.study))]
    blocks += [Numbers(table, f"{text}. {CHANGES}") for text, table in changes]
    if learned:
        caption = (
            "From one plus the number of significantly better methods to the number of methods that are not significantly "
            "worse. Two methods differ significantly if the 95 % interval of their difference, paired by seed and part, "
            "excludes zero; it is not corrected for multiple comparisons. Small: a task is solved if the whole interval of the "
            "share is at 90 % or above, not solved if all of it is below, and open otherwise."
        )
        blocks.append(Part("Rank by task", [Numbers(_ranks(tasks, learned), caption)]))
    lengths = [
        Folded(task.title, [Numbers(table, f"{task.title}, by length in tokens; means over seeds.")])
        for task in tasks
        if (table := retrieval.task_table(task.study) if task.name else tables.by_length(task.study))
    ]
    blocks.append(Part("Every length", [*lengths, Folded("Configuration", [configuration(tasks[0].study)])]))
    return Section(
        f"r{number}",
        "Position methods",
        title,
        blocks,
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
    return Plot("", "", figure, text) if figure else None


def _heat_map(tasks: Sequence[Task], learned: Sequence[Task]) -> Numbers:
    methods, (trained, longest) = comparison.methods(tasks), tasks[0].lengths
    places = [(task, at) for task in learned for at in task.lengths]
    rows = [series_row(one, [_cell(task, one.method, at) for task, at in places]) for one in methods]
    columns = [f"{trained:,}", f"{longest:,}"] * len(learned)
    table = Table(columns, [Rows("", rows)], groups=[(task.title, _legend(task)) for task in learned])
    caption = (
        f"{trained:,} tokens, the trained length L, and {longest:,}; small: 95 %, over seeds and over parts of the documents "
        "(with one seed, over these alone). Stronger color is better: from chance to all correct, and for text from twice the "
        "lowest perplexity to the lowest (sliding window). Bold: no other method is significantly better. Grey: the interval "
        "reaches from chance to solved, or there is none."
    )
    return Numbers(table, caption, label="Methods by task", css="heat")


def _cell(task: Task, method: str, length: int) -> Cell:
    found, place = measured(task, method, length), rank(task, method, length)
    share = (found.value - task.chance) / (1 - task.chance) if task.name else 2 - found.value
    text, bounds = score_text(task, found.value), found.interval
    spread = f"{score_text(task, bounds.low)} – {score_text(task, bounds.high)}" if bounds else ""
    if comparison.says_nothing(task, found):
        return Cell(text, spread=spread, css="unknown")
    heat = round(min(max(share, 0.0), 1.0), 3) if math.isfinite(share) else 0.0
    return Cell(text, spread=spread, heat=heat, best=place is not None and place[0] == 1)


def _ranks(tasks: Sequence[Task], learned: Sequence[Task]) -> Table:
    methods = comparison.methods(tasks)
    rows = [series_row(one, [_rank_cell(task, one.method) for task in learned]) for one in methods]
    return Table([task.title for task in learned], [Rows(f"Rank at {tasks[0].lengths[1]:,} tokens", rows)])


def _rank_cell(task: Task, method: str) -> Cell:
    longest = task.lengths[1]
    place = rank(task, method, longest)
    if place is None:
        return NOTHING
    level = comparison.level(measured(task, method, longest)) if task.name else ""
    return Cell(" – ".join(map(str, dict.fromkeys(place))), spread=level)


def _legend(task: Task) -> str:
    return f"% correct; chance {100 * task.chance:.0f}" if task.name else "perplexity / lowest at L"


def _why_not(task: Task) -> str:
    label, share = comparison.best_at_trained(task)
    best = f"the best, {label}, has {100 * share:.0f} %" if math.isfinite(share) else "nothing was measured there"
    return (
        f"Left out: {task.title}. No method has {100 * comparison.SOLVED:.0f} % correct answers at the trained length of "
        f"{task.lengths[0]:,} tokens ({best}), so longer lengths say nothing."
    )


def _facts(tasks: Sequence[Task]) -> Facts:
    """The size of the models and trainings, which all runs share."""
    weights, tokens = model_sizes(comparison.records(tasks))
    seeds = seed_counts([series for task in tasks for series in task.study.series])
    trained = f"{tasks[0].lengths[0]:,} tokens"
    return Facts([("weights", weights), ("training tokens each", tokens), ("seeds", seeds), ("trained at", trained)])
