"""Items of the paper: an answer of ours (a record of kind "paper-item") beside the paper's own numbers.

An answer's curves are its series, labeled as the paper labels them (see `published.py`). Perplexities of bytes or byte pairs of
another text are not those of WikiText-103's words: they never share an axis or a ranking, only a shape.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from alibi_attn.records import Json, Record
from alibi_attn.report import heads, paper_figures
from alibi_attn.report.figures import Points
from alibi_attn.report.paper_figures import Line, Panel
from alibi_attn.report.published import PUBLISHED, PublishedItem, method_of, trained_length
from alibi_attn.report.series import numbers

KIND = "paper-item"
_BY_LENGTH = ("figure-1", "figure-4", "figure-6", "figure-9", "figure-11")
_MEASURES = {
    "train_tokens_per_second": "tokens per second in training, log scale",
    "evaluation_tokens_per_second": "tokens per second in the test, log scale",
    "memory_bytes": "memory of the training in GB, log scale",
}
_OTHER_WAY = {"sliding_perplexity": "sliding", "nonoverlapping_perplexity": "nonoverlapping"}
_OTHER_TABLES = {  # where the paper has the same models, evaluated the other way
    "figure-1": ("table-13", "table-14", "table-15"),
    "figure-4": ("table-15",),
    "figure-11": ("table-5", "table-2", "table-3", "table-4"),
}

Column = Callable[[str, str], Points]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture of an item."""

    heading: str
    caption: str
    figure: Figure
    description: str


def is_drawn(record: Record) -> bool:
    """Answers to an item that the paper has."""
    return record.kind == KIND and record.name.split("/")[0] in PUBLISHED


def item_of(record: Record) -> PublishedItem:
    """What the paper says about the item that a record answers."""
    return PUBLISHED[record.name.split("/")[0]]


def pictures(record: Record) -> list[list[Picture]]:
    """Rows of ours and the paper's, as they stand beside each other; none for tables."""
    name, item = record.name.split("/")[0], item_of(record)
    if name == "figure-3":
        return [_head_pictures()]
    if name == "figure-10":
        return _window_pictures(record, item)
    if name == "figure-8":
        panels = _panels(record, item, "", "perplexity", None)
        return [[_picture(panel, paper_figures.frontier(panel)) for panel in panels]]
    groups: list[list[Panel]] = []
    if name in _BY_LENGTH:
        groups = [_panels(record, item, "length", "perplexity", labels) for labels in item.panels]
    elif name == "figure-5":
        groups = [_panels(record, item, "hours", "perplexity", labels) for labels in item.panels]
    elif name == "figure-7":
        groups = [_panels(record, item, "length", "train_tokens_per_second", None)]
    elif name == "figure-2":
        groups = [_panels(record, item, "trained", measure, None) for measure in item.columns]
    return [
        [_picture(panel, figure) for panel, figure in zip(group, paper_figures.line_figures(group), strict=True)]
        for group in groups
    ]


def scale_factor(record: Record) -> float:
    """How many times the paper's lengths are longer than ours."""
    for label in record.curves:
        for ours, theirs in zip(numbers(record, label, "length"), numbers(record, label, "paper_length"), strict=True):
            if ours > 0 and theirs > 0:
                return theirs / ours
    lengths = record.config.get("lengths")
    for theirs_text, ours_value in (lengths if isinstance(lengths, Mapping) else {}).items():
        if isinstance(ours_value, int | float) and ours_value > 0 and theirs_text.isdecimal():
            return float(theirs_text) / ours_value
    return 1.0


def unit_of(record: Record) -> str:
    """What our perplexity is per: "byte" or "token"."""
    unit = record.config.get("unit")
    if isinstance(unit, str):
        return unit
    sizes = [corpus.get("bytes_per_token") for corpus in _corpora(record)]
    return "byte" if sizes and all(size == 1 for size in sizes) else "token"


def corpus_of(record: Record) -> str:
    """The names of the texts that ours are measured on."""
    name = record.config.get("corpus")
    if isinstance(name, str):
        return name
    names = dict.fromkeys(str(corpus.get("name")) for corpus in _corpora(record) if corpus.get("name"))
    return " and ".join(names) or "another text"


