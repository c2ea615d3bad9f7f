"""Attention accumulated over the layers: does the first token win with depth (records of `alibi heads rollout`)?"""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from alibi_lab.records import Record
from alibi_lab.report import rollouts
from alibi_lab.report.plots import drawing
from alibi_lab.report.section import Archive, Section, count_of, html

_STYLES = ("-", (0, (5, 2)), (0, (2, 2)), (0, (1, 1)), (0, (6, 2, 1, 2)))
_WAYS = (rollouts.PLAIN, rollouts.RESIDUAL)


def find(archive: Archive) -> list[list[Record]]:
    """All records of rollouts, as one entry."""
    records = [record for record in archive.records if rollouts.is_drawn(record)]
    return [records] if records else []


def draw(records: Sequence[Record], number: int, archive: Archive) -> Section:
    """The shares at the last layer of trained models; `alibi heads rollout` draws them by layer."""
    rows, first = [], {}
    for name, members in rollouts.models(records).items():
        label, layers = rollouts.label_of(name, members[0]), max(rollouts.shares(members[0])[rollouts.PLAIN])
        shares = [(way, share) for way in _WAYS for share in rollouts.SHARES]
        ends = [np.mean([rollouts.by_depth(record, *one)[layers] for record in members]) for one in shares]
        rows.append((label, f"{layers:.0f}", *map("{:.1%}".format, ends)))
        first[label] = f"{label} {ends[0]:.0%}"
    names = rollouts.SHARES.values()
    body = html("rollout", columns=("model", "layers", *names, *(f"{name}, residual" for name in names)), rows=rows)
    found = f"Share of the first token in the attention accumulated over all layers: {', '.join(first.values())}."
    group, title = "Heads of trained models", "Attention through the layers"
    heading, about = "Attention accumulated over the layers", count_of(records)
    finding = found if first else ""
    return Section("rollout", group, title, body, heading, about=about, records=records, finding=finding)


def rollout_figure(record: Record) -> Figure:
    """The share of the first token by depth, of their setting or of one model."""
    figure, axes = drawing.plain_axes("share of the first token")
    figure.set_facecolor("white")
    axes.set_ylim(0, 1.03)
    (_draw_theory if record.name == rollouts.THEORY else _draw_model)(axes, record)
    return figure


def _draw_theory(axes: Axes, record: Record) -> None:
    """A line for each mask of their setting; the lines of one method differ by their dashes."""
    styles, longest = itertools.cycle(_STYLES), 1.0
    for way in rollouts.shares(record):
        if "random" in way:
            continue
        method = {"causal mask": "none", "rotary": "rotary"}.get(way, "alibi" if way.startswith("ALiBi") else "")
        x, y = zip(*rollouts.by_depth(record, way, "first_token").items(), strict=True)
        color = drawing.color_of(method) if method else drawing.MUTED
        dashes = next(styles) if method == "alibi" else "-" if method else ":"
        axes.plot(x, y, color=color, linestyle=dashes, linewidth=1.4, label=way)
        longest = max(longest, x[-1])
    drawing.length_ticks(axes, [2**power for power in range(0, int(np.log2(longest)) + 1, 2)], "layers")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7.5, handlelength=1.7)


def _draw_model(axes: Axes, record: Record) -> None:
    method, label = rollouts.method_of(record), rollouts.label_of(record.name, record)
    x, y = zip(*rollouts.by_depth(record, rollouts.PLAIN, "first_token").items(), strict=True)
    axes.plot(x, y, color=drawing.color_of(method), marker=drawing.marker_of(method), label=label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("layer")
    drawing.name_lines(axes)
