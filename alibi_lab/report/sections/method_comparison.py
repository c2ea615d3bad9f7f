"""A comparison of position methods: a heat map with numbers, changes with length, ranks, and all lengths."""

import math
from collections.abc import Sequence

from alibi_lab.report import answers, method_comparison
from alibi_lab.report.method_comparison import Task
from alibi_lab.report.plots import retrieval
from alibi_lab.report.plots import study as study_plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Block, Facts, Folded, Numbers, Part, Section, Text, count_of
from alibi_lab.report.sections.study import CHANGES, field_table, seed_counts
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.cost import model_sizes
from alibi_lab.report.tables.table import NOTHING, Cell, Table, variable_of
from alibi_lab.report.tables.table import Block as Rows


def find(archive: Archive) -> list[list[Task]]:
    """The tasks of each comparison."""
    named = answers.named_studies(archive.records)
    return method_comparison.comparisons(study for study in archive.studies if study.recipe not in named)


def draw(tasks: Sequence[Task], number: int, archive: Archive) -> Section:
    """All methods on all tasks that at least one method has learned."""
    learned = [task for task in tasks if method_comparison.is_learned(task)]
    methods = method_comparison.methods(tasks)
    trained, longest = tasks[0].lengths
    title = f"{len(methods)} position methods at {trained:,} and at {longest:,} tokens"
    records = method_comparison.records(tasks)
    blocks: list[Block] = [
        Text(
            "All runs differ only in the position method. The numbers are about models of this size, not about larger ones."
        ),
        _facts(tasks),
        Numbers(_heat_map(tasks, learned), _legend_of_heat(tasks), label="Methods by task", css="heat"),
        *(Text(claim) for claim in [method_comparison.dropped_beats_alibi(tasks)] if claim),
        *(Text(_why_not(task), "note") for task in tasks if task not in learned),
    ]
    changes = [(task.title, table) for task in tasks if not task.name and (table := tables.changes(task.study))]
    blocks += [Numbers(table, f"{title}. {CHANGES}") for title, table in changes]
    ranks = _ranks(tasks, learned)
    if ranks.columns:
        caption = (
            "From one plus the number of significantly better methods to the number of methods that are not significantly "
            "worse. Two methods differ significantly if the 95 % interval of their difference, paired by seed and part, "
            "excludes zero; it is not corrected for multiple comparisons. Small: a task is solved if the whole interval of the "
            "share is at 90 % or above, not solved if all of it is below, and open otherwise."
        )
        blocks.append(Part("Rank by task", [Numbers(ranks, caption)]))
    lengths = [
        Folded(task.title, [Numbers(table, f"{task.title}, by length in tokens; means over seeds.")])
        for task in tasks
        for table in [_by_length(task)]
        if table
    ]
    fields = Numbers(field_table(tasks[0].study), label="Configuration", css="text")
    blocks.append(Part("Every length", [*lengths, Folded("Configuration", [fields])]))
    return Section(
        anchor=f"r{number}",
        group="Position methods",
        title=title,
        heading=f"What each method is good for: {title}",
        about=count_of(records),
        blocks=blocks,
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


def _heat_map(tasks: Sequence[Task], learned: Sequence[Task]) -> Table:
    methods = method_comparison.methods(tasks)
    names = [series.method for series in methods]
    places = [(task, at) for task in learned for at in task.lengths]
    rows = tuple(
        (series.label, variable_of(series.method), tuple(_cell(task, series.method, at, names) for task, at in places))
        for series in methods
    )
    columns = tuple(f"{length:,}" for length in tasks[0].lengths) * len(learned)
    return Table(columns, (Rows("", rows),), groups=tuple((task.title, _legend(task)) for task in learned))


def _legend_of_heat(tasks: Sequence[Task]) -> str:
    trained, longest = tasks[0].lengths
    return (
        f"{trained:,} tokens, the trained length L, and {longest:,}; small: 95 %, over seeds and over parts of the documents "
        "(with one seed, over these alone). Stronger color is better: from chance to all correct, and for text from twice the "
        "lowest perplexity to the lowest (sliding window). Bold: no other method is significantly better. Grey: the interval "
        "reaches from chance to solved, or there is none."
    )


def _cell(task: Task, method: str, length: int, names: Sequence[str]) -> Cell:
    found = method_comparison.measured(task, method, length)
    place = method_comparison.rank(task, method, length, names)
    share = (found.value - task.chance) / (1 - task.chance) if task.name else 2 - found.value
    text, bounds = method_comparison.score_text(task, found.value), found.interval
    ends = [method_comparison.score_text(task, end) for end in (bounds.low, bounds.high)] if bounds else []
    spread = " – ".join(ends)
    if method_comparison.says_nothing(task, found):
        return Cell(text, spread=spread, css="unknown")
    return Cell(
        text=text,
        spread=spread,
        heat=round(min(max(share, 0.0), 1.0), 3) if math.isfinite(share) else 0.0,
        best=place is not None and place[0] == 1,
    )


def _ranks(tasks: Sequence[Task], learned: Sequence[Task]) -> Table:
    methods = method_comparison.methods(tasks)
    names = [series.method for series in methods]
    rows = []
    for series in methods:
        places = [method_comparison.rank(task, series.method, task.lengths[1], names) for task in learned]
        cells = [_rank_cell(task, series.method, place) for task, place in zip(learned, places, strict=True)]
        rows.append((series.label, variable_of(series.method), tuple(cells)))
    title = f"Rank at {tasks[0].lengths[1]:,} tokens"
    return Table(tuple(task.title for task in learned), (Rows(title, tuple(rows)),))


def _rank_cell(task: Task, method: str, place: tuple[int, int] | None) -> Cell:
    if place is None:
        return NOTHING
    found = method_comparison.measured(task, method, task.lengths[1])
    return Cell(" – ".join(map(str, dict.fromkeys(place))), spread=method_comparison.level(found) if task.name else "")


def _legend(task: Task) -> str:
    return f"% correct; chance {100 * task.chance:.0f}" if task.name else "perplexity / lowest at L"


def _why_not(task: Task) -> str:
    label, share = method_comparison.best_at_trained(task)
    best = f"the best, {label}, has {100 * share:.0f} %" if math.isfinite(share) else "nothing was measured there"
    return (
        f"Left out: {task.title}. No method has {100 * method_comparison.SOLVED:.0f} % correct answers at the trained length of "
        f"{task.lengths[0]:,} tokens ({best}), so longer lengths say nothing."
    )


def _by_length(task: Task) -> Table | None:
    return retrieval.task_table(task.study) if task.name else tables.by_length(task.study)


def _facts(tasks: Sequence[Task]) -> Facts:
    """The size of the models and trainings, which all runs share."""
    weights, tokens = model_sizes(method_comparison.records(tasks))
    found = {
        "weights": weights,
        "training tokens each": tokens,
        "seeds": seed_counts([series for task in tasks for series in task.study.series]),
        "trained at": f"{tasks[0].lengths[0]:,} tokens",
    }
    return Facts([(name, [value]) for name, value in found.items() if value])
