"""From reach to work: which queries attend to which keys, as a short list of pieces, each one call of a dense kernel.

A *piece* is `count` blocks of `rows` queries; block b attends to `keys` keys from `key + b·step` on. Blocks of a long sequence
differ by a shift only, so keys and values of a piece are one strided view. A plan is plain integers: it drives both forward and
backward, which therefore visit the same keys, and `explain` and `head_reach` report exactly what is computed.

Torch's operator is fastest with many queries per block, but many queries share only a part of their bands. So triangles, which
occur if a band begins at key 0 and at both ends of a wide band, are cut into squares of doubling size: large calls, few scores.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions
from alibi_attn.attention.certificate.bounds import LONG, Bounds
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.tiles import allowed_keys

Spec = AttentionSpec[Tensor]
Kind = Literal["tile", "diagonal", "left"]

ROWS = 256  # queries per block on the diagonal of a triangle
TRIANGLE = 512  # from this reach on, causal queries whose band begins at key 0 are a triangle, cut into squares
SQUARES = ((3072, 1024), (1536, 512))  # (reach, queries): from that reach on, this many queries share most of a band
# The same for narrower bands. Small blocks make slow products; in large ones most queries read keys that they do not need.
BLOCKS = ((768, 128), (97, 64), (0, 32))
RUN = 8192  # queries of a piece that slides; all of its blocks get the widest band among them
UNEVEN = 1.5  # bands whose widths differ by more are separate pieces: one query must not widen its neighbors' bands
MAX_KEYS = 4608  # keys per block; wider bands are cut and merged (keys and values of a call should stay in the cache)
PART = 256  # keys whose weighted values torch may add in fp32: a sum that has reached 1/2 drops weights below 3e-8
# From LONG keys on, forward computes far keys in sections, an eighth of a band each, so that backward need not read all of them.
# The nearest three are one: backward nearly always needs them.
SECTIONS, NEAR_SECTIONS, NARROWEST = 8, 3, 2 * TILE
MAX_GATHERED = 2**21  # elements of the gradients of one piece's keys
EDGE_BLOCKS = 4  # blocks that share their keys if the band ends at the first or last key
MAX_BIAS = 16.0  # nats: the largest bias along the keys of a diagonal block, for precision


@dataclasses.dataclass(frozen=True)
class Piece:
    """One call for `count` blocks of queries.

    Args:
        query, count, rows, stride: first query row; blocks; queries per block; queries from one block to the next.
        key, keys, step: first key of block 0; keys per block; keys from one block to the next (0: all blocks share theirs).
        kind: "tile" has a mask; "diagonal" is square and causal, and block b starts at its own position; "left" lies
            entirely to the left of its queries and needs no mask. The last two have a bias along the keys only.
        merge: whether an earlier piece has the same rows.
        is_outlier: whether it reads an outlier tile outside of the band.
        is_section: whether backward may find that it weighs nothing.
    """

    query: int
    count: int
    rows: int
    stride: int
    key: int
    keys: int
    step: int
    kind: Kind = "tile"
    merge: bool = False
    is_outlier: bool = False
    is_section: bool = False

    @property
    def scores(self) -> int:
        """Scores computed: query-key pairs."""
        per_block = self.rows * (self.rows + 1) // 2 if self.kind == "diagonal" else self.rows * self.keys
        return self.count * per_block


class _Block(NamedTuple):
    """Queries [query, query + rows) must attend to keys [low, high)."""

    query: int
    rows: int
    low: int
    high: int


@dataclasses.dataclass(frozen=True)
class _Head:
    """One head of one sequence, with the properties that a plan depends on.

    Args:
        first: position of query 0.
        left, right: [N] the certified reach of every tile of queries.
        low, high: [N] in keys: outside of them the mask and segments hide every key from the tile of queries.
        plain: causal, every query has a key at its position, no mask, and a bias small enough to be applied along the keys.
    """

    spec: Spec
    first: int
    left: np.ndarray
    right: np.ndarray
    low: np.ndarray
    high: np.ndarray
    plain: bool


def plan(
    spec: Spec, bounds: Bounds, *, threads: int, measured: bool = False, most_keys: int = MAX_KEYS
) -> list[list[list[Piece]]]:
    """The pieces of every sequence and head, [B][H]; reads the bounds on the host.

    Args:
        threads: the number of cores.
        measured: cut the far keys of wide bands into sections, whose weights forward measures.
        most_keys: keys per block of a piece.
    """
    first = first_positions(spec, spec.slopes.device).expand(spec.batch).tolist()
    slopes = spec.slopes.detach().reshape(-1, spec.num_heads).expand(spec.batch, -1)
    low, high = (x.numpy() for x in _reachable_tiles(spec))
    left, right = bounds.left.numpy(), bounds.right.numpy()  # ten times as fast as small tensors
    plain = spec.causal and spec.window is None and spec.key_mask is None and spec.key_segments is None
    pieces_of: list[list[list[Piece]]] = []
    for b in range(spec.batch):
        inside = first[b] >= 0 and first[b] + spec.query_len <= spec.key_len
        flat = (slopes[b] * ROWS >= 0) & (slopes[b] * ROWS <= 2 * MAX_BIAS)
        pieces_of.append([])
        for h, is_flat in enumerate(flat.tolist()):
            head = _Head(spec, first[b], left[b, h], right[b, h], low[b], high[b], plain and inside and is_flat)
            whole = _pieces(head, bounds.outlier_tiles[b, h].tolist(), measured=measured)
            cut = (part for piece in whole for part in _cut(piece, most_keys))
            pieces_of[b].append([part for piece in cut for part in _spread(spec, piece, threads)])
    return pieces_of


def _reachable_tiles(spec: Spec) -> tuple[Tensor, Tensor]:
    """(low, high) [B, N] in keys, whole tiles: outside of them the mask and segments hide every key from a tile of queries."""
    start = torch.arange(0, spec.query_len, TILE, device=spec.slopes.device)
    low, high = allowed_keys(dataclasses.replace(spec, causal=False, window=None), start, start + TILE)
    return low // TILE * TILE, (-(-high // TILE) * TILE).clamp(max=spec.key_len)


def _pieces(head: _Head, outlier_tiles: list[int], *, measured: bool) -> list[Piece]:
    spec = head.spec
    widest = min(int(head.left.max()), spec.window or spec.key_len, spec.key_len)
    edge = 0
    if head.plain and widest >= TRIANGLE:  # the first queries, whose band begins at key 0
        blocks = _blocks(head, 0, spec.query_len // ROWS * ROWS, ROWS)
        edge = ROWS * next((n for n, block in enumerate(blocks) if block.low > 0), len(blocks))
    met: list[_Block] = []
    pieces = [*_triangle(head.first, edge), *_sliding(head, edge, spec.query_len, widest, met)]
    if max(outlier_tiles, default=-1) >= 0:
        met = sorted([*met, *_without_band(spec, edge, met)])
    for tile in outlier_tiles:
        pieces += _outlier_pieces(spec, met, tile) if tile >= 0 else ()
    # A head whose certified reach is far beyond the keys needs most of them.
    if measured and spec.key_len >= LONG and np.median(head.left) <= 2 * spec.key_len:
        width = max(NARROWEST, -(-widest // SECTIONS // TILE) * TILE)
        pieces = [section for piece in pieces for section in _sections(head, piece, width)]
    return pieces


def _without_band(spec: Spec, query: int, met: list[_Block]) -> Iterator[_Block]:
    """The blocks of queries from `query` on whose bands have no key: they may see outlier tiles only."""
    for block in [*sorted(met), _Block(spec.query_len, 0, 0, 0)]:
        for start in range(query, block.query, ROWS):
            yield _Block(start, min(ROWS, block.query - start), spec.key_len, spec.key_len)
        query = max(query, block.query + block.rows)


def _sliding(head: _Head, query: int, stop: int, widest: int, met: list[_Block]) -> Iterator[Piece]:
    """Queries [query, stop), whose band is at most `widest`; adds their blocks to `met`."""
    square = next((rows for reach, rows in SQUARES if head.plain and widest >= reach), 0)
    if square:
        far = query + (stop - query) // square * square
        for run in _runs(head, query, far, square):
            reach = head.first + run[0].query - run[0].low
            if reach >= square and _slides(head, run[0]):
                for block in run:  # a triangle omits keys that only the first queries of a block need
                    rows = range(0, square, ROWS)
                    met += [_Block(block.query + row, ROWS, block.low + row, block.high) for row in rows]
                yield from _squares(run, head.first)
            else:
                yield from _rows_that_slide(head, run[0].query, run[-1].query + square, reach, met)
        query = far
    yield from _rows_that_slide(head, query, stop, widest, met)


def _rows_that_slide(head: _Head, query: int, stop: int, widest: int, met: list[_Block]) -> Iterator[Piece]:
    """`_sliding` without squares: one piece for each run of blocks."""
    for run in _runs(head, query, stop, next(rows for reach, rows in BLOCKS if widest >= reach)):
        met += run
        step = run[1].low - run[0].low if len(run) > 1 else 0
        yield Piece(run[0].query, len(run), run[0].rows, run[0].rows, run[0].low, run[0].high - run[0].low, step)


def _triangle(first: int, edge: int) -> Iterator[Piece]:
    """Queries [0, edge), each with all keys up to its own: blocks on the diagonal, and squares of doubling size next to them."""
    if not edge:
        return
    yield Piece(0, edge // ROWS, ROWS, ROWS, first, ROWS, ROWS, "diagonal")
    size = ROWS
    while size < edge:
        count, rest = divmod(edge, 2 * size)
        if count:
            yield Piece(size, count, size, 2 * size, first, size, 2 * size, "left", merge=True)
        if rest > size:
            start = count * 2 * size
            yield Piece(start + size, 1, rest - size, rest - size, first + start, size, 0, "left", merge=True)
        size *= 2
    if first:
        yield Piece(0, 1, edge, edge, 0, first, 0, "left", merge=True)


def _squares(run: list[_Block], first: int) -> Iterator[Piece]:
    """Sliding blocks of many queries: the keys that all queries of a block share, and a triangle at each end of them."""
    query, square = run[0].query, run[0].rows
    rows = len(run) * square
    top, low = first + query, run[0].low
    yield Piece(query, rows // ROWS, ROWS, ROWS, top, ROWS, ROWS, "diagonal")
    yield Piece(query, rows // ROWS, ROWS, ROWS, low, ROWS, ROWS, "left", merge=True)
    size = ROWS
    while size < square:
        count = rows // (2 * size)
        yield Piece(query + size, count, size, 2 * size, top, size, 2 * size, "left", merge=True)
        yield Piece(query, count, size, 2 * size, low + size, size, 2 * size, "left", merge=True)
        size *= 2
    yield Piece(query, len(run), square, square, low + square, top - low - square, square, "left", merge=True)


def _runs(head: _Head, query: int, stop: int, rows: int) -> Iterator[list[_Block]]:
    """Neighboring blocks that fit one strided view: all with the band inside the keys, or a few at an edge."""
    run: list[_Block] = []
    ahead = 0
    for block in _blocks(head, query, stop, rows):
        beyond = block.high - head.first - block.query
        if run:
            sliding = _slides(head, block)
            same = run[-1].query + rows == block.query and run[-1].rows == block.rows == rows
            same = same and _slides(head, run[0]) == sliding and len(run) < (RUN // rows if sliding else EDGE_BLOCKS)
            if not same or (sliding and not _fits(head, run[0], block, max(ahead, beyond))):
                yield _widened(head, run)
                run, ahead = [], 0
        run.append(block)
        ahead = max(ahead, beyond)
    if run:
        yield _widened(head, run)


def _blocks(head: _Head, query: int, stop: int, rows: int) -> list[_Block]:
    """Blocks of `rows` queries with the keys that they need; blocks that need none are omitted."""
    if query >= stop:
        return []
    spec = head.spec
    start = np.arange(query, stop, rows)
    end = np.minimum(start + rows, stop)
    # A block of half a tile has the tile's reach; a block of several tiles has the widest reach among them.
    tiles = np.arange(query // TILE, -(-stop // TILE), max(1, rows // TILE))
    of_tile = (start - query // TILE * TILE) // max(TILE, rows)

    def widest(row: np.ndarray) -> np.ndarray:
        most: np.ndarray = np.maximum.reduceat(row[: -(-stop // TILE)], tiles)[of_tile]
        return most

    far = spec.window or spec.key_len + spec.query_len + abs(head.first)
    low = head.first + start - np.minimum(widest(head.left), far) + 1
    low = np.maximum(np.maximum(low, -widest(-head.low)), 0)
    high = head.first + end
    if not spec.causal:
        high = high - 1 + np.minimum(widest(head.right), far)
    high = np.minimum(np.minimum(high, widest(head.high)), spec.key_len)
    blocks = map(_Block, start.tolist(), (end - start).tolist(), low.tolist(), high.tolist())
    return [block for block in blocks if block.low < block.high]


def _fits(head: _Head, at: _Block, block: _Block, ahead: int) -> bool:
    """Whether one band fits both: they are about as wide, and the band begins and ends inside the keys."""
    back, other = head.first + block.query - block.low, head.first + at.query - at.low
    even = max(back, other) <= UNEVEN * min(back, other) + TILE
    return even and back <= head.first + at.query and ahead <= head.spec.key_len - head.first - block.query


def _slides(head: _Head, block: _Block) -> bool:
    """Whether both ends of the block's keys are ends of its band, not of the keys."""
    top = head.first + block.query
    end = block.high == top + block.rows if head.spec.causal else block.high < head.spec.key_len
    return 0 < block.low <= top and end


