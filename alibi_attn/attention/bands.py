"""From reach to work: which queries meet which keys, as a short list of pieces, each one call of a dense kernel.

A *piece* is `count` blocks of `rows` queries; block b meets the `keys` keys from `key + b·step` on. Blocks of a long sequence
differ by a shift only, so keys and values of a piece are one strided view. Plain integers: the same plan drives forward and
backward, which therefore visit the same keys, and tells `explain` and `head_reach` exactly what is computed.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from alibi_attn.attention.bounds import TILE, Bounds
from alibi_attn.attention.spec import AttentionSpec

Spec = AttentionSpec[Tensor]
Kind = Literal["tile", "diagonal", "left"]

WIDE = 512  # from this band width on, diagonal and rectangle are separate pieces of WIDE_ROWS queries
WIDE_ROWS = 256
EDGE_ROWS = 768  # where such a band begins at the first key: from 768 queries on the operator works on 256 at a time
MAX_BLOCKS = 64  # blocks a piece
MAX_KEYS = 4608  # keys a block; wider bands are cut and merged (keys and values of a call should stay in the cache)
MAX_GATHERED = 2**21  # elements of the gradients of one piece's keys
EDGE_BLOCKS = 4  # blocks that share their keys where the band meets the first or last key
MAX_BIAS = 16.0  # nats: how far from 0 a bias along the keys of a diagonal block may get, for precision


@dataclasses.dataclass(frozen=True)
class Piece:
    """One call.

    Args:
        query, count, rows: first query row; blocks; queries a block.
        key, keys, step: first key of block 0; keys a block; keys from one block to the next (0: all blocks share theirs).
        kind: "tile" has its own mask; "diagonal" is square and causal, block b starting at its own position; "left" lies
            wholly to the left of its queries and needs no mask. The last two have a bias along the keys only.
        merge: the rows have met other keys before.
    """

    query: int
    count: int
    rows: int
    key: int
    keys: int
    step: int
    kind: Kind = "tile"
    merge: bool = False

    @property
    def scores(self) -> int:
        """Scores computed: query-key pairs."""
        per_block = self.rows * (self.rows + 1) // 2 if self.kind == "diagonal" else self.rows * self.keys
        return self.count * per_block


@dataclasses.dataclass(frozen=True)
class _Block:
    """Queries [query, query + rows) must meet keys [low, high)."""

    query: int
    rows: int
    low: int
    high: int


def plan(spec: Spec, bounds: Bounds, *, threads: int) -> list[list[list[Piece]]]:
    """The pieces of every sequence and head, [B][H]; reads the bounds on the host."""
    first = _first(spec)
    lows, highs = _reachable_tiles(spec)
    left, right, pins = bounds.left.tolist(), bounds.right.tolist(), bounds.pins.tolist()
    slopes = spec.slopes.detach().reshape(-1, spec.num_heads).expand(spec.batch, -1).tolist()
    return [
        [
            _head_plan(
                spec, first[b], left[b][h], right[b][h], [p for p in pins[b][h] if p >= 0], slopes[b][h],
                lows[b], highs[b], threads,
            )
            for h in range(spec.num_heads)
        ]
        for b in range(spec.batch)
    ]  # fmt: skip


def farthest(spec: Spec, pieces: list[Piece], first: int) -> int:
    """1 + the largest |i − j| that the pieces read; 0 where they read nothing."""
    distance = 0
    for p in pieces:
        for b in (0, p.count - 1):
            top, low = first + p.query + b * p.rows, p.key + b * p.step
            ends = (top + p.rows - 1 - low, low + p.keys - 1 - top)
            distance = max(distance, 1 + ends[0], 0 if spec.causal else 1 + ends[1])
    return distance if spec.window is None else min(distance, spec.window)


def _first(spec: Spec) -> list[int]:
    if isinstance(spec.query_offset, Tensor):
        return list(spec.query_offset.reshape(-1).expand(spec.batch).tolist())
    return [spec.query_offset] * spec.batch


def _reachable_tiles(spec: Spec) -> tuple[list[list[int]], list[list[int]]]:
    """(low, high) [B][N] in keys: outside of them every key is masked or of another segment than the block's queries."""
    n, tiles = -(-spec.query_len // TILE), -(-spec.key_len // TILE)
    alive = torch.ones(spec.batch, n, tiles, dtype=torch.bool)
    if spec.key_mask is not None:
        short = tiles * TILE - spec.key_len
        seen = torch.nn.functional.pad(spec.key_mask, (0, short)).reshape(spec.batch, tiles, TILE).any(-1)
        alive = alive & seen[:, None]
    if spec.query_segments is not None and spec.key_segments is not None:
        of_query, of_key = _tile_range(spec.query_segments), _tile_range(spec.key_segments)
        alive = alive & (of_query[0][..., None] <= of_key[1][:, None]) & (of_key[0][:, None] <= of_query[1][..., None])
    at = torch.arange(tiles)
    low = torch.where(alive, at, tiles).amin(-1) * TILE
    high = (torch.where(alive, at + 1, 0).amax(-1) * TILE).clamp(max=spec.key_len)
    return low.tolist(), high.tolist()


def _tile_range(segments: Tensor) -> tuple[Tensor, Tensor]:
    """(smallest, largest) segment of every tile, [B, tiles]."""
    short = -segments.shape[1] % TILE
    padded = torch.cat([segments, segments[:, -1:].expand(-1, short)], 1).reshape(segments.shape[0], -1, TILE)
    return padded.amin(-1), padded.amax(-1)


def _head_plan(
    spec: Spec, first: int, left: list[int], right: list[int], pins: list[int], slope: float,
    lows: list[int], highs: list[int], threads: int,
) -> list[Piece]:  # fmt: skip
    widest = min(max(left), spec.window or spec.key_len, spec.key_len)
    inside = first >= 0 and first + spec.query_len <= spec.key_len
    free = spec.causal and spec.window is None and spec.key_mask is None and spec.key_segments is None
    wide = free and inside and widest >= WIDE and spec.query_len >= 2 * TILE and 0 <= slope * WIDE_ROWS <= 2 * MAX_BIAS
    pieces, met = [], list[_Block]()
    for query, stop, rows in _stretches(spec, first, widest, slope, wide=wide):
        blocks = _blocks(spec, first, left, right, lows, highs, range(query, stop, rows))
        if wide:
            pieces += _diagonal(first, range(query, stop, rows))
        for run in _runs(spec, blocks, first, wide=wide):
            widened = _widened(spec, run, first)
            met += widened
            pieces += _run_pieces(spec, widened, first, threads, wide)
    for pin in pins:
        pieces += _pinned(spec, met, pin)
    return pieces


def _stretches(spec: Spec, first: int, widest: int, slope: float, *, wide: bool) -> Iterator[tuple[int, int, int]]:
    """(first query, end, queries a block) of the parts of a head: larger blocks where a wide band begins at key 0."""
    if not wide:
        yield 0, spec.query_len, 32 if widest <= 96 else TILE if widest < 768 else 2 * TILE
        return
    at_edge = 0
    if slope * EDGE_ROWS <= 2 * MAX_BIAS:
        at_edge = max(0, min(spec.query_len, widest - first)) // (2 * EDGE_ROWS) * (2 * EDGE_ROWS)
        yield 0, at_edge, EDGE_ROWS
    yield at_edge, spec.query_len, min(WIDE_ROWS, max(TILE, spec.query_len // 2 // TILE * TILE))


def _blocks(
    spec: Spec, first: int, left: list[int], right: list[int], lows: list[int], highs: list[int], starts: range
) -> Iterator[_Block]:
    """Blocks of queries with the keys they must meet; those that need none are left out."""
    for query in starts:
        count = min(starts.step, starts.stop - query)
        tiles = range(query // TILE, (query + count - 1) // TILE + 1)
        top, end = first + query, first + query + count
        reach = min(max(left[n] for n in tiles), spec.window or spec.key_len + spec.query_len + abs(first))
        low = max(0, top - reach + 1, min(lows[n] for n in tiles))
        high = min(spec.key_len, end, max(highs[n] for n in tiles))
        if not spec.causal:
            beyond = min(max(right[n] for n in tiles), spec.window or spec.key_len + abs(first) + spec.query_len)
            high = min(spec.key_len, end - 1 + beyond, max(highs[n] for n in tiles))
        if low < high:
            yield _Block(query, count, low, high)


def _runs(spec: Spec, blocks: Iterator[_Block], first: int, *, wide: bool) -> Iterator[list[_Block]]:
    """Neighbouring blocks that one strided view can serve: all with the band inside the keys, or a few at an edge."""
    run: list[_Block] = []
    for block in blocks:
        sliding = _slides(spec, block, first)
        if run:
            most = MAX_BLOCKS if sliding else _most_at_edge(block, wide=wide)
            same = _follows(run[-1], block) and _slides(spec, run[0], first) == sliding
            if not same or len(run) >= most or (sliding and not _fits(spec, run, block, first)):
                yield run
                run = []
        run.append(block)
    if run:
        yield run


def _most_at_edge(block: _Block, *, wide: bool) -> int:
    """Blocks that may share their keys where the band meets the first or last one."""
    if not wide:
        return EDGE_BLOCKS
    return 2 if block.rows == EDGE_ROWS else 1


def _follows(block: _Block, after: _Block) -> bool:
    return block.query + block.rows == after.query and block.rows == after.rows


def _fits(spec: Spec, run: list[_Block], block: _Block, first: int) -> bool:
    """One band serves all: the first block's begins inside the keys, the last block's ends there."""
    back = first + block.query - block.low
    ahead = max(b.high - first - b.query for b in (*run, block))
    return back <= first + run[0].query and ahead <= spec.key_len - first - block.query


def _slides(spec: Spec, block: _Block, first: int) -> bool:
    """Both ends of the block's keys are ends of its band, not of the keys."""
    top = first + block.query
    return 0 < block.low <= top and (block.high == top + block.rows if spec.causal else block.high < spec.key_len)


def _widened(spec: Spec, run: list[_Block], first: int) -> list[_Block]:
    """The run's blocks with the keys they really meet: equal bands where they slide, the same keys where they do not."""
    top = first + run[0].query
    if not _slides(spec, run[0], first):
        low, high = min(b.low for b in run), max(b.high for b in run)
        return [dataclasses.replace(b, low=low, high=high) for b in run]
    back = max(first + b.query - b.low for b in run)
    back = min(-(-back // 16) * 16, top)
    ahead = min(max(b.high - first - b.query for b in run), spec.key_len - first - run[-1].query)
    return [dataclasses.replace(b, low=first + b.query - back, high=first + b.query + ahead) for b in run]


def _run_pieces(spec: Spec, run: list[_Block], first: int, threads: int, wide: bool) -> Iterator[Piece]:
    """The pieces of one run of widened blocks."""
    head = run[0]
    high = min(head.high, first + head.query) if wide else head.high
    keys = high - head.low
    kind: Kind = "left" if wide else "tile"
    step = run[1].low - head.low if len(run) > 1 else 0
    if wide and step == 0:  # at the edge: the queries are divided among the cores, and share their keys
        both = dataclasses.replace(head, rows=sum(b.rows for b in run))
        yield from _shared_left(both, head.low, high, threads)
        for before, block in itertools.pairwise(run):
            yield from _shared_left(block, first + before.query, first + block.query, threads)
        return
    most = min(MAX_BLOCKS, MAX_GATHERED // (min(keys, MAX_KEYS) * spec.head_dim))
    most = max(threads, most // threads * threads)  # backward works on whole blocks in parallel: leave no core idle
    for start in range(0, len(run), most):
        count = min(most, len(run) - start)
        block = run[start]
        yield from _cut(Piece(block.query, count, block.rows, block.low, keys, step, kind, merge=wide))


def _diagonal(first: int, starts: range) -> list[Piece]:
    rows = starts.step
    count, rest = divmod(starts.stop - starts.start, rows)
    pieces = [Piece(starts.start, count, rows, first + starts.start, rows, rows, "diagonal")] if count else []
    if rest:
        query = starts.start + count * rows
        pieces.append(Piece(query, 1, rest, first + query, rest, rest, "diagonal"))
    return pieces


def _shared_left(block: _Block, low: int, high: int, threads: int) -> Iterator[Piece]:
    """Keys [low, high), all to the left of one block, whose queries are divided among the cores."""
    if high <= low:
        return
    parts = max(1, min(threads, block.rows // TILE))
    rows = -(-block.rows // parts)
    count, rest = divmod(block.rows, rows)
    yield from _cut(Piece(block.query, count, rows, low, high - low, 0, "left", merge=True))
    if rest:
        yield from _cut(Piece(block.query + count * rows, 1, rest, low, high - low, 0, "left", merge=True))


def _pinned(spec: Spec, blocks: list[_Block], pin: int) -> Iterator[Piece]:
    """The pinned tile, or what a band leaves of it, for every block that does not hold it already."""
    start, stop = pin * TILE, min((pin + 1) * TILE, spec.key_len)
    pending: Piece | None = None
    for block in blocks:
        parts = [(start, min(stop, block.low))]
        if not spec.causal:
            parts.append((max(start, block.high), stop))
        for low, high in parts:
            if low >= high:
                continue
            if pending is not None and pending.count < MAX_BLOCKS and (pending.key, pending.keys) == (low, high - low):
                end = pending.query + pending.count * pending.rows
                if end == block.query and pending.rows == block.rows:
                    pending = dataclasses.replace(pending, count=pending.count + 1)
                    continue
            if pending is not None:
                yield pending
            pending = Piece(block.query, 1, block.rows, low, high - low, 0, merge=True)
    if pending is not None:
        yield pending


def _cut(piece: Piece) -> Iterator[Piece]:
    """The piece in parts of at most MAX_KEYS keys, nearest keys first."""
    parts = -(-piece.keys // MAX_KEYS)
    size = -(-piece.keys // parts)
    for part in reversed(range(parts)):
        start = part * size
        keys = min(size, piece.keys - start)
        merge = piece.merge or part < parts - 1
        yield dataclasses.replace(piece, key=piece.key + start, keys=keys, merge=merge)
