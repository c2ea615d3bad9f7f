"""A benchmark: time and memory of every peer by length, and the ratio of its time to ours.

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
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.series import numbers, sequence
from alibi_lab.report.tables.table import processor_text

OURS = "ours"
_MEMORY = ("peak_memory_bytes", "cache_bytes")
_COLORS = ("sinusoidal", "rotary", "t5", "learned", "none", "ink", "alibi-learned", "alibi-half", "kerple")
MEASURED = {  # the first part of a record's name
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


def find(archive: Archive) -> list[Record]:
    """The benchmarks that have times by length."""
    return [record for record in archive.records if is_drawn(record)]


def draw(record: Record, number: int, archive: Archive) -> Section:
    """Two pictures, the ratios, and the record's other facts."""
    lengths, rows = ratio_table(record)
    description = f"Time against length of {', '.join(label for label, _ in rows)}; the table below has the ratios."
    times, memory = Plot(times_by_length(record), description), memory_by_length(record)
    columns, ratios = ("time relative to ours", *lengths), [(label, *cells) for label, cells in rows]
    name, values = f"b{number}", {"columns": columns, "ratios": ratios, "about": facts(record)}
    body = html("benchmark", name=name, record=record, times=times, memory=memory, **values)
    most = max(find(archive), key=lambda one: sum(len(peer.times) for peer in peer_times(one)))
    found = finding(record) if record is most else ""
    title = title_of(record)
    return Section(name, "Benchmarks", title, body, title, records=[record], finding=found, lead=times)


def title_of(record: Record) -> str:
    """What was measured: "Attention on a CPU: noise · 8 heads × 64 · float32 · to 65,536 tokens"."""
    place, _, inputs = record.name.partition("/")
    known = next((one for one in MEASURED if place == one or place.startswith(f"{one}-")), None)
    if known is None:
        return f"Benchmark {record.name}"
    details = (
        ", ".join(filter(None, (place.removeprefix(known).strip("-"), inputs))).replace("-", " ").replace("/", ", ")
    )
    config = record.config
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
        found = zip(
            numbers(record, name, "length"), numbers(record, name, "forward_ms") if forward_only else whole, strict=True
        )
        times = {int(length): float(time) for length, time in found if math.isfinite(length)}
        if times:
            peers.append(PeerTimes(name, times, forward_only))
    return sorted(peers, key=lambda peer: peer.name != OURS)


def times_by_length(record: Record) -> Figure:
    """Milliseconds against length, both logarithmic."""
    peers = peer_times(record)
    lines = {_label(peer): {x: y for x, y in peer.times.items() if math.isfinite(y)} for peer in peers}
    return _by_length("milliseconds, log scale", lines)


def memory_by_length(record: Record) -> Figure | None:
    """MiB, from zero, against length; None if no curve has memory by length."""
    lines = {}
    for name, columns in record.curves.items():
        column = next((column for column in _MEMORY if column in columns), None)
        if column is not None and "length" in columns:
            sizes = zip(numbers(record, name, "length"), numbers(record, name, column), strict=True)
            lines[name] = {int(x): y / 2**20 for x, y in sizes if math.isfinite(x) and y > 0}
    if not any(lines.values()):
        return None
    if len(lines) == 1:
        lines = {OURS: next(iter(lines.values()))}
    return _by_length("MiB", dict(sorted(lines.items(), key=lambda line: line[0] != OURS)))


def _by_length(title: str, lines: Mapping[str, Mapping[int, float]]) -> Figure:
    """One line per name; ours is thicker and has ALiBi's color."""
    figure, axes = drawing.plain_axes(title)
    lengths = sorted({length for points in lines.values() for length in points})
    others = [name for name in lines if name != OURS]
    for name, points in lines.items():
        if not points:
            continue
        x, y = np.array(sorted(points.items())).T
        ours = name == OURS
        color = drawing.color_of("alibi" if ours else _COLORS[others.index(name) % len(_COLORS)])
        marker, width = ("o", 2.4) if ours else (".", 1.5)
        axes.plot(x, y, color=color, marker=marker, linewidth=width, clip_on=False, label=name)
    if title.endswith("log scale"):
        drawing.log_axis(axes, np.array([y for points in lines.values() for y in points.values()]))
    else:
        axes.set_ylim(bottom=0)
    drawing.length_ticks(axes, lengths, "tokens")
    drawing.name_lines(axes)
    return figure


def ratio_table(record: Record) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(lengths, rows): every peer's time divided by ours; ours in milliseconds."""
    peers = peer_times(record)
    lengths = sorted({length for peer in peers for length in peer.times})
    ours = next((peer for peer in peers if peer.name == OURS), None)
    forward = dict(zip(numbers(record, OURS, "length"), numbers(record, OURS, "forward_ms"), strict=False))
    rows = []
    for peer in peers:
        base = {} if peer.name == OURS or ours is None else forward if peer.forward_only else ours.times
        cells = [_ratio(peer.times.get(length, math.nan), base.get(length, math.nan)) for length in lengths]
        rows.append((_label(peer), cells))
    return [f"{length:,}" for length in lengths], rows


def finding(record: Record) -> str:
    """Our time and the fastest peer's, at the longest length that a peer has; "" if no peer has any."""
    whole = {peer.name: peer.times for peer in peer_times(record) if not peer.forward_only}
    ours = whole.get(OURS, {})
    times = {
        (length, time, name)
        for name, of_peer in whole.items()
        for length, time in of_peer.items()
        if not name.startswith(OURS) and math.isfinite(time) and ours.get(length, 0.0) > 0
    }
    if not times:
        return ""
    longest = max(length for length, _, _ in times)
    time, name = min((time, name) for length, time, name in times if length == longest)
    start = f"At {longest:,} tokens ours takes {_milliseconds(ours[longest])}"
    return f"{start}; {name}, the fastest alternative, takes {time / ours[longest]:.2g} times as long."


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
    for name in record.curves:
        for why, missing in _reasons(record, name).items():
            rows.append((f"{name}, not at {', '.join(f'{length:,}' for length in missing)}", why))
    return rows


def processor(record: Record) -> str:
    """What computed: the GPU, or the processor if there was none."""
    return str(record.machine.get("gpu") or processor_text(record.machine))


def _reasons(record: Record, name: str) -> dict[str, list[int]]:
    """The lengths at which a peer was not run, by reason."""
    found: dict[str, list[int]] = {}
    reasons = record.curves[name].get("why_not", ())
    for length, why in zip(numbers(record, name, "length"), reasons, strict=False):
        if isinstance(why, str) and math.isfinite(length):
            found.setdefault(why, []).append(int(length))
    return found


def _label(peer: PeerTimes) -> str:
    return f"{peer.name} (forward)" if peer.forward_only else peer.name
