"""A page with several sections starts with the findings; colors are readable; old speeds are marked."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from markupsafe import Markup

from alibi_lab import records
from alibi_lab.position_methods import LOOKS
from alibi_lab.records import Record
from alibi_lab.report.page import MAX_FINDINGS, landing, report_html
from alibi_lab.report.section import Section

STYLE = (Path(__file__).parents[2] / "alibi_lab" / "report" / "page.css").read_text()


def named(number: int, group: str = "Group", finding: str = "") -> Section:
    title = f"Section {number}"
    return Section(f"x{number}", group, title, Markup(f"<p>text {number}</p>"), heading=title, finding=finding)


def page_of(sections: Sequence[Section], found: Sequence[Record] = ()) -> str:
    return report_html(found, sections=((lambda archive: sections, lambda entry, number, archive: entry),))


def test_the_first_screen_names_findings_of_every_group_with_links() -> None:
    sections = [named(n, "A", f"finding {n}") for n in range(6)] + [named(6, "B", "finding 6"), named(7, "C")]
    (first,) = landing(sections)
    assert re.findall(r'href="#(\w+)"', first.body) == ["x0", "x1", "x2", "x3", "x6"]
    assert first.body.count("<li>") == MAX_FINDINGS
    page = page_of(sections)
    assert page.index("What was found") < page.index("On this page") < page.index("text 0")
    assert '<a href="#x6">Section 6</a></h3><p>finding 6</p>' in page


def test_the_contrast_of_black_and_white_is_21(contrast) -> None:
    assert contrast((255, 255, 255), (0, 0, 0)) == pytest.approx(21)
    assert contrast((0x76, 0x76, 0x76), (255, 255, 255)) == pytest.approx(4.54, abs=0.01)
    assert contrast((200, 200, 200), (255, 255, 255)) < 4.5


@pytest.mark.parametrize("method", LOOKS)
def test_the_color_of_a_method_is_readable_on_the_page_and_on_cards(method: str, contrast) -> None:
    light, dark = (
        re.findall(r"--(?:paper|card): #(\w{6})", block) for block in STYLE.split("prefers-color-scheme: dark")[:2]
    )
    assert len(light) == len(dark[:2]) == 2
    for color, papers in ((LOOKS[method].light, light), (LOOKS[method].dark, dark[:2])):
        ink = bytes.fromhex(color.removeprefix("#"))
        assert min(contrast(ink, bytes.fromhex(paper)) for paper in papers) >= 4.5


def test_speeds_that_are_older_than_the_code_are_marked() -> None:
    curves = {"ours": {"length": [512, 1024], "forward_ms": [1.0, 2.0]}}
    record = records.make("benchmark", "cpu/noise", config={}, metrics={}, curves=curves)
    assert "Older than the code" not in report_html([record])
    old = dataclasses.replace(record, versions={**record.versions, "kernels": "0" * 12})
    assert "Older than the code: measured with other kernels than the present ones." in report_html([old])
