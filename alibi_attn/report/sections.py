"""Sections: what the template shows of an item of the paper, of a benchmark, of the heads of a trained model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import get_args

from markupsafe import Markup

from alibi_attn.records import Record
from alibi_attn.report import (
    answers,
    benchmarks,
    certificates,
    head_maps,
    heads,
    paper,
    paper_tables,
    sentences,
    tables,
    verdicts,
)
from alibi_attn.report.certificates import TrainedHeads
from alibi_attn.report.published import PUBLISHED
from alibi_attn.report.series import Study
from alibi_attn.report.study_sections import Shown, drawn, picture
from alibi_attn.report.tables import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSection:
    """The biases of ALiBi with so many heads over a length."""

    count: int
    length: int
    grid: Markup
    factors: Markup
    table: Sequence[tuple[str, str, str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkSection:
    """A benchmark: pictures, and the ratios by length."""

    name: str
    title: str
    picture: Markup
    memory: Markup | None
    lengths: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    facts: Sequence[tuple[str, str]]
    command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The heads of a trained model."""

    name: str
    title: str
    length: int
    trained: int
    reach: Markup
    mass: Markup | None
    rows: Sequence[tuple[str, str, str, str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapSection:
    """The heads of a model that was looked into, as maps and as rows."""

    name: str
    title: str
    sentence: str
    picture: Markup
    rows: Sequence[tuple[str, ...]]
    command: str


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


def head_sections(studies: Sequence[Study]) -> list[HeadSection]:
    """The heads of ALiBi, once for every number of heads in the studies."""
    longest: dict[int, int] = {}
    for study in studies:
        for count in sentences.head_counts(study):
            longest[count] = max([longest.get(count, 1), *study.lengths, *study.trained])
    return [
        HeadSection(
            count=count,
            length=length,
            grid=drawn(
                heads.bias_grid(count, length),
                f"heads{count}",
                f"The causal biases of {count} heads over {length:,} tokens: from a thin diagonal to a full triangle.",
            ),
            factors=drawn(
                heads.factor_curves(count, length),
                f"factors{count}",
                f"The factor that each of {count} heads leaves a key, by distance: steep heads forget within a few tokens.",
            ),
            table=tables.head_rows(count),
        )
        for count, length in sorted(longest.items())
    ]


def benchmark_section(record: Record, name: str) -> BenchmarkSection:
    """What the template shows of one benchmark."""
    lengths, rows = benchmarks.ratio_table(record)
    description = f"Time against length of {', '.join(label for label, _ in rows)}; the table below has the ratios."
    return BenchmarkSection(
        name=name,
        title=record.name,
        picture=drawn(benchmarks.times_by_length(record), f"{name}-times", description),
        memory=picture(benchmarks.memory_by_length(record), f"{name}-memory", "Peak memory against length."),
        lengths=lengths,
        rows=rows,
        facts=benchmarks.facts(record),
        command=record.command,
    )


def model_section(model: TrainedHeads, name: str) -> ModelSection:
    """What the template shows of the heads of one trained model."""
    said = f"Reach of the heads of {len(model.layers)} layers; the table below has the numbers."
    mass = "The share of attention that each head gives to near keys."
    return ModelSection(
        name=name,
        title=model.title,
        length=model.length,
        trained=model.trained,
        reach=drawn(certificates.reach_figure(model), f"{name}-reach", said),
        mass=picture(certificates.mass_figure(model), f"{name}-mass", mass),
        rows=certificates.head_table(model),
    )


def map_section(record: Record, name: str) -> MapSection:
    """What the template shows of the heads of a model that was looked into."""
    said = f"{head_maps.sentence(record)} The table below has the numbers of every head."
    return MapSection(
        name=name,
        title=record.name.partition("/")[2] or record.name,
        sentence=head_maps.sentence(record),
        picture=drawn(head_maps.heads_figure(record), f"{name}-maps", said),
        rows=head_maps.rows(record),
        command=record.command,
    )


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
                Shown(part.heading, part.caption, drawn(part.figure, f"{name}-{at}-{place}", part.description))
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
    return f"{value:.4f}" if value < 2 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
