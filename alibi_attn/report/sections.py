"""Sections: what the template shows of a study, of an item of the paper, of a benchmark, of the heads of a trained model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import get_args

from markupsafe import Markup
from matplotlib.figure import Figure

from alibi_attn.records import Record
from alibi_attn.report import (
    answers,
    benchmarks,
    certificates,
    figures,
    heads,
    paper,
    paper_tables,
    retrieval,
    sentences,
    tables,
    verdicts,
)
from alibi_attn.report.certificates import TrainedHeads
from alibi_attn.report.published import PUBLISHED
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
class PaperSection:
    """An item of the paper; `weights` and `tokens` say how large the models behind it are and how long they were trained."""

    name: str
    anchor: str
    title: str
    scale: str
    sentences: Sequence[str]
    verdicts: Sequence[verdicts.Verdict]
    weights: str
    tokens: str
    pictures: Sequence[Sequence[Shown]]
    folded: bool
    change: Table | None
    table: Table | None
    notes: str
    command: str

    @property
    def judged(self) -> str:
        """How many of its claims were decided, and how: "2 confirmed, 1 not decided"."""
        counts = {word: sum(one.word == word for one in self.verdicts) for word in get_args(verdicts.Word)}
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """A claim of the paper as the page shows it; ratios are texts, `asked` says on which side of what the claim wants them."""

    item: str
    anchor: str
    says: str
    paper: str
    ours: str
    interval: str
    asked: str
    word: verdicts.Word
    why: str
    weights: str
    tokens: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimBlock:
    """All claims that were asked at one scale, and how many got which verdict."""

    scale: str
    counts: Sequence[tuple[verdicts.Word, int]]
    rows: Sequence[ClaimRow]


def study_section(study: Study, name: str) -> dict[str, object]:
    """What the template shows of one study; `name` is the prefix of its ids."""
    parts = drawable(study)
    return {
        "name": name,
        "recipe": study.recipe,
        "corpus": study.corpus.get("name", ""),
        "unit": study.unit,
        "seeds": study.seeds,
        "headline": sentences.headline(study),
        "sliding": sentences.sliding_sentence(study),
        "stretched": any(series.stretch != "none" for series in study.series),
        "allowed": sentences.allowed(study),
        "not_allowed": sentences.not_allowed(study),
        "cards": tables.cards(study) if len(parts) == 1 else [],
        "perplexity": [panel for at, part in enumerate(parts) for panel in _perplexity(part, f"{name}-{at}", parts)],
        "perplexity_table": tables.by_length(study),
        "losses": [panel for at, part in enumerate(parts) for panel in _losses(part, f"{name}-{at}", parts)],
        "costs": [panel for at, part in enumerate(parts) for panel in _costs(part, f"{name}-{at}", parts)],
        "memory": any("peak_memory_bytes" in r.curves.get("by_length", {}) for r in study.records),
        "tasks": _tasks(study, name),
        "task_table": retrieval.task_table(study),
        "cost_tables": [table for table in (tables.training_cost(study), tables.evaluation_cost(study)) if table],
        "fields": tables.fields(study),
        "facts": tables.corpus_facts(study),
    }


def drawable(study: Study) -> list[Study]:
    """The study, or where it has too many lines for one picture, a study of each trained length."""
    if len(study.series) <= MOST_LINES:
        return [study]
    return [
        dataclasses.replace(study, series=tuple(series for series in study.series if series.trained == length))
        for length in study.trained
    ]


def head_sections(studies: Sequence[Study]) -> list[dict[str, object]]:
    """The heads of ALiBi, once for every number of heads in the studies."""
    longest: dict[int, int] = {}
    for study in studies:
        for count in sentences.head_counts(study):
            longest[count] = max([longest.get(count, 1), *study.lengths, *study.trained])
    return [
        {
            "count": count,
            "length": length,
            "grid": _picture(
                heads.bias_grid(count, length),
                f"heads{count}",
                f"The causal biases of {count} heads over {length:,} tokens: from a thin diagonal to a full triangle.",
            ),
            "factors": _picture(
                heads.factor_curves(count, length),
                f"factors{count}",
                f"The factor that each of {count} heads leaves a key, by distance: steep heads forget within a few tokens.",
            ),
            "table": tables.head_rows(count),
        }
        for count, length in sorted(longest.items())
    ]


def benchmark_section(record: Record, name: str) -> dict[str, object]:
    """What the template shows of one benchmark."""
    lengths, rows = benchmarks.ratio_table(record)
    description = f"Time against length of {', '.join(label for label, _ in rows)}; the table below has the ratios."
    return {
        "name": name,
        "title": record.name,
        "picture": _picture(benchmarks.times_by_length(record), f"{name}-times", description),
        "memory": _picture(benchmarks.memory_by_length(record), f"{name}-memory", "Peak memory against length."),
        "lengths": lengths,
        "rows": rows,
        "facts": benchmarks.facts(record),
        "command": record.command,
    }


def model_section(model: TrainedHeads, name: str) -> dict[str, object]:
    """What the template shows of the heads of one trained model."""
    said = f"Reach of the heads of {len(model.layers)} layers; the table below has the numbers."
    return {
        "name": name,
        "title": model.title,
        "length": model.length,
        "trained": model.trained,
        "reach": _picture(certificates.reach_figure(model), f"{name}-reach", said),
        "mass": _picture(
            certificates.mass_figure(model), f"{name}-mass", "The share of attention that each head gives to near keys."
        ),
        "rows": certificates.head_table(model),
    }


def sorted_items(records: Sequence[Record]) -> list[Record]:
    """Answers in the paper's order, figures first; several answers to one item by their scale."""
    order = list(PUBLISHED)
    return sorted(records, key=lambda r: (order.index(answers.item_name(r)), answers.scale_of(r), r.name))


