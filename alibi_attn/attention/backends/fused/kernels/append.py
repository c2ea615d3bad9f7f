"""New keys and values of a cache whose length is a tensor, in one kernel: `backends/fused/append.py`."""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Rows
from alibi_attn.attention.backends.fused.kernels.certificate import _TINY, UNIT, norm_bound
from alibi_attn.attention.backends.fused.kernels.reach import is_last
from alibi_attn.attention.backends.fused.kernels.tiles import TILE, load_rows, of_head, store_rows


@triton.jit
def kept_bound(rows, D: tl.constexpr):
    """An upper bound, fp64, of the norm of every row and of what torch's `norm_bound` returns, which rounds differently."""
    return norm_bound(rows, D).to(tl.float64) * (1.0 + 2 * (D + 32) * UNIT) + _TINY


@triton.jit
def raise_norm(NORMS, bounds, here):
    """The norm of a tile becomes at least these bounds."""
    most = tl.max(tl.where(here, bounds, 0.0), 0)
    tl.store(NORMS, tl.maximum(tl.load(NORMS), most))


@triton.jit
def append_kernel(
    K,
    V,
    KEYS,
    VALUES,
    KEY_NORMS,
    VALUE_NORMS,
    LENGTH,
    FIRST,
    ARRIVED,
    count,
    heads,
    capacity,
    parts,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """Program: those of the `count` new rows of a key head that belong to one tile of the cache, at most N.

    Args:
        K, V, KEYS, VALUES: rows of the new keys and values, and of the cache.
        KEY_NORMS, VALUE_NORMS: [B, heads, tiles] fp64, the norms of the cache's tiles.
        LENGTH: int64; the last program to finish adds `count`. FIRST gets what it was.
        ARRIVED: int32, 0 before and after.
        parts: the tiles that `count` rows can touch.
    """
    bk, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    b, kv = (bk // heads).to(tl.int64), bk % heads
    length = tl.load(LENGTH)
    place = tl.minimum(length, capacity - 1)
    tile = place // TILE + part
    start = tl.maximum(place, tile * TILE)
    at = start + tl.arange(0, N)
    here = (at < place + count) & (at < (tile + 1) * TILE) & (at < capacity)
    if start < tl.minimum(place + count, capacity):
        norms = bk.to(tl.int64) * tl.cdiv(capacity, TILE) + tile
        k = load_rows(of_head(K, b, kv), start - place, here, N, DK)
        k = tl.where(length + count > capacity, float("nan"), k.to(tl.float32))
        store_rows(of_head(KEYS, b, kv), start, k, here, N, DK)
        raise_norm(KEY_NORMS + norms, kept_bound(k, DK), here)
        v = load_rows(of_head(V, b, kv), start - place, here, N, DV)
        store_rows(of_head(VALUES, b, kv), start, v, here, N, DV)
        raise_norm(VALUE_NORMS + norms, kept_bound(v, DV), here)
    if is_last(ARRIVED, tl.num_programs(0)):  # all programs have read the length
        tl.store(ARRIVED, 0)
        tl.store(FIRST, length)
        tl.store(LENGTH, length + count)


@triton.jit
def append_to_rings_kernel(
    K, V, KEYS, VALUES, RINGS, LENGTH, FIRST, ARRIVED, heads, row, DK: tl.constexpr, DV: tl.constexpr
):
    """Program: the new token of one key head of one sequence.

    Args:
        K, V: the Rows of one key and value per head. KEYS, VALUES: the rows of all rings, one after the other.
        RINGS: [heads, `row`] int64, `append.Ring`.
        LENGTH, FIRST, ARRIVED: as for `append_kernel`; FIRST has one number for each group of heads.
    """
    b, kv = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    ring = RINGS + kv * row
    start, step, size = tl.load(ring), tl.load(ring + 1), tl.load(ring + 2)
    again, group = tl.load(ring + 3), tl.load(ring + 4)
    length, x = tl.load(LENGTH), tl.arange(0, 1)
    slot = tl.where(again > 0, length % size, tl.minimum(length, size - 1))
    place = start + b * step + slot
    k = load_rows(of_head(K, b, kv), 0, x == 0, 1, DK)
    k = tl.where((again == 0) & (length >= size), float("nan"), k.to(tl.float32))
    v = load_rows(of_head(V, b, kv), 0, x == 0, 1, DV)
    keys, values = Rows(KEYS, 0, 0, DK), Rows(VALUES, 0, 0, DV)
    store_rows(keys, place, k, x == 0, 1, DK)
    store_rows(values, place, v, x == 0, 1, DV)
    if again > 0:
        store_rows(keys, place + size, k, x == 0, 1, DK)
        store_rows(values, place + size, v, x == 0, 1, DV)
    if (b == 0) & (group >= 0):
        tl.store(FIRST + group, tl.where((again > 0) & (length >= size), size + slot, slot))
    if is_last(ARRIVED, tl.num_programs(0)):
        tl.store(ARRIVED, 0)
        tl.store(LENGTH, length + 1)
