"""Halo: the rows of keys and values that each rank needs from the others; numbers only, without tensors or processes.

Rank r holds a *shard* of the sequence, which starts at row `offsets[r]`. For every key head, its queries need some rows just
before the shard, in symmetric attention also some just after it, and perhaps a few outlier tiles farther away. All other rows
together weigh no more than the tolerance. `halo_bounds.py` computes a halo from tensors; `static_halo` computes one from slopes
and a bound on the scores.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alibi_attn.attention.call.checks import EPS, check_numbers
from alibi_attn.attention.call.options import DEFAULTS
from alibi_attn.attention.certificate.constants import UNIT
from alibi_attn.reach import static_reach
from alibi_attn.slopes import alibi_slopes

Span = tuple[int, int]  # a half-open range of positions, (start, stop)
Piece = tuple[int, int, Span]  # (key head, index into `Halo.spans`, rows in the owner's shard)
Rows = npt.NDArray[np.int64]

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
HALO_SCORE_UNITS = 16  # fp32 may add D + this many units of rounding to a score, and to λ; U bounds the exact scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halo:
    """The rows that each of R ranks receives from the others, for each of K key heads.

    Args:
        lengths: rows of each rank's shard, [R], in rank order.
        left, right: [R][K]: the number of rows just before and just after its shard that a rank needs, possibly from several
            ranks.
        outliers: [R][K]: spans of more distant rows that a rank needs, outside its halo and shard.
        row_bytes: bytes of one row of keys and one of values, for one key head and the whole batch.
    """

    lengths: tuple[int, ...]
    left: tuple[tuple[int, ...], ...]
    right: tuple[tuple[int, ...], ...]
    outliers: tuple[tuple[tuple[Span, ...], ...], ...]
    row_bytes: int

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The position of the first row of each shard, [R]."""
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
        """Whether no rank needs any rows."""
        return not any(any(heads) for side in (self.left, self.right, self.outliers) for heads in side)

    def spans(self, rank: int, head: int) -> list[Span]:
        """The rows that a rank needs for a key head: the halo before its shard, the halo after it, and outlier tiles."""
        start, stop = self.offsets[rank], self.offsets[rank] + self.lengths[rank]
        near = (start - self.left[rank][head], start), (stop, stop + self.right[rank][head])
        return [*near, *self.outliers[rank][head]]

    def pieces(self, rank: int, owner: int) -> list[Piece]:
        """The pieces from `owner` to `rank`, in order."""
        if owner == rank:
            return []
        begin, end = self.offsets[owner], self.offsets[owner] + self.lengths[owner]
        pieces = []
        for head in range(self.num_kv_heads):
            for at, (start, stop) in enumerate(self.spans(rank, head)):
                low, high = max(start, begin) - begin, min(stop, end) - begin
                if low < high:
                    pieces.append((head, at, (low, high)))
        return pieces

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows received, [R, R, K], indexed by receiving rank, owning rank and key head."""
        counts = np.zeros((self.num_ranks, self.num_ranks, self.num_kv_heads), dtype=np.int64)
        for rank, owner in itertools.permutations(range(self.num_ranks), 2):
            for head, _, (low, high) in self.pieces(rank, owner):
                counts[rank, owner, head] += high - low
        return counts

    @property
    def all_gather_rows(self) -> Rows:
        """The rows of all key heads that each rank would receive in an all-gather or in a ring, [R]."""
        return (sum(self.lengths) - np.array(self.lengths, dtype=np.int64)) * self.num_kv_heads

    @property
    def received_bytes(self) -> int:
        """The bytes that all ranks together receive."""
        return int(self.rows.sum()) * self.row_bytes

    @property
    def all_gather_bytes(self) -> int:
        """The bytes that all ranks together would receive in an all-gather of keys and values, or in a ring."""
        return int(self.all_gather_rows.sum()) * self.row_bytes

    def widest(self) -> "Halo":
        """The union over key heads, as a halo with one head, for masks and segments, which all heads share."""
        outliers = tuple((tuple(sorted({span for spans in heads for span in spans})),) for heads in self.outliers)
        left, right = (tuple((max(heads),) for heads in side) for side in (self.left, self.right))
        return dataclasses.replace(self, left=left, right=right, outliers=outliers)

    def __str__(self) -> str:
        """One line per rank, and a comparison with an all-gather."""
        lines = [f"{'rank':>5} {'rows':>9} {'from ranks':>12} {'received':>10} {'per head':>9} {'all-gather':>11}"]
        for rank, received in enumerate(self.rows):
            owners = [str(owner) for owner in range(self.num_ranks) if received[owner].any()]
            source = "–" if not owners else owners[0] if len(owners) == 1 else f"{owners[0]} … {owners[-1]}"
            total = int(received.sum())
            lines.append(
                f"{rank:>5} {self.lengths[rank]:>9} {source:>12} {total:>10} {total / self.num_kv_heads:>9.0f} "
                f"{self.all_gather_rows[rank] // self.num_kv_heads:>11}"
            )
        per_head = ", ".join(str(int(n)) for n in self.rows.sum(1).max(0))
        lines.append(f"rows per key head, on the rank that needs the most: {per_head}")
        halo, gather = self.received_bytes, self.all_gather_bytes
        fewer = f", 1/{gather / halo:.0f} of it" if halo else ""
        lines.append(
            f"all ranks together receive {halo:,} bytes; in an all-gather or a ring of keys and values {gather:,}{fewer} "
            f"(the ring in {self.num_ranks - 1} rounds)"
        )
        return "\n".join(lines)


def static_halo(
    lengths: Sequence[int],
    slopes: Sequence[float] | npt.NDArray[np.float64],
    *,
    score_bound: float,
    causal: bool = True,
    right_slopes: Sequence[float] | npt.NDArray[np.float64] | None = None,
    window: int | None = None,
    tolerance: float | None = None,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    batch: int = 1,
    dtype: str = "float32",
) -> Halo:
    """The halo for scores with a known bound, computed without queries and without communication.

    Every query sees its own key, so a head's reach is ⌈(2U + ln(1/ε) − ln(1 − e^(−m)))/m⌉, as in `ALiBiAttention.static_reach`.

    Args:
        lengths: rows of each rank's shard, [R].
        slopes: [H].
        score_bound: U ≥ |scale·q·k|, such as `ALiBiAttention.score_bound()` with QK-norm.
        causal, right_slopes, window, tolerance: as for `alibi_attention`.
        num_kv_heads, head_dim, batch, dtype: K (default H), D, B and the name of the dtype; they determine bytes, the rounding
            slack and the default tolerance.

    Raises:
        ValueError, TypeError: an argument is out of range.

    >>> halo = static_halo([16384] * 8, alibi_slopes(8), score_bound=5.0)
    >>> halo.left[1]
    (60, 123, 252, 515, 1052, 2148, 4385, 8948)
    >>> halo.rows[3, 2].tolist() == list(halo.left[3])
    True

    Source: docs/context-parallel.md.
    """
    if dtype not in EPS:
        raise TypeError(f"dtype is {dtype!r} but must be one of {', '.join(EPS)}")
    given = {"causal": causal, "right_slopes": right_slopes, "window": window, "tolerance": tolerance}
    _, tolerance = check_numbers({**DEFAULTS, **given}, head_dim=head_dim, dtype=dtype)
    shards, of_heads = _lengths(lengths), [float(m) for m in slopes]
    heads = len(of_heads) if num_kv_heads is None else num_kv_heads
    if heads < 1 or not of_heads or len(of_heads) % heads:
        raise ValueError(f"num_kv_heads is {heads} but must divide the {len(of_heads)} heads of slopes")
    if not 0.0 <= score_bound < math.inf:
        raise ValueError(f"score_bound is {score_bound} but bounds |scale·q·k|: it must be finite and nonnegative")
    right = of_heads if right_slopes is None else [float(m) for m in right_slopes]
    if len(right) != len(of_heads):
        raise ValueError(f"right_slopes has {len(right)} entries but slopes {len(of_heads)}: one per head each")
    unit = UNIT["float64" if dtype == "float64" else "float32"]
    slack = 2 * (head_dim + HALO_SCORE_UNITS) * unit * score_bound + (0.0 if causal else math.log(2.0))

    def widths(of_side: list[float]) -> list[int]:
        """The rows next to a shard that a query at its border needs, [K]."""
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
    """The lengths of R shards that split `length` rows evenly, longer shards first, [R].

    >>> even_lengths(10, 4)
    (3, 3, 2, 2)
    """
    if ranks < 1 or length < 0:
        raise ValueError(f"length is {length} and ranks is {ranks} but need length ≥ 0 and ranks ≥ 1")
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


def published_halo(length: int, ranks: int, *, num_heads: int = 8, score_bound: float = 5.0) -> Halo:
    """The causal fp32 halo of the published slopes; a bound of 5 lets a far key score 10 nats above a near one."""
    return static_halo(even_lengths(length, ranks), alibi_slopes(num_heads), score_bound=score_bound)


def _lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    shards = tuple(int(n) for n in lengths)
    if not shards or min(shards) < 0:
        raise ValueError(
            f"lengths is {list(shards)} but must have one or more entries, the number of rows of each rank"
        )
    return shards
