"""A new section of the report, complete: rain, from records of a new kind.

    python examples/extending/report_section.py page.html

writes a page that has it. To add it for good, copy this file without its last part to alibi_lab/report/sections/, import it in
alibi_lab/report/page.py, and add a row to `SECTIONS` there:

    (report_section.find, report_section.draw),
"""

from markupsafe import Markup

from alibi_lab.records import Record
from alibi_lab.report.section import Archive, Section, html


def find(archive: Archive) -> list[Record]:
    """The entries to draw."""
    return [record for record in archive.records if record.kind == "weather"]


def draw(record: Record, number: int, archive: Archive) -> Section:
    """The section of one entry."""
    rows = [("Monday", f"{record.metrics['rain_mm']:g} mm")]
    return Section(
        anchor=f"w{number}",
        group="Weather",
        title=record.name,
        heading=f"Rain in {record.name}",
        body=Markup("<p>{}</p>").format("Measured <daily>.")
        + html("texts", columns=("day", "rain"), rows=rows, label="Rain"),
        records=[record],
    )


WEATHER = [Record(kind="weather", name=name, config={}, metrics={"rain_mm": 3.5}) for name in ("Oslo", "Lima")]

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from alibi_lab.report.page import SECTIONS, report_html

    Path(sys.argv[1]).write_text(report_html(WEATHER, sections=(*SECTIONS, (find, draw))), encoding="utf-8")
