"""Which whole tiles a key mask, segments and a key bias hide: where the loops need no masks, and where no key is visible.

A tile of keys is uniform if nothing hides any of them, all belong to one segment, whose number is its label, and their biases are
close to one another. A tile of queries is uniform if all belong to one segment. Between uniform tiles with the same label nothing
is hidden. A key bias hides other keys from each head: the labels of keys have R = B rows, or B·H with a key bias.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.certificate import write_tile_sums
from alibi_attn.attention.backends.fused.kernels.key_bias import load_tile, split_tile
from alibi_attn.attention.backends.fused.kernels.positions import load_first_key, load_offset
from alibi_attn.attention.backends.fused.kernels.tiles import TILE

# Binary digits by which biases may differ from their tile's base, and bases of a pair of tiles.
NARROW = tl.constexpr(128.0)
MOST_BASE = tl.constexpr(2.0**30)  # of narrow tiles; `partial_scores` relies on it


@triton.jit
def labels_kernel(call, keys, queries, BIAS, SUMS, CAUSAL: tl.constexpr):
    """Program: one tile of TILE keys of one row, or after all of these one tile of TILE queries of one sequence.

    Writes their Labels. With a key bias, BIAS, it also splits that (`split_tile`), and writes SUMS, the `sums` of Norms.
    """
    B, H, T, S, masks = call.B, call.H, call.T, call.S, call.masks
    tiles, blocks = tl.cdiv(S, TILE), tl.cdiv(T, TILE)
    x, pid = tl.arange(0, TILE), tl.program_id(0)
    heads = 1
    if call.key_bias is not None:
        heads = H
    rows = B * heads
    if pid < rows * tiles:
        r, tile = (pid // tiles).to(tl.int64), pid % tiles
        b, j = r // heads, tile * TILE + x
        here = j < S
        least, most, uniform = segment_range(masks.key_segments, b, j, S)
        if masks.keys is not None:
            shown = tl.load(masks.keys + b * S + tl.minimum(j, S - 1)) != 0
            uniform = uniform & (tl.min(shown.to(tl.int32), 0) == 1)
            here = here & shown
        if call.key_bias is not None:
            rest, base = split_tile(BIAS, call.key_bias, r, tile, H, S)
            uniform = uniform & (tl.min(((rest > float("-inf")) | (j >= S)).to(tl.int32), 0) == 1)
            here = here & (rest > float("-inf"))
            _bias, _hidden, other = load_tile(BIAS, r, tl.minimum(tile ^ 1, tiles - 1), H, S)  # of its pair
            uniform = uniform & is_narrow(base, other, rest)
            write_tile_sums(call, tl.where(here, rest, float("-inf")), SUMS, r, tile, CAUSAL)
        at = r * tiles + tile
        tl.store(keys.edges + at, tl.min(tl.where(here, j, S), 0))
        tl.store(keys.edges + (r * 0 + rows) * tiles + at, tl.max(tl.where(here, j + 1, 0), 0))
        tl.store(keys.least + at, least)
        tl.store(keys.most + at, most)
        tl.store(keys.uniform + at, uniform.to(tl.int32))
    else:
        pid -= rows * tiles
        b, block = (pid // blocks).to(tl.int64), pid % blocks
        least, most, uniform = segment_range(masks.query_segments, b, block * TILE + x, T)
        at = b * blocks + block
        tl.store(queries.least + at, least)
        tl.store(queries.most + at, most)
        tl.store(queries.uniform + at, uniform.to(tl.int32))


@triton.jit
def segment_range(segments, b, j, n):
    """(the smallest of these segments, the largest, whether they are equal); the last of the n is repeated to fill the tile."""
    least, most = b * 0, b * 0
    if segments is not None:
        label = tl.load(segments + b * n + tl.minimum(j, n - 1)).to(tl.int64)
        least, most = tl.min(label, 0), tl.max(label, 0)
    return least, most, least == most


@triton.jit
def is_narrow(base, other, rest):
    """Whether a tile's biases are close to their base, and the base to another tile's."""
    widest = tl.max(tl.where(rest == float("-inf"), 0.0, tl.abs(rest)), 0)
    return (widest <= NARROW) & (tl.abs(base - other) <= NARROW) & (tl.abs(base) < MOST_BASE)


@triton.jit
def label_of(side, at, PARTS: tl.constexpr):
    """(label, uniform) of block `at` of PARTS tiles; outside of all blocks it is not uniform.

    `side` is (Labels, their row, the number of blocks, the number of tiles), of queries or of keys.
    """
    labels, b, count, tiles = side
    there = (at >= 0) & (at < count)
    label = tl.load(labels.least + b * tiles + at * PARTS, mask=there, other=0)
    uniform = there
    for part in tl.static_range(PARTS):
        place = b * tiles + tl.minimum(at * PARTS + part, tiles - 1)
        least = tl.load(labels.least + place, mask=there, other=0)
        most = tl.load(labels.most + place, mask=there, other=0)
        uniform = uniform & (least == label) & (most == label)
        uniform = uniform & (tl.load(labels.uniform + place, mask=there, other=0) == 1)
    return label, uniform


@triton.jit
def run_around(place, side, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """For each block in `place`, the half-open run of uniform blocks with its label, among the blocks of PARTS tiles."""
    count = side[2]
    low, high = place * 0, place * 0 + count
    for start in range(0, count, WIDTH):
        at = start + tl.arange(0, WIDTH)
        label, uniform = label_of(side, at, PARTS)
        before, as_well = label_of(side, at - 1, PARTS)
        begins = ((at < count) & ~(uniform & as_well & (label == before)))[None, :]
        is_later = at[None, :] > place[:, None]
        low = tl.maximum(low, tl.max(tl.where(begins & ~is_later, at[None, :], 0), 1))
        high = tl.minimum(high, tl.min(tl.where(begins & is_later, at[None, :], count), 1))
    return low, high


@triton.jit
def full_run(
    at, own, other, offset, PARTS: tl.constexpr, OF_PARTS: tl.constexpr, KEYS: tl.constexpr, OF_WIDTH: tl.constexpr
):
    """For each of the blocks `at` (PARTS tiles each), the nearest run of blocks of the other side (OF_PARTS tiles each) from
    which it hides nothing; KEYS: the blocks are keys, the others queries. Sides as for `label_of`.
    """
    label, uniform = label_of(own, at, PARTS)
    size, other_size = PARTS * TILE, OF_PARTS * TILE
    start = at * size + offset
    if KEYS:
        start = at * size - offset
    # The last other block that ends before a block begins, and the first that begins after its end.
    before, behind = (start + 1) // other_size - 1, (start + size + other_size - 2) // other_size
    near, far = before, behind
    if KEYS:  # queries attend to the left, so those that visit a tile come after it
        near, far = behind, before
    low, high = at * 0, at * 0
    for choice in tl.static_range(2):
        place = far
        if choice == 1:
            place = near
        of_label, of_uniform = label_of(other, place, OF_PARTS)
        fits = uniform & of_uniform & (label == of_label)
        first, last = run_around(place, other, OF_PARTS, OF_WIDTH)
        low, high = tl.where(fits, first, low), tl.where(fits, last, high)
    return low, high


@triton.jit
def blocks_until_cut(call, r, tile, count, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """For each of the tiles, the first of `count` blocks of queries some of which may not see its first key."""
    until = tile * 0 + count
    for start in range(0, count, WIDTH):
        block = start + tl.arange(0, WIDTH)
        last = tl.minimum((block + 1) * PARTS * TILE, call.T) - 1
        first_key = load_first_key(call, r, last, block < count)
        hides = (block < count)[None, :] & (first_key[None, :] > tile[:, None] * TILE)
        until = tl.minimum(until, tl.min(tl.where(hides, block[None, :], count), 1))
    return until


@triton.jit
def spread_kernel(
    call,
    keys,
    queries,
    ALLOWED,
    FIRST_SEEN,
    FULL_BLOCKS,
    FULL_TILES,
    row,
    PARTS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    OF_WIDTH: tl.constexpr,
):
    """Program: WIDTH blocks of queries, and WIDTH tiles of keys, of one row.

    Args:
        ALLOWED: [R, ⌈T / TILE⌉, 2] int32: TILE queries see no key outside this interval.
        FIRST_SEEN: [R] int32: the first visible key.
        FULL_BLOCKS, FULL_TILES: `full` of Visited, for blocks of PARTS tiles, and of Visitors, with `row` numbers per sequence.

    With a key bias it also writes the bias's `references`, one per BIAS_ROWS queries: the base of the tile where the first TILE
    of them end, or of the last tile before it with a visible key, or of the first one after it.
    """
    H, T, S = call.H, call.T, call.S
    tiles, blocks = tl.cdiv(S, TILE), tl.cdiv(T, TILE)
    parts = tl.cdiv(tl.maximum(tiles, blocks), WIDTH)
    r, at = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    b, h = r, r * 0
    if call.key_bias is not None:
        b, h = r // H, r % H
    every = tl.num_programs(0).to(tl.int64) // parts * tiles
    first_seen = S
    offset = load_offset(call.query_offset, b, T, S)
    end = offset + at * BIAS_ROWS + tl.minimum(TILE, T) - 1
    end_tile = tl.minimum(tl.maximum(end, 0), S - 1) // TILE
    before, after = at * 0 - 1, at * 0 + tiles
    low, high = tl.zeros([WIDTH], tl.int32) + S, tl.zeros([WIDTH], tl.int32)
    least = tl.load(queries.least + b * blocks + at, mask=at < blocks, other=0)[:, None]
    most = tl.load(queries.most + b * blocks + at, mask=at < blocks, other=0)[:, None]
    for start in range(0, tiles, OF_WIDTH):
        tile = start + tl.arange(0, OF_WIDTH)
        place = r * tiles + tile
        meets = (tile < tiles)[None, :]
        if call.masks.key_segments is not None:
            meets = meets & (tl.load(keys.least + place, mask=tile < tiles, other=0)[None, :] <= most)
            meets = meets & (tl.load(keys.most + place, mask=tile < tiles, other=0)[None, :] >= least)
        first = tl.load(keys.edges + place, mask=tile < tiles, other=S)
        last = tl.load(keys.edges + every + place, mask=tile < tiles, other=0)
        first_seen = tl.minimum(first_seen, tl.min(first, 0))
        if call.key_bias is not None:
            some, is_later = (first < last)[None, :], tile[None, :] > end_tile[:, None]
            before = tl.maximum(before, tl.max(tl.where(some & ~is_later, tile[None, :], -1), 1))
            after = tl.minimum(after, tl.min(tl.where(some & is_later, tile[None, :], tiles), 1))
        low = tl.minimum(low, tl.min(tl.where(meets, first[None, :], S), 1))
        high = tl.maximum(high, tl.max(tl.where(meets, last[None, :], 0), 1))
    if call.key_bias is not None:
        nearest = tl.where(before >= 0, before, tl.where(after < tiles, after, 0))
        count = tl.cdiv(T, BIAS_ROWS)
        reference = tl.load(call.key_bias.bases + r * tiles + nearest, mask=at < count, other=0.0)
        tl.store(call.key_bias.references + r * count + at, reference, mask=at < count)
    if call.query_start is not None:
        low = tl.maximum(low, load_first_key(call, r, at * TILE, at < blocks))
    tl.store(ALLOWED + (r * blocks + at) * 2, low, mask=at < blocks)
    tl.store(ALLOWED + (r * blocks + at) * 2 + 1, high, mask=at < blocks)
    tl.store(FIRST_SEEN + r, first_seen)
    count = tl.cdiv(blocks, PARTS)
    of_queries, of_keys = (queries, b, count, blocks), (keys, r, tiles, tiles)
    low, high = full_run(at, of_queries, of_keys, offset, PARTS, 1, KEYS=False, OF_WIDTH=OF_WIDTH)
    if call.query_start is not None:
        last = tl.minimum((at + 1) * PARTS * TILE, T) - 1
        low = tl.maximum(low, tl.cdiv(load_first_key(call, r, last, at < count), TILE))
    out = FULL_BLOCKS + b * row + (h * count + at) * 2
    tl.store(out, low, mask=at < count)
    tl.store(out + 1, high, mask=at < count)
    low, high = full_run(at, of_keys, of_queries, offset, 1, PARTS, KEYS=True, OF_WIDTH=OF_WIDTH)
    if call.query_start is not None:
        high = tl.minimum(high, blocks_until_cut(call, r, at, count, PARTS, OF_WIDTH))
    out = FULL_TILES + b * row + (h * tiles + at) * 2
    tl.store(out, low, mask=at < tiles)
    tl.store(out + 1, high, mask=at < tiles)
