"""A study: pictures and tables, with intervals, and what the numbers cannot show."""

import dataclasses
from pathlib import Path

import numpy as np

from alibi_lab.report import answers
from alibi_lab.report.plots import study as plots
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.sections.method_comparison import is_compared
from alibi_lab.report.series import Study, field
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.table import mean, rounded

MOST_LINES = 9  # per picture; a study with more lines gets one picture per trained length


def find(archive: Archive) -> list[Study]:
    """The studies that belong neither to the paper's items nor to a comparison of methods."""
    named = answers.named_studies(archive.records)
    return [study for study in archive.studies if study.recipe not in named and not is_compared(study)]


def draw(study: Study, number: int, archive: Archive) -> Section:
    """Perplexity with its changes and cautions, losses, tasks and costs, then the configuration."""
    name, parts = f"s{number}", drawable(study)
    of_part = [f", trained at {part.trained[0]:,}" if len(parts) > 1 else "" for part in parts]
    figures = [
        (which, kind, plots.figure_of(part, kind), _best(part) if kind == "passkey" else "")
        for which, part in zip(of_part, parts, strict=True)
        for kind in plots.KINDS
    ]
    values = {"has_cards": len(parts) == 1, "figures": figures, "fewest_tokens": _fewest(study)}
    body = html("study", name=name, study=study, tables=tables, **values)
    lead = next((figure for _, kind, figure, _ in figures if figure and kind in tables.WINDOWS), None)
    return Section(
        name,
        "Studies",
        title_of(study),
        body,
        about=count_of(study.records),
        records=study.records,
        css="recipe",
        finding=_finding(study),
        lead=lead,
    )


def title_of(study: Study) -> str:
    """What was trained and tested: "quick on novels · 0.8 M weights · 60 steps · 2 seeds · tested to 512"."""
    record = study.records[0]
    paths = field(record, "data", "text", "").split(",")
    text = study.corpus.get("name", "its text")
    text = ", ".join(Path(path).stem for path in paths) if text == "text" and paths != [""] else text
    steps = answers.between([float(field(record, "train", "steps", 0)) for record in study.records])
    seeds = answers.between([one.seeds for one in study.series])
    facts = [
        f"{study.recipe} on {text}",
        f"{weights} weights" if (weights := tables.model_sizes(study.records)[0]) else "",
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


def _finding(study: Study) -> str:
    """The lowest perplexity at the longest length, in a fixed form."""
    longest = max(study.lengths, default=0)
    means = [(mean(found), series.label) for series in study.series if (found := series.perplexity(longest))]
    lowest, label = min(means, key=lambda one: one[0], default=(0.0, ""))
    return (
        f"Lowest perplexity per {study.unit} at {longest:,} {study.unit}s: {label}, {rounded(lowest)}." if means else ""
    )


def _best(study: Study) -> str:
    """The highest share of passkeys that every series finds, for readers who cannot see the picture."""
    found = [
        f"{one.label} finds up to {100 * max(grid.values()):.0f} %" for one, grid in tables.tested(study, "passkey")
    ]
    return f"Passkey by length and depth. {'; '.join(found)}"


def _fewest(study: Study) -> float:
    """The smallest number of tokens that a position was tested with; 0 if it was not recorded."""
    counts = [np.nanmin(y) for s in study.series for _, y in [s.curve("by_position", "position", "tokens")] if y.size]
    return float(min(counts, default=0.0))
