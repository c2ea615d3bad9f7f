"""The paper's claims: all verdicts, in one table per scale; and claims of other papers (`rollouts.py`)."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from alibi_lab.records import Record
from alibi_lab.report import answers, rollouts, verdicts
from alibi_lab.report.intervals import Interval
from alibi_lab.report.plots import paper_items
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.sections import paper_item
from alibi_lab.report.tables.cost import model_sizes
from alibi_lab.report.tables.table import Block as Rows
from alibi_lab.report.tables.table import Cell, Row, Table
from alibi_lab.report.verdicts import Verdict, because, counted, interval_text, ratio_text, why

_COLUMNS = ("verdict", "ours", "95 %", "the paper", "holds if", "from")


def find(archive: Archive) -> list[list[tuple[Record, Verdict]]]:
    """All verdicts of all items, as one entry."""
    judged = verdicts.in_order(verdicts.all_verdicts(archive.records, archive.by_identity))
    return [judged] if judged or rollouts.claims(archive.records) else []


def draw(judged: Sequence[tuple[Record, Verdict]], number: int, archive: Archive) -> Section:
    """A table per scale, and one of other papers' claims."""
    by_scale: dict[str, list[tuple[Record, Verdict]]] = {}
    for record, verdict in judged:
        by_scale.setdefault(answers.scale_of(record) or "of unknown size", []).append((record, verdict))
    anchors = {id(record): paper_item.anchor(place) for place, record in enumerate(paper_item.find(archive))}
    counts = {scale: counted([verdict for _, verdict in members]) for scale, members in by_scale.items()}
    scales = [
        (scale, counts[scale], *_sizes(members, archive), _table([_row(*one, anchors) for one in members]))
        for scale, members in by_scale.items()
    ]
    body = html("claims", scales=scales, others=_of_others(archive.records))
    rows = (paper_items.pictures(record, archive.by_identity) for record in paper_item.find(archive))
    lead = next((plot for several in rows for row in several for plot in row), None)
    found = "; ".join(f"at scale {scale}: {count}" for scale, count in counts.items())
    found, title = f"Of the paper's claims, {found}." if found else "", "The paper's claims"
    about = "each contradicted, confirmed or open"
    return Section("claims", paper_item.GROUP, title, body, heading=title, about=about, finding=found, lead=lead)


def _of_others(records: Sequence[Record]) -> Table | None:
    """The table of the claims of `rollouts.py`; None if none was measured."""
    rows: list[Row] = []
    for claim in rollouts.claims(records):
        label = Markup('<a href="#rollout">Wu et al.</a> {}').format(claim.says)
        reason = f"over {claim.bounds.over}" if claim.bounds else "no interval"
        rows.append((label, "", _cells(claim.word, claim.ours, claim.bounds, math.nan, claim.condition, reason)))
    return _table(rows) if rows else None


def _table(rows: Sequence[Row]) -> Table:
    return Table(_COLUMNS, [Rows("", rows)], corner="claim")


def _sizes(members: Sequence[tuple[Record, Verdict]], archive: Archive) -> tuple[str, str]:
    """The sizes of the models and trainings that the verdicts are based on, in words."""
    answers_ = {id(record): record for record, _ in members}.values()
    return model_sizes([one for record in answers_ for one in answers.Sources(record, archive.by_identity).records])


def _row(record: Record, verdict: Verdict, anchors: dict[int, str]) -> Row:
    claim = verdict.claim
    explained = because(verdict, answers.scale_of(record))
    label = Markup('<a href="#{}">{}</a> {}').format(anchors[id(record)], paper_item.item_title(record), claim.says)
    reason = f"{why(verdict)}{f'. {explained}' if explained else ''}"
    return label, "", _cells(verdict.word, verdict.ours, verdict.interval, verdict.paper, claim.condition, reason)


def _cells(word: str, ours: float, bounds: Interval | None, paper: float, condition: str, reason: str) -> list[Cell]:
    """The cells of `_COLUMNS`."""
    numbers = (ratio_text(ours), interval_text(bounds), ratio_text(paper), condition)
    return [Cell(word, css=f"verdict {word}"), *map(Cell, numbers), Cell(reason, css="why")]
