"""The paper's own numbers: every figure and table of Press et al. 2022 (arXiv:2108.12409v2), as series of columns.

`published.json` holds all rows of tables 1 to 15; figures hold the numbers of the tables they draw, and no more. A series has
the paper's label, spelled in one way: "ALiBi, L = 512" is a model trained at 512 tokens; ", L_valid = 3072" says where it was
tested, if a row says that; "L = L_valid" is one model a length, each tested at its own. A number that was not published is None.

An answer of ours (a record of kind "paper-item") has the same series and columns, and columns of its own beside them:
    paper_length               the paper's length that stands behind ours, where ours are smaller
    low, high, seeds, tokens   the spread over the seeds, how many, and how many tokens were scored
    sliding_perplexity, nonoverlapping_perplexity   the other way to evaluate the same models; `perplexity` is the paper's way
Next: `paper.py`, which draws the two beside each other.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

Column = tuple[float | None, ...]

METHODS = {"Sinusoidal": "sinusoidal", "Rotary": "rotary", "T5 Bias": "t5", "ALiBi": "alibi"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedItem:
    """One figure or table.

    Args:
        title: what it shows, in our words.
        source: the table that its numbers are from.
        corpus, evaluation: what was read, and how it was scored; "" where nothing was.
        columns: what is measured -> its unit.
        panels: the labels that the paper draws together.
        cited: the labels of results that the paper took from other papers; nobody here runs them.
        notes: what the numbers do not say themselves.
        series: label -> column -> values; the columns of one series are equally long.
    """

    title: str
    source: str
    corpus: str
    evaluation: str
    columns: Mapping[str, str]
    panels: tuple[tuple[str, ...], ...]
    cited: tuple[str, ...]
    notes: str
    series: Mapping[str, Mapping[str, Column]]


def trained_length(label: str) -> int | None:
    """The length in a label: 512 of "ALiBi, L = 512, L_valid = 3072"; None where it has none.

    >>> trained_length("ALiBi, L = 512, L_valid = 3072")
    512
    """
    found = re.search(r"\bL = (\d+)", label)
    return int(found[1]) if found else None


def method_of(label: str) -> str:
    """The position method in a label as the lab names it, "alibi"; "" where it has none.

    >>> method_of("T5 Bias, L = 1024")
    't5'
    """
    return METHODS.get(label.split(",", 1)[0], "")


def _load() -> dict[str, PublishedItem]:
    data = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return {
        name: PublishedItem(
            **{
                **item,
                "panels": tuple(map(tuple, item["panels"])),
                "cited": tuple(item["cited"]),
                "series": {
                    label: {column: tuple(values) for column, values in columns.items()}
                    for label, columns in item["series"].items()
                },
            }
        )
        for name, item in data.items()
    }


PUBLISHED: Mapping[str, PublishedItem] = _load()
