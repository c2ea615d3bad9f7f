"""What kernels are told, as named tuples: on the host of tensors and numbers, inside of a kernel of pointers and numbers.

An element that is None is known when a kernel is compiled, and all that would read it is left out. Triton 3.6 lets no function
return a tuple with None in it, so each kernel makes its own Head and Queries; and no field is called `values` or `type`, which
Triton's tuples have already.
"""

from typing import NamedTuple


class Rows(NamedTuple):
    """Rows of D numbers, [B, heads, rows, D]: a pointer, and the strides of all axes but the last, whose stride is 1."""

    pointer: object
    batch: object
    head: object
    row: object


class Slopes(NamedTuple):
    """A slope a head, [B, H] fp32; the stride of the batch is 0 where all sequences have the same."""

    pointer: object
    batch: object


class QueryOffset(NamedTuple):
    """The position of query 0, [B] int64; the stride is 0 where all sequences have the same."""

    pointer: object
    batch: object


class Masks(NamedTuple):
    """keys [B, S] int8, 1 = may be seen; segments of queries [B, T] and of keys [B, S], integers. None = there are none."""

    keys: object
    query_segments: object
    key_segments: object


class Dropout(NamedTuple):
    """Which weights are dropped, as `attention/dropout.py` defines it.

    Args:
        threshold, factor: of `spec.dropout_numbers`.
        seed: a pointer to [R, 4] int64, `AttentionSpec.dropout_seed`.
        alike: how many sequences share a row of it, B / R.
    """

    threshold: object
    factor: object
    seed: object
    alike: object


class HeadDropout(NamedTuple):
    """Inside of a kernel: the same for one head, or for heads of any shape; uint32.

    Args:
        key: of the generator.
        shift: what is added to the positions of queries.
        first_key: the number of key 0.
    """

    threshold: object
    factor: object
    key: object
    shift: object
    first_key: object


class KeyBias(NamedTuple):
    """The biases of keys, fp32 in log2 units: base of the tile + rest. A pair is a number and what its rounding left out of it.

    Args:
        rest: [B, H, S]; −inf = may not be seen.
        pairs: [B, H, 2, S]: pairs, of each b itself, −inf and 0 where it may not be seen; for tiles whose biases differ so much
            that `rest` lacks digits.
        bases: [B, H, ⌈S / TILE⌉]: about the middle b in a tile; 0 where it has none that is finite.
        references: [B, H, N]: from which the certificate of a plan's block counts: the base of a tile near it.
    """

    rest: object
    pairs: object
    bases: object
    references: object


class BlockBias(NamedTuple):
    """Inside of a kernel: the biases of a head's keys; in decoding there are BM heads, one per row.

    Args:
        rest, pairs, bases: as in `KeyBias`, of the head; [BM, 1], [BM, 1] and [BM] in decoding.
        reference: that of a block of the plan, for its certificate.
    """

    rest: object
    pairs: object
    bases: object
    reference: object


class Call(NamedTuple):
    """What a call asks for: AttentionSpec as kernels take it.

    Args:
        right_slopes: None = the keys to the right have the same slopes.
        scale: of q·k, before the bias.
        window: how many keys a query sees at most, itself included; None = all.
        dropout: None = every weight is kept.
        key_bias: None = there is none.
        H, G, T, S: query heads, query heads a key head, queries, keys.
    """

    slopes: Slopes
    right_slopes: Slopes | None
    query_offset: QueryOffset
    masks: Masks
    scale: object
    window: object
    dropout: Dropout | None
    key_bias: KeyBias | None
    H: object
    G: object
    T: object
    S: object


class Visited(NamedTuple):
    """Which tiles of keys the blocks of a plan visit; int32.

    Args:
        bands, beside: of `tiles.Tiles`, [B, H, N, 4] and [B, H, N, OUTLIERS].
        full: [B, N, 2]: tiles in which the masks hide nothing from a block; None = nowhere, for there are none. With a key bias,
            which may hide keys too, [B, H, N, 2].
    """

    bands: object
    beside: object
    full: object


class Visitors(NamedTuple):
    """Which blocks of queries visit a tile of keys; int32.

    Args:
        bands: as in `Visited`.
        asked: [B, H, tiles, 3]: the first block that may, the block behind the last, and 1 where it is an outlier tile.
        full: [B, tiles, 2]: blocks from which the masks hide nothing of a tile; None = there are no masks. With a key bias
            [B, H, tiles, 2].
    """

    bands: object
    asked: object
    full: object


class Certificate(NamedTuple):
    """What follows from the norms, with each choice of how many tiles are outliers.

    Args:
        reach: [sides, CHOICES, B, H, ⌈T / TILE⌉] int32, to the left and to the right.
        outliers: [B, K, OUTLIERS] int32, the largest norm first, −1 after the last.
    """

    reach: object
    outliers: object


class Plan(NamedTuple):
    """What the kernels of a plan write: `tiles.Tiles`, and `reach` [2, B, H, ⌈T / TILE⌉], that of every TILE queries; int32."""

    bands: object
    outliers: object
    beside: object
    weight: object
    reach: object


class Labels(NamedTuple):
    """Of every TILE keys, or queries, what the masks say.

    Args:
        least, most: [B, tiles] int64: the smallest segment and the largest.
        uniform: [B, tiles] int32: 1 where these are the same and nothing is hidden.
        edges: [2, B, tiles] int32: the first key that may be seen (their count where there is none), the one behind the last (0).
    """

    least: object
    most: object
    uniform: object
    edges: object


class Norms(NamedTuple):
    """Bounds of the norms of keys and values, by tile or for all; fp32.

    Args:
        tiles: [3, B, K, tiles]: of the keys that may be seen the largest, of their values the largest and the smallest.
        each_value: [B, K, S]: of every value.
        prefix: [sides, CHOICES, B, K, tiles]: the largest of the keys that are no outliers, up to each tile, and from it on.
        extremes: [2, B, K]: of all values the largest and the smallest.
        latest: [B, K, tiles] int32: up to each tile the last one that has a key to be seen, else −1. None where no key is hidden.
        sums: [sides, B, H, tiles], with a key bias: log2 Σ 2^(rest ± slope·(j − first of the tile)) over the keys to be seen.
    """

    tiles: object
    each_value: object
    prefix: object
    extremes: object
    latest: object
    sums: object = None


class Head(NamedTuple):
    """Inside of a kernel: what the scores of a head are made with, in log2 units; in decoding some are columns, one a row.

    Args:
        number: b·H + h.
        right: the slope of keys to the right; None = the same.
        window: as in `Call`.
        dropout: None = every weight is kept.
        bias: of its keys, for one block of queries; None = there is none.
    """

    number: object
    slope: object
    right: object
    scale: object
    window: object
    dropout: HeadDropout | None
    bias: BlockBias | None = None


class Queries(NamedTuple):
    """Inside of a kernel: a block of queries.

    Args:
        q: [BM, DP]; zeros where there is no query.
        i: [BM] the number of each query in its sequence.
        position: [BM], of which `start` is the first.
        segments: [BM]; None = there are none.
        sequence: which of the batch.
    """

    q: object
    i: object
    position: object
    start: object
    segments: object
    sequence: object


class Band(NamedTuple):
    """Inside of a kernel: an interval of tiles, and those in it that are seen in full: `low` to before `high`, which lie to the
    left of the queries, and `after` to before `until`, to their right. For keys, the same of blocks of queries.
    """

    first: object
    last: object
    low: object
    high: object
    after: object
    until: object
