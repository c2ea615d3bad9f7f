"""Costs: trainings, weights, tokens, time and machines, summed over the records of each study."""

from collections.abc import Sequence

from alibi_lab.records import Record
from alibi_lab.report.series import Study
from alibi_lab.report.tables.table import Block, Cell, Table, machine_text


def cost_table(studies: Sequence[Study]) -> Table | None:
    """One row per recipe and text, and a total; a training that several studies share counts once."""
    by_title: dict[str, list[Record]] = {}
    for study in studies:
        by_title.setdefault(f"{study.recipe} on {study.corpus.get('name', 'its text')}", []).extend(study.records)
    rows = [(title, "ink", _cells(_unique(own))) for title, own in by_title.items()]
    counted = [record for own in by_title.values() for record in own]
    if not any(cell.value for _, _, cells in rows for cell in cells):
        return None
    if len(rows) > 1:
        rows.append(("total", "ink", _cells(_unique(counted))))
    several = len({machine_text(record.machine) for record in counted if record.machine}) > 1
    columns = ("trainings", "parameters", "tokens trained on", "training", "tests", *(("machine",) if several else ()))
    shown = tuple((label, color, cells[: len(columns)]) for label, color, cells in rows)
    return Table(columns, (Block("Studies", shown),))


def model_sizes(records: Sequence[Record]) -> tuple[str, str]:
    """The number of weights and of training tokens of the models of an answer, in words; "" if not recorded."""
    weights = [value for one in records if (value := one.metrics.get("parameters"))]
    tokens = [value for one in records if one.kind == "training" and (value := one.metrics.get("tokens"))]
    return _range_of_millions(weights) if weights else "", _range_of_millions(tokens) if tokens else ""


def duration(seconds: float) -> str:
    """Seconds in a readable unit: "48 s", "12 min", "3.4 h"."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def _cells(records: Sequence[Record]) -> tuple[Cell, ...]:
    trainings = [record for record in records if record.kind == "training"]
    sizes = [float(value) for r in trainings if (value := r.metrics.get("parameters")) is not None]
    tokens = sum(float(value) for r in trainings if (value := r.metrics.get("tokens")) is not None)
    seconds = sum(float(value) for r in trainings if (value := r.metrics.get("seconds")) is not None)
    tests = sum(record.seconds for record in records if record.kind == "evaluation")
    machines = dict.fromkeys(machine_text(record.machine) for record in records if record.machine)
    low, high = (_millions(min(sizes)), _millions(max(sizes))) if sizes else ("—", "—")
    return (
        Cell(f"{len(trainings):,}", float(len(trainings))),
        Cell(low if low == high else f"{low} – {high}"),
        Cell(_millions(tokens) if tokens else "—", tokens or None),
        Cell(duration(seconds) if seconds else "—", seconds or None),
        Cell(duration(tests) if tests else "—", tests or None),
        Cell("; ".join(machines)),
    )


def _unique(records: Sequence[Record]) -> list[Record]:
    return list({id(record): record for record in records}.values())


def _millions(value: float) -> str:
    if value >= 1e9:
        return f"{value / 1e9:.3g} G"
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}"


def _range_of_millions(values: Sequence[float]) -> str:
    low, high = (f"{bound / 1e6:.2g}" for bound in (min(values), max(values)))
    return f"{low} M" if low == high else f"{low} to {high} M"