def _corpora(record: Record) -> list[Mapping[str, Json]]:
    found = record.config.get("corpora")
    return [corpus for corpus in found if isinstance(corpus, Mapping)] if isinstance(found, list | tuple) else []


def spread_sentence(record: Record) -> str:
    """How many tokens were scored and how many seeds stand behind a number."""
    tokens = _range(record, "tokens", "valid_tokens", "test_tokens")
    seeds = _range(record, "seeds")
    said = []
    if tokens:
        said.append(f"{_between(tokens)} tokens are scored for every number of ours.")
    if seeds and seeds[1] == 1:
        said.append("There is one seed, so nothing shows how much chance does.")
    elif seeds:
        said.append(f"Bands and small numbers go from the lowest to the highest of {_between(seeds)} seeds.")
    return " ".join(said)


def scale_sentence(record: Record) -> str:
    """How our lengths stand to the paper's, and that the units differ."""
    item, factor = item_of(record), scale_factor(record)
    said = []
    if factor != 1:
        lengths = sorted({length for label in item.series if (length := trained_length(label))})
        example = lengths[0] if lengths else 512
        said.append(
            f"Our lengths are the paper's divided by {factor:g}: L = {example / factor:,.0f} stands for L = {example:,}."
        )
    slopes = _slopes(record, item)
    if slopes:
        equal = sum(ours == theirs for ours, theirs in slopes)
        said.append(f"{equal} of the paper's {len(slopes)} slopes are ours to the last bit.")
    elif item.corpus and any("perplexity" in column for column in item.columns):
        ours, theirs = f"{unit_of(record)} of {corpus_of(record)}", f"token of {item.corpus}"
        said.append(f"Ours is per {ours}, the paper's per {theirs}: compare shapes, not heights.")
    elif item.corpus:
        said.append(f"The machines differ (the paper's: {item.evaluation}), and so do the tokens: compare shapes.")
    return " ".join(said)


def _panels(record: Record, item: PublishedItem, x: str, y: str, labels: Sequence[str] | None) -> list[Panel]:
    """Ours as the paper evaluates, ours the other way where it was measured, and the paper's."""
    labels = [label for label in labels or item.series if label not in item.cited]
    factor = scale_factor(record)
    published = _published(item)
    found = []
    way = "sliding" if "sliding" in item.evaluation else "nonoverlapping"
    choices = [(y, "", way)]
    if y == "perplexity":
        choices += [(column, f"{other}_", other) for column, other in _OTHER_WAY.items()]
    for column, prefix, mode in choices:
        lines = _lines(_recorded(record), labels, x, column, factor, prefix)
        if lines:
            how = f", {mode} windows" if y == "perplexity" and x in ("length", "") else ""
            found.append(_panel(record, item, x, y, lines, labels, heading=f"Ours{how}", ours=True, factor=factor))
    theirs = [(published, way, item)]
    other = _other_published(record.name.split("/")[0], item)
    if other is not None and x == "length":
        theirs.append((_published(other), "sliding" if way == "nonoverlapping" else "nonoverlapping", other))
    for column_of, mode, source in theirs:
        lines = _lines(column_of, [label for label in labels if label in source.series], x, y, 1.0, "")
        how = f", {mode} windows" if y == "perplexity" and x in ("length", "") else ""
        if lines:
            found.append(_panel(record, source, x, y, lines, labels, heading=f"The paper{how}", ours=False, factor=1.0))
    return found


def _other_published(name: str, item: PublishedItem) -> PublishedItem | None:
    """The paper's numbers of the same models, evaluated the other way, up to the item's own longest length."""
    tables = [PUBLISHED[table] for table in _OTHER_TABLES.get(name, ())]
    if not tables:
        return None
    series: dict[str, Mapping[str, tuple[float | None, ...]]] = {}
    longest = max(length or 0 for columns in item.series.values() for length in columns["length"])
    for label in item.series:
        for table in tables:
            columns = table.series.get(label)
            if columns is not None and label not in series:
                kept = [at for at, length in enumerate(columns["length"]) if length and length <= longest]
                series[label] = {key: tuple(columns[key][at] for at in kept) for key in ("length", "perplexity")}
    source = "tables " + ", ".join(table.source.removeprefix("table ") for table in tables)
    return dataclasses.replace(
        item, series=series, source=source if tables[1:] else tables[0].source, evaluation=tables[0].evaluation
    )


