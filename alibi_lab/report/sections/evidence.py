"""The trainings and tests that the answers to the paper's items are computed from, one row per configuration and test."""

from collections.abc import Sequence

from alibi_lab.report import answers
from alibi_lab.report.section import Archive, Section, count_of, html
from alibi_lab.report.series import Study


def find(archive: Archive) -> list[list[Study]]:
    """All studies that answers name, as one entry."""
    named = answers.named_studies(archive.records)
    studies = [study for study in archive.studies if study.recipe in named]
    return [studies] if studies else []


def draw(studies: Sequence[Study], index: int, archive: Archive) -> Section:
    """For every series: the tested lengths, perplexities, and training time."""
    by_title: dict[str, list[Study]] = {}
    for study in studies:
        by_title.setdefault(f"{study.recipe} on {study.corpus.get('name', 'its text')}", []).append(study)
    # A training is in the study of each of its tests.
    records = list({id(record): record for study in studies for record in study.records}.values())
    group, title = "Sources of the paper's items", "Trainings and tests"
    heading, about = f"{title} used for the paper's items", count_of(records)
    body = html("evidence", studies=by_title)
    return Section("evidence", group, title, body, heading=heading, about=about, records=records)
