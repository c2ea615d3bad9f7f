"""The paper's own numbers and conclusions (Press et al. 2022, arXiv:2108.12409v2): figures and tables as series of columns, and
claims as ratios to test.

`published.json` has all rows of tables 1 to 15; a figure has the numbers of the tables that it draws, and no others. A series has
the paper's label in a uniform spelling: "ALiBi, L = 512" is a model trained at 512 tokens; ", L_valid = 3072" is the length at
which it was tested, if the row has one; "L = L_valid" is one model per length, each tested at its own length. A number that was
not published is None.

Our answer (a record of kind "paper-item") has the same series and columns, and these additional columns:
    paper_length               the paper's length that ours corresponds to, if ours is shorter
    low, high, seeds, tokens   the range over the seeds, and the numbers of seeds and of scored tokens
    sliding_perplexity, nonoverlapping_perplexity   the other way to evaluate the same models; `perplexity` is the paper's way

A claim says that a ratio of two products of numbers is below, above or equal to a threshold. Most are ratios of two perplexities:
of one method beyond and at its trained length, or of two methods at one length. Others are about speeds, memory and
definitions. Where the paper says "level", "as good" or "about", the threshold is a margin that we chose, and the claim states
it. The paper's own ratio is computed from `published.json`. `claims.json` has all claims; a cell is a label, a length and, unless
it is a perplexity, a column.
Next: `plots/paper.py`, which draws ours and the paper's side by side, and `verdicts.py`, which decides the claims.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from alibi_lab.position_methods import LOOKS

Relation = Literal["below", "above", "equal"]

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


@dataclasses.dataclass(frozen=True)
class Number:
    """A cell of an item: its label, the paper's length at which it was tested (None if its column has it), and its column."""

    label: str
    length: int | None = None
    column: str = "perplexity"

    @property
    def tested(self) -> int | None:
        """The paper's length at which it was tested, from `length` or the column's name ("perplexity_2048")."""
        digits = self.column.rpartition("_")[2]
        return int(digits) if self.length is None and digits.isdecimal() else self.length

    @property
    def model(self) -> tuple[str, int | None]:
        """The key of its model: the method and the trained length."""
        return method_of(self.label), trained_length(self.label) or self.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One conclusion of the paper.

    Args:
        item: the figure or table that has the numbers.
        says: the conclusion in our words; it holds if the ratio is on the `relation` side of the threshold.
        over, under: the ratio is the product of `over` divided by the product of `under`.
        relation, threshold: the threshold is 1 where the paper says better, worse, rises or falls.
    """

    item: str
    says: str
    over: tuple[Number, ...]
    under: tuple[Number, ...]
    relation: Relation
    threshold: float = 1.0

    @property
    def condition(self) -> str:
        """The condition under which it holds: "below 1.02"."""
        return f"{'equal to' if self.relation == 'equal' else self.relation} {self.threshold:.6g}"

    @property
    def about_training(self) -> bool:
        """Whether it compares different trainings, or speeds, so that a single seed cannot decide it."""
        cells = (*self.over, *self.under)
        return len({cell.model for cell in cells}) > 1 or any("perplexity" not in cell.column for cell in cells)


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


def claim_of(row: Mapping[str, Any]) -> Claim:
    """The claim in a row of `claims.json`."""
    return Claim(**{**row, **{side: tuple(Number(*cell) for cell in row[side]) for side in ("over", "under")}})


def _rows(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


PUBLISHED: Mapping[str, PublishedItem] = {name: PublishedItem(**item) for name, item in _rows("published.json").items()}
CLAIMS = tuple(map(claim_of, _rows("claims.json")))
