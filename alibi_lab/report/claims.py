"""Claims: the conclusions of Press et al. 2022 (arXiv:2108.12409v2) from figures and tables, as ratios to test.

A claim says that a ratio of two products of numbers is below, above or equal to a threshold. Most are ratios of two perplexities:
of one method beyond and at its trained length, or of two methods at one length. Others are about speeds, memory and
definitions. Where the paper says "level", "as good" or "about", the threshold is a margin that we chose, and the claim states
it. The paper's own ratio is computed from `published.py`. `claims.json` has all claims; a cell is a label, a length and, unless
it is a perplexity, a column.
Next: `verdicts.py`, which decides the claims.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

from alibi_lab.report.published import method_of, trained_length

Relation = Literal["below", "above", "equal"]


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
    def is_exact(self) -> bool:
        """Whether its numbers are defined, not measured."""
        return self.over[0].column in ("slope", "pass")

    @property
    def about_training(self) -> bool:
        """Whether it compares different trainings, or speeds, so that a single seed cannot decide it."""
        cells = (*self.over, *self.under)
        return len({cell.model for cell in cells}) > 1 or any("perplexity" not in cell.column for cell in cells)


def _load() -> tuple[Claim, ...]:
    rows = json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
    sides = ({side: tuple(Number(*cell) for cell in row[side]) for side in ("over", "under")} for row in rows)
    return tuple(Claim(**{**row, **cells}) for row, cells in zip(rows, sides, strict=True))


CLAIMS = _load()
