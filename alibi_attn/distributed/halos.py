"""Halo: which rows of keys and values every rank needs of the others; numbers only, without tensors and without processes.

A rank holds a *shard* of the sequence, the rows from `offsets[r]` on. Its queries need, for every key head, some rows just before
the shard, in symmetric attention some just behind it too, and perhaps a few outlier tiles farther off. All else weighs no more
than the tolerance. `need.py` finds a halo from tensors; here it is found from slopes and a bound on the scores.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alibi_attn.attention.certificate.constants import UNIT
from alibi_attn.attention.spec import EPS, check_numbers
from alibi_attn.reach import static_reach
from alibi_attn.slopes import alibi_slopes

Span = tuple[int, int]  # positions from the first on and before the second
Rows = npt.NDArray[np.int64]

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SCORE_UNITS = 16  # and D of them: what fp32 may add to a score, to λ too, where U bounds the true ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halo:
    """What R ranks receive of one another, for each of K key heads.

    Args:
        lengths: rows of each rank's shard, [R], in the order of the ranks.
        left, right: [R][K]: how many rows just before and just behind its shard a rank needs; they may belong to several ranks.
        outliers: [R][K]: spans of rows farther off that a rank needs, none of them within its halo or shard.
        row_bytes: one row of keys and one of values of one key head, over the batch.
    """

    lengths: tuple[int, ...]
    left: tuple[tuple[int, ...], ...]
    right: tuple[tuple[int, ...], ...]
    outliers: tuple[tuple[tuple[Span, ...], ...], ...]
    row_bytes: int

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """[R]: the position of the first row of each shard."""
        return tuple(int(n) for n in np.cumsum((0, *self.lengths[:-1])))

    @property
    def num_ranks(self) -> int:
        """R"""
        return len(self.lengths)

    @property
    def num_kv_heads(self) -> int:
        """K"""
        return len(self.left[0])

    @property
    def is_empty(self) -> bool:
        """Whether no rank needs anything."""
        return not any(any(heads) for side in (self.left, self.right, self.outliers) for heads in side)

    def spans(self, rank: int, head: int) -> list[Span]:
        """What a rank needs for a key head, beside its own rows: the halo before it, the one behind it, outlier tiles."""
        start, stop = self.offsets[rank], self.offsets[rank] + self.lengths[rank]
        near = (start - self.left[rank][head], start), (stop, stop + self.right[rank][head])
        return [*near, *self.outliers[rank][head]]

    def pieces(self, rank: int, owner: int) -> list[tuple[int, int, Span]]:
        """What `owner` sends to `rank`, in this order: (key head, which of its `spans`, rows counted from the owner's first)."""
        if owner == rank:
            return []
        begin, end = self.offsets[owner], self.offsets[owner] + self.lengths[owner]
        found = []
        for head in range(self.num_kv_heads):
            for at, (start, stop) in enumerate(self.spans(rank, head)):
                low, high = max(start, begin) - begin, min(stop, end) - begin
                if low < high:
                    found.append((head, at, (low, high)))
        return found

    @functools.cached_property
    def rows(self) -> Rows:
        """[R, R, K]: how many rows the first rank receives from the second for a key head."""
        found = np.zeros((self.num_ranks, self.num_ranks, self.num_kv_heads), dtype=np.int64)
        for rank in range(self.num_ranks):
            for head in range(self.num_kv_heads):
                for start, stop in self.spans(rank, head):
                    for owner in self._owners(start, stop):
                        begin = self.offsets[owner]
                        found[rank, owner, head] += min(stop, begin + self.lengths[owner]) - max(start, begin)
        return found

    def _owners(self, start: int, stop: int) -> range:
        """The ranks, from the first that holds a row of the span to the last; some between may hold none."""
        if start >= stop:
            return range(0)
        return range(bisect.bisect_right(self.offsets, start) - 1, bisect.bisect_left(self.offsets, stop))

    @property
    def all_gather_rows(self) -> Rows:
        """[R]: the rows, of all key heads, that every rank would receive of all others; a ring passes on as many."""
        return (sum(self.lengths) - np.array(self.lengths, dtype=np.int64)) * self.num_kv_heads

    @property
    def received_bytes(self) -> int:
        """Of all ranks together."""
        return int(self.rows.sum()) * self.row_bytes

    @property
    def all_gather_bytes(self) -> int:
        """What all ranks together would receive in an all-gather of keys and values, or in a ring."""
        return int(self.all_gather_rows.sum()) * self.row_bytes

    def widest(self) -> "Halo":
        """For what all heads share, masks and segments: one head, which needs whatever some head does."""
        outliers = tuple((tuple(sorted({span for spans in heads for span in spans})),) for heads in self.outliers)
        left, right = (tuple((max(heads),) for heads in side) for side in (self.left, self.right))
        return dataclasses.replace(self, left=left, right=right, outliers=outliers)

    def __str__(self) -> str:
        """A line a rank, and how it compares with an all-gather."""
        lines = [f"{'rank':>5} {'rows':>9} {'from ranks':>12} {'received':>10} {'a head':>9} {'all-gather':>11}"]
        for rank, received in enumerate(self.rows):
            owners = [str(owner) for owner in range(self.num_ranks) if received[owner].any()]
            source = "–" if not owners else owners[0] if len(owners) == 1 else f"{owners[0]} … {owners[-1]}"
            total = int(received.sum())
            lines.append(
                f"{rank:>5} {self.lengths[rank]:>9} {source:>12} {total:>10} {total / self.num_kv_heads:>9.0f} "
                f"{self.all_gather_rows[rank] // self.num_kv_heads:>11}"
            )
        per_head = ", ".join(str(int(n)) for n in self.rows.sum(1).max(0))
        lines.append(f"rows a key head, of the rank that needs most: {per_head}")
        halo, gather = self.received_bytes, self.all_gather_bytes
        fewer = f", 1/{gather / halo:.0f} of it" if halo else ""
        lines.append(
            f"all ranks receive {halo:,} bytes; an all-gather or a ring of keys and values {gather:,}{fewer} "
            f"(a ring in {self.num_ranks - 1} rounds)"
        )
        return "\n".join(lines)


def static_halo(
    lengths: Sequence[int], slopes: Sequence[float] | npt.NDArray[np.float64], *, score_bound: float, causal: bool = True,
    right_slopes: Sequence[float] | npt.NDArray[np.float64] | None = None, window: int | None = None,
    tolerance: float | None = None, num_kv_heads: int | None = None, head_dim: int = 64, batch: int = 1,
    dtype: str = "float32",
) -> Halo:  # fmt: skip
    """The halo of scores that never exceed a bound: known before any query exists, and without communication.

    Every query sees its own key, so a head's reach is ⌈(2U + ln(1/ε) − ln(1 − e^(−m)))/m⌉, as in `ALiBiAttention.static_reach`.

    Args:
        lengths: rows of each rank's shard, [R].
        slopes: [H].
        score_bound: U, which no |scale·q·k| exceeds; `ALiBiAttention.score_bound()` with QK-norm.
        causal, right_slopes, window, tolerance: as for `alibi_attention`.
        num_kv_heads, head_dim, batch, dtype: K (default H), D, B and the name of the dtype; they decide bytes, and the default
            of the tolerance.

    Raises:
        ValueError, TypeError: numbers that are not allowed.

    >>> halo = static_halo([16384] * 8, alibi_slopes(8), score_bound=5.0)
    >>> halo.left[1]
    (60, 123, 252, 515, 1052, 2148, 4385, 8948)
    >>> halo.rows[3, 2].tolist() == list(halo.left[3])
    True

    Source: docs/context-parallel.md.
    """
    if dtype not in EPS:
        raise TypeError(f"dtype is {dtype!r} but must be one of {', '.join(EPS)}")
    _, tolerance = check_numbers(
        causal=causal, has_right_slopes=right_slopes is not None, window=window, scale=None, dropout_p=0.0,
        tolerance=tolerance, head_dim=head_dim, dtype=dtype,
    )  # fmt: skip
    shards, of_heads = _lengths(lengths), [float(m) for m in slopes]
    heads = len(of_heads) if num_kv_heads is None else num_kv_heads
    if heads < 1 or not of_heads or len(of_heads) % heads:
        raise ValueError(f"num_kv_heads is {heads} but must divide the {len(of_heads)} heads of slopes")
    if not 0.0 <= score_bound < math.inf:
        raise ValueError(f"score_bound is {score_bound} but bounds |scale·q·k|: finite and not negative")
    right = of_heads if right_slopes is None else [float(m) for m in right_slopes]
    if len(right) != len(of_heads):
        raise ValueError(f"right_slopes has {len(right)} entries but slopes {len(of_heads)}: one a head each")
    unit = UNIT["float64" if dtype == "float64" else "float32"]
    slack = 2 * (head_dim + SCORE_UNITS) * unit * score_bound + (0.0 if causal else math.log(2.0))

    def widths(of_side: list[float]) -> list[int]:
        """[K]: the rows beside a shard that some query next to its border needs."""
        reaches = [1 if m == math.inf else static_reach(m, score_bound, tolerance, slack=slack) for m in of_side]
        reaches = [reach if window is None else min(reach, window) for reach in reaches]
        group = len(reaches) // heads
        return [max(reaches[k * group : (k + 1) * group]) - 1 for k in range(heads)]

    total, ends = sum(shards), np.cumsum(shards).tolist()
    row_bytes = 2 * batch * head_dim * ITEM_BYTES[dtype]
    sides = (widths(of_heads), [0] * heads if causal else widths(right))
    rooms = [(end - length, total - end) if length else (0, 0) for length, end in zip(shards, ends, strict=True)]
    left, right_rows = (
        tuple(tuple(min(width, room[at]) for width in side) for room in rooms) for at, side in enumerate(sides)
    )
    none = tuple(((),) * heads for _ in shards)
    return Halo(lengths=shards, left=left, right=right_rows, outliers=none, row_bytes=row_bytes)


def even_lengths(length: int, ranks: int) -> tuple[int, ...]:
    """[R]: `length` rows, as evenly as they go, the longer shards first.

    >>> even_lengths(10, 4)
    (3, 3, 2, 2)
    """
    if ranks < 1 or length < 0:
        raise ValueError(f"{length} rows on {ranks} ranks: there is at least one rank, and no fewer than 0 rows")
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


def published_halo(length: int, ranks: int, *, num_heads: int = 8, score_bound: float = 5.0) -> Halo:
    """The halo of the published slopes, fp32 and causal; a score bound of 5 is a spread of 10 nats between far and near keys."""
    return static_halo(even_lengths(length, ranks), alibi_slopes(num_heads), score_bound=score_bound)


def _lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    shards = tuple(int(n) for n in lengths)
    if not shards or min(shards) < 0:
        raise ValueError(f"lengths is {list(shards)} but says how many rows each of one or more ranks has")
    return shards
