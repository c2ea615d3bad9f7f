"""Attention accumulated over the layers: does the first token win with depth (records of `alibi heads rollout`)?"""

from collections.abc import Sequence

import numpy as np

from alibi_lab.records import Record
from alibi_lab.report import rollouts
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.tables.table import text_table

_WAYS = (rollouts.PLAIN, rollouts.RESIDUAL)


def find(archive: Archive) -> list[list[Record]]:
    """All records of rollouts, as one entry."""
    records = [record for record in archive.records if rollouts.is_drawn(record)]
    return [records] if records else []


def draw(records: Sequence[Record], number: int, archive: Archive) -> Section:
    """The shares at the last layer of trained models; `alibi heads rollout` draws them by layer."""
    models = rollouts.models(records)
    names = rollouts.SHARES.values()
    table = text_table(("model", "layers", *names, *(f"{name}, residual" for name in names)), _rows(models))
    body = html("rollout", table=table if models else None)
    group, title = "Heads of trained models", "Attention through the layers"
    heading, about = "Attention accumulated over the layers", count_of(records)
    return Section("rollout", group, title, body, heading, about=about, records=records, finding=_finding(models))


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
