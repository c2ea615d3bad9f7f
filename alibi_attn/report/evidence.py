"""Evidence: the trainings behind the paper's items, a row a configuration and a test; the items' own pictures show them."""

import math
from collections.abc import Sequence

from alibi_attn.report import sentences
from alibi_attn.report.costs import duration
from alibi_attn.report.drawing import variable_of
from alibi_attn.report.series import Series, Study
from alibi_attn.report.tables import Block, Cell, Table, mean, number


def evidence_table(studies: Sequence[Study]) -> Table | None:
    """Every series of the studies: where it was tested, with what perplexity, and what its training took."""
    blocks: dict[str, list[tuple[str, str, tuple[Cell, ...]]]] = {}
    for study in studies:
        title = f"{study.recipe} on {study.corpus.get('name', 'its text')}"
        rows = blocks.setdefault(title, [])
        rows += [(_label(series), variable_of(series.method), _cells(study, series)) for series in study.series]
    columns = ("tested at", "stride", "on", "perplexity, shortest", "perplexity, longest", "seeds", "trained in")
    return Table(columns, tuple(Block(title, tuple(rows)) for title, rows in blocks.items())) if blocks else None


def _label(series: Series) -> str:
    trained = f"{series.trained:,}"
    return series.label if trained in series.label else f"{series.label} {trained}"


def _cells(study: Study, series: Series) -> tuple[Cell, ...]:
    lengths = [int(length) for length in series.curve("by_length", "length", "nonoverlapping_nats")[0]]
    stride, split = study.evaluation.get("stride"), study.evaluation.get("split", "valid")
    tested = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if lengths[1:] else "") if lengths else "—"
    seconds = sum(series.metric("seconds"))
    return (
        Cell(tested),
        Cell("L/4" if stride is None else f"{stride}"),
        Cell(str(split)),
        _perplexity(series, lengths[0]) if lengths else Cell("—"),
        _perplexity(series, lengths[-1]) if lengths else Cell("—"),
        Cell(f"{series.seeds}"),
        Cell(duration(seconds) if seconds else "—"),
    )


def _perplexity(series: Series, length: int) -> Cell:
    values = sentences.perplexity(series, length)
    middle = mean(values)
    return Cell(number(middle), middle) if math.isfinite(middle) else Cell("—")
