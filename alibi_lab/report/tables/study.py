"""Tables of a study: perplexity by length, shares of tasks, costs, configuration and corpus; the costs of several studies.

A share is the mean over seeds; beyond the positions of a method, its cell is empty. Perplexity cannot show retrieval.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from alibi_attn.units import bits_per_byte, perplexity, word_perplexity
from alibi_lab.records import Record, flat
from alibi_lab.report.answers import between
from alibi_lab.report.intervals import Interval, change, exp, first_worse, interval
from alibi_lab.report.series import Mode, Series, Study, numbers, plain_text
from alibi_lab.report.tables import table
from alibi_lab.report.tables.table import NOTHING, Block, Cell, Table, mean, number, seeds_cell, series_row, signed

WINDOWS: Mapping[Mode, str] = {
    "nonoverlapping": "nonoverlapping windows",
    "sliding": "sliding window",
    "windowed": "context cut at the trained length",
}
TASKS = {  # with the quantity that is counted
    "passkey": "Passkey: numbers found, at the worst depth",
    "recall": "Recall: tokens repeated, at the worst distance",
    "mqar": "Associative recall: values of 8 keys; chance is 6 %",
    "needles": "Needles: values of 4 keys in noise; chance is 6 %",
    "copy": "Copy: symbols of a string; chance is 2 %",
    "flip-flop": "Flip-flop: bits that were last written; chance is 50 %",
}
_PLACES = {"passkey": "depth", "recall": "distance"}  # the column that varies within one length of such a task
_CHANGES = ("lengths", "at the first", "at the last", "change", "95 %", "seeds", "above sliding")
_SECTIONS = ("model", "data", "train", "eval")
_whole = "{:,.0f}".format

Values = Mapping[float, Sequence[float]]  # of all seeds, by length
Show = Callable[[float], str]
Shares = Mapping[tuple[float, float], float]  # (length, depth or distance or 0) -> share


def by_length(study: Study) -> Table | None:
    """Perplexity at every length, with both windows and on a stream; None if nothing was evaluated."""
    both = _losses(study, f"Perplexity per {study.unit}", perplexity, ("nonoverlapping", "sliding"))
    return _table(study, [*both, *_streams(study)])


def in_other_units(study: Study) -> Table | None:
    """The same losses per word and in bits, and the control with a cut context; None if there are none."""
    blocks = _losses(study, f"Perplexity per {study.unit}", perplexity, ("windowed",))
    if (words := study.per_token("words")) not in (None, 1):
        per_word = partial(word_perplexity, words_per_token=words)
        blocks += _losses(study, "Perplexity per word", per_word, WINDOWS)
    if (size := study.per_token("bytes")) is not None:
        bits = partial(bits_per_byte, bytes_per_token=size)
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
    bounds, (_, worse) = pairs and interval(pairs), first_worse(series, mode) or (0, None)
    other = mean(series.perplexity(trained, "sliding")) if mode == "nonoverlapping" else math.nan
    losses = series.curve("by_length", "length", f"{mode}_nats")[1]
    spread = float(np.max(np.nanmax(losses, axis=0) - np.nanmin(losses, axis=0))) if len(losses) > 1 else math.nan
    percents = [100 * (bound - 1) for bound in (bounds.low, bounds.high)] if bounds else []
    return (
        Cell(f"{trained:,} to {longest:,}"),
        seeds_cell(series.perplexity(trained, mode), number),
        seeds_cell(series.perplexity(longest, mode), number),
        Cell(_signed(pairs.logs.mean()), spread=f"from {worse:,}" if worse else "") if pairs else NOTHING,
        Cell(" to ".join(map(signed, percents)), spread=_samples(bounds)) if bounds else NOTHING,
        NOTHING if math.isnan(spread) else Cell(f"{spread:.3f}", spread=_signed(spread)),
        NOTHING if math.isnan(other / here) else Cell(signed(100 * (here / other - 1))),
    )


def _samples(bounds: Interval) -> str:
    """What an interval of a ratio is over; two seeds that differ by a fifth or more say little, and it says so."""
    few = bounds.over.startswith("2 seeds") and bounds.high > 1.2 * bounds.low
    return bounds.over.replace(" of the text", "").replace("2 seeds", "two seeds: too few" if few else "2 seeds")


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


def shares(series: Series, task: str) -> Shares:
    """(length, depth or distance) -> the share of correct answers, averaged over seeds; empty if not tested."""
    found: dict[tuple[float, float], list[float]] = {}
    for record in series.evaluations:
        lengths, accuracies = (numbers(record, task, name) for name in ("length", "accuracy"))
        places = numbers(record, task, _PLACES[task]) if task in _PLACES else [0.0] * len(lengths)
        for length, place, accuracy in zip(lengths, places, accuracies, strict=True):
            if math.isfinite(length + place + accuracy):
                found.setdefault((length, place), []).append(accuracy)
    return {key: sum(values) / len(values) for key, values in found.items()}


def tested(study: Study, task: str) -> Sequence[tuple[Series, Shares]]:
    """The series with shares of a task."""
    return [(series, grid) for series in study.series if (grid := shares(series, task))]


def task_table(study: Study) -> Table | None:
    """The shares by length, for each task at its worst depth or distance."""
    grids = {task: found for task in TASKS if (found := tested(study, task))}
    lengths = sorted({length for found in grids.values() for _, grid in found for length, _ in grid})
    blocks = []
    for task, found in grids.items():
        rows = [series_row(series, [_worst(grid, length) for length in lengths]) for series, grid in found]
        blocks.append(Block(TASKS[task], rows))
    return Table([f"{length:,.0f}" for length in lengths], blocks) if blocks else None


def cost_table(studies: Sequence[Study]) -> Table | None:
    """One row per recipe and text, and a total; a training that several studies share counts once."""
    by_title: dict[str, dict[int, Record]] = {}
    for study in studies:
        own = by_title.setdefault(f"{study.recipe} on {study.corpus.get('name', 'its text')}", {})
        own.update({id(record): record for record in study.records})
    counted = {key: record for own in by_title.values() for key, record in own.items()}
    totals = {"total": counted} if len(by_title) > 1 else {}
    rows: list[table.Row] = [(title, "ink", _cells(list(own.values()))) for title, own in (by_title | totals).items()]
    if not any(cell.value for _, _, cells in rows for cell in cells):
        return None
    several = len({table.machine_text(record.machine) for record in counted.values() if record.machine}) > 1
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


def fields(study: Study) -> list[tuple[str, str]]:
    """Every field of the configs with its value, or with all values if the runs differ."""
    configs = [flat(record.config) for record in study.records]
    names = [name for config in configs for name in config if not name.startswith("corpus.")]
    names = sorted(dict.fromkeys(names), key=lambda name: [*_SECTIONS, name.split(".")[0]].index(name.split(".")[0]))
    values = {name: dict.fromkeys(plain_text(config[name]) for config in configs if name in config) for name in names}
    return [(name, " · ".join(found)) for name, found in values.items()]


def corpus_facts(study: Study) -> list[tuple[str, str]]:
    """The recorded facts about the corpus."""
    show = {float: "{:,.6g}".format, int: "{:,}".format}
    return [(key.replace("_", " "), show.get(type(value), plain_text)(value)) for key, value in study.corpus.items()]


def _table(study: Study, blocks: Iterable[Block | None]) -> Table | None:
    """The blocks that have numbers, one column per length; None if there are none."""
    found = [block for block in blocks if block is not None]
    return Table([f"{length:,}" for length in study.lengths], found) if found else None


def _losses(study: Study, unit: str, convert: Callable[[float], float], modes: Iterable[Mode]) -> list[Block | None]:
    return [_block(study, f"{unit}, {WINDOWS[mode]}", _by_length(study, f"{mode}_nats", convert)) for mode in modes]


def _by_length(study: Study, column: str, convert: Callable[[float], float]) -> list[Values]:
    """The values of a column for every series."""
    curves = [series.curve("by_length", "length", column) for series in study.series]
    return [{at: [convert(v) for v in y[:, x == at].ravel() if math.isfinite(v)] for at in x} for x, y in curves]


def _streams(study: Study) -> list[Block | None]:
    """Perplexities on a continuous stream: one block per way of reading and number of kept tokens."""
    words = {"cached segments": "tokens of memory", "attention sinks": "first tokens"}
    found: dict[tuple[str, float], list[dict[float, list[float]]]] = {}
    for place, series in enumerate(study.series):
        for record in series.evaluations:
            columns = [numbers(record, "streams", name) for name in ("length", "kept", "nats")]
            ways = record.curves.get("streams", {}).get("way") or [None] * len(columns[0])
            for way, length, kept, nats in zip(ways, *columns, strict=True):
                if math.isfinite(length + kept + nats):
                    of_way = found.setdefault((str(way), kept), [defaultdict(list) for _ in study.series])
                    of_way[place][length].append(perplexity(nats))
    titles = {key: f"{key[0]}, {key[1]:,.0f} {words.get(key[0], 'kept')}" for key in sorted(found)}
    return [_block(study, f"Perplexity per {study.unit}, {title}", found[key]) for key, title in titles.items()]


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


def _worst(grid: Shares, length: float) -> Cell:
    found = [share for (at, _), share in grid.items() if at == length]
    return Cell(f"{100 * min(found):.0f} %", min(found)) if found else NOTHING


def _cells(records: Sequence[Record]) -> Sequence[Cell]:
    trainings = [record for record in records if record.kind == "training"]
    tokens, seconds = (sum(_metrics(trainings, name)) for name in ("tokens", "seconds"))
    tests = sum(record.seconds for record in records if record.kind == "evaluation")
    totals: Sequence[tuple[float, Show]] = ((tokens, _millions), (seconds, duration), (tests, duration))
    machines = dict.fromkeys(table.machine_text(record.machine) for record in records if record.machine)
    return (
        Cell(f"{len(trainings):,}", float(len(trainings))),
        Cell(between(_metrics(trainings, "parameters"), _millions, " – ") or "—"),
        *(seeds_cell([total] if total else [], show) for total, show in totals),
        Cell("; ".join(machines)),
    )


def _metrics(records: Sequence[Record], name: str) -> list[float]:
    """A metric of the records that have it."""
    return [float(value) for record in records if (value := record.metrics.get(name))]


def _millions(value: float) -> str:
    if value >= 1e9:
        return f"{value / 1e9:.3g} G"
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"
