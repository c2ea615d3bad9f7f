"""The positions of queries, which may lie up to 2⁶⁰ tokens from the keys, in int32 and without losing a digit.

If all queries of a sequence are on the same side of all keys, moving them together adds one number to all scores of a query.
So they are moved to right next to the keys. The window, dropout, the slope's gradient, and the reach and lse that are returned
compensate for it.
"""

# mypy: ignore-errors
# ruff: noqa: RET503
# A missing part of a call is None: Triton 3.6 returns that only implicitly.
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest number of fp32
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def given_offset(query_offset, b):
    """The given position of query 0, int64."""
    if query_offset.pointer is None:
        first = tl.cast(query_offset.first, tl.int64)
    else:
        first = tl.load(query_offset.pointer + b * query_offset.batch)
    return first


@triton.jit
def load_offset(query_offset, b, T, S):
    """The position of query 0 after the move, between −T and S."""
    first = given_offset(query_offset, b)
    return tl.minimum(tl.maximum(first, -T), S).to(tl.int32)


@triton.jit
def distance_moved(query_offset, b, T, S):
    """The given position of query 0 minus that of `load_offset`, int64; 0 unless all queries are on the same side of all keys."""
    first = given_offset(query_offset, b)
    return first - tl.minimum(tl.maximum(first, -T), S)


@triton.jit
def load_window(call, b):
    """The window after the move; 0 hides all keys, and None = all are inside."""
    if call.window is not None:
        moved = distance_moved(call.query_offset, b, call.T, call.S)
        return tl.minimum(tl.maximum(call.window - tl.abs(moved), 0), 2**30).to(tl.int32)


@triton.jit
def lse_before_move(lse, call, b, h):
    """The natural lse at the given positions; a finite one that overflows becomes the largest number."""
    moved = distance_moved(call.query_offset, b, call.T, call.S)
    slope = tl.load(call.slopes.pointer + b * call.slopes.batch + h)
    if call.right_slopes is not None:
        right = tl.load(call.right_slopes.pointer + b * call.right_slopes.batch + h)
        slope = tl.where(moved < 0, right, slope)
    bias = tl.where(moved == 0, 0.0, slope * tl.abs(moved).to(tl.float32))
    return tl.where(lse > float("-inf"), tl.minimum(tl.maximum(lse - bias, -LARGEST), LARGEST), lse)


@triton.jit
def biased_lse_before_move(lse, high, low, call, GIVEN_LSE, b, bh, i, there):
    """The natural lse of queries i with key biases, in fp64, with the bias of the queries; it fits the numbers of GIVEN_LSE.

    `lse` is in log2 units and relative to the pair (high, low).
    """
    natural = ((lse.to(tl.float64) + high.to(tl.float64)) + low.to(tl.float64)) * LN2
    if call.query_bias is not None:  # all queries are among the keys
        natural += tl.load(call.query_bias + bh * call.T + i, mask=there, other=0.0)
    else:
        moved, h = distance_moved(call.query_offset, b, call.T, call.S), (bh % call.H).to(tl.int32)
        slope = tl.load(call.slopes.pointer + b * call.slopes.batch + h)
        if call.right_slopes is not None:
            right = tl.load(call.right_slopes.pointer + b * call.right_slopes.batch + h)
            slope = tl.where(moved < 0, right, slope)
        natural -= tl.where(moved == 0, 0.0, slope.to(tl.float64) * tl.abs(moved).to(tl.float64))
    if GIVEN_LSE.dtype.element_ty == tl.float32:
        natural = tl.where(lse > float("-inf"), tl.minimum(tl.maximum(natural, -LARGEST), LARGEST), natural)
    return natural


@triton.jit
def load_first_key(call, bh, i, there):
    """The first key that the queries i of a head may see; None = all before them."""
    if call.query_start is not None:
        return tl.load(call.query_start + bh * call.T + i, mask=there, other=0).to(tl.int32)


@triton.jit
def table_of(call, b, h):
    """The address of a head's number of the table for distance 0, after the move; None = no table."""
    if call.table is not None:
        moved = distance_moved(call.query_offset, b, call.T, call.S)
        column = tl.minimum(tl.maximum(moved - call.table.first, -(2**30)), 2**30)  # beyond, no key is seen
        return call.table.numbers + h.to(tl.int64) * call.table.columns + column


@triton.jit
def reach_before_move(reach, moved):
    """The reach at the given positions; `moved` is the distance that the keys came nearer, and negative for the other side's."""
    return tl.minimum(reach + tl.maximum(moved, 0), 2**31 - 1).to(tl.int32)
