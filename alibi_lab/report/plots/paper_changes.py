"""Changes: our numbers and the paper's, each as ratios to a baseline of the same source, so that both can share an axis.

    by length, each model    perplexity / perplexity at the trained length L, against multiples of L
    by length, one baseline  if each length has its own sinusoidal model: all lines / the shortest of these models
    speed by L               speed / speed at the shortest L that both have
    four methods             value / that of sinusoidal at the same L
    the frontier             speed and perplexity / those of sinusoidal at the longest L

Our lines have bands: of ratios per seed, or over test text if there is one seed (see `verdicts.py`).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from alibi_lab.records import Record
from alibi_lab.report.answers import Sources, between, scale_of
from alibi_lab.report.intervals import interval
from alibi_lab.report.plots.paper import Line, Panel
from alibi_lab.report.published import Number, trained_length
from alibi_lab.report.verdicts import paired

_OWN = "L = L_valid"
_REFERENCE = "Sinusoidal, L = 3072"


@np.errstate(over="ignore")  # a ratio of a huge number to a tiny one is infinite, and not drawn
def change(
    record: Record, x: str, y: str, way: str, lines: Sequence[Line], by_identity: Mapping[str, Record]
) -> Panel | None:
    """Our lines and the paper's for one evaluation mode, as ratios; None if one of the two is missing.

    Args:
        x: the x axis: "length", "trained" or "speed"; "hours" has no change, because times have no common unit.
        y: the measure.
        by_identity: records for the bands.
    """
    if x == "hours" or len({line.ours for line in lines}) < 2:
        return None
    if x == "speed":
        drawn = list(_frontier(lines))
        texts = "speed of training / sinusoidal's", "perplexity / sinusoidal's, both at L = 3,072"
    elif x == "trained":
        drawn = list(_against_sinusoidal(lines))
        texts = "L of the paper, log scale", "times that of sinusoidal at the same L"
    elif y != "perplexity":
        drawn, texts = _from_shortest(lines, [line.label for line in lines])
        texts = texts[0], f"speed / speed at {texts[1]}"
    elif {line.ours for line in lines if _OWN in line.label} == {True, False}:
        drawn, texts = _from_shortest(lines, [line.label for line in lines if _OWN in line.label][:1])
        texts = texts[0], f"perplexity / sinusoidal's at {texts[1]}"
    else:
        drawn = [_scaled(line, line, trained_length(line.label)) for line in lines if _OWN not in line.label]
        texts = "multiples of the trained length L", "perplexity / perplexity at L"
    drawn = [line for line in drawn if np.isfinite(line.y).any()]
    if len({line.ours for line in drawn}) < 2:
        return None
    bands = ""
    if x == "length" and y == "perplexity":
        drawn, bands = _with_bands(drawn, Sources(record, by_identity), way)
    scale = f", {scale_of(record)}" if scale_of(record) else ""
    return Panel(
        heading=f"Both on one axis{f', {way} windows' if way else ''}",
        caption=f"Solid: ours{scale}. Dashed and hollow: the paper's. {bands}".strip(),
        x_label=texts[0],
        y_label=f"{texts[1]}, log scale",
        lines=tuple(drawn),
        unit=1.0 if x == "length" else None,
        ratio=True,
    )


def _scaled(line: Line, base: Line, length: float | None) -> Line:
    """The line divided by another line's value at one of the paper's lengths; x as multiples of that length."""
    at = base.y[base.paper_length == length]
    by, unknown = float(at[0]) if at.size else math.nan, np.full(len(line.y), math.nan)
    number = Number(base.label, int(length)) if length else None
    x = line.paper_length / (length or math.nan)
    return dataclasses.replace(line, x=x, y=line.y / by, low=unknown, high=unknown, base=number)


def _from_shortest(lines: Sequence[Line], labels: Sequence[str]) -> tuple[list[Line], tuple[str, str]]:
    """All lines, divided by the value at the shortest length that our lines and the paper's with these labels have.

    Lines with these labels are divided by their own value, others by that of a line with one of these labels."""
    places = [set(line.paper_length[np.isfinite(line.y)].tolist()) for line in lines if line.label in labels]
    common = set.intersection(*places)
    if not common:
        return [], ("", "")
    shortest = min(common)
    bases = {line.ours: line for line in reversed(lines) if line.label in labels}
    found = [_scaled(line, line if line.label in labels else bases[line.ours], shortest) for line in lines]
    return found, (f"multiples of L = {shortest:,.0f} of the paper", f"L = {shortest:,.0f}")


def _against_sinusoidal(lines: Sequence[Line]) -> Iterator[Line]:
    """Each method divided by sinusoidal of the same source at the same trained length."""
    bases = {line.ours: line for line in reversed(lines) if line.method == "sinusoidal"}
    for line in lines:
        if line.ours in bases and line.method != "sinusoidal":
            base = bases[line.ours]
            at = dict(zip(base.paper_length.tolist(), base.y.tolist(), strict=True))
            under = np.array([at.get(length, math.nan) for length in line.paper_length.tolist()])
            yield dataclasses.replace(line, x=line.paper_length, y=line.y / under)


def _frontier(lines: Sequence[Line]) -> Iterator[Line]:
    """Points divided by the reference point of the same source."""
    points = {line.ours: (line.x[0], line.y[0]) for line in reversed(lines) if line.label == _REFERENCE}
    for line in lines:
        if line.ours in points:
            x, y = points[line.ours]
            yield dataclasses.replace(line, x=line.x / x, y=line.y / y, low=line.low / y, high=line.high / y)


def _with_bands(lines: Sequence[Line], sources: Sources, way: str) -> tuple[list[Line], str]:
    """The lines with bands for ours, and a sentence that explains the bands."""
    found: list[Line] = []
    seeds: set[int] = set()
    parts: set[int] = set()
    for line in lines:
        low, high = np.full((2, len(line.y)), math.nan)
        for at, length in enumerate(line.paper_length.tolist()):
            if not line.ours or line.base is None or not math.isfinite(length):
                continue
            pair = paired(sources, [Number(line.label, int(length))], [line.base], way=way)
            if len(pair.logs) > 1 and np.isfinite(pair.logs).all():
                low[at], high[at] = np.exp(pair.logs.min()), np.exp(pair.logs.max())
                seeds.add(len(pair.logs))
            elif (bounds := interval(pair)) is not None:
                low[at], high[at] = bounds.low, bounds.high
                parts.add(len(pair.parts))
        found.append(dataclasses.replace(line, low=low, high=high))
    captions = []
    if seeds:
        captions.append(f"Bands: the lowest and the highest ratio of {between((min(seeds), max(seeds)))} seeds.")
    if parts:
        over = f"95 % over {between((min(parts), max(parts)))} parts of the text"
        captions.append(f"Bands of single trainings: {over}." if seeds else f"Bands: {over}, one training each.")
    return found, " ".join(captions)