def _widened(head: _Head, run: list[_Block]) -> list[_Block]:
    """The run's blocks with the keys they attend to: equal bands if they slide, else the same keys."""
    first, top = head.first, head.first + run[0].query
    if not _slides(head, run[0]):
        low, high = min(b.low for b in run), max(b.high for b in run)
        return [b._replace(low=low, high=high) for b in run]
    back = max(first + b.query - b.low for b in run)
    back = min(-(-back // 16) * 16, top)
    ahead = min(max(b.high - first - b.query for b in run), head.spec.key_len - first - run[-1].query)
    return [b._replace(low=first + b.query - back, high=first + b.query + ahead) for b in run]


def _outlier_pieces(spec: Spec, blocks: list[_Block], tile: int) -> Iterator[Piece]:
    """The outlier tile, or the part of it outside the band, for every block whose band does not include it."""
    start, stop = tile * TILE, min((tile + 1) * TILE, spec.key_len)
    pending: Piece | None = None
    for block in blocks:
        parts = [(start, min(stop, block.low))]
        if not spec.causal:
            parts.append((max(start, block.high), stop))
        for low, high in parts:
            if low >= high:
                continue
            piece = Piece(block.query, 1, block.rows, block.rows, low, high - low, 0, merge=True, is_outlier=True)
            if pending is not None and pending.count * pending.rows < RUN and piece == _at(pending, pending.count, 1):
                pending = dataclasses.replace(pending, count=pending.count + 1)
                continue
            if pending is not None:
                yield pending
            pending = piece
    if pending is not None:
        yield pending


def _sections(head: _Head, piece: Piece, width: int) -> Iterator[Piece]:
    """The piece in parts, nearest keys first: all near keys, then sections of `width` keys."""
    if piece.kind == "diagonal" or piece.is_outlier or piece.keys <= width:
        yield piece
        return
    top, near = head.first + piece.query - piece.key, max(0, NEAR_SECTIONS * width - piece.rows)
    low = max(0, min(top - near, piece.keys)) // TILE * TILE
    high = piece.keys if head.spec.causal else max(low, min(top + piece.rows + near, piece.keys))
    parts = [(low, high)] if low < high else []
    parts += [(max(end - width, 0), end) for end in range(low, 0, -width)]
    parts += [(begin, min(begin + width, piece.keys)) for begin in range(high, piece.keys, width)]
    for number, (begin, end) in enumerate(parts):
        merge, keys = piece.merge or number > 0, end - begin
        yield dataclasses.replace(piece, key=piece.key + begin, keys=keys, merge=merge, is_section=keys <= width)


def _cut(piece: Piece, most_keys: int) -> Iterator[Piece]:
    """The piece in parts of at most `most_keys` keys per block, nearest keys first."""
    parts = 1 if piece.kind == "diagonal" else -(-piece.keys // most_keys)
    size = -(-piece.keys // parts)
    for part in reversed(range(parts)):
        keys = min(size, piece.keys - part * size)
        merge = piece.merge or part < parts - 1
        yield dataclasses.replace(piece, key=piece.key + part * size, keys=keys, merge=merge)


def _spread(spec: Spec, piece: Piece, threads: int) -> Iterator[Piece]:
    """Splits the piece into groups of blocks so that no core is idle: backward processes whole blocks in parallel."""
    most = max(1, MAX_GATHERED // (piece.keys * spec.head_dim) // threads) * threads
    whole = piece.count
    if piece.kind != "diagonal" and piece.rows >= threads * TILE:
        whole -= piece.count % threads
    for block in range(0, whole, most):
        yield _at(piece, block, min(most, whole - block))
    for block in range(whole, piece.count):  # the queries of the remaining blocks are divided among the cores
        one = _at(piece, block, 1)
        rows = -(-one.rows // threads)
        count, rest = divmod(one.rows, rows)
        yield dataclasses.replace(one, count=count, rows=rows, stride=rows, step=0)
        if rest:
            yield dataclasses.replace(one, query=one.query + count * rows, rows=rest, stride=rest, step=0)


def _at(piece: Piece, block: int, count: int) -> Piece:
    return dataclasses.replace(
        piece, query=piece.query + block * piece.stride, key=piece.key + block * piece.step, count=count
    )
