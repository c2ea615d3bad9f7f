"""Tables: the numbers of a study and where they come from, as rows of plain text and values for the page and the terminal."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from alibi_attn.position_methods import METHODS
from alibi_attn.records import MOST, Json, Record, identity
from alibi_attn.report import sentences
from alibi_attn.report.series import Mode, Series, Study, flat, numbers
from alibi_attn.slopes import alibi_slopes
from alibi_attn.units import bits_per_byte, perplexity, word_perplexity

NEGLIGIBLE = 1e-6  # the factor at which a head is said to see nothing and its picture has faded out
_SECTIONS = ("model", "data", "train", "eval")
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Cell:
    """A number as shown and as it is; `spread` is its lowest and highest seed as shown, "" where they are one."""

    text: str
    value: float | None = None
    spread: str = ""
    best: bool = False


@dataclass(frozen=True)
class Block:
    """Rows of one quantity: a label, a method (for its color) and one cell a column."""

    title: str
    rows: tuple[tuple[str, str, tuple[Cell, ...]], ...]


@dataclass(frozen=True)
class Table:
    """Blocks under common columns."""

    columns: tuple[str, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A series in a nutshell: its perplexity `to` at the longest length, and the `change` since `before`, at the trained one."""

    method: str
    label: str
    before: str
    to: str
    at: str
    change: str


def by_length(study: Study) -> Table | None:
    """Perplexity, and bits per byte where it is known, at every length in every way; None if nothing was evaluated."""
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
    """For every series, its perplexity at the trained and at the longest length, and the change."""
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
    """Size, speed, memory and last loss of the trainings; None if there are none of these numbers."""
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


def head_rows(num_heads: int) -> list[tuple[str, str, str, str]]:
    """Head, slope, half-life and the distance at which the factor falls under 1e-6, for every head."""
    rows = []
    for head, slope in enumerate(alibi_slopes(num_heads).tolist(), start=1):
        distance = math.floor(-math.log(NEGLIGIBLE) / slope) + 1
        rows.append((f"{head}", fraction(slope), f"{half_life(slope):,.1f}", f"{distance:,}"))
    return rows


def half_life(slope: float) -> float:
    """The distance in tokens at which a head's factor e^(−m·d) is one half, ln 2 / m; infinite for slope 0."""
    return math.log(2) / slope if slope > 0 else math.inf


def fraction(slope: float) -> str:
    """A slope as people write it: "1/256" where it is one over a whole number, else three digits."""
    if slope > 1 / MOST and abs(1 / slope - round(1 / slope)) < 1e-9 / slope:
        return f"1/{round(1 / slope)}" if slope != 1 else "1"
    return f"{slope:.3g}"


def fields(study: Study) -> list[tuple[str, str]]:
    """Every field of the configs by its name, with its value, or its values where the runs differ."""
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
    """What the records say of the corpus."""
    return [
        (
            key.replace("_", " "),
            f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else _plain(value),
        )
        for key, value in study.corpus.items()
    ]


def provenance(records: Sequence[Record]) -> dict[str, list[str]]:
    """Machines, versions, commits, commands and days of the records, each once, and the time they took together."""
    machines = dict.fromkeys(machine_text(r.machine) for r in records if r.machine)
    packages = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in sorted(r.versions.items())) for r in records
    )
    days = sorted({r.started[:10] for r in records if r.started})
    seconds = sum(r.seconds for r in records)
    return {
        "machine": list(machines),
        "versions": [text for text in packages if text],
        "commit": list(dict.fromkeys(r.commit for r in records if r.commit)),
        "command": list(dict.fromkeys(r.command for r in records if r.command)),
        "run on": [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"] if days else [],
        "time": [f"{seconds:,.0f} s in {len(records)} records"] if records else [],
    }


def other_rows(records: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """Kind, name, metrics and identity of records that the page does not draw."""
    return [
        (
            record.kind,
            record.name,
            ", ".join(f"{name} {'—' if value is None else number(value)}" for name, value in record.metrics.items()),
            identity(record.kind, record.name, record.config),
        )
        for record in records
    ]


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def number(value: float) -> str:
    """Four digits, all of them shown: 7.020, 17.23; whole numbers from a thousand on, and 1.36·10⁷; small ones as they are."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 1e6:
        mantissa, _, power = f"{value:.2e}".partition("e+")
        return f"{mantissa}·10{str(int(power)).translate(_SUPERSCRIPTS)}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 3 - max(math.floor(math.log10(abs(value))), 0) if value else 0
    return f"{value:.{digits}f}" if abs(value) >= 0.1 else f"{value:.4g}"


def _block(
    study: Study,
    title: str,
    column: str,
    convert: Callable[[float], float],
    *,
    show: Callable[[float], str] | None = None,
) -> Block | None:
    """A row a series, a cell a length. Without `show` these are losses: the lowest of each column is marked."""
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
    """Perplexities of what was read on and on: a block for every way, and for every number of tokens that it keeps."""
    words = {"cached segments": "tokens of memory", "attention sinks": "first tokens"}
    asked = dict.fromkeys((way, kept) for record in study.records for way, _, kept, _ in _read_on(record))
    found = []
    for way, kept in sorted(asked):
        rows = []
        for series in study.series:
            by_length = _streamed(series, way, kept)
            rows.append([_cell(by_length.get(length, []), number) for length in study.lengths])
        title = f"Perplexity per {study.unit}, {way}, {kept:,.0f} {words.get(way, 'kept')}"
        found.append(_marked(study, title, rows))
    return found


def _streamed(series: Series, way: str, kept: float) -> dict[float, list[float]]:
    """The perplexities of every seed by length, read in one way."""
    found: dict[float, list[float]] = {}
    for record in series.evaluations:
        for own_way, length, own_kept, nats in _read_on(record):
            if (own_way, own_kept) == (way, kept) and math.isfinite(nats):
                found.setdefault(length, []).append(perplexity(nats))
    return found


def _read_on(record: Record) -> list[tuple[str, float, float, float]]:
    """Way, length, kept and nats of every row of the curve "streams"."""
    columns = [numbers(record, "streams", name) for name in ("length", "kept", "nats")]
    ways = record.curves.get("streams", {}).get("way") or [None] * len(columns[0])
    return [(str(way), *row) for way, *row in zip(ways, *columns, strict=True) if math.isfinite(row[0] + row[1])]


def _marked(study: Study, title: str, cells: list[list[Cell]]) -> Block | None:
    """A block of losses, the lowest of each column marked; None where all are empty."""
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


def processor_text(machine: Mapping[str, Json]) -> str:
    """A processor, and the best instructions it has where that was recorded; empty where nothing was."""
    name, has = machine.get("processor"), machine.get("instructions")
    return f"{name} ({has})" if name and has else str(name or "")


def machine_text(machine: Mapping[str, Json]) -> str:
    """A machine in a few words."""
    memory = machine.get("memory_bytes")
    parts = [
        processor_text(machine),
        f"{machine['cores']} cores" if machine.get("cores") else None,
        f"{memory / 2**30:.0f} GiB" if isinstance(memory, int | float) else None,
        machine.get("gpu"),
        machine.get("system"),
        f"Python {machine['python']}" if machine.get("python") else None,
    ]
    return ", ".join(str(part) for part in parts if part)


def _plain(value: Json) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value)
