"""Costs: trainings, weights, tokens, time and machines, summed over the records of each study."""

from collections.abc import Callable, Sequence

from alibi_lab.records import Record
from alibi_lab.report.answers import between
from alibi_lab.report.series import Study
from alibi_lab.report.tables.table import NOTHING, Block, Cell, Row, Table, machine_text


def cost_table(studies: Sequence[Study]) -> Table | None:
    """One row per recipe and text, and a total; a training that several studies share counts once."""
    by_title: dict[str, dict[int, Record]] = {}
    for study in studies:
        own = by_title.setdefault(f"{study.recipe} on {study.corpus.get('name', 'its text')}", {})
        own.update({id(record): record for record in study.records})
    counted = {key: record for own in by_title.values() for key, record in own.items()}
    totals = {"total": counted} if len(by_title) > 1 else {}
    rows: list[Row] = [(title, "ink", _cells(list(own.values()))) for title, own in (by_title | totals).items()]
    if not any(cell.value for _, _, cells in rows for cell in cells):
        return None
    several = len({machine_text(record.machine) for record in counted.values() if record.machine}) > 1
    columns = ("trainings", "parameters", "tokens trained on", "training", "tests", *["machine"] * several)
    return Table(columns, [Block("Studies", [(label, color, cells[: len(columns)]) for label, color, cells in rows])])


def model_sizes(records: Sequence[Record]) -> tuple[str, str]:
    """The number of weights and of training tokens of the models of an answer, in words; "" if not recorded."""
    trainings = [record for record in records if record.kind == "training"]
    return _in_millions(_metrics(records, "parameters")), _in_millions(_metrics(trainings, "tokens"))


def _in_millions(values: Sequence[float]) -> str:
    return f"{between([value / 1e6 for value in values], '{:.2g}'.format)} M" if values else ""


def duration(seconds: float) -> str:
    """Seconds in a readable unit: "48 s", "12 min", "3.4 h"."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def _cells(records: Sequence[Record]) -> Sequence[Cell]:
    trainings = [record for record in records if record.kind == "training"]
    tokens, seconds = (sum(_metrics(trainings, name)) for name in ("tokens", "seconds"))
    tests = sum(record.seconds for record in records if record.kind == "evaluation")
    machines = dict.fromkeys(machine_text(record.machine) for record in records if record.machine)
    return (
        Cell(f"{len(trainings):,}", float(len(trainings))),
        Cell(between(_metrics(trainings, "parameters"), _millions, " – ") or "—"),
        _sum(tokens, _millions),
        _sum(seconds, duration),
        _sum(tests, duration),
        Cell("; ".join(machines)),
    )


def _metrics(records: Sequence[Record], name: str) -> list[float]:
    """A metric of the records that have it."""
    return [float(value) for record in records if (value := record.metrics.get(name))]


def _sum(value: float, show: Callable[[float], str]) -> Cell:
    return Cell(show(value), value) if value else NOTHING


def _millions(value: float) -> str:
    if value >= 1e9:
        return f"{value / 1e9:.3g} G"
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}"