def _panel(
    record: Record, item: PublishedItem, x: str, y: str, lines: tuple[Line, ...], labels: Sequence[str], *, heading: str,
    ours: bool, factor: float,
) -> Panel:  # fmt: skip
    trained = {trained_length(label) for label in labels}
    (only,) = trained if len(trained) == 1 else (None,)
    unit = only / factor if only and x == "length" else None
    per = unit_of(record) if ours else "token"
    y_label = f"perplexity per {per}, log scale" if y == "perplexity" else _MEASURES[y]
    x_label = {
        "length": f"{per}s read at once" + (f", L = {unit:,.0f}" if unit else ", log scale"),
        "trained": f"L, {per}s of a training example",
        "hours": f"{_time_unit(lines)} of training" + ("" if ours else " (GPU)"),
        "": f"{per}s per second in training, log scale",
    }[x]
    if y == "train_tokens_per_second" and x == "length":
        x_label = f"L, {per}s of a training example"
        unit = None
    if x == "hours" and _time_unit(lines) == "minutes":
        lines = tuple(dataclasses.replace(line, x=60 * line.x) for line in lines)
    caption = "" if ours else f"Numbers of {item.source}: {item.corpus}, {item.evaluation}."
    return Panel(
        heading=heading, caption=caption, ours=ours, x_label=x_label, y_label=y_label, lines=lines,
        log_x=x != "hours", unit=unit,
    )  # fmt: skip


def _lines(column: Column, labels: Sequence[str], x: str, y: str, factor: float, prefix: str) -> tuple[Line, ...]:
    """A line a label that has such numbers; names say L where it differs, the method where that does."""
    found = []
    trained = {trained_length(label) for label in labels}
    methods = {method_of(label) for label in labels}
    for label in labels:
        values = column(label, y)
        if not np.isfinite(values).any():
            continue
        length = trained_length(label)
        if x == "length":
            places = column(label, "length")
        elif x == "hours":
            places = column(label, "hours")
        elif x == "trained":
            places = np.full(len(values), (length or math.nan) / factor)
        else:
            places = column(label, "train_tokens_per_second")
        scale = 1e9 if y == "memory_bytes" else 1.0
        name = label.split(",", 1)[0]
        if len(trained) > 1 and length and x != "trained":
            shown = f"{length / factor:,.0f}"
            name = f"{name} {shown}" if len(methods) > 1 else f"L = {shown}"
        found.append(
            (label, name, places, values / scale, column(label, f"{prefix}low"), column(label, f"{prefix}high"))
        )
    lines: dict[str, Line] = {}
    for label, name, places, values, low, high in found:
        key = label.split(",", 1)[0] if x == "trained" else label
        line = Line(name=name, method=method_of(label), x=places, y=values, low=low, high=high)
        if key in lines:
            old = lines[key]
            line = Line(
                name=name, method=line.method, x=np.append(old.x, line.x), y=np.append(old.y, line.y),
                low=np.append(old.low, line.low), high=np.append(old.high, line.high),
            )  # fmt: skip
        lines[key] = line
    return tuple(lines.values())


def _time_unit(lines: Sequence[Line]) -> str:
    longest = max((value for line in lines for value in line.x.tolist() if math.isfinite(value)), default=0.0)
    return "minutes" if longest < 2 else "hours"


def _recorded(record: Record) -> Column:
    def column(label: str, name: str) -> Points:
        return np.array(numbers(record, label, name), dtype=np.float64)

    return column


def _published(item: PublishedItem) -> Column:
    def column(label: str, name: str) -> Points:
        columns = item.series[label]
        values = columns.get(name) or (None,) * len(next(iter(columns.values())))
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    return column


