"""Tables of the paper's items: our rows and the paper's under common columns, and how both change with length."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from alibi_lab.records import Record
from alibi_lab.report.answers import Column, item_of, labels_of, published, recorded, scale_factor, unit_of, way_of
from alibi_lab.report.published import PublishedItem, method_of
from alibi_lab.report.tables.table import NOTHING, Block, Cell, Row, Table, number, signed, with_best

CITED = "cited, not run"
_MANY = 14  # a table with more columns is thinned
_NAMES = {
    "train_tokens_per_second": "training, tokens/s",
    "evaluation_tokens_per_second": "test, tokens/s",
    "memory_bytes": "memory, GB",
    "valid_perplexity": "perplexity, valid",
    "test_perplexity": "perplexity, test",
    "tokens_per_second": "test, tokens/s",
}
_OURS_TOO = {"sliding_perplexity": "sliding", "nonoverlapping_perplexity": "nonoverlapping"}

# label -> the paper's length -> (value, lowest seed, highest seed)
Rows = dict[str, dict[float, tuple[float, float, float]]]


def pair_table(record: Record) -> Table | None:
    """Our rows above the paper's; the columns are the paper's columns, or its lengths. None for drawings without measurements."""
    item = item_of(record)
    if "context" in item.columns or "slope" in item.columns:
        return None
    return _by_length(record, item) if "length" in item.columns else _by_column(record, item)


def change_table(record: Record) -> Table | None:
    """The change of perplexity, in percent, from the shortest to the longest length that both ours and the paper have."""
    item = item_of(record)
    if not {"length", "perplexity"} <= set(item.columns):
        return None
    labels, theirs = labels_of(record), _rows(published(item), item.series, "perplexity")
    ours = {column: _rows(recorded(record), labels, column) for column in ("perplexity", *_OURS_TOO)}
    compared = [*(found for found in ours.values() if found), theirs]
    rows: list[Row] = []
    for label in labels:
        if "L_valid" in label.replace("L_valid = ", ""):
            continue  # a different model at each length
        here = ours["perplexity"].get(label, {})  # T5 bias has no numbers at lengths that did not fit into memory
        in_paper = theirs.get(label, {}) if label in item.series else here
        both = [x for x in sorted(set(in_paper) & set(here)) if math.isfinite(in_paper[x][0] + here[x][0])]
        if len(both) >= 2:
            cells = [_change(found.get(label, {}), both[0], both[-1]) for found in compared]
            rows.append((f"{label}, to {both[-1]:,.0f}", method_of(label) or "ink", cells))
    if not rows:
        return None
    ways = ("ours", *(f"ours, {way}" for column, way in _OURS_TOO.items() if ours[column]))
    return Table((*ways, "the paper"), [Block("Change of perplexity from the trained length", rows)])


def _by_length(record: Record, item: PublishedItem) -> Table:
    factor, labels, unit = scale_factor(record), labels_of(record), f"perplexity per {unit_of(record)}"
    way = "sliding window" if way_of(item) == "sliding" else "nonoverlapping windows"
    found: list[tuple[str, str, Rows]] = []
    for measure in item.columns:
        if measure == "length":
            continue
        theirs = _title(measure, factor)
        ours = {measure: theirs}
        if measure == "perplexity":
            other_ways = {column: f"{unit}, {other} windows" for column, other in _OURS_TOO.items()}
            ours = {measure: f"{unit}, {way}", **other_ways, "word_perplexity": "perplexity per word"}
            theirs = f"perplexity per token of {item.corpus}, {way}"
        found += [(f"Ours: {name}", column, _rows(recorded(record), labels, column)) for column, name in ours.items()]
        found.append((f"The paper: {theirs}", measure, _rows(published(item), item.series, measure)))
    lengths = _shown(found)
    columns = tuple(f"{x:,.0f}" if factor == 1 else f"{x / factor:,.0f} ({x:,.0f})" for x in lengths)
    blocks = [
        _block(title, {label: [at.get(x, ()) for x in lengths] for label, at in rows.items()}, [measure] * len(lengths))
        for title, measure, rows in found
        if rows
    ]
    return Table(columns, blocks)


def _shown(found: list[tuple[str, str, Rows]]) -> list[float]:
    """All lengths; if there are too many, ours and the nearest ones of the paper (all are in `published.json`)."""
    ours, theirs = (
        {length for title, _, rows in found if title.startswith(who) for values in rows.values() for length in values}
        for who in ("Ours", "The paper")
    )
    if len(ours | theirs) <= _MANY or not ours:
        return sorted(ours | theirs)
    return sorted(ours | {min(sorted(theirs), key=lambda length: abs(length - x)) for x in ours})


def _by_column(record: Record, item: PublishedItem) -> Table:
    measured = any("perplexity" in measure for measure in item.columns)
    first = f"Ours, perplexity per {unit_of(record)}" if measured else "Ours"
    blocks = []
    for title, column, ours in ((first, recorded(record), True), (f"The paper, {item.corpus}", published(item), False)):
        lines: dict[str, Sequence[Sequence[float]]] = {}
        for label in labels_of(record) if ours else item.series:
            # Of a training curve, the last point, as in the paper's table.
            values = [column(label, measure).tolist()[-1:] for measure in item.columns]
            if any(values) or label in item.cited:
                lines[label if ours or label not in item.cited else f"{label}, cited"] = values
        not_run = set(item.cited) - set(record.curves) if ours else set()
        cited = [Cell(CITED), *[Cell("")] * (len(item.columns) - 1)]
        rows = _block(title, lines, list(item.columns)).rows
        blocks.append(Block(title, [(label, ink, cited if label in not_run else cells) for label, ink, cells in rows]))
    return Table([_title(measure, scale_factor(record)) for measure in item.columns], blocks)


def _block(title: str, rows: Mapping[str, Sequence[Sequence[float]]], measures: Sequence[str]) -> Block:
    """A row per label, whose cells are (value, lowest, highest) or less, and the measure of each column."""
    columns = [
        _marked(measure, [_cell(measure, *cell) for cell in column])
        for measure, column in zip(measures, zip(*rows.values(), strict=True), strict=False)
    ]
    cells = zip(rows, zip(*columns, strict=True), strict=True)
    return Block(title, [(label, method_of(label) or "ink", row) for label, row in cells])


def _marked(measure: str, column: list[Cell]) -> list[Cell]:
    """The column with its best value marked: the lowest perplexity or memory, or the highest speed; unmarked if all are equal."""
    values = [cell.value for cell in column if cell.value is not None]
    if len(set(values)) < 2 or not ("perplexity" in measure or measure.endswith("_per_second") or "memory" in measure):
        return column
    return with_best(column, max if measure.endswith("_per_second") else min)


def _cell(measure: str, middle: float = math.nan, low: float = math.nan, high: float = math.nan) -> Cell:
    if not math.isfinite(middle):
        return NOTHING
    if measure == "memory_bytes":
        return Cell(f"{middle / 1e9:.3g}", middle)
    show = number if "perplexity" in measure else _whole
    spread = f"{show(low)} – {show(high)}" if math.isfinite(low + high) and low != high else ""
    return Cell(show(middle), middle, spread)


def _whole(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _change(values: dict[float, tuple[float, float, float]], first: float, last: float) -> Cell:
    if first not in values or last not in values:
        return NOTHING
    percent = 100 * (values[last][0] / values[first][0] - 1)
    return Cell(signed(percent), percent)


def _rows(column: Column, labels: Iterable[str], measure: str) -> Rows:
    """The values of a measure by the paper's length, with the lowest and the highest seed if there are several."""
    rows: Rows = {}
    for label in labels:
        values = column(label, measure)
        if not np.isfinite(values).any():
            continue
        low, high = (column(label, measure.removesuffix("perplexity") + end) for end in ("low", "high"))
        points = zip(column(label, "paper_length"), values, low, high, strict=True)
        rows[label] = {float(at): (float(value), float(least), float(most)) for at, value, least, most in points}
    return rows


def _title(measure: str, factor: float) -> str:
    """A column's heading; for a perplexity at one of the paper's lengths, our length comes first."""
    if measure.startswith("perplexity_"):
        length = int(measure.removeprefix("perplexity_"))
        shown = f"{length:,}" if factor == 1 else f"{length / factor:,.0f} ({length:,})"
        return f"perplexity at {shown}"
    return _NAMES.get(measure, measure.replace("_", " "))
