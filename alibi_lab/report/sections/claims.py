"""The paper's claims: all verdicts, in one table per scale; and claims of other papers (`rollouts.py`)."""

import math
from collections.abc import Sequence

from alibi_lab.records import Record
from alibi_lab.report import answers, rollouts, verdicts
from alibi_lab.report.plots import paper_items
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.sections import paper_item
from alibi_lab.report.tables.cost import model_sizes
from alibi_lab.report.verdicts import Verdict, because, counted, why


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
        (scale, counts[scale], *_sizes(members, archive), [_row(*one, anchors) for one in members])
        for scale, members in by_scale.items()
    ]
    others = [
        (
            "rollout",
            "Wu et al.",
            one,
            one.bounds,
            math.nan,
            one,
            f"over {one.bounds.over}" if one.bounds else "no interval",
        )
        for one in rollouts.claims(archive.records)
    ]
    body = html("claims", scales=scales, others=others)
    rows = (paper_items.pictures(record, archive.by_identity) for record in paper_item.find(archive))
    lead = next((plot for several in rows for row in several for plot in row), None)
    found = "; ".join(f"at scale {scale}: {count}" for scale, count in counts.items())
    found, title = f"Of the paper's claims, {found}." if found else "", "The paper's claims"
    about = "each contradicted, confirmed or open"
    return Section("claims", paper_item.GROUP, title, body, heading=title, about=about, finding=found, lead=lead)


def _sizes(members: Sequence[tuple[Record, Verdict]], archive: Archive) -> tuple[str, str]:
    """The sizes of the models and trainings that the verdicts are based on, in words."""
    answers_ = {id(record): record for record, _ in members}.values()
    return model_sizes([one for record in answers_ for one in answers.Sources(record, archive.by_identity).records])


def _row(record: Record, verdict: Verdict, anchors: dict[int, str]) -> tuple[object, ...]:
    """The anchor and the name of the item, the verdict with its interval, the paper's ratio, the claim, and the reason."""
    reason = ". ".join(filter(None, (why(verdict), because(verdict, answers.scale_of(record)))))
    item = anchors[id(record)], paper_item.item_title(record)
    return *item, verdict, verdict.interval, verdict.paper, verdict.claim, reason
