"""The certified and true reach of the heads of a trained model (records of `alibi heads reach`)."""

from alibi_lab.report.plots import trained_heads as plots
from alibi_lab.report.plots.trained_heads import TrainedHeads
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.tables.table import text_table


def find(archive: Archive) -> list[TrainedHeads]:
    """One entry per model, with its layers."""
    return plots.trained_heads(archive.records)


def draw(model: TrainedHeads, number: int, archive: Archive) -> Section:
    """Reach and attention of every head of every layer."""
    name, reach, mass = f"h{number}", plots.reach_figure(model), plots.mass_figure(model)
    table = text_table(plots.COLUMNS, plots.head_table(model))
    body = html("trained_heads", name=name, model=model, reach=reach, mass=mass, table=table)
    group, heading, about = "Heads of trained models", f"Reach of trained heads: {model.title}", count_of(model.records)
    return Section(name, group, model.title, body, heading=heading, about=about, records=model.records)
