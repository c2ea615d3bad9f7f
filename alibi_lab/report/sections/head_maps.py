"""Where the heads of a trained model attend, as maps of layers by heads (records of `alibi heads summary`)."""

from alibi_lab.records import Record
from alibi_lab.report.plots import head_maps as plots
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.tables.table import text_table

_COLUMNS = ("layer", "head", "slope", "certified", "mean distance", "carried mass", "first token")


def find(archive: Archive) -> list[Record]:
    """The records of kind "heads" with complete layers."""
    return [record for record in archive.records if plots.is_drawn(record)]


def draw(record: Record, number: int, archive: Archive) -> Section:
    """The numbers of every head; `alibi heads summary --picture` draws them."""
    title = record.name.partition("/")[2] or record.name
    table = text_table((*_COLUMNS, *(f"zero, {name}" for name in ("fp32", "bf16", "fp16"))), plots.rows(record))
    body = html("head_maps", sentence=plots.sentence(record), table=table, title=title, record=record)
    group, heading = "Heads of trained models", f"Where the heads attend: {title}"
    return Section(f"m{number}", group, title, body, heading=heading, records=[record])
