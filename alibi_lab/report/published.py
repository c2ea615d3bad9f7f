"""The paper's own numbers: every figure and table of Press et al. 2022 (arXiv:2108.12409v2), as series of columns.

`published.json` has all rows of tables 1 to 15; a figure has the numbers of the tables that it draws, and no others. A series has
the paper's label in a uniform spelling: "ALiBi, L = 512" is a model trained at 512 tokens; ", L_valid = 3072" is the length at
which it was tested, if the row has one; "L = L_valid" is one model per length, each tested at its own length. A number that was
not published is None.

Our answer (a record of kind "paper-item") has the same series and columns, and these additional columns:
    paper_length               the paper's length that ours corresponds to, if ours is shorter
    low, high, seeds, tokens   the range over the seeds, and the numbers of seeds and of scored tokens
    sliding_perplexity, nonoverlapping_perplexity   the other way to evaluate the same models; `perplexity` is the paper's way
Next: `plots/paper.py`, which draws both side by side.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from alibi_lab.position_methods import LOOKS

PAPER_METHODS = {"Sinusoidal": "sinusoidal", "Rotary": "rotary", "T5 Bias": "t5", "ALiBi": "alibi"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedItem:
    """One figure or table.

    Args:
        title: its content, in our words.
        source: the table that its numbers are from.
        corpus, evaluation: the text and how it was scored; "" if no text was scored.
        columns: measured quantity -> unit.
        panels: the labels that the paper draws in one panel.
        cited: the labels of results that the paper cites from other papers; of these only staged training is run here.
        notes: remarks on the numbers.
        series: label -> column -> values; the columns of one series have equal lengths.
    """

    title: str
    source: str
    corpus: str
    evaluation: str
    columns: Mapping[str, str]
    panels: Sequence[Sequence[str]]
    cited: Sequence[str]
    notes: str
    series: Mapping[str, Mapping[str, Sequence[float | None]]]


def trained_length(label: str) -> int | None:
    """The trained length in a label, for example 512 in "ALiBi, L = 512, L_valid = 3072"; None if it has none.

    >>> trained_length("ALiBi, L = 512, L_valid = 3072")
    512
    """
    match = re.search(r"\bL = (\d+)", label)
    return int(match[1]) if match else None


def method_of(label: str) -> str:
    """The lab's name of the position method in a label, for example "alibi"; "" if it has none.

    >>> method_of("T5 Bias, L = 1024"), method_of("kerple, L = 512")
    ('t5', 'kerple')
    """
    name = label.split(",", 1)[0]
    return PAPER_METHODS.get(name, name if name in LOOKS else "")


_ITEMS = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
PUBLISHED: Mapping[str, PublishedItem] = {name: PublishedItem(**item) for name, item in _ITEMS.items()}
