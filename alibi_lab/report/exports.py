"""Perplexities as plain tables (CSV, Markdown, LaTeX), and any two methods compared with an interval.

Before: `series.py`, which groups records into studies, and `intervals.py`, which has the intervals.
"""

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from alibi_lab.records import Record
from alibi_lab.report.intervals import Interval, Word, between, exp, interval, seed_interval, word_of
from alibi_lab.report.series import MODES, Mode, Study, studies
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.table import Table, mean

Form = Literal["csv", "markdown", "latex"]
Side = Literal["lower", "higher", "open"]
_WORDS: dict[Word, Side] = {"confirmed": "lower", "contradicted": "higher", "open": "open"}


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


def rows(records: Sequence[Record]) -> Iterator[dict[str, object]]:
    """All perplexities of the language models among the records, one row per configuration and length.

    "window" is how the text was read, such as "nonoverlapping"; "perplexity", "lowest" and "highest" are per token (or byte): the
    mean over the seeds, and their range.
    """
    for study in studies(records):
        names = {"study": study.recipe, "text": str(study.corpus.get("name", ""))}
        for one, mode in itertools.product(study.series, MODES):
            for length in one.curve("by_length", "length", f"{mode}_nats")[0]:
                found = one.perplexity(length, mode)
                of_method = {"method": one.label, "trained": one.trained, "window": mode, "length": int(length)}
                values = {"perplexity": mean(found), "lowest": min(found), "highest": max(found)}
                yield names | of_method | {"seeds": len(found)} | values


def exported(records: Sequence[Record], form: Form) -> str:
    """The perplexities as CSV, one row per number, or as one Markdown or LaTeX (booktabs) table per kind of window.

    Raises:
        ValueError: no language model was evaluated.
    """
    found = list(rows(records))
    if not found:
        raise ValueError("no evaluation of a language model is among these records; alibi run and alibi eval make them")
    if form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, found[0], lineterminator="\n")
        writer.writeheader()
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
    for one, other, mode in itertools.product(over, under, MODES):
        if one.trained != other.trained:
            continue
        for length in one.curve("by_length", "length", f"{mode}_nats")[0]:
            if (pairs := between(one, other, mode, length)) is None:
                continue
            bounds = interval(pairs) if seed_interval(pairs) else None
            word = _WORDS[word_of(bounds, "below", 1.0)] if bounds else "open"
            ratio = exp(float(pairs.logs.mean()))
            yield Comparison(study.recipe, one.trained, mode, int(length), ratio, bounds, word)


def _markdown(study: Study, table: Table) -> str:
    lines = [f"{study.recipe} on {study.corpus.get('name', '')}\n"]
    for head, *body in _rows_of(table, "**{}**"):
        lines += ["|" + "|".join(row) + "|" for row in (head, ["---"] * len(head), *body)]
        lines.append("")
    return "\n".join(lines)


def _latex(study: Study, table: Table) -> str:
    lines = [f"% {study.recipe} on {study.corpus.get('name', '')}; \\usepackage{{booktabs}}"]
    for block in _rows_of(table, "\\textbf{{{}}}", lambda text: re.sub(r"([&%$#_{}])", r"\\\1", text)):
        head, *body = (f"{' & '.join(row)} \\\\" for row in block)
        lines += [f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}", "\\toprule", head, "\\midrule", *body]
        lines += ["\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(lines)


def _rows_of(table: Table, bold: str, escaped: Callable[[str], str] = str) -> Iterator[list[list[str]]]:
    """The rows of every block as text, its title and the columns first; `bold` is the form of the best values."""
    for block in table.blocks:
        rows = [[escaped(block.title), *table.columns]]
        for label, _, cells in block.rows:
            texts = [f"{cell.text} ({cell.spread.replace(' – ', '–')})" if cell.spread else cell.text for cell in cells]
            best = [bold.format(text) if cell.best else text for cell, text in zip(cells, texts, strict=True)]
            rows.append([escaped(label), *best])
        yield rows
