"""The trainings and tests that the answers to the paper's items are computed from, one row per configuration and test."""

import math
from collections.abc import Sequence

from alibi_lab.report import answers
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.series import Series, Study
from alibi_lab.report.tables.cost import duration
from alibi_lab.report.tables.table import NOTHING, Block, Cell, Row, Table, mean, number, variable_of

_COLUMNS = ("tested at", "stride", "on", "perplexity, shortest", "perplexity, longest", "seeds", "trained in")


def find(archive: Archive) -> list[list[Study]]:
    """All studies that answers name, as one entry."""
    named = answers.named_studies(archive.records)
    studies = [study for study in archive.studies if study.recipe in named]
    return [studies] if studies else []


def draw(studies: Sequence[Study], index: int, archive: Archive) -> Section:
    """For every series: the tested lengths, perplexities, and training time."""
    blocks: dict[str, list[Row]] = {}
    for study in studies:
        rows = blocks.setdefault(f"{study.recipe} on {study.corpus.get('name', 'its text')}", [])
        rows += [
            (_label(series), variable_of(series.method, series.look), _cells(study, series)) for series in study.series
        ]
    table = Table(_COLUMNS, [Block(title, rows) for title, rows in blocks.items()])
    # A training is in the study of each of its tests.
    records = list({id(record): record for study in studies for record in study.records}.values())
    group, title = "Sources of the paper's items", "Trainings and tests"
    heading, about = f"{title} used for the paper's items", count_of(records)
    body = html("evidence", table=table)
    return Section("evidence", group, title, body, heading=heading, about=about, records=records)


def _label(series: Series) -> str:
    trained = f"{series.trained:,}"
    return series.label if trained in series.label else f"{series.label} {trained}"


def _cells(study: Study, series: Series) -> Sequence[Cell]:
    lengths = [int(length) for length in series.curve("by_length", "length", "nonoverlapping_nats")[0]]
    stride, split = study.evaluation.get("stride"), study.evaluation.get("split", "valid")
    seconds = sum(series.metric("seconds"))
    return (
        Cell(answers.between(lengths) or "—"),
        Cell("L/4" if stride is None else f"{stride}"),
        Cell(str(split)),
        *(_perplexity(series, length) for length in (lengths[:1] or [0]) + (lengths[-1:] or [0])),
        Cell(f"{series.seeds}"),
        Cell(duration(seconds) if seconds else "—"),
    )


def _perplexity(series: Series, length: int) -> Cell:
    middle = mean(series.perplexity(length))
    return Cell(number(middle), middle) if math.isfinite(middle) else NOTHING
