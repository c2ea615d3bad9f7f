"""The paper's claims, with all verdicts in one table per scale and those on claims of other papers (`rollouts.py`); its figures
and tables, each with our answer next to the paper's own numbers; and the trainings and tests that answers are computed from.
"""

from collections.abc import Sequence

from markupsafe import Markup

from alibi_lab.records import Record
from alibi_lab.report import answers, rollouts, verdicts
from alibi_lab.report.plots import paper_items
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.series import Study, grouped
from alibi_lab.report.tables import paper as tables
from alibi_lab.report.verdicts import Verdict, because, counted, why

GROUP = "The paper, item by item"


def find_claims(archive: Archive) -> list[list[tuple[Record, Verdict]]]:
    """All verdicts of all items, as one entry."""
    judged = verdicts.all_verdicts(archive.records, archive.by_identity)
    return [judged] if judged or rollouts.claims(archive.records) else []


def draw_claims(judged: Sequence[tuple[Record, Verdict]], number: int, archive: Archive) -> Section:
    """A table per scale, and one of other papers' claims."""
    items = find_items(archive)
    anchors = {id(record): f"p{place}" for place, record in enumerate(items)}
    by_scale = grouped(judged, lambda one: answers.scale_of(one[0]) or "of unknown size")
    scales = []
    for scale, members in by_scale.items():
        own = {id(record): record for record, _ in members}.values()
        sources = [one for record in own for one in answers.Sources(record, archive.by_identity).records]
        reasons = [". ".join(filter(None, (why(one), because(one, scale)))) for _, one in members]
        rows = [(anchors[id(of)], _title(of), one, why_) for (of, one), why_ in zip(members, reasons, strict=True)]
        scales.append((scale, counted([one for _, one in members]), sources, rows))
    others = [("rollout", "Wu et al.", one, why(one)) for one in rollouts.claims(archive.records)]
    body = html("claims", scales=scales, others=others)
    drawn = (row for one in items for row in paper_items.pictures(one, archive.by_identity))
    lead = next((plot.figure for row in drawn for plot in row), None)
    found = "; ".join(f"at scale {scale}: {count}" for scale, count, *_ in scales)
    found, title = f"Of the paper's claims, {found}." if found else "", "The paper's claims"
    about = "each contradicted, confirmed or open"
    return Section("claims", GROUP, title, body, about=about, finding=found, lead=lead)


def find_items(archive: Archive) -> list[Record]:
    """The answers, in the paper's order."""
    return answers.sorted_items(archive.records)


def draw_item(record: Record, number: int, archive: Archive) -> Section:
    """Pictures, changes, numbers and the paper's notes."""
    item, title, scale, name = answers.item_of(record), _title(record), answers.scale_of(record), f"p{number}"
    known = archive.by_identity
    evidence, count = answers.Sources(record, known).records, counted(verdicts.verdicts(record, known))
    values = {"counted": count, "evidence": evidence, "rows": paper_items.pictures(record, known)}
    body = html("paper_item", name=name, record=record, item=item, answers=answers, tables=tables, **values)
    small = Markup(" <small>{}</small>").format(scale) if scale else ""
    heading = Markup("{}: {}{}").format(title, item.title, small)
    return Section(name, GROUP, title, body, heading=heading, about=item.title, records=[record], css="item")


def find_evidence(archive: Archive) -> list[list[Study]]:
    """All studies that answers name, as one entry."""
    named = answers.named_studies(archive.records)
    studies = [study for study in archive.studies if study.recipe in named]
    return [studies] if studies else []


def draw_evidence(studies: Sequence[Study], number: int, archive: Archive) -> Section:
    """For every series: the tested lengths, perplexities, and training time."""
    by_title = grouped(studies, lambda study: f"{study.recipe} on {study.corpus.get('name', 'its text')}")
    # A training is in the study of each of its tests.
    records = list({id(record): record for study in studies for record in study.records}.values())
    group, title, about = "Sources of the paper's items", "Trainings and tests", count_of(records)
    body, heading = html("evidence", studies=by_title), f"{title} used for the paper's items"
    return Section("evidence", group, title, body, heading=heading, about=about, records=records)


def _title(record: Record) -> str:
    """The item that a record answers: "Figure 1"."""
    return answers.item_name(record).replace("-", " ").capitalize()
