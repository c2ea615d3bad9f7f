"""Every record is listed in results/README.md, and every figure and table of the documents matches the records."""

import fnmatch
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from alibi_lab.records import find, key
from alibi_lab.report.verdicts import CONTRADICTED_BECAUSE

ROOT = Path(__file__).parent.parent
LISTED = re.compile(r"`([\w*-]+\.jsonl(?:#[\w*-]+)?)`")
LETTERS = re.compile(r"<text.*?>(.*?)</text>", re.DOTALL)


def patterns() -> list[str]:
    """The records listed in results/README.md's table, as FILE or FILE#KEY."""
    rows = (ROOT / "results" / "README.md").read_text(encoding="utf-8").split("## Which are here")[1]
    return [f"{name}#*" if name.endswith(".jsonl") else name for row in rows.split("\n") if row.startswith("|")
            for name in LISTED.findall(row.split("|")[1])]  # fmt: skip


def places() -> list[str]:
    """All records of results/, as FILE#KEY."""
    files = sorted((ROOT / "results").glob("*.jsonl"))
    return [f"{file.name}#{key(one)}" for file in files for one in find(file)]


def assert_listed(places: list[str], listed: list[str]) -> None:
    unlisted = [name for name in places if sum(fnmatch.fnmatchcase(name, pattern) for pattern in listed) != 1]
    assert not unlisted, f"results/README.md must list once: {unlisted}"
    empty = [pattern for pattern in listed if not any(fnmatch.fnmatchcase(name, pattern) for name in places)]
    assert not empty, f"results/README.md lists records that do not exist: {empty}"


@pytest.fixture(scope="module")
def from_records() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_records", ROOT / "docs" / "from_records.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_record_is_packed_and_listed_once_and_nothing_else():
    assert len(list((ROOT / "results").iterdir())) <= 80
    assert {path.suffix for path in (ROOT / "results").iterdir()} == {".jsonl", ".md"}
    found = places()
    assert_listed(found, patterns())
    for wrong in ([*found, "attention.jsonl#benchmark-new-0"], [name for name in found if "jax" not in name]):
        with pytest.raises(AssertionError, match=r"results/README\.md"):
            assert_listed(wrong, patterns())


def test_every_link_to_a_record_finds_it():
    found = set(places())
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for name, file in re.findall(r"`([\w-]+-[0-9a-f]{12})`\]\([./]*results/([\w-]+\.jsonl)\)", text):
            assert f"{file}#{name}" in found, f"{path.name} cites {name}, which is not in {file}"
        for place in re.findall(r"`results/([\w-]+\.jsonl#[\w*-]+)`", text):
            assert fnmatch.filter(found, place), f"{path.name} cites {place}"


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
