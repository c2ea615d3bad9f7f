"""A benchmark: time and memory of every peer by length, and the ratio of its time to ours; and a long text that was read into a
cache in files (records of `alibi bench texts`), its cost and what opening it again costs.

A peer is a curve with a column `length` and columns whose names end in `_ms`; its time is their sum. The line of a peer ends at
its longest measured length. "ours" is drawn first, and ratios are relative to it.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from alibi_lab.records import Record
from alibi_lab.report.plots import drawing
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.series import Array, column_by, numbers, sequence
from alibi_lab.report.tables.table import processor_text

OURS = "ours"
_MEMORY = ("peak_memory_bytes", "cache_bytes")
_COLORS = ("sinusoidal", "rotary", "t5", "learned", "none", "ink", "alibi-learned", "alibi-half", "kerple")
MEASURED = {  # the first part of a record's name
    "attention": "Attention",
    "models": "Models",
    "texts": "Long texts",
    "cpu": "Attention on a CPU",
    "jax": "Attention in JAX",
    "gpu": "On a GPU",
    "decoding": "Attention of one more token",
    "next-tokens": "Tokens after a prompt",
    "generating": "One more token of a model",
    "gates": "Forget gates",
    "embedding": "Encoders",
    "late-chunking": "Vectors of passages",
    "serving": "Patched models",
    "streaming": "Caches that forget",
    "context-parallel": "Context parallelism",
    "host": "Time of the host",
    "training": "Training steps",
}


class PeerTimes(NamedTuple):
    """The milliseconds of one peer of a record by length; NaN for lengths that were not timed."""

    name: str
    times: dict[int, float]
    forward_only: bool

    @property
    def label(self) -> str:
        return f"{self.name} (forward)" if self.forward_only else self.name


def find(archive: Archive) -> list[Record]:
    """The benchmarks that have times by length."""
    return [record for record in archive.records if is_drawn(record)]


def draw(record: Record, number: int, archive: Archive) -> Section:
    """Two pictures, the ratios, and the record's other facts."""
    lengths, rows = ratio_table(record)
    times, memory = times_by_length(record), memory_by_length(record)
    columns, ratios = ("time relative to ours", *lengths), [(label, *cells) for label, cells in rows]
    name, values = f"b{number}", {"columns": columns, "ratios": ratios, "about": facts(record)}
    body = html("benchmark", name=name, record=record, times=times, memory=memory, **values)
    most = max(find(archive), key=lambda one: sum(len(peer.times) for peer in peer_times(one)))
    found, title = finding(record) if record is most else "", title_of(record)
    return Section(name, "Benchmarks", title, body, records=[record], finding=found, lead=times)


def find_texts(archive: Archive) -> list[Record]:
    """The records with a time per token and the memory along a text, the longest text first."""
    drawn = [record for record in archive.records if record.kind == "benchmark" and _tenths(record)]
    return sorted(drawn, key=lambda record: -_tenths(record)[-1][0])


def draw_text(record: Record, number: int, archive: Archive) -> Section:
    """Time per token and memory along the text, and a table of what a process needs to continue."""
    at, seconds, sizes = np.array(_tenths(record)).T
    length, name = f"{at[-1]:,.0f}", f"l{number}"
    time, memory = _along_text("ms per token", at, seconds * 1e3), _along_text("MiB", at, sizes / 2**20)
    body = html(
        "long_text", name=name, record=record, length=length, time=time, memory=memory, machine=processor(record)
    )
    metrics = map(record.metrics.get, ("peak_added_bytes", "cold_bytes_read", "stored_bytes"))
    added, read, stored = (math.nan if value is None else value for value in metrics)
    found = ""
    if number == 0 and stored > 0 and math.isfinite(added + read):
        found = (
            f"Reading {length} tokens adds at most {added / 2**20:,.0f} MiB of memory; a process that continues reads "
            f"{read / stored:.1%} of the saved cache."
        )
    title, heading = f"{length} tokens", f"A text of {length} tokens"
    return Section(name, "Long texts", title, body, heading=heading, records=[record], finding=found, lead=time)


