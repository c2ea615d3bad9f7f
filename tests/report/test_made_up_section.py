"""A new section of the report is a file with `find` and `draw`, and a row of the table of sections."""

import re
import runpy
from pathlib import Path

from alibi_lab.report.page import SECTIONS, report_html
from alibi_lab.report.section import Archive

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/extending/report_section.py"))
WEATHER = EXAMPLE["WEATHER"]


def test_a_section_is_drawn_listed_and_linked() -> None:
    page = re.sub(r"\n", "", report_html(WEATHER, sections=(*SECTIONS, (EXAMPLE["find"], EXAMPLE["draw"]))))
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