def paper_section(record: Record, name: str, by_identity: Mapping[str, Record]) -> PaperSection:
    """What the template shows of one item of the paper; `by_identity` holds the records that the answer was read from."""
    item = answers.item_of(record)
    title = answers.item_name(record).replace("-", " ")
    weights, tokens = verdicts.size(verdicts.Evidence(record, by_identity).records)
    return PaperSection(
        name=title.capitalize(),
        anchor=name,
        title=item.title,
        scale=answers.scale_of(record),
        sentences=[text for text in (answers.scale_sentence(record), answers.spread_sentence(record)) if text],
        verdicts=verdicts.verdicts(record, by_identity),
        weights=weights,
        tokens=tokens,
        pictures=[
            [
                Shown(part.heading, part.caption, _drawn(part.figure, f"{name}-{at}-{place}", part.description))
                for place, part in enumerate(row)
            ]
            for at, row in enumerate(paper.pictures(record, by_identity))
        ],
        folded=item.source != title,
        change=paper_tables.change_table(record),
        table=paper_tables.pair_table(record),
        notes=item.notes,
        command=record.command,
    )


def claim_blocks(parts: Sequence[PaperSection]) -> list[ClaimBlock]:
    """The verdicts of all items, a block a scale."""
    by_scale: dict[str, list[PaperSection]] = {}
    for part in parts:
        if part.verdicts:
            by_scale.setdefault(part.scale, []).append(part)
    return [
        ClaimBlock(
            scale=scale or "of unknown size",
            counts=[
                (word, sum(one.word == word for part in found for one in part.verdicts))
                for word in get_args(verdicts.Word)
            ],
            rows=[_claim_row(part, one) for part in found for one in part.verdicts],
        )
        for scale, found in by_scale.items()
    ]


def _claim_row(part: PaperSection, found: verdicts.Verdict) -> ClaimRow:
    bounds, claim = found.interval, found.claim
    return ClaimRow(
        item=part.name,
        anchor=part.anchor,
        says=claim.says,
        paper=_ratio(found.paper),
        ours=_ratio(found.ours),
        interval=f"{_ratio(bounds.low)} to {_ratio(bounds.high)}" if bounds else "",
        asked=f"{'below' if claim.relation == 'below' else 'above'} {claim.threshold:g}",
        word=found.word,
        why=found.why,
        weights=part.weights,
        tokens=part.tokens,
    )


def _ratio(value: float) -> str:
    if not math.isfinite(value):
        return "—"
    return f"{value:.3f}" if value < 2 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _perplexity(study: Study, name: str, parts: Sequence[Study]) -> list[Shown]:
    panels = []
    for mode, heading, caption in _MODES:
        description = f"Perplexity by length, {heading.lower()}. {_ends(study, mode)}"
        picture = _picture(figures.perplexity_by_length(study, mode), f"{name}-{mode}", description)
        if picture is not None:
            panels.append(Shown(heading + _which(study, parts), caption, picture))
    return panels


def _losses(study: Study, name: str, parts: Sequence[Study]) -> list[Shown]:
    position = (
        f"At the longest length: how well the token at each position is predicted. {sentences.position_sentence(study)}"
    )
    drawn = (
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
    return _panels(drawn, study, name, "loss", parts)


def _costs(study: Study, name: str, parts: Sequence[Study]) -> list[Shown]:
    below = "by length, for every method; the table below has the numbers."
    drawn = (
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
    return _panels(drawn, study, name, "cost", parts)


def _tasks(study: Study, name: str) -> list[Shown]:
    drawn = (
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
    )
    return _panels(drawn, study, name, "task", [study])


def _panels(
    drawn: Sequence[tuple[str, str, Figure | None, str]], study: Study, name: str, kind: str, parts: Sequence[Study]
) -> list[Shown]:
    found = []
    for place, (heading, caption, figure, description) in enumerate(drawn):
        picture = _picture(figure, f"{name}-{kind}{place}", description)
        if picture is not None:
            found.append(Shown(heading + _which(study, parts), caption, picture))
    return found


def _which(study: Study, parts: Sequence[Study]) -> str:
    return f", trained at {study.trained[0]:,}" if len(parts) > 1 else ""


def _picture(figure: Figure | None, name: str, description: str) -> Markup | None:
    return None if figure is None else _drawn(figure, name, description)


def _drawn(figure: Figure, name: str, description: str) -> Markup:
    return Markup(figures.svg(figure, name, description))


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
