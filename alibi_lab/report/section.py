"""The sections of the page, as data. `blocks.html` renders them to HTML; `page.py` lists the sections.

To add a section, write a file in `sections/` with two functions and add it to `SECTIONS` in `page.py`:

    find(archive)                the entries to draw, one per section of the page; an empty list if there are none
    draw(entry, number, archive) the Section of one entry; `number` is the entry's index and keeps anchors unique
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from markupsafe import Markup

from alibi_lab.records import Record, age, identity
from alibi_lab.report import series
from alibi_lab.report.plots.drawing import Plot, svg
from alibi_lab.report.series import Study
from alibi_lab.report.tables.table import Table


class Archive:
    """The records of one page, without duplicates, and their studies."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.by_identity = {identity(one.kind, one.name, one.config): one for one in records}
        self.records = list(self.by_identity.values())

    @functools.cached_property
    def studies(self) -> list[Study]:
        """All studies, including those that answers to the paper's items are computed from."""
        return series.studies(self.records)


class Text(NamedTuple):
    """A paragraph; `css` is its class."""

    text: str
    css: str = ""


class Picture(NamedTuple):
    """A figure as SVG with its heading and caption."""

    heading: str
    caption: str
    image: Markup


class Numbers(NamedTuple):
    """A table in a box that scrolls.

    Args:
        caption: a sentence above the table.
        label: a name of the table, if it has no caption.
        css: classes of the table.
        tall: whether the box also scrolls vertically.
    """

    table: Table
    caption: str = ""
    label: str = ""
    css: str = ""
    tall: bool = False


class Facts(NamedTuple):
    """Names with their values, a text or several; names without a value are left out."""

    rows: Iterable[tuple[str, str | Sequence[str]]]


class Items(NamedTuple):
    """A bulleted list."""

    items: Sequence[str]


class Cards(NamedTuple):
    """Each series with its perplexities in large type, the rows of `tables.study.cards`."""

    cards: Sequence[tuple[str, str, str, str, str, str]]


class Findings(NamedTuple):
    """The findings of the sections of a page: the name, anchor, result and picture (SVG, "" for none) of each."""

    findings: Sequence[tuple[str, str, str, Markup]]


class Group(NamedTuple):
    """Blocks in a `div` with a class."""

    css: str
    blocks: "Sequence[Block]"


class Part(NamedTuple):
    """Blocks under a heading, part of a section."""

    title: str
    blocks: "Sequence[Block]"
    level: int = 2


class Folded(NamedTuple):
    """Blocks that are hidden until a click."""

    summary: str
    blocks: "Sequence[Block]"


Block: TypeAlias = Text | Picture | Numbers | Facts | Items | Cards | Findings | Group | Part | Folded


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the page.

    Args:
        anchor: its id, unique in the page.
        group: the heading under which the contents list it; "" leaves it out of the contents.
        title: its name in the contents.
        blocks: its content.
        heading: its heading; "" for none.
        about: a few words after the title in the contents.
        records: the records that it draws, so that the list of all records can link to it.
        css: its class.
        finding: its result in a sentence of fixed form, for the top of a page with several sections.
        lead: the picture that shows it.
    """

    anchor: str
    group: str
    title: str
    blocks: Sequence[Block]
    heading: str = ""
    about: str = ""
    records: Sequence[Record] = ()
    css: str = ""
    finding: str = ""
    lead: Plot | None = None


def pictures(plots: Iterable[Plot], prefix: str) -> list[Picture]:
    """The plots as pictures of the page; `prefix` begins the ids inside their SVG and must be unique."""
    return [
        Picture(plot.heading, plot.caption, Markup(svg(plot.figure, f"{prefix}-{number}", plot.description)))
        for number, plot in enumerate(plots)
    ]


def panels(plots: Iterable[Plot], prefix: str, css: str = "panels") -> list[Group]:
    """The plots side by side if there is room; an empty list if there are none."""
    drawn = pictures(plots, prefix)
    return [Group(css, drawn)] if drawn else []


def aged(records: Iterable[Record]) -> list[Text]:
    """A note if speeds were measured with other kernels than the present ones; an empty list if not."""
    reasons = [reason for record in records if (reason := age(record))]
    return [Text(f"Older than the code: {reason}.", "note aged") for reason in dict.fromkeys(reasons)]


def code(text: str) -> Markup:
    """The text as code."""
    return Markup("<code>{}</code>").format(text)


def count_of(records: Sequence[Record]) -> str:
    """The number of records, as the contents show it: "3 records"."""
    return f"{len(records)} record{'' if len(records) == 1 else 's'}"
