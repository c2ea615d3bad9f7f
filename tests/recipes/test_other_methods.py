"""Items of the paper with other position methods than the paper's: trained, tested and drawn next to ALiBi."""

import math

import pytest

from alibi_lab import records
from alibi_lab.lab.config import ConfigError
from alibi_lab.recipes.paper.cells import select
from alibi_lab.recipes.paper.items import ITEMS
from alibi_lab.recipes.paper.run_items import run_items
from alibi_lab.report.page import report_html

OWN = """
from alibi_lab.lab.model.position_method import PositionMethod

class Nothing(PositionMethod):
    def bias(self, at):
        return None
"""


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> list[records.Record]:
    folder = tmp_path_factory.mktemp("other")
    (folder / "mine.py").write_text(OWN, encoding="utf-8")
    methods = ("alibi", "kerple", f"{folder / 'mine.py'}:Nothing")
    items = [ITEMS["table-2"], ITEMS["table-1"]]
    return [records.load(path) for path in run_items(items, out=folder, scale="smoke", methods=methods)]


def answer(answered: list[records.Record], name: str) -> records.Record:
    (found,) = (one for one in answered if one.name == name)
    return found


def test_each_method_has_the_cells_of_alibi(answered: list[records.Record]) -> None:
    table = answer(answered, "table-2")
    assert set(table.curves) == {"ALiBi, L = 512", "kerple, L = 512", "Nothing, L = 512"}
    lengths = {tuple(columns["length"]) for columns in table.curves.values()}
    assert len(lengths) == 1
    assert all(value > 0 for columns in table.curves.values() for value in columns["perplexity"])
    speeds = answer(answered, "table-1").curves
    assert {label.split(",")[0] for label in speeds} == {"ALiBi", "kerple", "Nothing"}
    assert all(math.isfinite(value) for columns in speeds.values() for value in columns["train_tokens_per_second"])


def test_the_report_shows_them_next_to_the_paper(answered: list[records.Record]) -> None:
    page = report_html(answered)
    for label in ("kerple, L = 512", "Nothing, L = 512", "kerple, L = 512, to"):
        assert label in page


@pytest.mark.parametrize(
    ("item", "methods", "message"),
    [
        ("figure-3", ["alibi"], "figure-3 does not compare position methods"),
        ("table-13", ["alibi", "kerple"], "table-13 does not compare position methods"),
        ("figure-1", ["kerple"], "pass --methods alibi,kerple"),
        ("figure-1", ["alibi", "a.py:X", "b.py:X"], "two methods of one name"),
        ("figure-1", ["alibi", "alibbi"], "model.method is 'alibbi'"),
    ],
)
def test_methods_that_an_item_cannot_compare_are_refused(item: str, methods: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select(ITEMS[item], scale="smoke", methods=methods)
