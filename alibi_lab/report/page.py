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
    from alibi_lab.report.section import TEMPLATES, Archive, Section, count_of, html
    from alibi_lab.report.sections import benchmark, heads, method_comparison, paper, study
except ModuleNotFoundError as error:
    if error.name not in ("jinja2", "matplotlib"):
        raise
    raise ImportError(f'a report needs {error.name}; install it with: pip install ".[lab]" in a clone') from error

from alibi_attn.files import replace_file
from alibi_lab.position_methods import LOOKS
from alibi_lab.records import Record
from alibi_lab.report.series import grouped
from alibi_lab.report.tables.study import cost_table
from alibi_lab.report.tables.table import machine_text, processor_text, variable_of

TITLE = "Train short, test long"
QUESTION = "A language model is trained on short texts. Does it still predict well when it reads longer ones?"
MAX_FINDINGS = 5
MOST_OPEN = 8  # on a page with more sections, each section is folded under its heading

Find: TypeAlias = Callable[[Archive], Sequence[Any]]
Draw: TypeAlias = Callable[[Any, int, Archive], Section]

SECTIONS: Sequence[tuple[Find, Draw]] = [
    (paper.find_claims, paper.draw_claims),
    (paper.find_items, paper.draw_item),
    (paper.find_evidence, paper.draw_evidence),
    (method_comparison.find, method_comparison.draw),
    (study.find, study.draw),
    (heads.find_slopes, heads.draw_slopes),
    (heads.find, heads.draw),
    (heads.find_maps, heads.draw_map),
    (heads.find_rollouts, heads.draw_rollouts),
    (benchmark.find_texts, benchmark.draw_text),
    (benchmark.find, benchmark.draw),
]


def write_report(
    records: Sequence[Record], path: Path, *, title: str = TITLE, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write the report of the records to one HTML file, atomically, and return its path.

    Args:
        records: any kinds, in any order; without records the page explains how to make some.
        progress: called after each section with (drawn sections, all sections).

    Raises:
        OSError: the file cannot be written.
    """
    return replace_file(path, report_html(records, title=title, progress=progress).encode())


def report_html(
    records: Sequence[Record],
    *,
    title: str = TITLE,
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
    shown += other_records(archive, shown)
    listed = [section for section in shown if section.group]
    first = landing(shown) if len(listed) > 1 else []
    shown += ending(archive)
    contents = grouped(_distinguished(listed), lambda section: section.group) if len(listed) > 1 else {}
    if contents:
        shown.append(record_list(archive, shown))
    shown_in = [series for study in archive.studies for series in study.series]
    own = {variable_of(one): one.look for one in shown_in if one.look and one.look not in LOOKS.values()}
    page = TEMPLATES.get_template("page.html").render(
        title=title,
        colors=lambda theme: drawing.css(theme, {**LOOKS, **own}),
        question=QUESTION if archive.studies else "",
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


def landing(sections: Sequence[Section]) -> list[Section]:
    """The findings of at most MAX_FINDINGS sections, from each group in turn, most records first; none if there is only one."""
    found = sorted((section for section in sections if section.finding), key=lambda section: -len(section.records))
    groups = [section.group for section in found]
    in_turns = sorted(range(len(found)), key=lambda at: groups[:at].count(groups[at]))
    chosen = sorted((found[at] for at in in_turns[:MAX_FINDINGS]), key=sections.index)
    if len(chosen) < 2:
        return []
    return [Section("found", "", "", html("findings", sections=chosen), heading="What was found")]


def other_records(archive: Archive, sections: Sequence[Section]) -> list[Section]:
    """The metrics of the records that no section draws."""
    drawn = {id(record) for section in sections for record in section.records}
    others = {key: record for key, record in archive.by_identity.items() if id(record) not in drawn}
    if not others:
        return []
    records, body = list(others.values()), html("others", records=others)
    return [Section("others", "Other", "Other records", body, about=count_of(records), records=records)]


def ending(archive: Archive) -> list[Section]:
    """The costs of each study; machines, versions, commits, commands and dates of the records, and their total time."""
    records, table = archive.records, cost_table(archive.studies)
    machines = list(dict.fromkeys(machine_text(record.machine) for record in records if record.machine))
    packages = dict.fromkeys(", ".join(f"{name} {of}" for name, of in sorted(one.versions.items())) for one in records)
    days = sorted({record.started[:10] for record in records if record.started})
    found = {"Cost": html("cost", table=table, machines=machines)} if table else {}
    if records:
        days = list(dict.fromkeys(days[:1] + days[-1:]))
        found["Provenance"] = html("provenance", records=records, machines=machines, packages=packages, days=days)
    return [Section(heading.lower(), "", "", body, heading=heading) for heading, body in found.items()]


def record_list(archive: Archive, sections: Sequence[Section]) -> Section:
    """Every record once, with a link to the first section that draws it."""
    first = {id(record): section.anchor for section in reversed(sections) for record in section.records}
    anchors = {key: first[id(record)] for key, record in archive.by_identity.items() if id(record) in first}
    ordered = sorted(archive.by_identity.items(), key=lambda one: (one[1].kind, one[1].name, one[0]))
    return Section("records", "", "", html("record_list", records=ordered, anchors=anchors), heading="All records")


def _distinguished(sections: Sequence[Section]) -> list[Section]:
    """The sections for the contents; entries that would read the same also get their scale, machine or day."""
    found = list(sections)
    for detail in (answers.scale_of, lambda one: processor_text(one.machine), lambda one: one.started[:10]):
        keys = [(section.group, section.title, section.about) for section in found]
        for at, section in enumerate(found):
            if keys.count(keys[at]) > 1 and section.records:
                about = ", ".join(filter(None, (section.about, detail(section.records[0]))))
                found[at] = dataclasses.replace(section, about=about)
    return found
