"""Which whole tiles a key mask and segments hide: where the loops need no masks (`full`), and where no key is visible.

A tile of keys is uniform if the mask hides none of them and all belong to one segment, whose number is its label. A tile of
queries is uniform if all belong to one segment. Between uniform tiles with the same label nothing is hidden.
"""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.certificate import larger
from alibi_attn.attention.backends.fused.kernels.positions import load_offset
from alibi_attn.attention.backends.fused.kernels.tiles import TILE


@triton.jit
def labels_kernel(KEY_MASK, SEGMENTS, labels, n, tiles):
    """Program: one tile of TILE of the `n` keys, or queries; writes its Labels. KEY_MASK and SEGMENTS [B, n] may be None."""
    b, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    j = tile * TILE + tl.arange(0, TILE)
    here = j < n
    least, most = (b * 0), (b * 0)
    if SEGMENTS is not None:
        # The last one is repeated to fill the tile.
        label = tl.load(SEGMENTS + b * n + tl.minimum(j, n - 1)).to(tl.int64)
        least, most = tl.min(label, 0), tl.max(label, 0)
    uniform = least == most
    if KEY_MASK is not None:
        shown = tl.load(KEY_MASK + b * n + tl.minimum(j, n - 1)) != 0
        uniform = uniform & (tl.min(shown.to(tl.int32), 0) == 1)
        here = here & shown
    at = b * tiles + tile
    tl.store(labels.least + at, least)
    tl.store(labels.most + at, most)
    tl.store(labels.uniform + at, uniform.to(tl.int32))
    tl.store(labels.edges + at, tl.min(tl.where(here, j, n), 0))
    tl.store(labels.edges + tl.num_programs(0).to(tl.int64) + at, tl.max(tl.where(here, j + 1, 0), 0))


@triton.jit
def label_of(labels, b, at, count, tiles, PARTS: tl.constexpr):
    """(label, uniform) of block `at` of `count` blocks of PARTS tiles; outside of them it is not uniform."""
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
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def runs_kernel(labels, RUNS, tiles, count, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Program: one sequence. RUNS [2, B, count] int32: for each block of PARTS tiles, the half-open run of uniform blocks with
    its label.
    """
    b = tl.program_id(0).to(tl.int64)
    every = tl.num_programs(0).to(tl.int64) * count
    x = tl.arange(0, WIDTH)
    begin = 0
    for start in range(0, count, WIDTH):
        at = start + x
        label, uniform = label_of(labels, b, at, count, tiles, PARTS)
        before, as_well = label_of(labels, b, at - 1, count, tiles, PARTS)
        goes_on = uniform & as_well & (label == before)
        run = tl.maximum(tl.associative_scan(tl.where(goes_on, 0, at), 0, larger), begin)
        tl.store(RUNS + b * count + at, run, mask=at < count)
        begin = tl.max(run, 0)
    end = count
    for step in range(tl.cdiv(count, WIDTH)):
        at = (tl.cdiv(count, WIDTH) - 1 - step) * WIDTH + x
        label, uniform = label_of(labels, b, at, count, tiles, PARTS)
        behind, as_well = label_of(labels, b, at + 1, count, tiles, PARTS)
        goes_on = uniform & as_well & (label == behind)
        run = tl.minimum(tl.associative_scan(tl.where(goes_on, count, at + 1), 0, _smaller, reverse=True), end)
        tl.store(RUNS + every + b * count + at, run, mask=at < count)
        end = tl.min(tl.where(at < count, run, count), 0)


@triton.jit
def full_kernel(
    labels, of_labels, RUNS, query_offset, FULL, tiles, count, of_tiles, of_count,
    PARTS: tl.constexpr, OF_PARTS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program: WIDTH of the `count` blocks (PARTS tiles each) of one sequence. FULL [B, count, 2] int32: for each block, the
    nearest run of blocks of the other kind, `of` (OF_PARTS tiles each), from which it hides nothing. KEYS: the blocks
    are keys, the others queries.
    """
    parts = tl.cdiv(count, WIDTH)
    b = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    size, other_size = PARTS * TILE, OF_PARTS * TILE
    T, S = tiles * TILE, of_tiles * TILE
    if KEYS:
        T, S = S, T
    offset = load_offset(query_offset, b, T, S)
    label, uniform = label_of(labels, b, at, count, tiles, PARTS)
    start = at * size + offset
    if KEYS:
        start = at * size - offset
    # The last other block that ends before a block begins, and the first that begins after its end.
    before, behind = (start + 1) // other_size - 1, (start + size + other_size - 2) // other_size
    near, far = before, behind
    if KEYS:  # queries attend to the left, so those that visit a tile come after it
        near, far = behind, before
    low, high = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    every = tl.num_programs(0).to(tl.int64) // parts * of_count
    for choice in tl.static_range(2):
        place = far
        if choice == 1:
            place = near
        of_label, of_uniform = label_of(of_labels, b, place, of_count, of_tiles, OF_PARTS)
        fits = uniform & of_uniform & (label == of_label)
        low = tl.where(fits, tl.load(RUNS + b * of_count + place, mask=fits, other=0), low)
        high = tl.where(fits, tl.load(RUNS + every + b * of_count + place, mask=fits, other=0), high)
    tl.store(FULL + (b * count + at) * 2, low, mask=at < count)
    tl.store(FULL + (b * count + at) * 2 + 1, high, mask=at < count)


@triton.jit
def allowed_kernel(
    queries, keys, ALLOWED, blocks, tiles, S, HAS_SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, OF_WIDTH: tl.constexpr
):  # fmt: skip
    """Program: WIDTH blocks of TILE queries of one sequence. ALLOWED [B, blocks, 2] int32: outside of these keys they see none.

    `queries` and `keys` are their Labels.
    """
    parts = tl.cdiv(blocks, WIDTH)
    b = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    every = tl.num_programs(0).to(tl.int64) // parts * tiles
    low, high = tl.zeros([WIDTH], tl.int32) + S, tl.zeros([WIDTH], tl.int32)
    least = tl.load(queries.least + b * blocks + at, mask=at < blocks, other=0)[:, None]
    most = tl.load(queries.most + b * blocks + at, mask=at < blocks, other=0)[:, None]
    for start in range(0, tiles, OF_WIDTH):
        tile = start + tl.arange(0, OF_WIDTH)
        place = b * tiles + tile
        meets = (tile < tiles)[None, :]
        if HAS_SEGMENTS:
            meets = meets & (tl.load(keys.least + place, mask=tile < tiles, other=0)[None, :] <= most)
            meets = meets & (tl.load(keys.most + place, mask=tile < tiles, other=0)[None, :] >= least)
        first = tl.load(keys.edges + place, mask=tile < tiles, other=S)[None, :]
        last = tl.load(keys.edges + every + place, mask=tile < tiles, other=0)[None, :]
        low = tl.minimum(low, tl.min(tl.where(meets, first, S), 1))
        high = tl.maximum(high, tl.max(tl.where(meets, last, 0), 1))
    tl.store(ALLOWED + (b * blocks + at) * 2, low, mask=at < blocks)
    tl.store(ALLOWED + (b * blocks + at) * 2 + 1, high, mask=at < blocks)
