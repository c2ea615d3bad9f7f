"""A section of the page: what the contents and the first screen say about it, and its HTML, from a macro of `sections.html`.

To add a section, write a file in `sections/` with two functions and add it to `SECTIONS` in `page.py`:

    find(archive)                the entries to draw, one per section of the page; an empty list if there are none
    draw(entry, number, archive) the Section of one entry; `number` is the entry's index and keeps anchors unique

`html` calls a macro of `sections.html`: "numbers" draws a table, "texts" one of text, "panels" figures, "facts" a list of names
with values; a section of another form has its own macro.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from alibi_lab.records import Record, age, identity
from alibi_lab.report import series
from alibi_lab.report.answers import between
from alibi_lab.report.plots.drawing import described, svg
from alibi_lab.report.plots.study import FEWEST
from alibi_lab.report.series import Study
from alibi_lab.report.tables.study import TASKS, duration, model_sizes, task_table
from alibi_lab.report.tables.table import fraction, mean, number, rounded, variable_of
from alibi_lab.report.verdicts import interval_text, ratio_text


def code(text: str) -> Markup:
    """The text as code."""
    return Markup("<code>{}</code>").format(text)


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals |= {"svg": svg, "described": described, "titles": TASKS, "task_table": task_table, "fewest": FEWEST}
TEMPLATES.filters |= {
    one.__name__: one for one in (age, between, code, duration, fraction, math.isfinite, mean, number, rounded)
}
TEMPLATES.filters |= {"interval": interval_text, "ratio": ratio_text, "sizes": model_sizes, "variable": variable_of}


class Archive:
    """The records of one page, without duplicates, and their studies."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.by_identity = {identity(one.kind, one.name, one.config): one for one in records}
        self.records = list(self.by_identity.values())

    @functools.cached_property
    def studies(self) -> list[Study]:
        """All studies, including those that answers to the paper's items are computed from."""
        return series.studies(self.records)


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the page.

    Args:
        anchor: its id, unique in the page.
        group: the heading under which the contents list it; "" leaves it out of the contents.
        title: its name in the contents.
        body: its content.
        heading: its heading; by default the title.
        about: a few words after the title in the contents.
        records: the records that it draws, so that the list of all records can link to it.
        css: its class.
        finding: its result in a sentence of fixed form, for the top of a page with several sections.
        lead: the picture that shows it.
    """

    anchor: str
    group: str
    title: str
    body: Markup
    heading: str = ""
    about: str = ""
    records: Sequence[Record] = ()
    css: str = ""
    finding: str = ""
    lead: Figure | None = None


def html(macro: str, **values: object) -> Markup:
    """What a macro of `sections.html` makes of the values."""
    return Markup(getattr(TEMPLATES.get_template("sections.html").module, macro)(**values))


def count_of(records: Sequence[Record]) -> str:
    """The number of records, as the contents show it: "3 records"."""
    return f"{len(records)} record{'' if len(records) == 1 else 's'}"
