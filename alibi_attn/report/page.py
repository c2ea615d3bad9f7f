"""The page: records in, one self-contained HTML file out, which opens offline, on a phone, in print, in light and dark.

`tables.py` and `paper_tables.py` have the numbers, `figures.py` and its neighbors the pictures, `sentences.py` the words,
`sections.py` what stands in each section, `page.html` the place of each. A part whose records are missing is left out;
records of kinds that this page does not draw are listed.
"""

from collections.abc import Sequence
from pathlib import Path

try:
    import jinja2

    from alibi_attn.report import (
        answers,
        benchmarks,
        certificates,
        contents,
        costs,
        drawing,
        evidence,
        head_maps,
        referee,
        referee_section,
        sections,
        sentences,
        study_sections,
        tables,
    )
except ModuleNotFoundError as error:
    if error.name not in ("jinja2", "matplotlib"):
        raise
    raise ImportError(f'a report needs {error.name}; install it with: pip install "alibi-attn[lab]"') from error

from alibi_attn.records import Record, identity, replace_file
from alibi_attn.report.contents import Entry
from alibi_attn.report.series import other_records, studies

TITLE = "Train short, test long"


def write_report(records: Sequence[Record], path: Path, *, title: str = TITLE, question: str | None = None) -> Path:
    """Write the report of the records to one HTML file, whole or not at all, and return its path.

    Args:
        records: of any kinds, in any order; none at all gives a page that says how to make some.
        question: the sentence under the title; by default what the records ask.

    Raises:
        OSError: the file cannot be written.
    """
    return replace_file(path, report_html(records, title=title, question=question).encode())


def report_html(records: Sequence[Record], *, title: str = TITLE, question: str | None = None) -> str:
    """The page that `write_report` writes, as text; equal records give equal text, and one that comes twice is drawn once."""
    by_identity = {identity(record.kind, record.name, record.config): record for record in records}
    records = list(by_identity.values())
    every = studies(records)
    items = sections.sorted_items([record for record in records if answers.is_drawn(record)])
    asked = {record.config.get("study") for record in items}
    comparisons = referee.comparisons(study for study in every if study.recipe not in asked)
    found = [study for study in every if study.recipe not in asked and not referee.is_of_referee(study)]
    behind = [study for study in every if study.recipe in asked]
    timed = [record for record in records if benchmarks.is_drawn(record)]
    models = certificates.trained_heads(records)
    looked = [record for record in records if head_maps.is_drawn(record)]
    others = [
        record
        for record in other_records(records)
        if not (
            benchmarks.is_drawn(record)
            or answers.is_drawn(record)
            or certificates.is_drawn(record)
            or head_maps.is_drawn(record)
        )
    ]
    paper_sections = [sections.paper_section(record, f"p{number}", by_identity) for number, record in enumerate(items)]
    comparison_sections = [
        referee_section.referee_section(tasks, f"r{number}") for number, tasks in enumerate(comparisons)
    ]
    shown_studies = [study_sections.study_section(study, f"s{number}") for number, study in enumerate(found)]
    model_sections = [sections.model_section(model, f"h{number}") for number, model in enumerate(models)]
    map_sections = [sections.map_section(record, f"m{number}") for number, record in enumerate(looked)]
    bench_sections = [sections.benchmark_section(record, f"b{number}") for number, record in enumerate(timed)]
    entries = [
        *(
            Entry(f"p{number}", "The paper, item by item", part.name, part.title, (record,))
            for number, (record, part) in enumerate(zip(items, paper_sections, strict=True))
        ),
        *(
            Entry(f"r{number}", "Position methods", part.title, _about(used), tuple(used))
            for number, (tasks, part) in enumerate(zip(comparisons, comparison_sections, strict=True))
            for used in [referee.records(tasks)]
        ),
        *(
            Entry(
                f"s{number}",
                "Studies",
                f"{study.recipe} on {study.corpus.get('name', '')}",
                _about(study.records),
                tuple(study.records),
            )
            for number, study in enumerate(found)
        ),
        *(
            Entry(f"h{number}", "Heads of trained models", model.title, _about(model.records), tuple(model.records))
            for number, model in enumerate(models)
        ),
        *(
            Entry(f"m{number}", "Heads of trained models", part.title, "", (record,))
            for number, (record, part) in enumerate(zip(looked, map_sections, strict=True))
        ),
        *(Entry(f"b{number}", "Benchmarks", record.name, "", (record,)) for number, record in enumerate(timed)),
    ]
    if behind:
        used = tuple(record for study in behind for record in study.records)
        entries.append(Entry("evidence", "Behind the paper's items", "Trainings and tests", _about(used), used))
    if others:
        entries.append(Entry("others", "Other", "Other records", _about(others), tuple(others)))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        colors_light=drawing.css("light"),
        colors_dark=drawing.css("dark"),
        question=question or (sentences.question(every) if every else ""),
        contents=contents.groups(entries) if len(entries) > 1 else [],
        unanswered=contents.unanswered([record.name for record in items]),
        record_rows=contents.record_rows(records, entries),
        papers=paper_sections,
        claims=sections.claim_blocks(paper_sections),
        comparisons=comparison_sections,
        studies=shown_studies,
        evidence=evidence.evidence_table(behind),
        heads=sections.head_sections(every),
        models=model_sections,
        maps=map_sections,
        benchmarks=bench_sections,
        others=tables.other_rows(others),
        cost=costs.cost_table(every),
        provenance=tables.provenance(records),
        count=len(records),
    )


def _about(records: Sequence[Record]) -> str:
    return f"{len(records)} record{'' if len(records) == 1 else 's'}"
