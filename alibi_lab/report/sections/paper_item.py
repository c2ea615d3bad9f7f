"""A figure or table of the paper: our answer next to the paper's own numbers, with the verdicts on its claims."""

from markupsafe import Markup

from alibi_lab.records import Record
from alibi_lab.report import answers, verdicts
from alibi_lab.report.plots import paper_items
from alibi_lab.report.section import Archive, Block, Facts, Folded, Numbers, Section, Text, aged, code, panels
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
    blocks: list[Block] = [Facts(facts)] if (facts := answers.facts(record)) else []
    judged = verdicts.verdicts(record, archive.by_identity)
    evidence = answers.Sources(record, archive.by_identity).records
    if judged:
        weights, tokens = model_sizes(evidence)
        trained = f", trained on {tokens} tokens each" if tokens else ""
        size = f" ({weights} weights{trained})" if weights else ""
        start = f"The paper's claims about it, at this size{size}: "
        blocks.append(Text(Markup('{}<a href="#claims">{}</a>.').format(start, verdicts.counted(judged))))
    blocks += aged(evidence)
    for place, row in enumerate(paper_items.pictures(record, archive.by_identity)):
        blocks += panels(row, f"{anchor(number)}-{place}")
    change, table = tables.change_table(record), tables.pair_table(record)
    if change:
        caption = "The same change in our results and in the paper, at equal multiples of the trained length."
        blocks.append(Numbers(change, caption))
    if table:
        caption = (
            "Ours and the paper's. If a column has two lengths, ours comes first. The best value of each column is bold, "
            "separately for ours and the paper's."
        )
        numbers = Numbers(table, caption)
        blocks.append(numbers if item.source == title.lower() else Folded("The numbers", [numbers]))
    if item.notes:
        blocks.append(Text(f"Notes on the paper's numbers: {item.notes}", "note"))
    if record.command:
        blocks.append(Text(Markup("Made with {}").format(code(record.command)), "note"))
    small = Markup(" <small>{}</small>").format(scale) if scale else ""
    heading, about = Markup("{}: {}{}").format(title, item.title, small), item.title
    return Section(anchor(number), GROUP, title, blocks, heading=heading, about=about, records=[record], css="item")
