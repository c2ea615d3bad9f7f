"""Claims: the conclusions of Press et al. 2022 (arXiv:2108.12409v2) from figures and tables, as ratios to test.

A claim says that a ratio of two products of numbers is below, above or equal to a threshold. Most are ratios of two perplexities:
of one method beyond and at its trained length, or of two methods at one length. Others are about speeds, memory and
definitions. Where the paper says "level", "as good" or "about", the threshold is a margin that we chose, and the claim states
it. The paper's own ratio is computed from `published.py`.
Next: `verdicts.py`, which decides the claims.
"""

import dataclasses
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


def _changes(
    item: str, label: str, to: int, relation: Relation, says: str, *, threshold: float = 1.0, column: str = "perplexity"
) -> Claim:
    """A model's perplexity at a length, divided by that at its trained length."""
    return Claim(
        item=item,
        says=says,
        over=(Number(label, to, column),),
        under=(Number(label, trained_length(label), column),),
        relation=relation,
        threshold=threshold,
    )


def _compared(
    item: str,
    one: tuple[str, int | None],
    other: tuple[str, int | None],
    relation: Relation,
    says: str,
    *,
    threshold: float = 1.0,
    column: str = "perplexity",
) -> Claim:
    """One cell divided by another."""
    return Claim(
        item=item,
        says=says,
        over=(Number(*one, column),),
        under=(Number(*other, column),),
        relation=relation,
        threshold=threshold,
    )


def _keeps_longer(item: str, one: str, other: str, to: int, says: str) -> Claim:
    """One model's change with length, divided by another's."""
    return Claim(
        item=item,
        says=says,
        over=(Number(one, to), Number(other, trained_length(other))),
        under=(Number(one, trained_length(one)), Number(other, to)),
        relation="below",
    )


def _speed(item: str, one: str, other: str, column: str, relation: Relation, threshold: float, says: str) -> Claim:
    """One model's speed or memory, divided by another's."""
    return _compared(item, (one, None), (other, None), relation, says, threshold=threshold, column=column)


_TRAIN, _TEST, _MEMORY = "train_tokens_per_second", "evaluation_tokens_per_second", "memory_bytes"
_SIN, _ROT, _T5, _OURS = "Sinusoidal, L = 512", "Rotary, L = 512", "T5 Bias, L = 512", "ALiBi, L = 512"
_OWN = "Sinusoidal, L = L_valid"

