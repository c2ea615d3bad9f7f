"""A figure or table of the paper: our answer next to the paper's own numbers, with the verdicts on its claims."""

from markupsafe import Markup

from alibi_lab.records import Record
from alibi_lab.report import answers, verdicts
from alibi_lab.report.plots import paper_items
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.tables import paper as tables
from alibi_lab.report.tables.cost import model_sizes

GROUP = "The paper, item by item"


def find(archive: Archive) -> list[Record]:
    """The answers, in the paper's order."""
    return answers.sorted_items(archive.records)


def anchor(number: int) -> str:
    """The id of the section of the answer with this index."""
    return f"p{number}"


def item_title(record: Record) -> str:
    """The item that a record answers: "Figure 1"."""
    return answers.item_name(record).replace("-", " ").capitalize()


def draw(record: Record, number: int, archive: Archive) -> Section:
    """Pictures, changes, numbers and the paper's notes."""
    item, title, scale = answers.item_of(record), item_title(record), answers.scale_of(record)
    evidence = answers.Sources(record, archive.by_identity).records
    body = html(
        "paper_item",
        name=anchor(number),
        facts_=answers.facts(record),
        size=model_sizes(evidence),
        counted=verdicts.counted(verdicts.verdicts(record, archive.by_identity)),
        evidence=evidence,
        rows=paper_items.pictures(record, archive.by_identity),
        change=tables.change_table(record),
        table=tables.pair_table(record),
        is_table=item.source == title.lower(),
        notes=item.notes,
        record=record,
    )
    small = Markup(" <small>{}</small>").format(scale) if scale else ""
    heading, about = Markup("{}: {}{}").format(title, item.title, small), item.title
    return Section(anchor(number), GROUP, title, body, heading=heading, about=about, records=[record], css="item")
