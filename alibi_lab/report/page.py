"""The report page: one self-contained HTML file drawn from records. It works offline, on a phone, in print, in light and dark.

`SECTIONS` lists the sections in page order; `section.py` explains how to add one. Sections without records are left
out, and records that no section draws are listed under "Other records".
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

try:
    from alibi_lab.report import answers
    from alibi_lab.report.plots import drawing
    from alibi_lab.report.section import TEMPLATES, Archive, Section
    from alibi_lab.report.sections import (
        alibi_heads,
        benchmark,
        claims,
        evidence,
        frame,
        head_maps,
        long_texts,
        method_comparison,
        paper_item,
        rollouts,
        study,
        trained_heads,
    )
except ModuleNotFoundError as error:
    if error.name not in ("jinja2", "matplotlib"):
        raise
    raise ImportError(f'a report needs {error.name}; install it with: pip install ".[lab]" in a clone') from error

from alibi_attn.files import replace_file
from alibi_lab.position_methods import LOOKS
from alibi_lab.records import Record
from alibi_lab.report.tables.table import processor_text, variable_of

TITLE = "Train short, test long"
QUESTION = "A language model is trained on short texts. Does it still predict well when it reads longer ones?"
MOST_OPEN = 8  # on a page with more sections, each section is folded under its heading

Find: TypeAlias = Callable[[Archive], Sequence[Any]]
Draw: TypeAlias = Callable[[Any, int, Archive], Section]

_OF_THE_PAPER = (claims, paper_item, evidence)
_OF_MODELS = (method_comparison, study, alibi_heads, trained_heads, head_maps, rollouts)
_OF_SPEED = (long_texts, benchmark)
SECTIONS: Sequence[tuple[Find, Draw]] = [(x.find, x.draw) for x in (*_OF_THE_PAPER, *_OF_MODELS, *_OF_SPEED)]


def write_report(
    records: Sequence[Record],
    path: Path,
    *,
    title: str = TITLE,
    question: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the report of the records to one HTML file, atomically, and return its path.

    Args:
        records: any kinds, in any order; without records the page explains how to make some.
        question: the sentence under the title; default a fixed one if there are language models.
        progress: called after each section with (drawn sections, all sections).

    Raises:
        OSError: the file cannot be written.
    """
    return replace_file(path, report_html(records, title=title, question=question, progress=progress).encode())


def report_html(
    records: Sequence[Record],
    *,
    title: str = TITLE,
    question: str | None = None,
    sections: Sequence[tuple[Find, Draw]] = SECTIONS,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """The HTML of `write_report`. Equal records give equal text; a record passed twice is drawn once."""
    archive = Archive(records)
    entries = [(draw, entry, number) for find, draw in sections for number, entry in enumerate(find(archive))]
    shown = []
    for draw, entry, number in entries:
        shown.append(draw(entry, number, archive))
        if progress is not None:
            progress(len(shown), len(entries))
    shown += frame.other_records(archive, shown)
    listed = [section for section in shown if section.group]
    first = frame.landing(shown) if len(listed) > 1 else []
    shown += [*frame.costs(archive), *frame.provenance(archive)]
    contents: dict[str, list[Section]] = {}
    if len(listed) > 1:
        shown.append(frame.record_list(archive, shown))
        for section in _distinguished(listed):
            contents.setdefault(section.group, []).append(section)
    shown_in = [series for study in archive.studies for series in study.series]
    own = {variable_of(one): one.look for one in shown_in if one.look and one.look not in LOOKS.values()}
    page = TEMPLATES.get_template("page.html").render(
        title=title,
        colors=lambda theme: f"{drawing.css(theme)} {drawing.css(theme, own)}".rstrip(),
        question=question or (QUESTION if archive.studies else ""),
        first=first,
        contents=list(contents.items()),
        folded=len(listed) > MOST_OPEN,
        unanswered=answers.unanswered(archive.records),
        sections=shown,
        count=len(archive.records),
    )
    style, end, body = page.partition("</style>")
    for variable, look in own.items():  # of methods from a file, whose figures have the colors of a light page
        body = body.replace(f": {look.light.lower()}", f": var(--{variable})")  # not where a config names the color
    return style + end + body


def _distinguished(sections: Sequence[Section]) -> list[Section]:
    """The sections for the contents; entries that would read the same also get their scale, machine or day."""
    for place in range(3):
        keys = [(section.group, section.title, section.about) for section in sections]
        sections = [
            _with_detail(section, place) if keys.count(key) > 1 and section.records else section
            for section, key in zip(sections, keys, strict=True)
        ]
    return list(sections)


def _with_detail(section: Section, place: int) -> Section:
    record = section.records[0]
    details = (answers.scale_of(record), processor_text(record.machine), record.started[:10])
    return dataclasses.replace(section, about=", ".join(filter(None, (section.about, details[place]))))
