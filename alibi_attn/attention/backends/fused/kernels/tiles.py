"""What forward, backward and decoding share: tiles of rows, masks and bias of a tile of scores, and which tiles there are.

Shapes: BM queries, BN keys, DP ≥ D numbers a row. Scores live in units of log2. The bias is formed in fp32 from integer
distances, relative to the tile.
"""

# mypy: ignore-errors
# Triton compiles these functions itself and takes no type annotations but its own.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Band, BlockBias, Rows
from alibi_attn.attention.certificate import constants

LOG2E = tl.constexpr(1.4426950408889634)
OUTLIERS = tl.constexpr(constants.OUTLIER_TILES)
TILE = tl.constexpr(constants.TILE)


@triton.constexpr_function
def padded(head_dim):
    """The numbers of a row that a tile has room for."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def of_head(X, b, h):
    """The rows of one head of one sequence."""
    return Rows(X.pointer + b * X.batch + h.to(tl.int64) * X.head, X.batch, X.head, X.row)


@triton.jit
def addresses(X, first, N: tl.constexpr, D: tl.constexpr):
    """Of N rows of a head, from row `first` on."""
    at = X.pointer + tl.cast(first, tl.int64) * X.row
    return at + tl.arange(0, N)[:, None] * X.row + tl.arange(0, padded(D))[None, :]  # [N, DP]


@triton.jit
def inside(here, D: tl.constexpr):
    """Which numbers of a tile there are, of rows that are `here`."""
    here = here[:, None]
    if padded(D) != D:
        here = here & (tl.arange(0, padded(D)) < D)[None, :]
    return here  # [N, 1] or [N, DP]


@triton.jit
def load_tile(X, tile, N: tl.constexpr, D: tl.constexpr):
    """Tile number `tile` of N rows, all of them there; zeros beyond D."""
    at = addresses(X, tile * N, N, D)
    if padded(D) == D:
        rows = tl.load(at)
    else:
        rows = tl.load(at, mask=(tl.arange(0, padded(D)) < D)[None, :], other=0.0)
    return rows


@triton.jit
def load_rows(X, first, here, N: tl.constexpr, D: tl.constexpr):
    """N rows from row `first` on; zeros where they are not `here`, and beyond D."""
    return tl.load(addresses(X, first, N, D), mask=inside(here, D), other=0.0)


@triton.jit
def store_rows(X, first, rows, here, N: tl.constexpr, D: tl.constexpr):
    tl.store(addresses(X, first, N, D), rows.to(X.pointer.dtype.element_ty), mask=inside(here, D))


@triton.jit
def all_finite(rows):
    """Of every row of a tile, whether no number in it is NaN or inf."""
    return tl.sum(rows.to(tl.float32) * 0.0, 1) == 0.0


@triton.jit
def load_slope(slopes, b, h, there=None):
    """The slopes of some heads, in log2 units a token; 0 where there is no head."""
    at = slopes.pointer + b * slopes.batch + h
    if there is None:
        m = tl.load(at)
    else:
        m = tl.load(at, mask=there, other=0.0)
    return m * LOG2E


@triton.jit
def load_offset(query_offset, b):
    return tl.load(query_offset.pointer + b * query_offset.batch).to(tl.int32)


@triton.jit
def shown_keys(masks, sequence, j, here, S):
    """Which of the keys j may be seen, of those that are `here`."""
    if masks.keys is not None:
        here = tl.load(masks.keys + sequence * S + j, mask=here, other=0) != 0
    return here  # [BN]


@triton.jit
def bias_for(key_bias, bh, block, tiles, S):
    """The BlockBias of a head for a block of the plan, whose number is among those of all heads; everything broadcasts."""
    at = key_bias.references + block * 2
    return BlockBias(key_bias.rest + bh * S, key_bias.bases + bh * tiles * 2, tl.load(at), tl.load(at + 1))


@triton.jit
def relative_base(bias, tile, BN: tl.constexpr):
    """The base of the keys of tile number `tile`, relative to a block's reference, of which only the difference is rounded.

    It is added to maxima and taken from lse, not added to scores: where keys weigh much it cancels. BN divides TILE.
    """
    at = bias.bases + tile // (TILE // BN) * 2
    return (tl.load(at) - bias.high) + (tl.load(at + 1) - bias.low)


@triton.jit
def add_exactly(total, left, x):
    """(total, left) after x was added, where `left` is what rounding left out of the total (Knuth's sum of two)."""
    new = total + x
    part = new - total
    return new, left + ((total - (new - part)) + (x - part))


@triton.jit
def biased_scores(products, distance, shown, head, CAUSAL: tl.constexpr, own=None):
    """(scores, seen) of one tile: products·scale − slope·|distance| + own; everything broadcasts, and `head` is in log2 units.

    `shown` says what the masks leave, and `own` are the biases of the keys. A score that is not seen may be anything.
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
        # An infinite slope forbids.
        seen = seen & (slope < float("inf"))
        slope = tl.where(slope < float("inf"), slope, 0.0)
    if head.window is not None:
        seen = seen & (away < head.window)
    if own is not None:
        return products * head.scale + (own - slope * away.to(tl.float32)), seen & (own > float("-inf"))
    return products * head.scale - slope * away.to(tl.float32), seen


@triton.jit
def partial_scores(
    tile, queries, head, K, masks, S, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(scores, seen, k, here) of a tile of keys, of which some queries may not see some; `here` are the keys that are read.

    Biases of keys count from the base of the tile.
    """
    jj = tl.arange(0, BN)
    j = tile * BN + jj
    here = shown_keys(masks, queries.sequence, j, j < S, S)
    own = None
    if head.bias is not None:
        own = tl.load(head.bias.rest + j[None, :], mask=here[None, :], other=float("-inf"))  # [1 or BM, BN]
        here = here & (tl.max(own, 0) > float("-inf"))
    k = load_rows(K, tile * BN, here, BN, D)  # [BN, DP]
    shown = here[None, :]
    if masks.key_segments is not None:
        segments = tl.load(masks.key_segments + queries.sequence * S + j, mask=here, other=0)
        shown = shown & (queries.segments[:, None] == segments[None, :])
    products = tl.dot(queries.q, k.T, input_precision=PRECISION)  # [BM, BN]
    scores, seen = biased_scores(products, queries.position[:, None] - j[None, :], shown, head, CAUSAL, own)
    return scores, seen, k, here


@triton.jit
def raised_maximum(m_i, largest):
    """(m_i, what to subtract of scores, what to multiply earlier sums with) after scores of which `largest` is the largest."""
    new = tl.maximum(m_i, largest)
    known = tl.where(new == float("-inf"), 0.0, new)
    return new, known, tl.exp2(m_i - known)  # [BM]


@triton.jit
def normalized(acc, l_i):
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # [BM, DP]


@triton.jit
def natural_lse(m_i, l_i):
    return (m_i + tl.log2(l_i)) / LOG2E  # [BM]


@triton.jit
def kept_lse(m_i, l_i, key_bias):
    """The lse that is kept: natural; where keys have biases in log2 units, for then it may be large and its rounding is felt."""
    if key_bias is not None:
        lse = m_i + tl.log2(l_i)
    else:
        lse = natural_lse(m_i, l_i)
    return lse  # [BM]


@triton.jit
def in_log2(kept, key_bias):
    """What `kept_lse` kept, in log2 units."""
    if key_bias is None:
        kept = kept * LOG2E
    return kept


@triton.jit
def linear_bias(tile, start, head, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """(slope, near): in a tile seen in full the bias is slope·(j − near) − slope·(position − near); `near` is its key next to
    the queries, the first of which stands at `start`.
    """
    near = tile * BN + BN - 1
    if CAUSAL:
        return head.slope, near
    to_left = near <= start
    away = head.slope
    if head.right is not None:
        away = head.right
    return tl.where(to_left, head.slope, -away), tl.where(to_left, near, near - (BN - 1))


@triton.jit
def band_of(visited, block, of_sequence, start, head, S, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """The Band, in tiles of BN keys, of BM queries from position `start` on, which are in a plan's block.

    `block` is its number among those of all heads, `of_sequence` among those of all sequences.
    """
    first = tl.load(visited.bands + block * 4) * (TILE // BN)
    last = tl.minimum(tl.load(visited.bands + block * 4 + 1) * (TILE // BN), tl.cdiv(S, BN))
    low, until = first, tl.minimum(last, S // BN)
    if visited.full is not None:
        low = tl.maximum(low, tl.load(visited.full + of_sequence * 2) * (TILE // BN))
        until = tl.minimum(until, tl.load(visited.full + of_sequence * 2 + 1) * (TILE // BN))
    end = start + BM - 1
    if head.window is not None:
        low = tl.maximum(low, tl.maximum(end - head.window + BN, 0) // BN)
    high = tl.maximum(tl.minimum(tl.maximum(start + 1, 0) // BN, until), low)
    after = high
    if CAUSAL:
        until = high
    else:
        after = tl.maximum(after, tl.cdiv(tl.maximum(end, 0), BN))
        if head.window is not None:
            until = tl.minimum(until, tl.maximum(start + head.window, 0) // BN)
        until = tl.maximum(until, after)
        if head.right is not None:
            until = tl.where(head.right < float("inf"), until, after)  # an infinite slope forbids
    return Band(first, last, low, high, after, until)


@triton.jit
def full_count(band):
    return band.high - band.low + band.until - band.after


@triton.jit
def full_tile(x, band, CAUSAL: tl.constexpr):
    """The number x of the tiles of a band that are seen in full."""
    tile = band.low + x
    if not CAUSAL:
        tile += tl.where(tile >= band.high, band.after - band.high, 0)
    return tile


@triton.jit
def partial_tile(x, band, CAUSAL: tl.constexpr):
    """The number x of the others."""
    tile = band.first + x
    tile += tl.where(tile >= band.low, band.high - band.low, 0)
    if not CAUSAL:
        tile += tl.where(tile >= band.after, band.until - band.after, 0)
    return tile


@triton.jit
def outlier_count(outliers):
    """Of the outlier tiles of one block."""
    return tl.sum((tl.load(outliers + tl.arange(0, OUTLIERS)) >= 0).to(tl.int32), 0)


@triton.jit
def outlier_tile(x, outliers, BN: tl.constexpr):
    """The number x of the tiles of BN keys in them."""
    x = tl.cast(x, tl.int32)  # the interpreter counts a loop in Python's own integers
    return tl.load(outliers + x // (TILE // BN)) * (TILE // BN) + x % (TILE // BN)
