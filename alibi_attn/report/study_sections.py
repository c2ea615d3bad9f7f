"""What the template shows of a study: the result in words, its pictures, its tables, and what may be concluded."""

import dataclasses
from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.figure import Figure

from alibi_attn.report import drawing, figures, retrieval, sentences, tables
from alibi_attn.report.series import Mode, Study
from alibi_attn.report.tables import Table

MOST_LINES = 9  # in one picture; a study with more is drawn one trained length at a time
_MODES: tuple[tuple[Mode, str, str], ...] = (
    ("nonoverlapping", "Nonoverlapping windows", "The text is cut into pieces; each is read from nothing."),
    (
        "sliding",
        "Sliding window",
        "Windows overlap; only their last tokens are scored, so that each has seen a long context.",
    ),
    (
        "windowed",
        "Context cut at the trained length",
        "The control: the same weights and tokens, but no token sees further back than it did in training.",
    ),
)


@dataclasses.dataclass(frozen=True)
class Shown:
    """A picture of the page."""

    heading: str
    caption: str
    picture: Markup


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudySection:
    """A study: what came out in words, pictures and tables, what may be concluded, and what was run."""

    name: str
    recipe: str
    corpus: str
    seeds: int
    headline: str
    sliding: str
    stretched: bool
    allowed: Sequence[str]
    not_allowed: Sequence[str]
    cards: Sequence[tables.Card]
    perplexity: Sequence[Shown]
    perplexity_table: Table | None
    losses: Sequence[Shown]
    costs: Sequence[Shown]
    memory: bool
    tasks: Sequence[Shown]
    task_table: Table | None
    cost_tables: Sequence[Table]
    fields: Sequence[tuple[str, str]]
    facts: Sequence[tuple[str, str]]


def study_section(study: Study, name: str) -> StudySection:
    """What the template shows of one study; `name` is the prefix of its ids."""
    parts = drawable(study)
    return StudySection(
        name=name,
        recipe=study.recipe,
        corpus=str(study.corpus.get("name", "")),
        seeds=study.seeds,
        headline=sentences.headline(study),
        sliding=sentences.sliding_sentence(study),
        stretched=any(series.stretch != "none" for series in study.series),
        allowed=sentences.allowed(study),
        not_allowed=sentences.not_allowed(study),
        cards=tables.cards(study) if len(parts) == 1 else [],
        perplexity=[panel for at, part in enumerate(parts) for panel in _perplexity(part, f"{name}-{at}", parts)],
        perplexity_table=tables.by_length(study),
        losses=[panel for at, part in enumerate(parts) for panel in _losses(part, f"{name}-{at}", parts)],
        costs=[panel for at, part in enumerate(parts) for panel in _costs(part, f"{name}-{at}", parts)],
        memory=any("peak_memory_bytes" in r.curves.get("by_length", {}) for r in study.records),
        tasks=_tasks(study, name),
        task_table=retrieval.task_table(study),
        cost_tables=[table for table in (tables.training_cost(study), tables.evaluation_cost(study)) if table],
        fields=tables.fields(study),
        facts=tables.corpus_facts(study),
    )


def drawable(study: Study) -> list[Study]:
    """The study, or where it has too many lines for one picture, a study of each trained length."""
    if len(study.series) <= MOST_LINES:
        return [study]
    return [
        dataclasses.replace(study, series=tuple(series for series in study.series if series.trained == length))
        for length in study.trained
    ]


def picture(figure: Figure | None, name: str, description: str) -> Markup | None:
    """A figure for the page, or None for none; `name` begins its ids."""
    return None if figure is None else drawn(figure, name, description)


def drawn(figure: Figure, name: str, description: str) -> Markup:
    """A figure for the page; `name` begins its ids, `description` is for readers who do not see it."""
    return Markup(drawing.svg(figure, name, description))


