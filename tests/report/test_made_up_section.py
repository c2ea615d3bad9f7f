"""A new section of the report is a file with `find` and `draw`, and a row of the table of sections."""

import re

from alibi_lab.records import Record
from alibi_lab.report.page import SECTIONS, report_html
from alibi_lab.report.section import Archive, Numbers, Section, Text
from alibi_lab.report.tables.table import text_table


def find(archive: Archive) -> list[Record]:
    return [record for record in archive.records if record.kind == "weather"]


def draw(record: Record, number: int, archive: Archive) -> Section:
    table = text_table(("day", "rain"), [("Monday", f"{record.metrics['rain_mm']:g} mm")])
    return Section(
        anchor=f"w{number}",
        group="Weather",
        title=record.name,
        heading=f"Rain in {record.name}",
        blocks=[Text("Measured <daily>."), Numbers(table, label="Rain")],
        records=[record],
    )


WEATHER = [Record(kind="weather", name=name, config={}, metrics={"rain_mm": 3.5}) for name in ("Oslo", "Lima")]


def test_a_section_is_drawn_listed_and_linked() -> None:
    page = re.sub(r"\n", "", report_html(WEATHER, sections=(*SECTIONS, (find, draw))))
    assert '<section id="w1"><h2>Rain in Lima</h2><p>Measured &lt;daily&gt;.</p>' in page
    assert '<tr><th scope="row">Monday</th><td>3.5 mm</td></tr>' in page
    assert '<h3>Weather</h3><ul class="contents"><li><a href="#w0">Oslo</a></li>' in page
    assert '<td><a href="#w0">Oslo</a></td>' in page  # in the list of all records
    assert "Other records" not in page


def test_without_its_row_the_records_are_listed_as_others() -> None:
    page = report_html(WEATHER)
    assert "Rain in" not in page
    assert "Other records" in page


def test_every_section_is_left_out_without_records() -> None:
    assert [find(Archive([])) for find, _ in SECTIONS] == [[]] * len(SECTIONS)
