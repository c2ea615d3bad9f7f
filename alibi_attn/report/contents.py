"""Contents: the index that opens a page of several sections, and the list of all records, each with where it is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

from alibi_attn.records import Record, identity
from alibi_attn.report.published import PUBLISHED


@dataclass(frozen=True)
class Entry:
    """A section of the page: its anchor, its title, what is in it in a few words, and its records."""

    anchor: str
    group: str
    title: str
    about: str
    records: tuple[Record, ...]


def groups(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """The entries under the titles of their groups, both in the order of the page."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.group, []).append(entry)
    return list(found.items())


def record_rows(records: Sequence[Record], entries: Sequence[Entry]) -> list[tuple[str, str, str, str, str, str]]:
    """Kind, name, identity, day, seconds and the anchor of the section that draws it, for every record once."""
    places = {_identity(record): entry.anchor for entry in reversed(entries) for record in entry.records}
    rows = {}
    for record in records:
        key = _identity(record)
        rows[key] = (
            record.kind,
            record.name,
            key,
            record.started[:10],
            f"{record.seconds:,.0f}",
            places.get(key, ""),
        )
    return sorted(rows.values())


def unanswered(names: Sequence[str]) -> list[str]:
    """The figures and tables of the paper that no record answers; [] where none is answered at all."""
    answered = {name.split("/")[0] for name in names}
    return [f"{name.replace('-', ' ')}" for name in PUBLISHED if name not in answered] if answered else []


def _identity(record: Record) -> str:
    return identity(record.kind, record.name, record.config)
