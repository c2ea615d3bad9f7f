"""Perplexities as plain tables (CSV, Markdown, LaTeX), and any two methods compared with an interval.

Before: `series.py`, which groups records into studies, and `intervals.py`, which has the intervals.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from alibi_lab.records import Record
from alibi_lab.report.intervals import Interval, Word, between, exp, interval, seed_interval, word_of
from alibi_lab.report.series import MODES, Mode, Study, studies
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.table import Cell, Table, mean

Form = Literal["csv", "markdown", "latex"]
Side = Literal["lower", "higher", "open"]
_WORDS: dict[Word, Side] = {"confirmed": "lower", "contradicted": "higher", "open": "open"}


class Row(NamedTuple):
    """The perplexity of one configuration at one length, over its seeds.

    Args:
        window: how the text was read, such as "nonoverlapping".
        perplexity, lowest, highest: per token (or byte): the mean over the seeds, and their range.
    """

    study: str
    text: str
    method: str
    trained: int
    window: Mode
    length: int
    seeds: int
    perplexity: float
    lowest: float
    highest: float


class Comparison(NamedTuple):
    """Two methods at one length: the ratio of their perplexities.

    Args:
        bounds: the 95 % interval, over seeds and text; None with fewer than two paired seeds.
        word: "lower" or "higher" if the whole interval is below or above 1, else "open".
    """

    study: str
    trained: int
    window: Mode
    length: int
    ratio: float
    bounds: Interval | None
    word: Side


def rows(records: Sequence[Record]) -> list[Row]:
    """All perplexities of the language models among the records."""
    return [
        Row(study.recipe, str(study.corpus.get("name", "")), one.label, one.trained, mode, int(length), len(found),
            mean(found), min(found), max(found))
        for study in studies(records)
        for one in study.series
        for mode in MODES
        for length in one.curve("by_length", "length", f"{mode}_nats")[0]
        if (found := one.perplexity(length, mode))
    ]  # fmt: skip


def exported(records: Sequence[Record], form: Form) -> str:
    """The perplexities as CSV, one row per number, or as one Markdown or LaTeX (booktabs) table per kind of window.

    Raises:
        ValueError: no language model was evaluated.
    """
    found = rows(records)
    if not found:
        raise ValueError("no evaluation of a language model is among these records; alibi run and alibi eval make them")
    if form == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(found)
        return text.getvalue()
    write = _markdown if form == "markdown" else _latex
    return "\n".join(write(study, table) for study in studies(records) if (table := tables.by_length(study)))


def compared(records: Sequence[Record], first: str, second: str) -> list[Comparison]:
    """The perplexity of one method divided by that of another, wherever both were tested; methods as in `--methods`.

    Each training is one sample, so an interval needs at least two seeds that both methods share.

    Raises:
        ValueError: no study tested both methods at a common length.
    """
    found = [one for study in studies(records) for one in _of_study(study, first, second)]
    if not found:
        tested = sorted({one.method for study in studies(records) for one in study.series})
        raise ValueError(
            f"no study tested {first} and {second}, trained at one length; these records have {', '.join(tested)}"
        )
    return found


def _of_study(study: Study, first: str, second: str) -> Iterator[Comparison]:
    plain = [one for one in study.series if one.stretch == "none"]
    over, under = (
        [one for one in plain if name in (one.method, one.method.rpartition(":")[2])] for name in (first, second)
    )
    for one, other in ((one, other) for one in over for other in under if one.trained == other.trained):
        for mode in MODES:
            for length in one.curve("by_length", "length", f"{mode}_nats")[0]:
                if (pairs := between(one, other, mode, length)) is None:
                    continue
                bounds = interval(pairs) if seed_interval(pairs) else None
                word = _WORDS[word_of(bounds, "below", 1.0)] if bounds else "open"
                ratio = exp(float(pairs.logs.mean()))
                yield Comparison(study.recipe, one.trained, mode, int(length), ratio, bounds, word)


def _markdown(study: Study, table: Table) -> str:
    lines = [f"{study.recipe} on {study.corpus.get('name', '')}\n"]
    for head, *body in _rows_of(table, "**{}**", str):
        lines += ["|" + "|".join(row) + "|" for row in (head, ["---"] * len(head), *body)]
        lines.append("")
    return "\n".join(lines)


def _latex(study: Study, table: Table) -> str:
    lines = [f"% {study.recipe} on {study.corpus.get('name', '')}; \\usepackage{{booktabs}}"]
    for rows_ in _rows_of(table, "\\textbf{{{}}}", _escaped):
        head, *body = (f"{' & '.join(row)} \\\\" for row in rows_)
        columns = f"l{'r' * len(table.columns)}"
        lines += [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", head, "\\midrule", *body]
        lines += ["\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(lines)


def _rows_of(table: Table, bold: str, escaped: Callable[[str], str]) -> Iterator[list[list[str]]]:
    """The rows of every block as text, its head first; the best values are bold."""

    def text(cell: Cell) -> str:
        plain = f"{cell.text} ({cell.spread.replace(' – ', '–')})" if cell.spread else cell.text
        return bold.format(plain) if cell.best else plain

    for block in table.blocks:
        rows_of = [[escaped(label), *map(text, cells)] for label, _, cells in block.rows]
        yield [[escaped(block.title), *table.columns], *rows_of]


def _escaped(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)
