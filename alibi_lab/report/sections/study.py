"""A study: pictures and tables, with intervals, and what the numbers cannot show."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.figure import Figure

from alibi_lab.report import answers, method_comparison
from alibi_lab.report.plots import retrieval
from alibi_lab.report.plots import study as plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.series import Mode, Series, Study, field
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.cost import model_sizes
from alibi_lab.report.tables.table import mean, rounded

# Kind, figure, description; `sections.html` has the headings and captions of all kinds.
Drawn: TypeAlias = Iterator[tuple[str, Figure | None, str]]
MOST_LINES = 9  # per picture; a study with more lines gets one picture per trained length


def find(archive: Archive) -> list[Study]:
    """The studies that belong neither to the paper's items nor to a comparison of methods."""
    named = answers.named_studies(archive.records)
    others = (study for study in archive.studies if study.recipe not in named)
    return [study for study in others if not method_comparison.is_compared(study)]


def draw(study: Study, number: int, archive: Archive) -> Section:
    """Perplexity with its changes and cautions, losses, tasks and costs, then the configuration."""
    name, title, parts = f"s{number}", title_of(study), drawable(study)
    figures = [
        (kind, f", trained at {part.trained[0]:,}" if len(parts) > 1 else "", figure, description)
        for part in parts
        for kind, figure, description in _figures(part)
        if figure is not None
    ]
    body = html(
        "study",
        name=name,
        study=study,
        tables=tables,
        has_cards=len(parts) == 1,
        figures=figures,
        tasks=[(kind, "", figure, text) for kind, figure, text in _task_figures(study) if figure is not None],
        by_task=retrieval.task_table(study),
        has_memory=any("peak_memory_bytes" in record.curves.get("by_length", {}) for record in study.records),
        sizes=model_sizes(study.records),
        seeds=seed_counts(study.series),
        fewest_tokens=_fewest(study),
    )
    return Section(
        name,
        "Studies",
        title,
        body,
        heading=title,
        about=count_of(study.records),
        records=study.records,
        css="recipe",
        finding=_finding(study),
        lead=next((Plot(figure, text) for kind, _, figure, text in figures if kind in tables.WINDOWS), None),
    )


def title_of(study: Study) -> str:
    """What was trained and tested: "quick on novels · 0.8 M weights · 60 steps · 2 seeds · tested to 512"."""
    record = study.records[0]
    paths = field(record, "data", "text", "").split(",")
    text = study.corpus.get("name", "its text")
    text = ", ".join(Path(path).stem for path in paths) if text == "text" and paths != [""] else text
    steps = answers.between([float(field(record, "train", "steps", 0)) for record in study.records])
    seeds = seed_counts(study.series)
    facts = [
        f"{study.recipe} on {text}",
        f"{weights} weights" if (weights := model_sizes(study.records)[0]) else "",
        f"{steps} steps",
        f"{seeds} seed{'' if seeds == '1' else 's'}",
        f"tested to {max(study.lengths):,}" if study.lengths else "",
    ]
    return " · ".join(filter(None, facts))


def drawable(study: Study) -> list[Study]:
    """The study, or one study per trained length if it has too many lines for one picture."""
    if len(study.series) <= MOST_LINES:
        return [study]
    by_length = [tuple(series for series in study.series if series.trained == length) for length in study.trained]
    return [dataclasses.replace(study, series=series) for series in by_length]


def _figures(study: Study) -> Drawn:
    below = "by length, for every method; the table below has the numbers."
    for mode, words in tables.WINDOWS.items():
        yield mode, plots.perplexity_by_length(study, mode), f"Perplexity by length, {words}. {_ends(study, mode)}"
    yield "position", plots.loss_by_position(study), f"Loss by position. {_ends(study)}"
    yield "training", plots.training_curves(study), "Training loss of every run by step."
    yield "seconds", plots.validation_curves(study, "seconds"), "Perplexity during training, by seconds."
    yield "step", plots.validation_curves(study, "step"), "Perplexity during training, by step."
    speed, memory = (plots.cost_by_length(study, measure) for measure in ("tokens_per_second", "peak_memory_bytes"))
    yield "speed", speed, f"{study.unit.capitalize()}s evaluated per second, {below}"
    yield "memory", memory, f"Peak memory of the evaluation, {below}"


def _task_figures(study: Study) -> Drawn:
    titles = {"passkey": "Passkey by length and depth", "recall": "Recall by distance"}
    drawn = {"passkey": retrieval.passkey_grid(study), "recall": retrieval.recall_by_distance(study)}
    for task, figure in {**drawn, **dict(retrieval.symbols_by_length(study))}.items():
        yield task, figure, f"{titles.get(task, retrieval.TITLES[task])}. {retrieval.describe(study, task)}"


def _finding(study: Study) -> str:
    """The lowest perplexity at the longest length, in a fixed form."""
    longest = max(study.lengths, default=0)
    means = [(mean(found), series.label) for series in study.series if (found := series.perplexity(longest))]
    lowest, label = min(means, key=lambda one: one[0], default=(0.0, ""))
    return (
        f"Lowest perplexity per {study.unit} at {longest:,} {study.unit}s: {label}, {rounded(lowest)}." if means else ""
    )


def _fewest(study: Study) -> float:
    """The smallest number of tokens that a position was tested with; 0 if it was not recorded."""
    counts = [np.nanmin(y) for s in study.series for _, y in [s.curve("by_position", "position", "tokens")] if y.size]
    return float(min(counts, default=0.0))


def seed_counts(series: Sequence[Series]) -> str:
    """The number of seeds of each series: "2", or "1 to 3" if they differ."""
    return answers.between([one.seeds for one in series])


def _ends(study: Study, mode: Mode = "nonoverlapping") -> str:
    """Where each line starts and ends, for readers who cannot see it."""
    return " ".join(
        f"{series.label}: perplexity {mean(series.perplexity(first, mode)):.3g} at {first:,} {study.unit}s, "
        f"{mean(series.perplexity(last, mode)):.3g} at {last:,}."
        for series, (first, last) in study.ended(mode)
    )
