"""Tables of a study: perplexity by length, costs, configuration and corpus."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from alibi_attn.units import bits_per_byte, perplexity, word_perplexity
from alibi_lab.records import Json, Record
from alibi_lab.report import paired
from alibi_lab.report.intervals import exp, interval
from alibi_lab.report.series import Mode, Series, Study, flat, numbers
from alibi_lab.report.tables.table import (
    NOTHING,
    Block,
    Cell,
    Table,
    mean,
    number,
    rounded,
    seeds_cell,
    signed,
    variable_of,
    with_best,
)

WINDOWS: Mapping[Mode, str] = {
    "nonoverlapping": "nonoverlapping windows",
    "sliding": "sliding window",
    "windowed": "context cut at the trained length",
}
_CHANGES = ("lengths", "at the first", "at the last", "change", "95 %", "seeds", "above sliding")
_SECTIONS = ("model", "data", "train", "eval")


@dataclass(frozen=True)
class Card:
    """A summary of a series: its perplexity `to` at the longest length, and the `change` from `before`, at the trained length."""

    method: str
    label: str
    before: str
    to: str
    at: str
    change: str


def by_length(study: Study) -> Table | None:
    """Perplexity at every length, with both windows and on a stream; None if nothing was evaluated."""
    both = _losses(study, f"Perplexity per {study.unit}", perplexity, ("nonoverlapping", "sliding"))
    return _table(study, [*both, *_streams(study)])


def in_other_units(study: Study) -> Table | None:
    """The same losses per word and in bits, and the control with a cut context; None if there are none."""
    blocks = _losses(study, f"Perplexity per {study.unit}", perplexity, ("windowed",))
    if study.words_per_token not in (None, 1):
        blocks += _losses(
            study,
            "Perplexity per word",
            partial(word_perplexity, words_per_token=study.words_per_token),
            tuple(WINDOWS),
        )
    if study.bytes_per_token is not None:
        blocks += _losses(
            study, "Bits per byte", partial(bits_per_byte, bytes_per_token=study.bytes_per_token), tuple(WINDOWS)
        )
    return _table(study, blocks)


def _losses(study: Study, unit: str, convert: Callable[[float], float], modes: Sequence[Mode]) -> list[Block | None]:
    return [_block(study, f"{unit}, {WINDOWS[mode]}", f"{mode}_nats", convert) for mode in modes]


def speeds(study: Study) -> str:
    """The GPU and the tokens per second of each training on it, as a sentence; "" if there was no GPU."""
    devices = dict.fromkeys(str(gpu) for record in study.records if (gpu := record.machine.get("gpu")))
    trained = [f"{s.label} {_whole(mean(found))}" for s in study.series if (found := s.metric("tokens_per_second"))]
    return f"{', '.join(devices)}: {', '.join(trained)} tokens per second in training." if devices and trained else ""


def cards(study: Study) -> list[Card]:
    """For every series, its perplexity at the trained and the longest length, and the change."""
    ended = [(series, between) for series in study.series if (between := series.ends())]
    return [_card(series, *between) for series, between in ended]


def _card(series: Series, trained: int, longest: int) -> Card:
    before, to = (rounded(mean(series.perplexity(length))) for length in (trained, longest))
    pairs = paired.change(series, "nonoverlapping")
    change = signed(_percent(float(pairs.logs.mean()))) if pairs else ""
    return Card(variable_of(series.method), series.label, f"{before} at {trained:,}", to, f"at {longest:,}", change)


def changes(study: Study) -> Table | None:
    """By evaluation mode, how perplexity changes from the trained to the longest length; None if nothing was evaluated."""
    blocks = []
    for mode, words in WINDOWS.items():
        found = [(series, ends) for series in study.series if (ends := series.ends(mode))]
        rows = [
            (series.label, variable_of(series.method), _change_cells(series, mode, *ends)) for series, ends in found
        ]
        blocks += [Block(words.capitalize(), tuple(rows))] if rows else []
    return Table(_CHANGES, tuple(blocks)) if blocks else None


def _change_cells(series: Series, mode: Mode, trained: int, longest: int) -> tuple[Cell, ...]:
    pairs, here = paired.change(series, mode), mean(series.perplexity(trained, mode))
    bounds = pairs and interval(pairs)
    other = mean(series.perplexity(trained, "sliding")) if mode == "nonoverlapping" else math.nan
    losses = series.curve("by_length", "length", f"{mode}_nats")[1]
    spread = float(np.max(np.nanmax(losses, axis=0) - np.nanmin(losses, axis=0))) if len(losses) > 1 else math.nan
    percents = [100 * (bound - 1) for bound in (bounds.low, bounds.high)] if bounds else []
    return (
        Cell(f"{trained:,} to {longest:,}"),
        seeds_cell(series.perplexity(trained, mode), number),
        seeds_cell(series.perplexity(longest, mode), number),
        Cell(signed(_percent(float(pairs.logs.mean()))), spread=_worse_from(series, mode)) if pairs else NOTHING,
        Cell(" to ".join(map(signed, percents)), spread=bounds.over.replace(" of the text", "")) if bounds else NOTHING,
        NOTHING if math.isnan(spread) else Cell(f"{spread:.3f}", spread=signed(_percent(spread))),
        NOTHING if math.isnan(other / here) else Cell(signed(100 * (here / other - 1))),
    )


def _worse_from(series: Series, mode: Mode) -> str:
    """The first tested length that is worse than the trained one, as "from 253"; "" if none is."""
    found = paired.first_worse(series, mode)
    return f"from {found[1]:,}" if found and found[1] else ""


def _percent(nats: float) -> float:
    return 100 * (exp(nats) - 1)


def training_cost(study: Study) -> Table | None:
    """Size, speed, memory and last loss of the trainings; None if none of these was recorded."""
    metrics: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("parameters", "parameters", _whole),
        ("seconds", "seconds", _whole),
        ("tokens_per_second", "tokens/s", _whole),
        ("peak_memory_bytes", "peak memory", _mebibytes),
        ("loss_nats", "last loss, nats", lambda value: f"{value:.3f}"),
    )
    known = [metric for metric in metrics if any(s.metric(metric[0]) for s in study.series)]
    rows = [
        (s.label, variable_of(s.method), tuple(seeds_cell(s.metric(name), show) for name, _, show in known))
        for s in study.series
    ]
    return Table(tuple(title for _, title, _ in known), (Block("Training", tuple(rows)),)) if known else None


def evaluation_cost(study: Study) -> Table | None:
    """Speed and memory of the evaluation at every length."""
    blocks = [
        _block(study, "Evaluated tokens per second", "tokens_per_second", float, show=_whole),
        _block(study, "Peak memory of the evaluation", "peak_memory_bytes", float, show=_mebibytes),
    ]
    return _table(study, blocks)


def fields(study: Study) -> list[tuple[str, str]]:
    """Every field of the configs with its value, or with all values if the runs differ."""
    configs = [flat(record.config) for record in study.records]
    names = [name for config in configs for name in config if not name.startswith("corpus.")]
    names = sorted(dict.fromkeys(names), key=lambda name: [*_SECTIONS, name.split(".")[0]].index(name.split(".")[0]))
    values = {name: dict.fromkeys(_plain(config[name]) for config in configs if name in config) for name in names}
    return [(name, " · ".join(found)) for name, found in values.items()]


def corpus_facts(study: Study) -> list[tuple[str, str]]:
    """The recorded facts about the corpus."""
    show = {float: "{:,.6g}".format, int: "{:,}".format}
    return [(key.replace("_", " "), show.get(type(value), _plain)(value)) for key, value in study.corpus.items()]


def _table(study: Study, blocks: Sequence[Block | None]) -> Table | None:
    """The blocks that have numbers, one column per length; None if there are none."""
    found = tuple(block for block in blocks if block is not None)
    return Table(tuple(f"{length:,}" for length in study.lengths), found) if found else None


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
        cells.append([seeds_cell(some, show or number) for some in seeds])
    return _rows(study, title, cells, mark=show is None)


def _streams(study: Study) -> list[Block | None]:
    """Perplexities on a continuous stream: one block per way of reading and number of kept tokens."""
    words = {"cached segments": "tokens of memory", "attention sinks": "first tokens"}
    ways = dict.fromkeys((way, kept) for record in study.records for way, _, kept, _ in _stream_rows(record))
    found = []
    for way, kept in sorted(ways):
        rows = []
        for series in study.series:
            by_length = _streamed(series, way, kept)
            rows.append([seeds_cell(by_length.get(length, []), number) for length in study.lengths])
        title = f"Perplexity per {study.unit}, {way}, {kept:,.0f} {words.get(way, 'kept')}"
        found.append(_rows(study, title, rows, mark=True))
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


def _rows(study: Study, title: str, cells: list[list[Cell]], *, mark: bool) -> Block | None:
    """One row of cells per series; None if all are empty. `mark`: the lowest value of each column is bold."""
    if all(cell.value is None for row in cells for cell in row):
        return None
    if mark and len(cells) > 1:
        cells = [list(row) for row in zip(*(with_best(column) for column in zip(*cells, strict=True)), strict=True)]
    return Block(
        title, tuple((s.label, variable_of(s.method), tuple(row)) for s, row in zip(study.series, cells, strict=True))
    )


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def _plain(value: Json) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value)
