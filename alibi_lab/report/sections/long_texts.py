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


def find(archive: Archive) -> list[Record]:
    """The records with a time per token and the memory along a text, the longest text first."""
    drawn = [record for record in archive.records if record.kind == "benchmark" and _tenths(record)]
    return sorted(drawn, key=lambda record: -_tenths(record)[-1][0])


def draw(record: Record, number: int, archive: Archive) -> Section:
    """Time per token and memory along the text, and a table of what a process needs to continue."""
    at, seconds, sizes = np.array(_tenths(record)).T
    length, name = f"{at[-1]:,.0f}", f"l{number}"
    time = Plot(_figure("ms per token", at, seconds * 1e3), "Time per token along the text.")
    memory, machine = _figure("MiB", at, sizes / 2**20), processor(record)
    body = html("long_text", name=name, record=record, length=length, time=time, memory=memory, machine=machine)
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
