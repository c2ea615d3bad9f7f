"""Tables of a study: perplexity by length, costs, configuration and corpus."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from alibi_attn.units import bits_per_byte, perplexity, word_perplexity
from alibi_lab.records import Json, Record, flat
from alibi_lab.report.intervals import Interval, change, exp, first_worse, interval
from alibi_lab.report.series import Mode, Series, Study, numbers
from alibi_lab.report.tables import table
from alibi_lab.report.tables.table import NOTHING, Block, Cell, Table, mean, number, seeds_cell, series_row, signed

WINDOWS: Mapping[Mode, str] = {
    "nonoverlapping": "nonoverlapping windows",
    "sliding": "sliding window",
    "windowed": "context cut at the trained length",
}
_CHANGES = ("lengths", "at the first", "at the last", "change", "95 %", "seeds", "above sliding")
_SECTIONS = ("model", "data", "train", "eval")
_whole = "{:,.0f}".format

Values = Mapping[float, Sequence[float]]  # of all seeds, by length
Show = Callable[[float], str]


def by_length(study: Study) -> Table | None:
    """Perplexity at every length, with both windows and on a stream; None if nothing was evaluated."""
    both = _losses(study, f"Perplexity per {study.unit}", perplexity, ("nonoverlapping", "sliding"))
    return _table(study, [*both, *_streams(study)])


def in_other_units(study: Study) -> Table | None:
    """The same losses per word and in bits, and the control with a cut context; None if there are none."""
    blocks = _losses(study, f"Perplexity per {study.unit}", perplexity, ("windowed",))
    if study.words_per_token not in (None, 1):
        per_word = partial(word_perplexity, words_per_token=study.words_per_token)
        blocks += _losses(study, "Perplexity per word", per_word, WINDOWS)
    if study.bytes_per_token is not None:
        bits = partial(bits_per_byte, bytes_per_token=study.bytes_per_token)
        blocks += _losses(study, "Bits per byte", bits, WINDOWS)
    return _table(study, blocks)


def change_text(series: Series) -> str:
    """How its perplexity changes from the trained to the longest length, with nonoverlapping windows; "" for one length."""
    pairs = change(series, "nonoverlapping")
    return _signed(pairs.logs.mean()) if pairs else ""


def changes(study: Study) -> Table | None:
    """By evaluation mode, how perplexity changes from the trained to the longest length; None if nothing was evaluated."""
    blocks = []
    for mode, words in WINDOWS.items():
        rows = [series_row(series, _change_cells(series, mode, *ends)) for series, ends in study.ended(mode)]
        blocks += [Block(words.capitalize(), rows)] if rows else []
    return Table(_CHANGES, blocks) if blocks else None


def _change_cells(series: Series, mode: Mode, trained: int, longest: int) -> Sequence[Cell]:
    pairs, here = change(series, mode), mean(series.perplexity(trained, mode))
    bounds = pairs and interval(pairs)
    other = mean(series.perplexity(trained, "sliding")) if mode == "nonoverlapping" else math.nan
    losses = series.curve("by_length", "length", f"{mode}_nats")[1]
    spread = float(np.max(np.nanmax(losses, axis=0) - np.nanmin(losses, axis=0))) if len(losses) > 1 else math.nan
    percents = [100 * (bound - 1) for bound in (bounds.low, bounds.high)] if bounds else []
    return (
        Cell(f"{trained:,} to {longest:,}"),
        seeds_cell(series.perplexity(trained, mode), number),
        seeds_cell(series.perplexity(longest, mode), number),
        Cell(_signed(pairs.logs.mean()), spread=_worse_from(series, mode)) if pairs else NOTHING,
        Cell(" to ".join(map(signed, percents)), spread=_samples(bounds)) if bounds else NOTHING,
        NOTHING if math.isnan(spread) else Cell(f"{spread:.3f}", spread=_signed(spread)),
        NOTHING if math.isnan(other / here) else Cell(signed(100 * (here / other - 1))),
    )


def _samples(bounds: Interval) -> str:
    """What an interval of a ratio is over; two seeds that differ by a fifth or more say little, and it says so."""
    few = bounds.over.startswith("2 seeds") and bounds.high > 1.2 * bounds.low
    return bounds.over.replace(" of the text", "").replace("2 seeds", "two seeds: too few" if few else "2 seeds")


def _worse_from(series: Series, mode: Mode) -> str:
    """The first tested length that is worse than the trained one, as "from 253"; "" if none is."""
    found = first_worse(series, mode)
    return f"from {found[1]:,}" if found and found[1] else ""


def _signed(nats: float) -> str:
    """A difference of losses as a change of perplexity in percent."""
    return signed(100 * (exp(float(nats)) - 1))


def training_cost(study: Study) -> Table | None:
    """Size, speed, memory and last loss of the trainings; None if none of these was recorded."""
    metrics: tuple[tuple[str, str, Show], ...] = (
        ("parameters", "parameters", _whole),
        ("seconds", "seconds", _whole),
        ("tokens_per_second", f"{study.unit}s/s", _whole),
        ("peak_memory_bytes", "peak memory", _mebibytes),
        ("loss_nats", "last loss, nats", lambda value: f"{value:.3f}"),
    )
    known = [metric for metric in metrics if any(s.metric(metric[0]) for s in study.series)]
    rows = [series_row(s, [seeds_cell(s.metric(name), show) for name, _, show in known]) for s in study.series]
    return Table([title for _, title, _ in known], [Block("Training", rows)]) if known else None


def evaluation_cost(study: Study) -> Table | None:
    """Speed and memory of the evaluation at every length."""
    speed, memory = (_by_length(study, column, float) for column in ("tokens_per_second", "peak_memory_bytes"))
    speeds = _block(study, f"Evaluated {study.unit}s per second", speed, _whole)
    return _table(study, [speeds, _block(study, "Peak memory of the evaluation", memory, _mebibytes)])


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


def _table(study: Study, blocks: Iterable[Block | None]) -> Table | None:
    """The blocks that have numbers, one column per length; None if there are none."""
    found = [block for block in blocks if block is not None]
    return Table([f"{length:,}" for length in study.lengths], found) if found else None


def _losses(study: Study, unit: str, convert: Callable[[float], float], modes: Iterable[Mode]) -> list[Block | None]:
    found = [(WINDOWS[mode], _by_length(study, f"{mode}_nats", convert)) for mode in modes]
    return [_block(study, f"{unit}, {windows}", values) for windows, values in found]


def _by_length(study: Study, column: str, convert: Callable[[float], float]) -> list[Values]:
    """The values of a column for every series."""
    curves = [series.curve("by_length", "length", column) for series in study.series]
    return [{at: [convert(v) for v in y[:, x == at].ravel() if math.isfinite(v)] for at in x} for x, y in curves]


def _streams(study: Study) -> list[Block | None]:
    """Perplexities on a continuous stream: one block per way of reading and number of kept tokens."""
    words = {"cached segments": "tokens of memory", "attention sinks": "first tokens"}
    found: dict[tuple[str, float], list[dict[float, list[float]]]] = {}
    for place, series in enumerate(study.series):
        for way, length, kept, nats in (row for record in series.evaluations for row in _stream_rows(record)):
            of_way = found.setdefault((way, kept), [defaultdict(list) for _ in study.series])
            of_way[place][length].append(perplexity(nats))
    titles = {key: f"{key[0]}, {key[1]:,.0f} {words.get(key[0], 'kept')}" for key in sorted(found)}
    return [_block(study, f"Perplexity per {study.unit}, {title}", found[key]) for key, title in titles.items()]


def _stream_rows(record: Record) -> list[tuple[str, float, float, float]]:
    """(way, length, kept tokens, nats) of every row of the curve "streams"."""
    columns = [numbers(record, "streams", name) for name in ("length", "kept", "nats")]
    ways = record.curves.get("streams", {}).get("way") or [None] * len(columns[0])
    return [(str(way), *row) for way, *row in zip(ways, *columns, strict=True) if math.isfinite(sum(row))]


def _block(study: Study, title: str, values: Sequence[Values], show: Show | None = None) -> Block | None:
    """One row per series, one cell per length; None if all are empty. Without `show` these are losses, and the lowest of each
    column is bold."""
    cells = [[seeds_cell(own.get(length, []), show or number) for length in study.lengths] for own in values]
    if all(cell.value is None for row in cells for cell in row):
        return None
    if show is None and len(cells) > 1:
        columns = [table.with_best(column) for column in zip(*cells, strict=True)]
        cells = [list(row) for row in zip(*columns, strict=True)]
    return Block(title, [series_row(series, row) for series, row in zip(study.series, cells, strict=True)])


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def _plain(value: Json) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value)
