"""What surrounds the sections of a page.

Its first screen, with the finding of each kind of section, a picture and a link; and its end: records that no section draws,
costs, machines and dates, and the list of all records.
"""

from collections.abc import Sequence

from alibi_lab.records import Record
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.tables.cost import cost_table
from alibi_lab.report.tables.table import machine_text

MAX_FINDINGS = 5


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
    title, records = "Other records", list(others.values())
    body = html("others", records=others)
    return [Section("others", "Other", title, body, heading=title, about=count_of(records), records=records)]


def costs(archive: Archive) -> list[Section]:
    """Trainings, tokens and time of each study."""
    table = cost_table(archive.studies)
    if table is None:
        return []
    body = html("cost", table=table, machines=_machines(archive.records))
    return [Section("cost", "", "", body, heading="Cost")]


def provenance(archive: Archive) -> list[Section]:
    """Machines, versions, commits, commands and dates of the records, without duplicates, and their total time."""
    records = archive.records
    if not records:
        return []
    packages = (", ".join(f"{name} {version}" for name, version in sorted(r.versions.items())) for r in records)
    days = sorted({record.started[:10] for record in records if record.started})
    body = html(
        "provenance",
        records=records,
        machines=_machines(records),
        packages=list(dict.fromkeys(packages)),
        days=dict.fromkeys(days[:1] + days[-1:]),
    )
    return [Section("provenance", "", "", body, heading="Provenance")]


def record_list(archive: Archive, sections: Sequence[Section]) -> Section:
    """Every record once, with a link to the first section that draws it."""
    first = {id(record): section.anchor for section in reversed(sections) for record in section.records}
    anchors = {key: first[id(record)] for key, record in archive.by_identity.items() if id(record) in first}
    ordered = sorted(archive.by_identity.items(), key=lambda one: (one[1].kind, one[1].name, one[0]))
    return Section("records", "", "", html("record_list", records=ordered, anchors=anchors), heading="All records")


def _machines(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(machine_text(record.machine) for record in records if record.machine))
