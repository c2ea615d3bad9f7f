"""Tables of a study: perplexity by length, costs, configuration and corpus."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from alibi_attn.position_methods import METHODS
from alibi_attn.records import Json, Record
from alibi_attn.report import sentences
from alibi_attn.report.series import Mode, Series, Study, flat, numbers
from alibi_attn.report.tables.table import Block, Cell, Table, mean, number
from alibi_attn.units import bits_per_byte, perplexity, word_perplexity

_SECTIONS = ("model", "data", "train", "eval")


@dataclass(frozen=True, kw_only=True)
class Card:
    """A summary of a series: its perplexity `to` at the longest length, and the `change` from `before`, at the trained length."""

    method: str
    label: str
    before: str
    to: str
    at: str
    change: str


def by_length(study: Study) -> Table | None:
    """Perplexity, and bits per byte if known, at every length for every evaluation mode; None if nothing was evaluated."""
    lengths = study.lengths
    modes: tuple[tuple[Mode, str], ...] = (
        ("nonoverlapping", "nonoverlapping windows"),
        ("sliding", "sliding window"),
        ("windowed", "context cut at the trained length"),
    )
    blocks = [
        _block(study, f"Perplexity per {study.unit}, {words}", f"{mode}_nats", perplexity) for mode, words in modes
    ]
    words_per_token = study.words_per_token
    if words_per_token is not None and words_per_token != 1:
        per_word = partial(word_perplexity, words_per_token=words_per_token)
        blocks += [_block(study, f"Perplexity per word, {words}", f"{mode}_nats", per_word) for mode, words in modes]
    if study.bytes_per_token is not None:
        bits = partial(bits_per_byte, bytes_per_token=study.bytes_per_token)
        blocks += [_block(study, f"Bits per byte, {words}", f"{mode}_nats", bits) for mode, words in modes]
    found = tuple(block for block in [*blocks, *_streams(study)] if block is not None)
    columns = tuple(f"{length:,}" for length in lengths)
    return Table(columns, found) if found else None


def cards(study: Study) -> list[Card]:
    """For every series, its perplexity at the trained and the longest length, and the change."""
    found = []
    for series in study.series:
        between, change = sentences.ends(series), sentences.change_percent(series)
        if between is None:
            continue
        first, last = (mean(sentences.perplexity(series, length)) for length in between)
        found.append(
            Card(
                method=_variable(series),
                label=series.label,
                before=f"{sentences.rounded(first)} at {between[0]:,}",
                to=sentences.rounded(last),
                at=f"at {between[1]:,}",
                change="" if change is None else sentences.signed(change),
            )
        )
    return found


def training_cost(study: Study) -> Table | None:
    """Size, speed, memory and last loss of the trainings; None if none of these was recorded."""
    metrics: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("parameters", "parameters", lambda value: f"{value:,.0f}"),
        ("seconds", "seconds", lambda value: f"{value:,.0f}"),
        ("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
        ("peak_memory_bytes", "peak memory", _mebibytes),
        ("loss_nats", "last loss, nats", lambda value: f"{value:.3f}"),
    )
    known = [metric for metric in metrics if any(s.metric(metric[0]) for s in study.series)]
    rows = [
        (s.label, _variable(s), tuple(_cell(s.metric(name), show) for name, _, show in known)) for s in study.series
    ]
    return Table(tuple(title for _, title, _ in known), (Block("Training", tuple(rows)),)) if known else None


def evaluation_cost(study: Study) -> Table | None:
    """Speed and memory of the evaluation at every length."""
    blocks = (
        _block(study, "Evaluated tokens per second", "tokens_per_second", float, show=lambda value: f"{value:,.0f}"),
        _block(study, "Peak memory of the evaluation", "peak_memory_bytes", float, show=_mebibytes),
    )
    found = tuple(block for block in blocks if block is not None)
    return Table(tuple(f"{length:,}" for length in study.lengths), found) if found else None


def fields(study: Study) -> list[tuple[str, str]]:
    """Every field of the configs with its value, or with all values if the runs differ."""
    configs = [flat(record.config) for record in study.records]
    names = [
        name for name in dict.fromkeys(key for config in configs for key in config) if not name.startswith("corpus.")
    ]
    names.sort(
        key=lambda name: _SECTIONS.index(name.split(".")[0]) if name.split(".")[0] in _SECTIONS else len(_SECTIONS)
    )
    values = {name: dict.fromkeys(_plain(config[name]) for config in configs if name in config) for name in names}
    return [(name, " · ".join(found)) for name, found in values.items()]


def corpus_facts(study: Study) -> list[tuple[str, str]]:
    """The recorded facts about the corpus."""
    return [
        (
            key.replace("_", " "),
            f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else _plain(value),
        )
        for key, value in study.corpus.items()
    ]


def _block(
    study: Study,
    title: str,
    column: str,
    convert: Callable[[float], float],
    *,
    show: Callable[[float], str] | None = None,
) -> Block | None:
    """One row per series, one cell per length. Without `show` these are losses, and the lowest of each column is marked."""
    cells: list[list[Cell]] = []
    for series in study.series:
        x, y = series.curve("by_length", "length", column)
        values = dict(zip(x.tolist(), y.T.tolist(), strict=True))
        seeds = [[convert(v) for v in values.get(length, []) if math.isfinite(v)] for length in study.lengths]
        cells.append([_cell(some, show or number) for some in seeds])
    if show is None:
        return _marked(study, title, cells)
    if all(cell.value is None for row in cells for cell in row):
        return None
    return Block(title, tuple((s.label, _variable(s), tuple(row)) for s, row in zip(study.series, cells, strict=True)))


def _streams(study: Study) -> list[Block | None]:
    """Perplexities on a continuous stream: one block per way of reading and number of kept tokens."""
    words = {"cached segments": "tokens of memory", "attention sinks": "first tokens"}
    ways = dict.fromkeys((way, kept) for record in study.records for way, _, kept, _ in _stream_rows(record))
    found = []
    for way, kept in sorted(ways):
        rows = []
        for series in study.series:
            by_length = _streamed(series, way, kept)
            rows.append([_cell(by_length.get(length, []), number) for length in study.lengths])
        title = f"Perplexity per {study.unit}, {way}, {kept:,.0f} {words.get(way, 'kept')}"
        found.append(_marked(study, title, rows))
    return found


def _streamed(series: Series, way: str, kept: float) -> dict[float, list[float]]:
    """The perplexities of all seeds by length, for one way of reading."""
    found: dict[float, list[float]] = {}
    for record in series.evaluations:
        for own_way, length, own_kept, nats in _stream_rows(record):
            if (own_way, own_kept) == (way, kept) and math.isfinite(nats):
                found.setdefault(length, []).append(perplexity(nats))
    return found


def _stream_rows(record: Record) -> list[tuple[str, float, float, float]]:
    """(way, length, kept tokens, nats) of every row of the curve "streams"."""
    columns = [numbers(record, "streams", name) for name in ("length", "kept", "nats")]
    ways = record.curves.get("streams", {}).get("way") or [None] * len(columns[0])
    return [(str(way), *row) for way, *row in zip(ways, *columns, strict=True) if math.isfinite(row[0] + row[1])]


def _marked(study: Study, title: str, cells: list[list[Cell]]) -> Block | None:
    """A block of losses with the lowest of each column marked; None if all cells are empty."""
    if all(cell.value is None for row in cells for cell in row):
        return None
    for place in range(len(study.lengths) if len(cells) > 1 else 0):
        lowest = min((value for row in cells if (value := row[place].value) is not None), default=math.nan)
        for row in cells:
            row[place] = replace(row[place], best=row[place].value == lowest)
    return Block(title, tuple((s.label, _variable(s), tuple(row)) for s, row in zip(study.series, cells, strict=True)))


def _cell(values: Sequence[float], show: Callable[[float], str]) -> Cell:
    if not values:
        return Cell("—")
    low, high = show(min(values)), show(max(values))
    spread = "" if low == high else f"{low} – {high}"
    return Cell(show(mean(values)), mean(values), spread)


def _variable(series: Series) -> str:
    return series.method if series.method in METHODS else "ink"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def _plain(value: Json) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value)