CLAIMS: tuple[Claim, ...] = (
    _changes("figure-1", _SIN, 1012, "above", "sinusoidal, L = 512, is worse at about 2 L than at L"),
    _changes("figure-1", _SIN, 15_512, "above", "sinusoidal, L = 512, is worse at 30 L than at L"),
    _changes("figure-1", _ROT, 15_512, "above", "rotary, L = 512, is worse at 30 L than at L"),
    _changes("figure-1", _T5, 1012, "below", "T5 bias, L = 512, gains from reading about 2 L"),
    _changes("figure-1", _T5, 10_512, "above", "T5 bias, L = 512, is worse at 20 L than at L"),
    _changes("figure-1", _OURS, 1012, "below", "ALiBi, L = 512, gains from reading about 2 L"),
    _changes("figure-1", _OURS, 15_512, "below", "ALiBi, L = 512, is better at 30 L than at L"),
    _keeps_longer("figure-1", _ROT, _SIN, 15_512, "up to 30 L rotary loses less than sinusoidal, L = 512"),
    _keeps_longer("figure-1", _T5, _ROT, 10_512, "up to 20 L T5 bias loses less than rotary, L = 512"),
    _keeps_longer("figure-1", _OURS, _T5, 10_512, "up to 20 L ALiBi loses less than T5 bias, L = 512"),
    _compared("figure-1", (_OURS, 15_512), (_ROT, 15_512), "below", "at 30 L ALiBi is better than rotary, L = 512"),
    _compared("figure-1", (_OURS, 10_512), (_T5, 10_512), "below", "at 20 L ALiBi is better than T5 bias, L = 512"),
    _changes("figure-1", "Sinusoidal, L = 1024", 16_024, "above", "sinusoidal, L = 1024, is worse at 16 L than at L"),
    _changes("figure-1", "ALiBi, L = 1024", 16_024, "below", "ALiBi, L = 1024, is better at 16 L than at L"),
    _compared("figure-2", ("ALiBi, L = 1024", None), ("Sinusoidal, L = 1024", None), "above",
              "ALiBi trains as fast as sinusoidal, to 5 %", threshold=0.95, column="train_tokens_per_second"),
    _speed("figure-2", "ALiBi, L = 3072", "Sinusoidal, L = 3072", _TRAIN, "above", 0.95,
           "at L = 3072 ALiBi trains as fast as sinusoidal, to 5 %"),
    _speed("figure-2", "ALiBi, L = 1024", "Sinusoidal, L = 1024", _TEST, "above", 0.95,
           "ALiBi is tested as fast as sinusoidal, to 5 %"),
    _speed("figure-2", "T5 Bias, L = 3072", "Sinusoidal, L = 3072", _TRAIN, "below", 0.5,
           "at L = 3072 T5 bias trains at most half as fast as sinusoidal"),
    _speed("figure-2", "T5 Bias, L = 1024", "Sinusoidal, L = 1024", _TEST, "below", 0.5,
           "T5 bias is tested at most half as fast as sinusoidal"),
    Claim(item="figure-3", says="of eight heads the flattest has the slope 1/256",
          over=(Number("ALiBi, 8 heads", None, "slope"),), under=(), relation="equal", threshold=2.0**-8),
    Claim(item="figure-3", says="sixteen heads have the flattest slope of eight",
          over=(Number("ALiBi, 16 heads", None, "slope"),), under=(Number("ALiBi, 8 heads", None, "slope"),), relation="equal"),
    _changes("figure-4", _OURS, 3072, "below", "ALiBi, L = 512, is better at 3,072 than at 512"),
    _compared("figure-4", (_OURS, 512), (_OWN, 512), "below", "at 512 ALiBi is better than sinusoidal, both trained there"),
    _compared("figure-4", ("ALiBi, L = 3072", 3072), (_OWN, 3072), "below",
              "at 3,072 ALiBi is better than sinusoidal, both trained there"),
    _compared("figure-4", (_OURS, 3072), (_OWN, 3072), "below",
              "ALiBi trained at 512 is better at 3,072 than sinusoidal trained at 3,072"),
    _compared("figure-4", ("ALiBi, L = 1024", 3072), (_OWN, 3072), "below",
              "ALiBi trained at 1,024 is better at 3,072 than sinusoidal trained at 3,072"),
    _compared("figure-4", ("ALiBi, L = 3072", 3072), (_OURS, 3072), "below",
              "at 3,072 ALiBi trained at 3,072 is better than ALiBi trained at 512"),
    _compared("figure-5", ("ALiBi, L = 512", None), ("Sinusoidal, L = 1024", None), "below",
              "after equal time a large ALiBi model, L = 512, is as good at 1,024 as sinusoidal, L = 1024, to 1 %",
              threshold=1.01),
    _compared("figure-5", ("ALiBi, L = 1024", None), ("Sinusoidal, L = 2048", None), "below",
              "after equal time a large ALiBi model, L = 1024, is as good at 2,048 as sinusoidal, L = 2048, to 1 %",
              threshold=1.01),
    _changes("figure-6", "Sinusoidal, L = 512", 1024, "above", "the large sinusoidal model, L = 512, is worse at 2 L"),
    _changes("figure-6", _OURS, 1024, "below", "the large ALiBi model, L = 512, is better at 2 L"),
    _changes("figure-6", "ALiBi, L = 1024", 2048, "below", "the large ALiBi model, L = 1024, is better at 2 L"),
    _compared("figure-6", (_OURS, 512), (_SIN, 512), "below",
              "at L = 512 the large ALiBi model is as good as the sinusoidal one, to 2 %", threshold=1.02),
    _compared("figure-7", ("Sinusoidal", 3072), ("Sinusoidal", 512), "below", "sinusoidal trains slower at L = 3072 than at 512",
              column=_TRAIN),
    _compared("figure-7", ("ALiBi", 3072), ("ALiBi", 512), "below", "ALiBi trains slower at L = 3072 than at 512", column=_TRAIN),
    _compared("figure-7", ("ALiBi", 512), ("Sinusoidal", 3072), "above",
              "ALiBi, L = 512, trains 1.84 times as fast as sinusoidal, L = 3072", threshold=1.84, column=_TRAIN),
    _compared("figure-8", ("ALiBi, L = 512", None), ("Sinusoidal, L = 3072", None), "below",
              "ALiBi, L = 512, is better at 3,072 than sinusoidal trained there, and trains faster"),
    _speed("figure-8", "ALiBi, L = 512", "Sinusoidal, L = 3072", _TRAIN, "above", 1.84,
           "the model that is better at 3,072, ALiBi, L = 512, trains 1.84 times as fast"),
    _compared("figure-9", (_OURS, 512), (_OWN, 512), "below",
              "books: at 512 ALiBi is better than sinusoidal, both trained there"),
    _compared("figure-9", (_OURS, 3072), (_OWN, 3072), "below",
              "books: ALiBi trained at 512 is better at 3,072 than sinusoidal trained at 3,072"),
    Claim(item="figure-10", says="a sliding window of four reads eight tokens in five passes, where two do without sliding",
          over=(Number("Sliding window", None, "pass"),), under=(Number("Nonoverlapping", None, "pass"),), relation="equal",
          threshold=2.5),
    _changes("figure-11", _SIN, 1024, "above", "sliding by 1: sinusoidal, L = 512, is worse at 2 L"),
    _changes("figure-11", _OURS, 3072, "above",
              "sliding by 1: ALiBi, L = 512, gains less than 1 % from reading 6 L", threshold=0.99),
    _changes("figure-11", _OURS, 3072, "below",
              "sliding by 1: ALiBi, L = 512, loses less than 5 % from reading 6 L", threshold=1.05),
    _compared("figure-11", (_OURS, 512), (_SIN, 512), "below", "sliding by 1: at L = 512 ALiBi is better than sinusoidal"),
    _speed("table-1", _T5, _SIN, _TRAIN, "below", 0.51, "T5 bias trains about half as fast as sinusoidal or slower, L = 512"),
    _speed("table-1", "T5 Bias, L = 1024", "Sinusoidal, L = 1024", _TRAIN, "below", 0.51,
           "T5 bias trains about half as fast as sinusoidal or slower, L = 1024"),
    _speed("table-1", _ROT, _SIN, _TRAIN, "below", 0.75, "rotary trains 32 % slower than sinusoidal, at least 25 %, L = 512"),
    _speed("table-1", _ROT, _SIN, _TEST, "below", 0.6, "rotary is tested 48 % slower than sinusoidal, at least 40 %, L = 512"),
    _speed("table-1", _OURS, _SIN, _MEMORY, "below", 1.02, "ALiBi needs the memory of sinusoidal, to 2 %, L = 512"),
    _speed("table-1", "ALiBi, L = 3072", "Sinusoidal, L = 3072", _MEMORY, "below", 1.02,
           "ALiBi needs the memory of sinusoidal, to 2 %, L = 3072"),
    _compared("table-2", (_OURS, 15_512), (_SIN, 15_512), "above", "read one text at a time, ALiBi is as fast at 30 L, to 5 %",
              threshold=0.95, column="tokens_per_second"),
    _compared("table-2", (_T5, 512), (_OURS, 512), "below", "at L = 512 T5 bias is better than ALiBi"),
    _changes("table-3", "Rotary, L = 1024", 16_024, "above", "rotary, L = 1024, is worse at 16 L than at L"),
    _compared("table-3", ("ALiBi, L = 1024", 16_024), ("Rotary, L = 1024", 16_024), "below",
              "at 16 L ALiBi is better than rotary, L = 1024"),
    _compared("table-3", ("ALiBi, L = 1024", 1024), ("Sinusoidal, L = 1024", 1024), "below",
              "at L = 1024 ALiBi is better than sinusoidal"),
    _changes("table-4", "Sinusoidal, L = 3072", 13_072, "above", "sinusoidal, L = 3072, is worse at 4 L than at L"),
    _changes("table-4", "ALiBi, L = 3072", 13_072, "below", "ALiBi, L = 3072, is better at 4 L than at L"),
    _compared("table-5", ("ALiBi, L = 64", 64), (_OWN, 64), "above", "at L = 64 sinusoidal is better than ALiBi"),
    _compared("table-5", ("ALiBi, L = 128", 128), (_OWN, 128), "above", "at L = 128 sinusoidal is better than ALiBi"),
    _compared("table-5", ("ALiBi, L = 3072", 3072), ("T5 Bias, L = L_valid", 3072), "below",
              "at L = 3072 ALiBi is better than T5 bias"),
    _compared("table-6", ("ALiBi, L = 3072, L_valid = 3072", 3072), ("Sinusoidal, L = 3072", 3072), "below",
              "test text: at L = 3072 ALiBi is better than sinusoidal", column="test_perplexity"),
    _compared("table-6", ("ALiBi, L = 512, L_valid = 3072", 3072), ("Sinusoidal, L = 3072", 3072), "below",
              "test text: ALiBi trained at 512 is better at 3,072 than sinusoidal trained there", column="test_perplexity"),
    _compared("table-7", ("ALiBi, L = 3072, L_valid = 3072", 3072), ("Sinusoidal, L = 3072", 3072), "below",
              "test text, sliding by 512: at L = 3072 ALiBi is better than sinusoidal", column="test_perplexity"),
    _compared("table-7", ("ALiBi, L = 512, L_valid = 3072", 3072), ("Sinusoidal, L = 3072", 3072), "above",
              "test text, sliding by 512: ALiBi trained at 512 is worse at 3,072 than sinusoidal trained there",
              column="test_perplexity"),
    _changes("table-8", _OURS, 3072, "below", "books: ALiBi, L = 512, is better at 3,072 than at 512"),
    _compared("table-8", ("ALiBi, L = 3072", 3072), (_OWN, 3072), "below",
              "books: at 3,072 ALiBi is better than sinusoidal, both trained there"),
    _compared("table-9", ("ALiBi, L = 512, L_valid = 3072", 3072), ("Sinusoidal, L = 3072", 3072), "below",
              "test text of books: ALiBi trained at 512 is better at 3,072 than sinusoidal trained there",
              column="test_perplexity"),
    _compared("table-10", ("ALiBi, L = 3072, L_valid = 3072", 3072), ("Sinusoidal, L = 3072", 3072), "below",
              "test text of books, sliding by 512: at L = 3072 ALiBi is better than sinusoidal", column="test_perplexity"),
    _compared("table-11", ("ALiBi, L = 1024", None), ("Sinusoidal, L = 2048", None), "below",
              "after equal time a large ALiBi model, L = 1024, is better at 2,048 than sinusoidal, L = 2048",
              column="perplexity_2048"),
    _speed("table-11", "ALiBi, L = 1024", "Sinusoidal, L = 2048", _MEMORY, "below", 0.9,
           "a large ALiBi model, L = 1024, needs 11 % less memory than sinusoidal, L = 2048, at least 10 %"),
    Claim(item="table-12", says="the large sinusoidal model, L = 512, is worse at 4 L than at 2 L",
          over=(Number(_SIN, None, "perplexity_2048"),), under=(Number(_SIN, None, "perplexity_1024"),), relation="above"),
    Claim(item="table-12", says="the large ALiBi model, L = 512, is worse at 4 L than at 2 L",
          over=(Number(_OURS, None, "perplexity_2048"),), under=(Number(_OURS, None, "perplexity_1024"),), relation="above"),
    _compared("table-12", ("ALiBi, L = 1024", None), ("Sinusoidal, L = 1024", None), "below",
              "at L = 1024 the large ALiBi model is as good as the sinusoidal one, to 2 %",
              threshold=1.02, column="perplexity_1024"),
    _compared("table-12", ("ALiBi, L = 2048", None), ("Sinusoidal, L = 2048", None), "below",
              "at L = 2048 the large ALiBi model is as good as the sinusoidal one, to 2 %",
              threshold=1.02, column="perplexity_2048"),
    _changes("table-13", "Sinusoidal, L = 1024", 3072, "above", "sliding by 1: sinusoidal, L = 1024, is worse at 3 L"),
    _changes("table-14", _T5, 3072, "above", "sliding by 1: T5 bias, L = 512, is worse at 6 L"),
    _changes("table-15", "ALiBi, L = 1024", 3072, "below", "sliding by 1: ALiBi, L = 1024, loses less than 5 % from reading 3 L",
             threshold=1.05),
)  # fmt: skip
