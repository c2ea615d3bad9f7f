"""Which tiles a block of queries visits, which blocks visit a tile of keys, and where in them nothing is hidden."""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Band
from alibi_attn.attention.backends.fused.kernels.tiles import OUTLIERS, TILE


@triton.jit
def band_of(visited, b, h, n, start, head, T, S, C):
    """The Band, in tiles of BN keys, of block n of BM queries, the first of which is at `start`.

    `bands` of `visited` has one for UNIT queries, and `full` one for ROWS.
    """
    blocks = tl.cdiv(T, C.ROWS)
    of_sequence = b * visited.row + n * C.BM // C.ROWS * 2
    if head.bias is not None:
        of_sequence += h * blocks * 2  # each head hides other keys
    block = b * visited.row + (h * blocks * (C.ROWS // C.UNIT) + n * C.BM // C.UNIT) * 4
    first, last = tl.load(visited.bands + block), tl.load(visited.bands + block + 1)
    for part in tl.static_range(1, C.BM // C.UNIT):
        first = tl.minimum(first, tl.load(visited.bands + block + 4 * part))
        last = tl.maximum(last, tl.load(visited.bands + block + 4 * part + 1))
    first, last = first * (TILE // C.BN), tl.minimum(last * (TILE // C.BN), tl.cdiv(S, C.BN))
    if C.CAUSAL:
        last = tl.minimum(last, tl.cdiv(tl.maximum(start + C.BM, 0), C.BN))
    low, until = first, tl.minimum(last, S // C.BN)
    if visited.full is not None:
        low = tl.maximum(low, tl.load(visited.full + of_sequence) * (TILE // C.BN))
        until = tl.minimum(until, tl.load(visited.full + of_sequence + 1) * (TILE // C.BN))
    end = start + C.BM - 1
    if head.window is not None:
        low = tl.maximum(low, tl.maximum(end - head.window + C.BN, 0) // C.BN)
    high = tl.maximum(tl.minimum(tl.maximum(start + 1, 0) // C.BN, until), low)
    after = high
    if C.CAUSAL:
        until = high
    else:
        after = tl.maximum(after, tl.cdiv(tl.maximum(end, 0), C.BN))
        if head.window is not None:
            until = tl.minimum(until, tl.maximum(start + head.window, 0) // C.BN)
        until = tl.maximum(until, after)
        if head.right is not None:
            until = tl.where(head.right < float("inf"), until, after)  # an infinite slope hides them
    return Band(first, last, low, high, after, until)


@triton.jit
def blocks_of(first, last, full_first, full_last, tile_start, query_offset, head, T, C):
    """The Band of BN keys from `tile_start` on: the blocks of BM queries in [first, last), and those that see the keys in full,
    before and after the keys, within [full_first, full_last).
    """
    tile_end = tile_start + C.BN - 1 - query_offset  # positions relative to the first query
    tile_start = tile_start - query_offset
    low = tl.maximum(first, full_first)
    until = tl.minimum(tl.minimum(last, full_last), T // C.BM)
    high = low
    if not C.CAUSAL:
        if head.window is not None:
            low = tl.maximum(low, tl.maximum(tile_end - head.window + C.BM, 0) // C.BM)
        high = tl.maximum(tl.minimum(tl.maximum(tile_start + 1, 0) // C.BM, until), low)
        if head.right is not None:
            high = tl.where(head.right < float("inf"), high, low)
    after = tl.maximum(high, tl.cdiv(tl.maximum(tile_end, 0), C.BM))
    if head.window is not None:
        until = tl.minimum(until, tl.maximum(tile_start + head.window, 0) // C.BM)
    return Band(first, last, low, high, after, tl.maximum(until, after))


@triton.jit
def full_count(band):
    return band.high - band.low + band.until - band.after


@triton.jit
def full_tile(x, band, CAUSAL: tl.constexpr):
    """Tile number x of those in a band that are seen in full."""
    tile = band.low + x
    if not CAUSAL:
        tile += tl.where(tile >= band.high, band.after - band.high, 0)
    return tile


@triton.jit
def partial_tile(x, band, CAUSAL: tl.constexpr):
    """Tile number x of the others in a band."""
    tile = band.first + x
    tile += tl.where(tile >= band.low, band.high - band.low, 0)
    if not CAUSAL:
        tile += tl.where(tile >= band.after, band.until - band.after, 0)
    return tile


@triton.jit
def outward_full(x, band, CAUSAL: tl.constexpr):
    """Tile number x of those that are seen in full: to the left from the nearest on, and then to the right."""
    tile = band.high - 1 - x
    if not CAUSAL:
        tile = tl.where(tile >= band.low, tile, band.after + (band.low - 1 - tile))
    return tile


@triton.jit
def outward_partial(x, count, band, CAUSAL: tl.constexpr):
    """Tile number x of the `count` others in a band, the nearest first."""
    if CAUSAL:
        x = count - 1 - x
    else:
        x = x + tl.minimum(tl.maximum(band.low - band.first, 0), count)
        x = tl.where(x < count, x, x - count)
    return partial_tile(x, band, CAUSAL)


@triton.jit
def outlier_count(outliers):
    """The number of outlier tiles of one block."""
    return tl.sum((tl.load(outliers + tl.arange(0, OUTLIERS)) >= 0).to(tl.int32), 0)


@triton.jit
def uniform_outlier_count(outliers):
    """The same. The compiler sees that all threads have the same number, and keeps a loop's addresses once for all of them."""
    count = 0
    for x in tl.static_range(OUTLIERS):
        count += (tl.load(outliers + x) >= 0).to(tl.int32)
    return count


@triton.jit
def outlier_tile(x, outliers, BN: tl.constexpr):
    """Tile number x of BN keys in the outlier tiles of a block."""
    x = tl.cast(x, tl.int32)  # in the interpreter a loop variable is a Python int
    return tl.load(outliers + x // (TILE // BN)) * (TILE // BN) + x % (TILE // BN)