def _picture(panel: Panel, figure: Figure) -> Picture:
    ends = []
    for line in panel.lines:
        some = np.isfinite(line.y)
        if some.any():
            ends.append(f"{line.name} from {line.y[some][0]:,.4g} to {line.y[some][-1]:,.4g}")
    return Picture(
        heading=panel.heading,
        caption=panel.caption,
        figure=figure,
        description=f"{panel.heading}: {panel.y_label.removesuffix(', log scale')}. {'; '.join(ends)}.",
    )


def _head_pictures() -> list[Picture]:
    return [
        Picture(
            heading="The bias of each of eight heads",
            caption="Queries go down, keys to the right, 64 each; full color is no penalty.",
            figure=heads.bias_grid(8, 64),
            description="The causal biases of eight heads, from a thin diagonal to a full triangle.",
        ),
        Picture(
            heading="How fast each head forgets",
            caption="The factor that the bias gives a key; dots mark the half-life, with the slope.",
            figure=heads.factor_curves(8, 512),
            description="The factor that each of eight heads leaves a key, by distance.",
        ),
    ]


def _window_pictures(record: Record, item: PublishedItem) -> list[list[Picture]]:
    rows = []
    for label in item.series:
        row = []
        for who, column in (("Ours", _recorded(record)), ("The paper", _published(item))):
            token, context, passes = (column(label, name) for name in ("token", "context", "pass"))
            if _are_windows(token, context, passes):
                row.append(
                    Picture(
                        heading=f"{label}: {who.lower()}",
                        caption="Filled: scored in this pass. Pale: read again, for context.",
                        figure=paper_figures.windows(token, context, passes),
                        description=f"{label} over {len(token)} tokens takes {passes.max():.0f} forward passes.",
                    )
                )
        rows.append(row)
    measured = _window_losses(record, item)
    return [*rows, [measured]] if measured else rows


def _are_windows(token: Points, context: Points, passes: Points) -> bool:
    """Whether every pass scores a token, and reads no more than there are."""
    whole = np.concatenate([token, context, passes])
    if not token.size or not np.isfinite(whole).all() or whole.min() < 1 or (whole % 1).any():
        return False
    return bool(
        (context <= token).all() and passes.max() <= token.size and set(passes) == set(range(1, int(passes.max()) + 1))
    )


def _window_losses(record: Record, item: PublishedItem) -> Picture | None:
    """What a trained model loses on the eight places, where the record has it."""
    column = _recorded(record)
    whole: list[str] = []
    lines: list[Line] = []
    for label in item.series:
        token, loss, mean = (column(label, name) for name in ("token", "loss_nats", "whole_text_nats"))
        if not np.isfinite(loss).any():
            continue
        nothing = np.full(len(token), math.nan)
        method = "sinusoidal" if not lines else "alibi"
        lines.append(Line(name=label, method=method, x=token, y=loss, low=nothing, high=nothing))
        if np.isfinite(mean).any():
            whole.append(f"{mean[0]:.3f} nats ({label.lower()})")
    if not lines:
        return None
    panel = Panel(
        heading="What it is worth: ours",
        caption="The loss of a trained model by how much it reads."
        + (f" Over the whole text: {', '.join(whole)}." if whole else ""),
        ours=True, x_label="token of the text", y_label="nats per token, log scale", lines=tuple(lines), log_x=False,
    )  # fmt: skip
    return _picture(panel, paper_figures.line_figures([panel])[0])


def _slopes(record: Record, item: PublishedItem) -> list[tuple[float, float | None]]:
    """(ours, the paper's) slope of every head of both."""
    if "slope" not in item.columns:
        return []
    return [
        pair
        for label, columns in item.series.items()
        for pair in zip(numbers(record, label, "slope"), columns["slope"], strict=False)
    ]


def _range(record: Record, *columns: str) -> tuple[float, float] | None:
    cells = (value for label in record.curves for column in columns for value in numbers(record, label, column))
    found = [value for value in cells if math.isfinite(value)]
    return (min(found), max(found)) if found else None


def _between(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
