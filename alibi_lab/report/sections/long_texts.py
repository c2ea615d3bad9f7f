"""A long text read into a cache in files (records of `alibi bench texts`): its cost, and what opening it again costs."""

import math

import numpy as np
from matplotlib.figure import Figure

from alibi_lab.records import Record
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.sections.benchmark import processor
from alibi_lab.report.series import Array, numbers
from alibi_lab.report.tables.table import Table, text_table

_PEER = "llama_cpp_"


def find(archive: Archive) -> list[Record]:
    """The records with a time per token and the memory along a text, the longest text first."""
    drawn = [record for record in archive.records if record.kind == "benchmark" and _tenths(record)]
    return sorted(drawn, key=lambda record: -_tenths(record)[-1][0])


def draw(record: Record, number: int, archive: Archive) -> Section:
    """Time per token and memory along the text, and a table of what a process needs to continue."""
    at, seconds, sizes = np.array(_tenths(record)).T
    length, share, name = f"{at[-1]:,.0f}", _share(record, ""), f"l{number}"
    time = Plot(_figure("ms per token", at, seconds * 1e3), "Time per token along the text.")
    values = {
        "name": name,
        "record": record,
        "length": length,
        "table": _continuing(record),
        "machine": processor(record),
    }
    body = html("long_text", time=time, memory=_figure("MiB", at, sizes / 2**20), **values)
    added = _metric(record, "peak_added_bytes") / 2**20
    found = (
        f"Reading {length} tokens adds at most {added:,.0f} MiB of memory; a process that continues reads {share:.1%} of the "
        "saved cache."
    )
    found = found if number == 0 and math.isfinite(share + added) else ""
    title, heading = f"{length} tokens", f"A text of {length} tokens"
    return Section(name, "Long texts", title, body, heading=heading, records=[record], finding=found, lead=time)


def _tenths(record: Record) -> list[tuple[float, float, float]]:
    """(tokens read, processor seconds per token, bytes added) at the end of each tenth; empty if the record has none."""
    columns = (numbers(record, "ours", name) for name in ("length", "token_cpu_seconds", "added_bytes"))
    rows = list(zip(*columns, strict=False))
    return rows if all(0 < number < math.inf for row in rows for number in row) else []


def _figure(title: str, at: Array, values: Array) -> Figure:
    """One line from 0, against the tokens that were read."""
    figure, axes = drawing.plain_axes(title)
    axes.plot(at, values, color=drawing.color_of("alibi"), marker="o", clip_on=False, label=title)
    axes.set_ylim(0, 1.25 * values.max())
    axes.set_xlim(0, at[-1])
    drawing.ticks(axes.xaxis, [at[-1] * share for share in (0, 0.5, 1)], drawing.short_number)
    axes.set_xlabel("tokens read")
    return figure


def _continuing(record: Record) -> Table:
    """Ours and, if it was measured, llama.cpp: loading with a token, a warm token, and the bytes read from the disk."""
    names = ("open_and_first_token_ms", "warm_token_ms", "cold_open_and_first_token_ms")
    columns = ("", "open and first token", "a warm token", "open from a cold disk", "read from the disk")
    peers = {"llama.cpp, saved state": _PEER} if f"{_PEER}stored_bytes" in record.metrics else {}
    rows = []
    for label, prefix in {"ours": "", **peers}.items():
        times = (_metric(record, prefix + name) for name in names)
        read, stored = (_metric(record, prefix + name) / 2**20 for name in ("cold_bytes_read", "stored_bytes"))
        part = f"{read:,.0f} of {stored:,.0f} MiB" if math.isfinite(_share(record, prefix)) else "–"
        rows.append((label, *(f"{ms:,.0f} ms" if math.isfinite(ms) else "–" for ms in times), part))
    return text_table(columns, rows)


def _share(record: Record, prefix: str) -> float:
    """The share of the stored bytes that opening reads from a cold disk; NaN if unknown."""
    stored = _metric(record, prefix + "stored_bytes")
    return _metric(record, prefix + "cold_bytes_read") / stored if stored > 0 else math.nan


def _metric(record: Record, name: str) -> float:
    value = record.metrics.get(name)
    return math.nan if value is None else float(value)