def title_of(record: Record) -> str:
    """What was measured: "Attention on a CPU: noise · 8 heads × 64 · float32 · to 65,536 tokens"."""
    place, _, inputs = record.name.partition("/")
    known = next((one for one in MEASURED if place == one or place.startswith(f"{one}-")), None)
    if known is None:
        return f"Benchmark {record.name}"
    config = record.config
    said = (str(config.get("dtype")), f"{config.get('heads')}x{config.get('head_dim')}")  # in the parts that follow
    names = [place.removeprefix(known).strip("-"), *inputs.split("/")]
    kept = (" ".join(word for word in name.split("-") if word not in said) for name in names)
    details = ", ".join(filter(None, kept))
    lengths = [length for length in sequence(config.get("lengths")) if isinstance(length, int)]
    parts = [
        f"{MEASURED[known]}: {details}" if details else MEASURED[known],
        f"{config['heads']} heads × {config['head_dim']}" if {"heads", "head_dim"} <= config.keys() else "",
        str(config.get("dtype", "")),
        f"to {max(lengths):,} tokens" if lengths else "",
    ]
    return " · ".join(filter(None, parts))


def is_drawn(record: Record) -> bool:
    """Whether the record is a benchmark with times by length."""
    times = (time for peer in peer_times(record) for time in peer.times.values())
    return record.kind == "benchmark" and any(map(math.isfinite, times))


def peer_times(record: Record) -> list[PeerTimes]:
    """The peers of a record, ours first, then in the record's order."""
    peers = []
    for name, columns in record.curves.items():
        timed = [column for column in columns if column.endswith("_ms")]
        if "length" not in columns or not timed:
            continue
        whole = np.sum([numbers(record, name, column) for column in timed], axis=0)
        forward_only = "forward_ms" in timed and bool(np.isnan(whole).all())
        found = numbers(record, name, "forward_ms") if forward_only else whole.tolist()
        lengths = numbers(record, name, "length")
        if times := {int(x): time for x, time in zip(lengths, found, strict=True) if math.isfinite(x)}:
            peers.append(PeerTimes(name, times, forward_only))
    return sorted(peers, key=lambda peer: peer.name != OURS)


def times_by_length(record: Record) -> Figure:
    """Milliseconds against length, both logarithmic."""
    return _by_length("milliseconds, log scale", {peer.label: peer.times for peer in peer_times(record)})


def memory_by_length(record: Record) -> Figure | None:
    """MiB, from zero, against length; None if no curve has memory by length."""
    lines = {}
    for name, columns in record.curves.items():
        column = next((column for column in _MEMORY if column in columns), None)
        if column is not None and "length" in columns:
            sizes = column_by(record, name, "length", column)
            lines[name] = {int(x): y / 2**20 for x, y in sizes.items() if math.isfinite(x) and y > 0}
    if not any(lines.values()):
        return None
    if len(lines) == 1:
        lines = {OURS: next(iter(lines.values()))}
    return _by_length("MiB", dict(sorted(lines.items(), key=lambda line: line[0] != OURS)))


def _by_length(title: str, lines: Mapping[str, Mapping[int, float]]) -> Figure:
    """One line per name; ours is thicker and has ALiBi's color."""
    figure, axes = drawing.plain_axes(title)
    known = {name: sorted((x, y) for x, y in of.items() if math.isfinite(y)) for name, of in lines.items()}
    others = [name for name in lines if name != OURS]
    for name, points in known.items():
        if not points:
            continue
        x, y = np.array(points).T
        ours = name == OURS
        color = drawing.color_of("alibi" if ours else _COLORS[others.index(name) % len(_COLORS)])
        marker, width = ("o", 2.4) if ours else (".", 1.5)
        axes.plot(x, y, color=color, marker=marker, linewidth=width, clip_on=False, label=name)
    if title.endswith("log scale"):
        drawing.log_axis(axes, np.array([y for points in known.values() for _, y in points]))
    else:
        axes.set_ylim(bottom=0)
    drawing.length_ticks(axes, sorted({x for points in known.values() for x, _ in points}), "tokens")
    drawing.name_lines(axes)
    return figure


