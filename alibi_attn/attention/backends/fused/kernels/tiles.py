"""Shared by forward, backward and decoding: tiles of rows, and the masks and bias of a tile of scores.

Shapes: BM queries, BN keys, DP ≥ D numbers per row. Scores are in units of log2. The bias is computed in fp32 from integer
distances, relative to the tile.
"""

# mypy: ignore-errors
# ruff: noqa: RET503
# A missing part of a call is None: Triton 3.6 returns that only implicitly.
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import BlockBias, Rows
from alibi_attn.attention.certificate import constants

LOG2E = tl.constexpr(1.4426950408889634)
OUTLIERS = tl.constexpr(constants.OUTLIER_TILES)
TILE = tl.constexpr(constants.TILE)
NEAR = tl.constexpr(16.0)  # binary digits that a score may exceed its reference by


@triton.constexpr_function
def padded(head_dim):
    """DP: D rounded up to the size of a tile's row."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def of_head(X, b, h):
    """The rows of one head of one sequence."""
    return Rows(X.pointer + b * X.batch + h.to(tl.int64) * X.head, X.batch, X.head, X.row)


@triton.jit
def addresses(X, first, N: tl.constexpr, D: tl.constexpr):
    """The addresses of N rows of a head, from row `first` on."""
    at = X.pointer + tl.cast(first, tl.int64) * X.row
    return at + (tl.arange(0, N)[:, None] * X.row + tl.arange(0, padded(D))[None, :])  # [N, DP]


@triton.jit
def inside(here, D: tl.constexpr):
    """The numbers of a tile that exist, given the rows that exist, `here`."""
    here = here[:, None]
    if padded(D) != D:
        here = here & (tl.arange(0, padded(D)) < D)[None, :]
    return here  # [N, 1] or [N, DP]


@triton.jit
def load_tile(X, tile, N: tl.constexpr, D: tl.constexpr):
    """Tile number `tile` of N rows, which all exist; zeros beyond D."""
    if X.row is None:
        rows = load_described(X.pointer, X.batch, X.head, tile * N, N, D)
    elif padded(D) == D:
        rows = tl.load(addresses(X, tile * N, N, D))
    else:
        rows = tl.load(addresses(X, tile * N, N, D), mask=(tl.arange(0, padded(D)) < D)[None, :], other=0.0)
    return rows


@triton.jit
def load_described(X, b, h, first, N: tl.constexpr, D: tl.constexpr):
    """N rows of a head from row `first` on, [N, DP], given a descriptor of X [B, heads, rows, D]; zeros past the last row."""
    return X.load([tl.cast(b, tl.int32), tl.cast(h, tl.int32), first, 0]).reshape([N, padded(D)])


@triton.jit
def load_rows(X, first, here, N: tl.constexpr, D: tl.constexpr):
    """N rows from row `first` on; zeros beyond D, and for rows that are not `here`, or with a descriptor past the last."""
    if X.row is None:
        rows = load_described(X.pointer, X.batch, X.head, first, N, D)
    else:
        rows = tl.load(addresses(X, first, N, D), mask=inside(here, D), other=0.0)
    return rows


@triton.jit
def store_rows(X, first, rows, here, N: tl.constexpr, D: tl.constexpr):
    tl.store(addresses(X, first, N, D), rows.to(X.pointer.dtype.element_ty), mask=inside(here, D))


@triton.jit
def all_finite(rows):
    """For every row of a tile, whether it has no NaN and no inf."""
    return tl.sum(rows.to(tl.float32) * 0.0, 1) == 0.0


@triton.jit
def load_slope(slopes, b, h, there=None):
    """The slopes of some heads, in log2 units per token; 0 past the last head. Only an infinite slope is infinite in them.

    Like all that loads a part of a call: None if the call does not have it.
    """
    if slopes is not None:
        at = slopes.pointer + b * slopes.batch + h
        if there is None:
            m = tl.load(at)
        else:
            m = tl.load(at, mask=there, other=0.0)
        return m * tl.where(tl.abs(m) < 2.3e38, LOG2E, 1.0)


@triton.jit
def load_segments(segments, b, i, there, count):
    """The segments of queries, or keys, i of sequence b, of which there are `count`; None if there are no segments."""
    if segments is not None:
        return tl.load(segments + b * count + i, mask=there, other=0)


@triton.jit
def shown_keys(masks, sequence, j, here, S):
    """The visible ones of the keys j that are `here`."""
    if masks.keys is not None:
        here = tl.load(masks.keys + sequence * S + j, mask=here, other=0) != 0
    return here  # [BN]


@triton.jit
def bias_for(key_bias, bh, block, tiles, S):
    """The BlockBias of a head for a block of the plan, numbered over all heads; everything broadcasts."""
    if key_bias is not None:
        reference = tl.load(key_bias.references + block)
        return BlockBias(key_bias.rest + bh * S, key_bias.pairs + bh * 2 * S, key_bias.bases + bh * tiles, reference)


@triton.jit
def base_of(bias, tile, BN: tl.constexpr):
    """The base of the biases of a tile that is seen in full. BN divides TILE."""
    return tl.load(bias.bases + tile // (TILE // BN))


@triton.jit
def ahead_of(base, origin):
    """How much one pair exceeds another; only the difference is rounded. It is added to maxima and subtracted from lse, not
    added to scores: it cancels for keys that weigh much.
    """
    return (base[0] - origin[0]) + (base[1] - origin[1])


@triton.jit
def lse_rows(LSE, bh, b, H, T, key_bias):
    """The address of a head's lse: [B, H, T]; with a key bias [B, 3, H, T], followed by the pair that it is relative to."""
    at = LSE + bh * T
    if key_bias is not None:
        at += b * 2 * H * T
    return at


