"""What key mask and segments hide, in whole tiles: where the loops need not ask (`open`), and where there is nothing to be seen.

A tile of keys is whole if the mask hides none of them and they are of one segment, whose number is its label; a tile of queries
is whole if they are of one segment. Between whole tiles with the same label nothing is hidden.
"""

# mypy: ignore-errors
# Triton compiles these functions itself and takes no type annotations but its own.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.certificate import larger


@triton.jit
def labels_kernel(
    MASK, SEGMENTS, LEAST, MOST, WHOLE, EDGES, n, tiles, HAS_MASK: tl.constexpr, HAS_SEGMENTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Program: one tile of TILE keys, or queries, of `n`. LEAST, MOST [B, tiles] int64: its smallest and largest segment.

    WHOLE [B, tiles] int32: 1 where it is. EDGES [2, B, tiles] int32: the first key that may be seen (n where there is none), and
    the one behind the last (0).
    """
    b, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    j = tile * TILE + tl.arange(0, TILE)
    here = j < n
    least, most = (b * 0), (b * 0)
    if HAS_SEGMENTS:
        # The last one stands in for those behind it.
        label = tl.load(SEGMENTS + b * n + tl.minimum(j, n - 1)).to(tl.int64)
        least, most = tl.min(label, 0), tl.max(label, 0)
    whole = least == most
    if HAS_MASK:
        shown = tl.load(MASK + b * n + tl.minimum(j, n - 1)) != 0
        whole = whole & (tl.min(shown.to(tl.int32), 0) == 1)
        here = here & shown
    at = b * tiles + tile
    tl.store(LEAST + at, least)
    tl.store(MOST + at, most)
    tl.store(WHOLE + at, whole.to(tl.int32))
    tl.store(EDGES + at, tl.min(tl.where(here, j, n), 0))
    tl.store(EDGES + tl.num_programs(0).to(tl.int64) + at, tl.max(tl.where(here, j + 1, 0), 0))


@triton.jit
def label_of(LEAST, MOST, WHOLE, b, at, count, tiles, PARTS: tl.constexpr):
    """(label, whole) of block `at` of PARTS tiles each, of `count` blocks; not whole outside."""
    there = (at >= 0) & (at < count)
    label = tl.load(LEAST + b * tiles + at * PARTS, mask=there, other=0)
    whole = there
    for part in tl.static_range(PARTS):
        place = b * tiles + tl.minimum(at * PARTS + part, tiles - 1)
        same = (tl.load(LEAST + place, mask=there, other=0) == label) & (
            tl.load(MOST + place, mask=there, other=0) == label
        )
        whole = whole & same & (tl.load(WHOLE + place, mask=there, other=0) == 1)
    return label, whole


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def runs_kernel(LEAST, MOST, WHOLE, RUNS, tiles, count, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Program: one sequence. RUNS [2, B, count] int32: of each block of PARTS tiles, where the run of whole blocks with its label
    begins, and the block behind it.
    """
    b = tl.program_id(0).to(tl.int64)
    every = tl.num_programs(0).to(tl.int64) * count
    x = tl.arange(0, WIDTH)
    begin = 0
    for start in range(0, count, WIDTH):
        at = start + x
        label, whole = label_of(LEAST, MOST, WHOLE, b, at, count, tiles, PARTS)
        before, as_well = label_of(LEAST, MOST, WHOLE, b, at - 1, count, tiles, PARTS)
        goes_on = whole & as_well & (label == before)
        run = tl.maximum(tl.associative_scan(tl.where(goes_on, 0, at), 0, larger), begin)
        tl.store(RUNS + b * count + at, run, mask=at < count)
        begin = tl.max(run, 0)
    end = count
    for step in range(tl.cdiv(count, WIDTH)):
        at = (tl.cdiv(count, WIDTH) - 1 - step) * WIDTH + x
        label, whole = label_of(LEAST, MOST, WHOLE, b, at, count, tiles, PARTS)
        behind, as_well = label_of(LEAST, MOST, WHOLE, b, at + 1, count, tiles, PARTS)
        goes_on = whole & as_well & (label == behind)
        run = tl.minimum(tl.associative_scan(tl.where(goes_on, count, at + 1), 0, _smaller, reverse=True), end)
        tl.store(RUNS + every + b * count + at, run, mask=at < count)
        end = tl.min(tl.where(at < count, run, count), 0)


@triton.jit
def open_kernel(
    LEAST, MOST, WHOLE, OF_LEAST, OF_MOST, OF_WHOLE, RUNS, FIRST, OPEN, first_b, tiles, count, of_tiles, of_count,
    PARTS: tl.constexpr, OF_PARTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program: WIDTH of the `count` blocks (PARTS tiles each) of one sequence. OPEN [B, count, 2] int32: the run of others, `OF`
    (OF_PARTS tiles each), to which nothing is hidden: the one next to where a block stands. KEYS: the blocks are keys, the others
    queries, the first of which stands at FIRST.
    """
    parts = tl.cdiv(count, WIDTH)
    b = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    origin = tl.load(FIRST + b * first_b).to(tl.int32)
    size, other_size = PARTS * TILE, OF_PARTS * TILE
    label, whole = label_of(LEAST, MOST, WHOLE, b, at, count, tiles, PARTS)
    begin = at * size + origin
    if KEYS:
        begin = at * size - origin
    # Of the others, the last that ends before a block begins, and the first that begins behind its end.
    before, behind = (begin + 1) // other_size - 1, (begin + size + other_size - 2) // other_size
    near, far = before, behind
    if KEYS:  # queries look back: those that ask a tile stand behind it
        near, far = behind, before
    low, high = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    every = tl.num_programs(0).to(tl.int64) // parts * of_count
    for choice in tl.static_range(2):
        place = far
        if choice == 1:
            place = near
        of_label, of_whole = label_of(OF_LEAST, OF_MOST, OF_WHOLE, b, place, of_count, of_tiles, OF_PARTS)
        fits = whole & of_whole & (label == of_label)
        low = tl.where(fits, tl.load(RUNS + b * of_count + place, mask=fits, other=0), low)
        high = tl.where(fits, tl.load(RUNS + every + b * of_count + place, mask=fits, other=0), high)
    tl.store(OPEN + (b * count + at) * 2, low, mask=at < count)
    tl.store(OPEN + (b * count + at) * 2 + 1, high, mask=at < count)


@triton.jit
def allowed_kernel(
    LEAST, MOST, EDGES, OF_LEAST, OF_MOST, ALLOWED, blocks, tiles, S,
    HAS_SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, OF_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program: WIDTH blocks of TILE queries of one sequence. ALLOWED [B, blocks, 2] int32: outside of these keys they see none.

    LEAST, MOST are those of the queries, OF_LEAST, OF_MOST and EDGES those of the keys.
    """
    parts = tl.cdiv(blocks, WIDTH)
    b = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    every = tl.num_programs(0).to(tl.int64) // parts * tiles
    low, high = tl.zeros([WIDTH], tl.int32) + S, tl.zeros([WIDTH], tl.int32)
    least = tl.load(LEAST + b * blocks + at, mask=at < blocks, other=0)[:, None]
    most = tl.load(MOST + b * blocks + at, mask=at < blocks, other=0)[:, None]
    for start in range(0, tiles, OF_WIDTH):
        tile = start + tl.arange(0, OF_WIDTH)
        place = b * tiles + tile
        meets = (tile < tiles)[None, :]
        if HAS_SEGMENTS:
            meets = meets & (tl.load(OF_LEAST + place, mask=tile < tiles, other=0)[None, :] <= most)
            meets = meets & (tl.load(OF_MOST + place, mask=tile < tiles, other=0)[None, :] >= least)
        first = tl.load(EDGES + place, mask=tile < tiles, other=S)[None, :]
        last = tl.load(EDGES + every + place, mask=tile < tiles, other=0)[None, :]
        low = tl.minimum(low, tl.min(tl.where(meets, first, S), 1))
        high = tl.maximum(high, tl.max(tl.where(meets, last, 0), 1))
    tl.store(ALLOWED + (b * blocks + at) * 2, low, mask=at < blocks)
    tl.store(ALLOWED + (b * blocks + at) * 2 + 1, high, mask=at < blocks)
