"""The certified and true reach of the heads of a trained model (records of `alibi heads reach`)."""

from markupsafe import Markup

from alibi_lab.report.plots import trained_heads as plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.plots.trained_heads import TrainedHeads
from alibi_lab.report.section import Archive, Block, Numbers, Section, Text, count_of, panels
from alibi_lab.report.tables.table import text_table


def find(archive: Archive) -> list[TrainedHeads]:
    """One entry per model, with its layers."""
    return plots.trained_heads(archive.records)


def draw(model: TrainedHeads, number: int, archive: Archive) -> Section:
    """Reach and attention of every head of every layer."""
    trained = f", after training at {model.trained:,}" if model.trained else ""
    text = Markup(
        "On {:,} tokens{}. <b>Filled:</b> the certified reach, beyond which keys are skipped because their total weight is "
        "certified to be below the tolerance. <b>Open:</b> the distance beyond which their weight is in fact below it. Dotted "
        "lines mark the two lengths."
    ).format(model.length, trained)
    reach = Plot(
        "Certified reach and true distance",
        "The maximum over all queries, in tokens, log scale.",
        plots.reach_figure(model),
        f"Reach of the heads of {len(model.records)} layers; the table below has the numbers.",
    )
    caption = (
        "The share of a head's attention on keys nearer than a distance, averaged over the queries. "
        "Pale lines are flat heads."
    )
    described, mass = "The share of attention that each head gives to near keys.", plots.mass_figure(model)
    drawn = [reach, *([Plot("Where the attention is", caption, mass, described)] if mass else [])]
    table = text_table(("layer", "slope", "certified", "true", "ratio"), plots.head_table(model))
    numbers = Numbers(table, label=f"Reach of every head of {model.title}", tall=True)
    blocks: list[Block] = [Text(text), *panels(drawn, f"h{number}"), numbers]
    group, heading, about = "Heads of trained models", f"Reach of trained heads: {model.title}", count_of(model.records)
    return Section(f"h{number}", group, model.title, blocks, heading=heading, about=about, records=model.records)
