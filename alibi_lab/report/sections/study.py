"""A study: pictures and tables, with intervals, and what the numbers cannot show."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.figure import Figure

from alibi_lab.report import answers, method_comparison
from alibi_lab.report.plots import retrieval
from alibi_lab.report.plots import study as plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Section, code, count_of, html
from alibi_lab.report.series import Mode, Series, Study, field
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.cost import model_sizes
from alibi_lab.report.tables.table import Table, mean, rounded, text_table

Drawn: TypeAlias = Iterator[tuple[str, str, Figure | None, str]]  # heading, caption, figure, description
MOST_LINES = 9  # per picture; a study with more lines gets one picture per trained length
_MODES: dict[Mode, str] = {
    "nonoverlapping": "The text is split into segments; each is read without earlier context.",
    "sliding": "Windows overlap, and only their last tokens are scored, so each scored token has a long context.",
    "windowed": "A control: no token sees more context than in training.",
}


def find(archive: Archive) -> list[Study]:
    """The studies that belong neither to the paper's items nor to a comparison of methods."""
    named = answers.named_studies(archive.records)
    others = (study for study in archive.studies if study.recipe not in named)
    return [study for study in others if not method_comparison.is_compared(study)]


def draw(study: Study, number: int, archive: Archive) -> Section:
    """Perplexity with its changes and cautions, losses, tasks and costs, then the configuration."""
    name, title, parts = f"s{number}", title_of(study), drawable(study)
    perplexity = _plots(_by_mode, parts)
    body = html(
        "study",
        name=name,
        study=study,
        tables=tables,
        cards=tables.cards(study) if len(parts) == 1 else [],
        perplexity=perplexity,
        losses=_plots(_losses, parts),
        tasks=_plots(_tasks, [study]),
        by_task=retrieval.task_table(study),
        costs=_plots(_costs, parts),
        has_memory=any("peak_memory_bytes" in record.curves.get("by_length", {}) for record in study.records),
        about=_about(study),
        config=configuration(study),
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
        lead=next(iter(perplexity), None),
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


def _by_mode(study: Study) -> Drawn:
    for mode, caption in _MODES.items():
        description = f"Perplexity by length, {tables.WINDOWS[mode]}. {_ends(study, mode)}"
        yield tables.WINDOWS[mode].capitalize(), caption, plots.perplexity_by_length(study, mode), description


def _losses(study: Study) -> Drawn:
    position = (
        f"At the longest length: how well the {study.unit} at each position is predicted. Neighboring positions are joined until "
        f"a mean has {plots.FEWEST} {study.unit}s."
    )
    yield "Loss by position", position, plots.loss_by_position(study), f"Loss by position. {_ends(study)}"
    caption = "Loss on the training text, as logged, not smoothed."
    yield "Training", caption, plots.training_curves(study), "Training loss of every run by step."
    by_time, by_step = plots.validation_curves(study, "seconds"), plots.validation_curves(study, "step")
    caption = "Perplexity on held-out text; one line per seed."
    yield "Validation by time", caption, by_time, "Perplexity during training, by seconds."
    yield "Validation by step", "The same by training step.", by_step, "Perplexity during training, by step."


def _costs(study: Study) -> Drawn:
    below = "by length, for every method; the table below has the numbers."
    speed, memory = (plots.cost_by_length(study, measure) for measure in ("tokens_per_second", "peak_memory_bytes"))
    yield "Speed of the evaluation", "", speed, f"{study.unit.capitalize()}s evaluated per second, {below}"
    yield "Memory of the evaluation", "", memory, f"Peak memory of the evaluation, {below}"


def _tasks(study: Study) -> Drawn:
    caption = (
        "A number is hidden in filler text, at a depth from 0 (the start) to 1 (the end). Percentage of numbers found; "
        "length runs to the right, depth down."
    )
    found = retrieval.describe(study, "passkey")
    yield "Passkey", caption, retrieval.passkey_grid(study), f"Passkey by length and depth. {found}"
    caption = (
        "Random tokens are repeated; accuracy at the longest length of each method, by the distance to their first "
        "occurrence."
    )
    found = retrieval.describe(study, "recall")
    yield "Recall", caption, retrieval.recall_by_distance(study), f"Recall by distance. {found}"
    for task, figure in retrieval.symbols_by_length(study):
        name, title = "Associative recall" if task == "mqar" else task.capitalize(), retrieval.TITLES[task]
        caption = f"{title}. The queried symbol is as far back as the length allows."
        yield name, caption, figure, f"{title}. {retrieval.describe(study, task)}"


def _finding(study: Study) -> str:
    """The lowest perplexity at the longest length, in a fixed form."""
    longest = max(study.lengths, default=0)
    means = [(mean(found), series.label) for series in study.series if (found := series.perplexity(longest))]
    lowest, label = min(means, key=lambda one: one[0], default=(0.0, ""))
    return (
        f"Lowest perplexity per {study.unit} at {longest:,} {study.unit}s: {label}, {rounded(lowest)}." if means else ""
    )


def _about(study: Study) -> list[tuple[str, str]]:
    """How much was trained and tested, and on what text."""
    counts = [np.nanmin(y) for s in study.series for _, y in [s.curve("by_position", "position", "tokens")] if y.size]
    weights, tokens = model_sizes(study.records)
    return [
        ("configurations", f"{len(study.series):,}"),
        ("seeds of each", seed_counts(study.series)),
        ("weights", weights),
        (f"training {study.unit}s", tokens),
        (f"fewest {study.unit}s at a position", f"{min(counts):,.0f}" if counts else ""),
        *((f"corpus {name}", code(value) if name == "sha256" else value) for name, value in tables.corpus_facts(study)),
    ]


def seed_counts(series: Sequence[Series]) -> str:
    """The number of seeds of each series: "2", or "1 to 3" if they differ."""
    return answers.between([one.seeds for one in series])


def configuration(study: Study) -> Table:
    """Every field of the configs with its values."""
    return text_table((), [(code(name), value) for name, value in tables.fields(study)])


def _plots(describe: Callable[[Study], Drawn], parts: list[Study]) -> list[Plot]:
    """The plots with a figure that `describe` yields for each part; headings name the trained length if there are several."""
    return [
        Plot(f"{heading}, trained at {part.trained[0]:,}" if len(parts) > 1 else heading, caption, figure, description)
        for part in parts
        for heading, caption, figure, description in describe(part)
        if figure is not None
    ]


def _ends(study: Study, mode: Mode = "nonoverlapping") -> str:
    """Where each line starts and ends, for readers who cannot see it."""
    return " ".join(
        f"{series.label}: perplexity {mean(series.perplexity(first, mode)):.3g} at {first:,} {study.unit}s, "
        f"{mean(series.perplexity(last, mode)):.3g} at {last:,}."
        for series, (first, last) in study.ended(mode)
    )
