"""Tables of the paper's items: our rows and the paper's under common columns, and how both change with length."""

import math
from collections.abc import Iterable

import numpy as np

from alibi_lab.records import Record
from alibi_lab.report.answers import Column, item_of, labels_of, published, recorded, scale_factor, unit_of, way_of
from alibi_lab.report.published import PublishedItem, method_of
from alibi_lab.report.tables.table import NOTHING, Block, Cell, Table, number, signed, with_best

CITED = "cited, not run"
_MANY = 14  # a table with more columns is thinned
_NAMES = {
    "train_tokens_per_second": "training, tokens/s",
    "evaluation_tokens_per_second": "test, tokens/s",
    "memory_bytes": "memory, GB",
    "parameters": "parameters",
    "valid_perplexity": "perplexity, valid",
    "test_perplexity": "perplexity, test",
    "updates": "updates",
    "hours": "hours",
    "perplexity": "perplexity",
    "tokens_per_second": "test, tokens/s",
}
_OURS_TOO = {"sliding_perplexity": "sliding", "nonoverlapping_perplexity": "nonoverlapping"}

_SPREAD = {"perplexity": "", **{column: column.removesuffix("perplexity") for column in _OURS_TOO}}

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
    theirs = _rows(published(item), item.series, "perplexity")
    labels = labels_of(record)
    ours = {column: _rows(recorded(record), labels, column) for column in ("perplexity", *_OURS_TOO)}
    rows = []
    for label in labels:
        if "L_valid" in label.replace("L_valid = ", ""):
            continue  # a different model at each length
        here = ours["perplexity"].get(label, {})  # T5 bias has no numbers at lengths that did not fit into memory
        in_paper = theirs.get(label, {}) if label in item.series else here
        both = [x for x in sorted(set(in_paper) & set(here)) if math.isfinite(in_paper[x][0] + here[x][0])]
        if len(both) < 2:
            continue
        first, last = both[0], both[-1]
        cells = [_change(found.get(label, {}), first, last) for found in ours.values() if found]
        rows.append(
            (
                f"{label}, to {last:,.0f}",
                (method_of(label) or "ink"),
                (*cells, _change(theirs.get(label, {}), first, last)),
            )
        )
    if not rows:
        return None
    ways = ["ours", *(f"ours, {way}" for column, way in _OURS_TOO.items() if ours[column])]
    return Table((*ways, "the paper"), (Block("Change of perplexity from the trained length", tuple(rows)),))


def _by_length(record: Record, item: PublishedItem) -> Table:
    factor, measures = scale_factor(record), [name for name in item.columns if name != "length"]
    ours, theirs, labels = recorded(record), published(item), labels_of(record)
    way = "sliding window" if way_of(item) == "sliding" else "nonoverlapping windows"
    found: list[tuple[str, str, Rows]] = []
    for measure in measures:
        per = _NAMES[measure]
        how = f", {way}" if measure == "perplexity" else ""
        unit = f" per {unit_of(record)}" if measure == "perplexity" else ""
        found.append((f"Ours: {per}{unit}{how}", measure, _rows(ours, labels, measure)))
        if measure == "perplexity":
            found += [
                (f"Ours: perplexity{unit}, {other} windows", column, _rows(ours, labels, column))
                for column, other in _OURS_TOO.items()
            ]
            found.append(("Ours: perplexity per word", "word_perplexity", _rows(ours, labels, "word_perplexity")))
        words = f" per token of {item.corpus}" if measure == "perplexity" else ""
        found.append((f"The paper: {per}{words}{how}", measure, _rows(theirs, item.series, measure)))
    lengths = _shown(
        {x for title, _, rows in found if title.startswith("Ours") for at in rows.values() for x in at}, found
    )
    columns = tuple(f"{x:,.0f}" if factor == 1 else f"{x / factor:,.0f} ({x:,.0f})" for x in lengths)
    blocks = [
        _block(title, measure, {label: [rows.get(label, {}).get(x) for x in lengths] for label in rows})
        for title, measure, rows in found
        if rows
    ]
    return Table(columns, tuple(blocks))


def _shown(ours: set[float], found: list[tuple[str, str, Rows]]) -> list[float]:
    """All lengths; if there are too many, ours and the nearest ones of the paper (all are in `published.json`)."""
    every = sorted({length for _, _, rows in found for values in rows.values() for length in values})
    if len(every) <= _MANY or not ours:
        return every
    theirs = sorted({x for title, _, rows in found if title.startswith("The") for at in rows.values() for x in at})
    return sorted(ours | {min(theirs, key=lambda length: abs(length - x)) for x in ours})


def _by_column(record: Record, item: PublishedItem) -> Table:
    measures = list(item.columns)
    blocks = []
    measured = any("perplexity" in measure for measure in measures)
    first = f"Ours, perplexity per {unit_of(record)}" if measured else "Ours"
    paper = f"The paper, {item.corpus}"
    for title, column, ours in ((first, recorded(record), True), (paper, published(item), False)):
        names = labels_of(record) if ours else item.series
        last = -1 if ours else 0  # the paper's table has the last point of a training curve
        values = {
            (label, measure): dict(enumerate(column(label, measure).tolist()[last:]))
            for label in names
            for measure in measures
        }
        labels = [
            (label, place)
            for label in names
            for place in range(max(len(values[label, measure]) for measure in measures) or (label in item.cited))
        ]
        columns = []
        for measure in measures:
            found = [values[label, measure].get(place, math.nan) for label, place in labels]
            columns.append(_marked(measure, [_cell(measure, (value, math.nan, math.nan)) for value in found]))
        lines = []
        for (label, _), *cells in zip(labels, *columns, strict=True):
            cited = label in item.cited
            not_run = ours and cited and label not in record.curves
            shown = (Cell(CITED), *(Cell("") for _ in measures[1:])) if not_run else tuple(cells)
            lines.append((f"{label}, cited" if cited and not ours else label, method_of(label) or "ink", shown))
        blocks.append(Block(title, tuple(lines)))
    return Table(tuple(_title(measure, scale_factor(record)) for measure in measures), tuple(blocks))


def _block(title: str, measure: str, rows: dict[str, list[tuple[float, float, float] | None]]) -> Block:
    columns = zip(*rows.values(), strict=True)
    marked = [_marked(measure, [_cell(measure, value) for value in column]) for column in columns]
    by_label = zip(rows, zip(*marked, strict=True), strict=True)
    return Block(title, tuple((label, method_of(label) or "ink", cells) for label, cells in by_label))


def _marked(measure: str, column: list[Cell]) -> list[Cell]:
    """The column with its best value marked: the lowest perplexity or memory, or the highest speed; unmarked if all are equal."""
    values = [cell.value for cell in column if cell.value is not None]
    if len(set(values)) < 2 or not ("perplexity" in measure or measure.endswith("_per_second") or "memory" in measure):
        return column
    return with_best(column, max if measure.endswith("_per_second") else min)


def _cell(measure: str, value: tuple[float, float, float] | None) -> Cell:
    if value is None or not math.isfinite(value[0]):
        return NOTHING
    middle, low, high = value
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
        nothing = np.full(len(values), math.nan)
        low, high = (
            column(label, f"{_SPREAD[measure]}{end}") if measure in _SPREAD else nothing for end in ("low", "high")
        )
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
