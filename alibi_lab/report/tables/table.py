"""Tables of numbers and text for the page and the terminal, the heads of ALiBi in numbers, and number formatting."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from alibi_attn import alibi_slopes
from alibi_lab.position_methods import LOOKS
from alibi_lab.records import MAX_COUNT, Json
from alibi_lab.report.series import Series

NEGLIGIBLE = 1e-6  # a key with a smaller factor is negligible and is drawn without color
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Cell:
    """One cell.

    Args:
        text: the value as shown.
        value: the number itself; None for text.
        spread: shown below the text in small type, for example the range over seeds; "" for none.
        best: whether it is bold.
        heat: strength of the background color, from 0 to 1; None for no color.
        css: its class.
    """

    text: str
    value: float | None = None
    spread: str = ""
    best: bool = False
    heat: float | None = None
    css: str = ""


Row = tuple[str, str, Sequence[Cell]]  # label, position method (for its color; "" for none), one cell per column


@dataclass(frozen=True)
class Block:
    """Rows of one quantity under a title."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    """Blocks under common columns."""

    columns: Sequence[str]
    blocks: Sequence[Block]


NOTHING = Cell("—")


def variable_of(series: Series) -> str:
    """The CSS variable of its method's color; that of its own look if it is not built in, else "ink"."""
    if series.method in LOOKS:
        return series.method
    return f"own-{series.look.light[1:].lower()}" if series.look else "ink"


def series_row(series: Series, cells: Sequence[Cell]) -> Row:
    """The row of a series, in the color of its method."""
    return series.label, variable_of(series), cells


def seeds_cell(values: Sequence[float], show: Callable[[float], str]) -> Cell:
    """The mean over seeds, and below it the lowest and the highest if they differ."""
    if not values:
        return NOTHING
    low, high = show(min(values)), show(max(values))
    return Cell(show(mean(values)), mean(values), "" if low == high else f"{low} – {high}")


def with_best(column: Sequence[Cell], best: Callable[[Sequence[float]], float] = min) -> list[Cell]:
    """The cells of a column, the best value bold."""
    values = [cell.value for cell in column if cell.value is not None]
    return [replace(cell, best=cell.value == best(values)) for cell in column] if values else list(column)


def mean(values: Sequence[float]) -> float:
    """The mean; NaN if there are no values."""
    return sum(values) / len(values) if values else math.nan


def number(value: float) -> str:
    """A number with four significant digits: 7.020, 17.23; integers from 1,000, and 1.36·10⁷ from a million."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 1e6:
        mantissa, _, power = f"{value:.2e}".partition("e+")
        return f"{mantissa}·10{str(int(power)).translate(_SUPERSCRIPTS)}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 3 - max(math.floor(math.log10(abs(value))), 0) if value else 0
    return f"{value:.{digits}f}" if abs(value) >= 0.1 else f"{value:.4g}"


def rounded(value: float) -> str:
    """A number with three digits or more: 7.02, 17.2, 1,234."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def signed(percent: float) -> str:
    """A change with its sign: "+32 %", "−4.7 %", "+0.004 %"; as many digits as show that it is not 0, which is "0 %"."""
    if abs(percent) < 5e-5:
        return "0\N{NO-BREAK SPACE}%"
    digits = 0 if abs(percent) >= 10 else 1
    if 0 < abs(percent) < 0.05:
        digits = min(-math.floor(math.log10(abs(percent))), 4)
    return f"{percent:+,.{digits}f}\N{NO-BREAK SPACE}%".replace("-", "−")


def head_rows(num_heads: int) -> list[tuple[str, str, str, str]]:
    """Head, slope, half-life and the distance from which the factor is below 1e-6, for every head."""
    return [
        (f"{head}", fraction(m), f"{half_life(m):,.1f}", f"{math.floor(-math.log(NEGLIGIBLE) / m) + 1:,}")
        for head, m in enumerate(alibi_slopes(num_heads).tolist(), start=1)
    ]


def half_life(slope: float) -> float:
    """The distance in tokens at which a head's factor e^(−m·d) is one half, ln 2 / m; infinite for slope 0."""
    return math.log(2) / slope if slope > 0 else math.inf


def fraction(slope: float) -> str:
    """A slope as text: "1/256" if it is one over an integer, otherwise three digits."""
    if slope > 1 / MAX_COUNT and abs(1 / slope - round(1 / slope)) < 1e-9 / slope:
        return f"1/{round(1 / slope)}" if slope != 1 else "1"
    return f"{slope:.3g}"


def processor_text(machine: Mapping[str, Json]) -> str:
    """The processor, with its widest instruction set if recorded; "" if nothing was recorded."""
    name, has = machine.get("processor"), machine.get("instructions")
    return f"{name} ({has})" if name and has else str(name or "")


def machine_text(machine: Mapping[str, Json]) -> str:
    """A short description of a machine."""
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
