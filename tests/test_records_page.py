"""Every record is listed in results/README.md, and every figure and table of the documents matches the records."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from alibi_lab.report.verdicts import CONTRADICTED_BECAUSE

ROOT = Path(__file__).parent.parent
LISTED = re.compile(r"`([\w*/-]+\.json)`")
LETTERS = re.compile(r"<text.*?>(.*?)</text>", re.DOTALL)


def patterns() -> list[str]:
    """The records listed in results/README.md's table."""
    rows = (
        (ROOT / "results" / "README.md").read_text(encoding="utf-8").split("## Which are here")[1].split("\nOldest")[0]
    )
    return LISTED.findall(rows)


def assert_listed(files: list[str], listed: list[str]) -> None:
    def fits(name: str, pattern: str) -> bool:
        return re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^/]*"), name) is not None

    unlisted = [name for name in files if sum(fits(name, pattern) for pattern in listed) != 1]
    assert not unlisted, f"results/README.md must list once: {unlisted}"
    empty = [pattern for pattern in listed if not any(fits(name, pattern) for name in files)]
    assert not empty, f"results/README.md lists records that do not exist: {empty}"


@pytest.fixture(scope="module")
def from_records() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_records", ROOT / "docs" / "from_records.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_record_is_listed_and_nothing_else():
    files = [path.relative_to(ROOT / "results").as_posix() for path in (ROOT / "results").rglob("*.json")]
    assert_listed(files, patterns())
    for wrong in ([*files, "benchmark-new-0.json"], [name for name in files if "jax" not in name]):
        with pytest.raises(AssertionError, match=r"results/README\.md"):
            assert_listed(wrong, patterns())


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