def ratio_table(record: Record) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(lengths, rows): every peer's time divided by ours; ours in milliseconds."""
    peers = peer_times(record)
    lengths = sorted({length for peer in peers for length in peer.times})
    ours = {peer.name: peer.times for peer in peers}.get(OURS, {})
    forward = column_by(record, OURS, "length", "forward_ms")
    rows = []
    for peer in peers:
        base = {} if peer.name == OURS else forward if peer.forward_only else ours
        cells = [_ratio(peer.times.get(length, math.nan), base.get(length, math.nan)) for length in lengths]
        rows.append((peer.label, cells))
    return [f"{length:,}" for length in lengths], rows


def finding(record: Record) -> str:
    """Our time and the fastest peer's, at the longest length that a peer has; "" if no peer has any."""
    whole = {peer.name: peer.times for peer in peer_times(record) if not peer.forward_only}
    ours = whole.get(OURS, {})
    peers = {name: times for name, times in whole.items() if not name.startswith(OURS)}
    both = {
        at for times in peers.values() for at, time in times.items() if math.isfinite(time) and ours.get(at, 0.0) > 0
    }
    if not both:
        return ""
    last = max(both)
    time, name = min((times[last], name) for name, times in peers.items() if math.isfinite(times.get(last, math.nan)))
    start = f"At {last:,} tokens ours takes {_milliseconds(ours[last])}"
    return f"{start}; {name}, the fastest alternative, takes {time / ours[last]:.2g} times as long."


def _ratio(time: float, base: float) -> str:
    """The time as a multiple of another, or in milliseconds if there is no other."""
    return "–" if math.isnan(time) else f"{time / base:.2f}×" if base > 0 else _milliseconds(time)


def _milliseconds(time: float) -> str:
    """A time with two digits below 10 ms, otherwise in whole milliseconds: 0.31 ms, 1,167 ms."""
    return f"{time:.2g} ms" if time < 10 else f"{time:,.0f} ms"


def facts(record: Record) -> list[tuple[str, str]]:
    """Further facts of the record as (name, text): its metrics, the errors of the peers, and why some were not run."""
    rows = [("machine", processor(record))]
    rows += [(name, "–" if value is None else f"{value:,.3g}") for name, value in record.metrics.items()]
    for name in record.curves:
        lengths, errors, shares = (numbers(record, name, x) for x in ("length", "relative_error", "utilization"))
        if known := list(filter(math.isfinite, errors)):
            rows.append((f"error of {name}", f"{max(known):.1e} of max‖v‖"))
        rows += [
            (f"{name}, {length:,.0f} tokens", f"{share:.0%} of the matrix rate")
            for length, share in zip(lengths, shares, strict=False)
            if math.isfinite(length + share)
        ]
    missing: dict[tuple[str, str], list[str]] = {}
    for name, columns in record.curves.items():
        for length, why in zip(numbers(record, name, "length"), columns.get("why_not", ()), strict=False):
            if isinstance(why, str) and math.isfinite(length):
                missing.setdefault((name, why), []).append(f"{int(length):,}")
    return rows + [(f"{name}, not at {', '.join(lengths)}", why) for (name, why), lengths in missing.items()]


def processor(record: Record) -> str:
    """What computed: the GPU, or the processor if there was none."""
    return str(record.machine.get("gpu") or processor_text(record.machine))


def _tenths(record: Record) -> list[tuple[float, float, float]]:
    """(tokens read, processor seconds per token, bytes added) at the end of each tenth; empty if the record has none."""
    columns = (numbers(record, "ours", name) for name in ("length", "token_cpu_seconds", "added_bytes"))
    rows = list(zip(*columns, strict=False))
    return rows if all(0 < number < math.inf for row in rows for number in row) else []


def _along_text(title: str, at: Array, values: Array) -> Figure:
    """One line from 0, against the tokens that were read."""
    figure, axes = drawing.plain_axes(title)
    axes.plot(at, values, color=drawing.color_of("alibi"), marker="o", clip_on=False, label=title)
    axes.set_ylim(0, 1.25 * values.max())
    axes.set_xlim(0, at[-1])
    drawing.ticks(axes.xaxis, [at[-1] * share for share in (0, 0.5, 1)], drawing.short_number)
    axes.set_xlabel("tokens read")
    return figure
