"""Every figure, table and link of the documents matches the records, and all of these are listed."""

import fnmatch
import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from alibi_lab.records import find, key
from alibi_lab.report.verdicts import CONTRADICTED_BECAUSE

ROOT = Path(__file__).parent.parent
LETTERS = re.compile(r"<text.*?>(.*?)</text>", re.DOTALL)


@functools.cache
def places() -> list[str]:
    """All records of results/, as FILE#KEY."""
    files = sorted((ROOT / "results").glob("*.jsonl"))
    return [f"{file.name}#{key(one)}" for file in files for one in find(file)]


@pytest.fixture(scope="module")
def from_records() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_records", ROOT / "docs" / "from_records.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_to_a_record_finds_it():
    found = set(places())
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for name, file in re.findall(r"`([\w-]+-[0-9a-f]{12})`\]\([./]*results/([\w-]+\.jsonl)\)", text):
            assert f"{file}#{name}" in found, f"{path.name} cites {name}, which is not in {file}"
        for place in re.findall(r"`results/([\w-]+\.jsonl#[\w*-]+)`", text):
            assert fnmatch.filter(found, place), f"{path.name} cites {place}"


def test_the_readme_of_the_records_lists_all_of_them_and_no_others():
    _, table = (ROOT / "results" / "README.md").read_text(encoding="utf-8").split("## Which are here")
    named = re.findall(r"`([\w-]+\.jsonl[\w#*-]*)`", table)
    listed = {name: fnmatch.filter(places(), name if "#" in name else f"{name}#*") for name in named}
    assert [name for name, found in listed.items() if not found] == []
    assert set(places()) - {place for found in listed.values() for place in found} == set()


def test_tables_of_the_documents_match_the_records(from_records):
    for name in from_records.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert from_records.MARKED.search(text), name
        assert from_records.renewed(text) == text, f"run python docs/from_records.py: {name} does not match its records"
    assert from_records.renewed(text.replace("105.", "104.")) == text


def test_pictures_of_the_documents_match_the_records(from_records):
    """Compares words and numbers of points: exact pixel positions depend on matplotlib."""
    for name in from_records.PICTURES:
        kept = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
        drawn = from_records.drawn(name)
        assert LETTERS.findall(kept) == LETTERS.findall(drawn), (
            f"run python docs/from_records.py: {name}.svg does not match its record"
        )
        assert kept.count("<use ") == drawn.count("<use ")
        assert len(LETTERS.findall(kept)) > 8
    on_disk = {path.stem for path in (ROOT / "docs").glob("*.svg")}
    assert on_disk == {*from_records.PICTURES, "idea"}  # the tour's drawing of the idea has no numbers of a record


@pytest.mark.parametrize(("scale", "folder"), [("small", "paper"), ("medium", "medium")])
def test_every_contradiction_of_our_results_is_explained_and_no_other_claim(from_records, scale, folder):
    contradicted = {one.claim.says for one in from_records.verdicts_on(folder) if one.word == "contradicted"}
    assert contradicted == CONTRADICTED_BECAUSE[scale].keys()
