"""Attention accumulated over the layers: does the first token win with depth (records of `alibi heads rollout`)?"""

from collections.abc import Sequence

import numpy as np

from alibi_lab.records import Record
from alibi_lab.report import rollouts
from alibi_lab.report.answers import between
from alibi_lab.report.plots import rollouts as plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Block, Numbers, Section, Text, count_of, panels
from alibi_lab.report.tables.table import text_table

_WAYS = (rollouts.PLAIN, rollouts.RESIDUAL)
_ABOUT = (
    "Each layer's attention, averaged over its heads, is multiplied by that of the layers below: from which tokens an output "
    "would come if values were only mixed. Shares are averaged over the queries of the second half of a text; a tenth is that of "
    "the tokens a query sees. Wu, Wang, Jegelka and Jadbabaie (2025, arXiv:2502.01951) prove that under a causal mask with "
    "bounded scores all of it ends at the first token, and that a bias −m·d works against that. With scores of 0 a layer moves "
    "back by 1/(e^m − 1) tokens on average, so the first token wins after about n·(e^m − 1) layers."
)


def find(archive: Archive) -> list[list[Record]]:
    """All records of rollouts, as one entry."""
    records = [record for record in archive.records if rollouts.is_drawn(record)]
    return [records] if records else []


def draw(records: Sequence[Record], number: int, archive: Archive) -> Section:
    """Pictures of their setting and of trained models, and the shares by layer."""
    models, shares = rollouts.models(records), ("first_token", "last_tenth")
    theory = [record for record in records if record.name == rollouts.THEORY][:1]
    drawn = [_of_theory(record, share) for record in theory for share in shares]
    drawn += [_of_models(models, way, share) for way in _WAYS for share in shares if models]
    blocks: list[Block] = [Text(_ABOUT), *panels(drawn, f"r{number}")]
    if models:
        names = rollouts.SHARES.values()
        table = text_table(("model", "layers", *names, *(f"{name}, residual" for name in names)), _rows(models))
        blocks.append(Numbers(table, label="Shares at the last layer; the mean of the seeds"))
    group, title = "Heads of trained models", "Attention through the layers"
    heading, about = "Attention accumulated over the layers", count_of(records)
    found, lead = _finding(models), drawn[2 if theory and models else 0]
    return Section("rollout", group, title, blocks, heading, about=about, records=records, finding=found, lead=lead)


def _of_theory(record: Record, share: str) -> Plot:
    length = record.config.get("length")
    return Plot(
        f"Their setting: the {rollouts.SHARES[share]}",
        f"{length} tokens; the same attention in every layer, with scores of 0 (rotary: of equal tokens). Log scale.",
        plots.theory_figure(record, share),
        f"The share of the {rollouts.SHARES[share]} against the number of layers, one line per mask.",
    )


def _of_models(models: rollouts.Models, way: str, share: str) -> Plot:
    counts = [len(members) for members in models.values()]
    seeds = f"; the mean and range of {between(counts)} seeds" if max(counts) > 1 else ""
    residual = ", half of every layer being its input" if way == rollouts.RESIDUAL else ""
    return Plot(
        f"Trained models: the {rollouts.SHARES[share]}{residual}",
        f"By layer, on held-out text{seeds}.",
        plots.model_figure(models, way, share),
        f"The share of the {rollouts.SHARES[share]} by layer, one line per model.",
    )


def _rows(models: rollouts.Models) -> list[tuple[str, ...]]:
    rows = []
    for name, members in models.items():
        layers = f"{rollouts.depths(members[0], rollouts.PLAIN)[-1]:.0f}"
        ends = [f"{_at_the_end(members, way, share):.1%}" for way in _WAYS for share in rollouts.SHARES]
        rows.append((rollouts.label_of(name, members[0]), layers, *ends))
    return rows


def _at_the_end(members: Sequence[Record], way: str, share: str) -> float:
    """A share at the last layer, averaged over the seeds."""
    return float(np.mean([rollouts.by_depth(record, way, share)[-1] for record in members]))


def _finding(models: rollouts.Models) -> str:
    """The first token's share at the last layer, by model."""
    ends = {
        rollouts.label_of(name, members[0]): _at_the_end(members, rollouts.PLAIN, "first_token")
        for name, members in models.items()
    }
    found = ", ".join(f"{label} {end:.0%}" for label, end in ends.items())
    return f"Share of the first token in the attention accumulated over all layers: {found}." if found else ""
