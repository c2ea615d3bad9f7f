"""Figures for a notebook, where `%matplotlib inline` shows them: the curves of a run, and the heads of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.figure import Figure

from alibi_lab.records import Record, find
from alibi_lab.report.plots.drawing import STYLE
from alibi_lab.report.plots.head_maps import heads_figure, is_drawn
from alibi_lab.report.plots.study import loss_by_position, perplexity_by_length, training_curves
from alibi_lab.report.series import Study, studies

Curve = Literal["nonoverlapping", "sliding", "position", "training"]
_CURVES: dict[Curve, Callable[[Study], Figure | None]] = {
    "nonoverlapping": lambda study: perplexity_by_length(study, "nonoverlapping"),
    "sliding": lambda study: perplexity_by_length(study, "sliding"),
    "position": loss_by_position,
    "training": training_curves,
}


def plot_run(folder: str | Path, curve: Curve = "nonoverlapping") -> Figure:
    """The curves of the models that `alibi run` recorded in a folder (`--out`), one per model.

    Args:
        folder: the `--out` of a run, or its folder of records.
        curve: perplexity against tested length ("nonoverlapping" or "sliding"), loss by "position", or loss in "training".

    Raises:
        ValueError: another curve, or a folder without records of it.
    """
    if curve not in _CURVES:
        raise ValueError(f"curve is {curve!r}; pass one of {', '.join(map(repr, _CURVES))}")
    places = [place for place in (Path(folder) / "records", Path(folder)) if place.exists()]
    loaded = list(find(*places[:1]))
    found = max(studies(loaded), key=lambda study: len(study.series), default=None)
    with matplotlib.rc_context({**STYLE, "figure.facecolor": "white"}):
        figure = None if found is None else _CURVES[curve](found)
    if figure is None:
        raise ValueError(
            f"{folder} has {len(loaded)} records and none with the curve {curve!r}; pass the --out of a run"
        )
    figure.set_facecolor("white")
    return figure


def plot_heads(record: Record) -> Figure:
    """Maps of a model's heads by layer: certified reach, mean distance, share of the first token, weights that are zero in bf16.

    Args:
        record: the result of `alibi_lab.heads.summary.summary(load(folder), text)`.

    Raises:
        ValueError: a record of another kind.
    """
    if not is_drawn(record):
        raise ValueError(
            f"the record is of kind {record.kind!r} and has no heads; pass the result of alibi_lab.heads.summary.summary"
        )
    figure = heads_figure(record)
    figure.set_facecolor("white")
    return figure