@triton.jit
def pair_rows(LSE, H, T):
    """(numbers, rounding errors): the addresses of the pairs of a head, from the address of its lse."""
    every = tl.cast(H, tl.int64) * T
    return LSE + every, LSE + 2 * every


@triton.jit
def add_exactly(total, left, x):
    """(total, left) after adding x; `left` is the rounding error of the total (Knuth's two-sum)."""
    new = total + x
    part = new - total
    return new, left + ((total - (new - part)) + (x - part))


@triton.jit
def biased_scores(products, distance, shown, head, CAUSAL: tl.constexpr):
    """(scores, seen) of one tile: products·scale − slope·|distance|; everything broadcasts, and `head` is in log2 units.

    `shown` are the keys that the masks leave. A score that is not seen may have any value.
    """
    slope, away = head.slope, distance
    if not CAUSAL:
        away = tl.abs(distance)
    if head.right is not None:
        slope = tl.where(distance < 0, head.right, head.slope)
    seen = shown
    if CAUSAL:
        seen = seen & (distance >= 0)
    elif head.right is not None:
        # An infinite slope hides the key.
        seen = seen & (slope < float("inf"))
        slope = tl.where(slope < float("inf"), slope, 0.0)
    if head.window is not None:
        seen = seen & (away < head.window)
    return products * head.scale - slope * away.to(tl.float32), seen