def _perplexity(study: Study, name: str, parts: Sequence[Study]) -> list[Shown]:
    panels = []
    for mode, heading, caption in _MODES:
        description = f"Perplexity by length, {heading.lower()}. {_ends(study, mode)}"
        image = picture(figures.perplexity_by_length(study, mode), f"{name}-{mode}", description)
        if image is not None:
            panels.append(Shown(heading + _which(study, parts), caption, image))
    return panels


def _losses(study: Study, name: str, parts: Sequence[Study]) -> list[Shown]:
    position = (
        f"At the longest length: how well the token at each position is predicted. {sentences.position_sentence(study)}"
    )
    asked = (
        ("Loss by position", position, figures.loss_by_position(study), f"Loss by position. {_ends(study)}"),
        (
            "Training",
            "Loss on the training text, as logged, not smoothed.",
            figures.training_curves(study),
            "Training loss of every run by step.",
        ),
        (
            "Validation by time",
            "Perplexity on text that is not trained on; every seed is a line.",
            figures.validation_curves(study, "seconds"),
            "Perplexity through the training, by seconds.",
        ),
        (
            "Validation by step",
            "The same, step for step.",
            figures.validation_curves(study, "step"),
            "Perplexity through the training, by step.",
        ),
    )
    return _panels(asked, study, name, "loss", parts)


def _costs(study: Study, name: str, parts: Sequence[Study]) -> list[Shown]:
    below = "by length, for every method; the table below has the numbers."
    asked = (
        (
            "Speed of the evaluation",
            "",
            figures.cost_by_length(study, "tokens_per_second"),
            f"Tokens evaluated per second, {below}",
        ),
        (
            "Memory of the evaluation",
            "",
            figures.cost_by_length(study, "peak_memory_bytes"),
            f"Peak memory of the evaluation, {below}",
        ),
    )
    return _panels(asked, study, name, "cost", parts)


def _tasks(study: Study, name: str) -> list[Shown]:
    asked = (
        (
            "Passkey",
            "A number hides in filler text, at a depth from 0 (the start) to 1 (the end). Per cent of the numbers found; "
            "length to the right, depth down.",
            retrieval.passkey_grid(study),
            f"Passkey by length and depth. {retrieval.describe(study, 'passkey')}",
        ),
        (
            "Recall",
            "Random tokens come a second time; at the longest length of each method, by how far back they first came.",
            retrieval.recall_by_distance(study),
            f"Recall by distance. {retrieval.describe(study, 'recall')}",
        ),
        *(
            (
                "Associative recall" if task == "mqar" else task.capitalize(),
                f"{retrieval.title_of(task)}. What is asked for stands as far back as the length allows.",
                figure,
                f"{retrieval.title_of(task)}. {retrieval.describe(study, task)}",
            )
            for task, figure in retrieval.symbols_by_length(study)
        ),
    )
    return _panels(asked, study, name, "task", [study])


def _panels(
    asked: Sequence[tuple[str, str, Figure | None, str]], study: Study, name: str, kind: str, parts: Sequence[Study]
) -> list[Shown]:
    found = []
    for place, (heading, caption, figure, description) in enumerate(asked):
        image = picture(figure, f"{name}-{kind}{place}", description)
        if image is not None:
            found.append(Shown(heading + _which(study, parts), caption, image))
    return found


def _which(study: Study, parts: Sequence[Study]) -> str:
    return f", trained at {study.trained[0]:,}" if len(parts) > 1 else ""


def _ends(study: Study, mode: Mode = "nonoverlapping") -> str:
    """Where each line starts and ends, for readers who do not see it."""
    said = []
    for series in study.series:
        between = sentences.ends(series, mode)
        if between:
            first, last = (tables.mean(sentences.perplexity(series, length, mode)) for length in between)
            said.append(
                f"{series.label}: perplexity {first:.3g} at {between[0]:,} tokens, {last:.3g} at {between[1]:,}."
            )
    return " ".join(said)
