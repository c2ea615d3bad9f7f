"""A comparison of position methods: a heat map with numbers, a paragraph per method, ranks, and all lengths."""

import math
from collections.abc import Sequence

from alibi_lab.report import answers, method_comparison, method_paragraphs
from alibi_lab.report.method_comparison import Task
from alibi_lab.report.plots import retrieval
from alibi_lab.report.plots import study as study_plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Block, Facts, Folded, Numbers, Part, Section, Text, count_of
from alibi_lab.report.sections.study import field_table
from alibi_lab.report.sentences import have_equal_seeds, seed_count
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.table import NOTHING, Cell, Table, variable_of
from alibi_lab.report.tables.table import Block as Rows
from alibi_lab.report.verdicts import size


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
    headline = method_paragraphs.headline(tasks)
    blocks: list[Block] = [
        Text(headline, "headline"),
        Text(_setting(tasks)),
        Numbers(_heat_map(tasks, learned), _legend_of_heat(tasks), label="Methods by task", css="heat"),
        *(Text(_why_not(task), "note") for task in tasks if task not in learned),
        _method_by_method(tasks, learned),
    ]
    ranks = _ranks(tasks, learned)
    if ranks.columns:
        caption = (
            "From one plus the number of significantly better methods to the number of methods that are not significantly "
            "worse. Two methods differ significantly if the 95 % interval of their difference, paired by seed and part, "
            "excludes zero."
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
        anchor=f"r{number}", group="Position methods", title=title, heading=f"What each method is good for: {title}",
        about=count_of(records), blocks=blocks, records=records, css="recipe", finding=headline,
        lead=_lead(tasks[0]),
    )  # fmt: skip


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
        f"{trained:,} tokens, the trained length L, and {longest:,}; small: 95 %, {_intervals(tasks)}. Stronger color "
        "is better: from chance to all correct, and for text from twice the lowest perplexity to the lowest (sliding window). "
        "Bold: no other method is significantly better. Grey: the interval reaches from chance to solved, or there is none."
    )


def _method_by_method(tasks: Sequence[Task], learned: Sequence[Task]) -> Part:
    methods = method_comparison.methods(tasks)
    text = (
        "A task is solved if the whole interval is at 90 % or above, and open if the interval includes 90 %. Intervals are not "
        "corrected for multiple comparisons: of twenty, one may be wrong by chance."
    )
    paragraphs = [(series.label, [method_paragraphs.paragraph(learned, series.method)]) for series in methods]
    return Part("Method by method", [Text(text), Facts(paragraphs, [variable_of(one.method) for one in methods])])


def _cell(task: Task, method: str, length: int, names: Sequence[str]) -> Cell:
    found = method_comparison.measured(task, method, length)
    place = method_comparison.rank(task, method, length, names)
    share = (found.value - task.chance) / (1 - task.chance) if task.name else 2 - found.value
    text, spread = method_paragraphs.number(task, found), method_paragraphs.between(task, found)
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
        cells = [NOTHING if place is None else Cell(" – ".join(map(str, dict.fromkeys(place)))) for place in places]
        rows.append((series.label, variable_of(series.method), tuple(cells)))
    title = f"Rank at {tasks[0].lengths[1]:,} tokens"
    return Table(tuple(task.title for task in learned), (Rows(title, tuple(rows)),))


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


def _intervals(tasks: Sequence[Task]) -> str:
    """The samples that the intervals are computed from, in words."""
    several = [series.seeds > 1 for task in tasks for series in task.study.series]
    if all(several):
        return "covering the intervals over seeds and over parts of the documents"
    start = "over seeds if there are several, and over" if any(several) else "over"
    return f"{start} parts of the documents; one seed says nothing about other trainings"


def _setting(tasks: Sequence[Task]) -> str:
    """The size of the models, and what all runs share."""
    shared = (
        "All runs have the same model, data, data order and seeds"
        if have_equal_seeds(series for task in tasks for series in task.study.series)
        else "All runs of one seed have the same model, data and data order"
    )
    return (
        f"All sentences and numbers are about models of this size: {_size(tasks)}. They say nothing about larger models. "
        f"{shared}, and differ only in the position method."
    )


def _size(tasks: Sequence[Task]) -> str:
    """The size of the models and trainings, in words."""
    weights, tokens = size(method_comparison.records(tasks))
    parts = [
        f"{weights} weights" if weights else "",
        f"{tokens} training tokens each" if tokens else "",
        seed_count(series for task in tasks for series in task.study.series),
        f"trained at {tasks[0].lengths[0]:,} tokens",
    ]
    return ", ".join(part for part in parts if part)
