"""The first screen of a page with several sections: the finding of each kind of section, with a picture and a link."""

from collections.abc import Sequence

from markupsafe import Markup

from alibi_lab.report.plots.drawing import svg
from alibi_lab.report.section import Findings, Section

MAX_FINDINGS = 5


def landing(sections: Sequence[Section]) -> list[Section]:
    """The findings of at most MAX_FINDINGS sections, from each group in turn, most records first; none if there is only one."""
    found = sorted((section for section in sections if section.finding), key=lambda section: -len(section.records))
    groups = [section.group for section in found]
    in_turns = sorted(range(len(found)), key=lambda at: groups[:at].count(groups[at]))
    chosen = sorted((found[at] for at in in_turns[:MAX_FINDINGS]), key=sections.index)
    if len(chosen) < 2:
        return []
    rows = [
        (section.title, section.anchor, section.finding, _image(section, f"landing-{number}"))
        for number, section in enumerate(chosen)
    ]
    return [Section("found", "", "", [Findings(rows)], heading="What was found")]


def _image(section: Section, prefix: str) -> Markup:
    lead = section.lead
    return Markup(svg(lead.figure, prefix, lead.description)) if lead else Markup()
