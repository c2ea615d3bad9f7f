"""The end of the page: records that no section draws, costs, machines and dates, and the list of all records."""

from collections.abc import Sequence

from markupsafe import Markup

from alibi_lab.records import Record, identity
from alibi_lab.report.section import Archive, Facts, Numbers, Section, Text, code, count_of
from alibi_lab.report.tables.cost import cost_table
from alibi_lab.report.tables.table import machine_text, number, text_table


def other_records(archive: Archive, sections: Sequence[Section]) -> list[Section]:
    """The metrics of the records that no section draws."""
    drawn = {id(record) for section in sections for record in section.records}
    others = [record for record in archive.records if id(record) not in drawn]
    if not others:
        return []
    rows = [(record.kind, record.name, _metrics(record), code(_identity(record))) for record in others]
    table = Numbers(text_table(("kind", "name", "metrics", "identity"), rows), label="Other records", css="text")
    text = Text("This page has no figures for these kinds of records, so it lists their numbers.")
    title, about = "Other records", count_of(others)
    return [Section("others", "Other", title, [text, table], heading=title, about=about, records=others)]


def costs(archive: Archive) -> list[Section]:
    """Trainings, tokens and time of each study."""
    table = cost_table(archive.studies)
    if table is None:
        return []
    machines = _machines(archive.records)
    same_machine = f" All on {machines[0]}." if len(machines) == 1 else ""
    text = (
        "Sums over the records of each study. Time is that of the whole machine. Power was not measured, so there is no figure "
        "for energy."
    )
    numbers = Numbers(table, f"A training that several studies share counts once.{same_machine}")
    return [Section("cost", "", "", [Text(text), numbers], heading="Cost")]


def provenance(archive: Archive) -> list[Section]:
    """Machines, versions, commits, commands and dates of the records, without duplicates, and their total time."""
    records = archive.records
    if not records:
        return []
    packages = (", ".join(f"{name} {version}" for name, version in sorted(r.versions.items())) for r in records)
    days = sorted({record.started[:10] for record in records if record.started})
    facts: dict[str, str | Sequence[str]] = {
        "machine": _machines(records),
        "versions": [text for text in dict.fromkeys(packages) if text],
        "commit": [code(text) for text in dict.fromkeys(r.commit for r in records if r.commit)],
        "command": [code(text) for text in dict.fromkeys(r.command for r in records if r.command)],
        "run on": " to ".join(dict.fromkeys(days[:1] + days[-1:])),
        "time": f"{sum(r.seconds for r in records):,.0f} s in {len(records)} records",
    }
    return [Section("provenance", "", "", [Facts(facts.items())], heading="Provenance")]


def record_list(archive: Archive, sections: Sequence[Section]) -> Section:
    """Every record once, with a link to the first section that draws it."""
    anchors = {id(record): section.anchor for section in reversed(sections) for record in section.records}
    rows = []
    for record in archive.records:
        anchor, key = anchors.get(id(record)), _identity(record)
        name = Markup('<a href="#{}">{}</a>').format(anchor, record.name) if anchor else record.name
        cells = (record.kind, name, code(key), record.started[:10], f"{record.seconds:,.0f}")
        rows.append(((record.kind, record.name, key), cells))
    table = text_table(("kind", "name", "identity", "day", "seconds"), [cells for _, cells in sorted(rows)])
    numbers = Numbers(table, label="All records", css="text list", tall=True)
    return Section("records", "", "", [numbers], heading="All records")


def _machines(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(machine_text(record.machine) for record in records if record.machine))


def _metrics(record: Record) -> str:
    return ", ".join(f"{name} {'—' if value is None else number(value)}" for name, value in record.metrics.items())


def _identity(record: Record) -> str:
    return identity(record.kind, record.name, record.config)