@triton.jit
def partial_scores(tile, queries, head, K, masks, S, origin, C):
    """(scores, seen, k, here, origin) of a tile in which some keys are hidden from some queries; `here` are the keys that
    are read.

    Scores with key biases are relative to `origin`, a pair of [BM]: the given one, or about the row's largest score. Its second
    number is 0 below 2^31, so it need not be read for tiles that are seen in full, which have smaller bases. Without key biases
    it is a pair of 0.
    """
    jj = tl.arange(0, C.BN)
    j = tile * C.BN + jj
    here = shown_keys(masks, queries.sequence, j, j < S, S)
    own = None
    if head.bias is not None:
        own = tl.load(head.bias.pairs + j[None, :], mask=here[None, :], other=float("-inf"))  # [1 or BM, BN]
        here = here & (tl.max(own, 0) > float("-inf"))
    k = load_rows(K, tile * C.BN, here, C.BN, C.D)  # [BN, DP]
    shown = here[None, :]
    if masks.key_segments is not None:
        segments = tl.load(masks.key_segments + queries.sequence * S + j, mask=here, other=0)
        shown = shown & (queries.segments[:, None] == segments[None, :])
    if queries.first_key is not None:
        shown = shown & (j[None, :] >= queries.first_key[:, None])
    products = tl.dot(queries.q, k.T, input_precision=C.PRECISION)  # [BM, BN]
    scores, seen = biased_scores(products, queries.position[:, None] - j[None, :], shown, head, C.CAUSAL)
    if own is None:
        origin = 0.0, 0.0
    else:
        seen = seen & (own > float("-inf"))
        low = tl.load(head.bias.pairs + S + j[None, :], mask=here[None, :], other=0.0)
        if origin is None:
            total = tl.where(seen, own + scores, float("-inf"))
            most = tl.max(total, 1)
            rest = tl.max(tl.where(seen & (total >= most[:, None]), low, float("-inf")), 1)
            is_huge = (tl.abs(most) >= 2147483648.0) & (most > float("-inf"))
            origin = tl.where(most > float("-inf"), most, 0.0), tl.where(is_huge, rest, 0.0)
        scores += (own - origin[0][:, None]) + (low - origin[1][:, None])
    if head.table is not None:
        scores += tl.load(head.table + (queries.position[:, None] - j[None, :]), mask=seen, other=0.0)
    return scores, seen, k, here, origin


@triton.jit
def no_maximum(BM: tl.constexpr):
    """The running maximum of no scores; see `raised`."""
    nothing = tl.zeros([BM], tl.float32)
    return nothing + float("-inf"), nothing, nothing


@triton.jit
def raised(m_i, largest, base, table):
    """(m_i, the number to subtract from this tile's scores, the factor for earlier sums) after a tile with these largest scores.

    Args:
        m_i: the largest score, and the pair that it is relative to if keys have biases: (value, high, low), each [BM].
        base: the pair that the tile's scores are relative to; rows whose own pair is far below adopt it. None without biases.
        table: of Head.
    """
    value, high, low = m_i
    if base is not None:
        ahead = ahead_of(base, (high, low))
        ahead = tl.where(largest == float("-inf"), 0.0, ahead)  # no key is seen, and the difference may overflow
        moves = largest + ahead > value + NEAR
        value = tl.where(moves & (value > float("-inf")), value - ahead, value)
        high, low = tl.where(moves, base[0], high), tl.where(moves, base[1], low)
        ahead = tl.where(moves, 0.0, ahead)
        largest += ahead
    value, known, shrink = raised_maximum(value, largest, table)
    if base is not None:
        known -= ahead
    return (value, high, low), known, shrink


@triton.jit
def raised_maximum(m_i, largest, table=None):
    """(m_i, the number to subtract from scores, the factor for earlier sums) after scores with this `largest` one."""
    new = tl.maximum(m_i, largest)
    known = tl.where(new == float("-inf"), 0.0, new)
    return new, known, power(m_i - known, table)  # [BM]


@triton.jit
def power(x, table):
    """2 to a number in units of log2; with a table, e to a natural one."""
    if table is not None:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def normalized(acc, l_i):
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # [BM, DP]


@triton.jit
def natural_lse(m_i, l_i):
    return (m_i + tl.log2(l_i)) / LOG2E  # [BM]


@triton.jit
def kept_lse(m_i, l_i, key_bias):
    """The lse to store: natural; with key biases in log2 units, because a large one must not be rounded twice."""
    if key_bias is not None:
        lse = m_i + tl.log2(l_i)
    else:
        lse = natural_lse(m_i, l_i)
    return lse  # [BM]


@triton.jit
def in_log2(kept, call):
    """A result of `kept_lse`, in log2 units; with a table unchanged."""
    if call.key_bias is None and call.table is None:
        kept = kept * LOG2E
    return kept


@triton.jit
def linear_bias(tile, start, head, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """(slope, near): in a tile seen in full the bias is slope·(j − near) − slope·(position − near); `near` is its key next to
    the queries, the first of which is at `start`.
    """
    near = tile * BN + BN - 1
    if CAUSAL:
        return head.slope, near
    to_left = near <= start
    away = head.slope
    if head.right is not None:
        away = head.right
    return tl.where(to_left, head.slope, -away), tl.where(to_left, near, near - (BN - 1))
