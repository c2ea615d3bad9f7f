"""The arguments of kernels as named tuples: tensors and numbers on the host, pointers and numbers inside a kernel.

Elements that are None are known at compile time, and the code that would read them is left out. In Triton 3.6 a function cannot
return a tuple that contains None, so each kernel builds its own Head and Queries; a tuple that contains None cannot be compared
with None; and fields cannot be called `values` or `type`,
which are attributes of Triton's tuples.
"""

from typing import NamedTuple


class Rows(NamedTuple):
    """Rows of D numbers, [B, heads, rows, D]: a pointer, and the strides of all axes but the last, whose stride is 1.

    Inside a kernel a head's rows may be a descriptor, the sequence, the head, and None.
    """

    pointer: object
    batch: object
    head: object
    row: object


class Slopes(NamedTuple):
    """One slope per head, [B, H] fp32; the stride of the batch is 0 if all sequences share them."""

    pointer: object
    batch: object


class QueryOffset(NamedTuple):
    """The position of query 0: [B] int64, with a stride of 0 if all sequences share it; without a pointer the number `first`."""

    pointer: object
    batch: object
    first: object = 0


class Masks(NamedTuple):
    """keys [B, S] int8, 1 = visible; segments of queries [B, T] and of keys [B, S], integers. None = no such mask."""

    keys: object
    query_segments: object
    key_segments: object


class Dropout(NamedTuple):
    """The dropped weights, as defined in `attention/call/dropout.py`.

    Args:
        threshold, factor: of `spec.dropout_numbers`.
        seed: a pointer to [R, 4] int64, `AttentionSpec.dropout_seed`.
        alike: the number of sequences that share a row of it, B / R.
    """

    threshold: object
    factor: object
    seed: object
    alike: object


class HeadDropout(NamedTuple):
    """Inside a kernel: the same for one head, or for heads of any shape; uint32.

    Args:
        key: the generator's key.
        shift: added to the positions of queries.
        first_key: the index of key 0.
    """

    threshold: object
    factor: object
    key: object
    shift: object
    first_key: object


class Numbers(NamedTuple):
    """Inside a kernel: the numbers with which dropout counts the queries and keys of a sequence, where they are not in order.

    Args:
        queries: a pointer to the number of the query at position 0.
        keys: a pointer to that of key 0.
        stop, S: the position after the last query, and the number of keys.
    """

    queries: object
    keys: object
    stop: object
    S: object


class KeyBias(NamedTuple):
    """The biases of keys, fp32 in log2 units: base of the tile + rest. A pair is a number and its rounding error.

    Args:
        rest: [B, H, S]; −inf = hidden.
        pairs: [B, H, 2, S]: each b as a pair, −inf and 0 if hidden; for tiles whose biases differ so much that `rest` has too
            few digits.
        bases: [B, H, ⌈S / TILE⌉]: about the median b of a tile; 0 if none is finite.
        references: [B, H, N]: the number that the certificate of a plan's block is relative to: the base of a tile near it.
    """

    rest: object
    pairs: object
    bases: object
    references: object


class BlockBias(NamedTuple):
    """Inside a kernel: the biases of a head's keys; decoding has BM heads, one per row.

    Args:
        rest, pairs, bases: as in `KeyBias`, for the head; [BM, 1], [BM, 1] and [BM] in decoding.
        reference: the reference of a block of the plan, for its certificate.
    """

    rest: object
    pairs: object
    bases: object
    reference: object


class Table(NamedTuple):
    """A table: numbers [H, columns] fp32; column c is for the distance first + c."""

    numbers: object
    columns: object
    first: object


class Call(NamedTuple):
    """A call: AttentionSpec in the form that kernels accept.

    Args:
        right_slopes: None = the keys to the right have the same slopes.
        scale: factor of q·k, before the bias.
        window: the most keys that a query sees, including its own; None = all.
        dropout: None = every weight is kept.
        key_bias: None = no key biases.
        B, H, G, T, S: sequences, query heads, query heads per key head, queries, keys.
        query_bias: [B, H, T] fp64, only with a key bias; None = 0.
        query_start: [B, H, T] int64, only with a key bias: the first key that each query may see, never less than that of the
            query before; None = 0.
        query_numbers, key_numbers: [B, T] and [B, S] int64, with which dropout counts; None = queries and keys in order.
        table: None = no table; with one, all slopes are 0.
    """

    slopes: Slopes
    right_slopes: Slopes | None
    query_offset: QueryOffset
    masks: Masks
    scale: object
    window: object
    dropout: Dropout | None
    key_bias: KeyBias | None
    B: object
    H: object
    G: object
    T: object
    S: object
    query_bias: object = None
    query_start: object = None
    query_numbers: object = None
    key_numbers: object = None
    table: Table | None = None


class Tiling(NamedTuple):
    """What the code of a kernel depends on, `C` in the kernels; known at compile time.

    Args:
        D: numbers per row.
        BM, BN: queries and keys of a tile.
        ROWS: queries of a block of the plan; None in decoding.
        UNIT: queries of a block of its bands, which in backward may be fewer.
        PRECISION: of products in fp32.
        DESCRIBED: rows of the other side are loaded by descriptors; only in backward.
    """

    D: object
    BM: object
    BN: object
    ROWS: object
    UNIT: object
    CAUSAL: object
    PRECISION: object
    DESCRIBED: object

    @classmethod
    def of(cls, *known: object) -> "Tiling":
        from triton.language import constexpr

        return cls(*map(constexpr, known))


class Visited(NamedTuple):
    """The tiles of keys that the blocks of a plan visit; int32.

    Args:
        bands, beside: from `tiles.Tiles`, [B, H, N, 4] and [B, H, N, OUTLIERS].
        full: [B, N, 2]: tiles in which the masks hide nothing from a block; None = there are no masks. With a key bias, which
            may hide keys too, [B, H, N, 2].
        row: from one sequence to the next, for all three.
    """

    bands: object
    beside: object
    full: object
    row: object


class Visitors(NamedTuple):
    """The blocks of queries that visit a tile of keys; int32.

    Args:
        bands: as in `Visited`.
        candidates: [B, H, tiles, 3]: the half-open range of blocks that may, and 1 if it is an outlier tile.
        full: [B, tiles, 2]: blocks from which the masks hide nothing of a tile; None = there are no masks. With a key bias
            [B, H, tiles, 2].
        row: from one sequence to the next, for `bands` and `full`.
    """

    bands: object
    candidates: object
    full: object
    row: object


class Certificate(NamedTuple):
    """The result of the norms, for each choice of the number of outlier tiles.

    Args:
        reach: [sides, CHOICES, B, H, ⌈T / TILE⌉] int32, to the left and to the right.
        outliers: [B, H, OUTLIERS] int32, those of the head's keys, the largest norm first, padded with −1.
        allowance: [B, H, ⌈T / TILE⌉] fp32: the share of its softmax that a query may lack in backward.
        costs: [B, H, CHOICES] int64: the keys that the blocks of a head visit; see `bounds._cost`.
        online: [B, H, ⌈T / TILE⌉] int32, if causal: keys at this distance from a block, or farther, need no online softmax.
    """

    reach: object
    outliers: object
    allowance: object
    costs: object
    online: object


class Plan(NamedTuple):
    """The output of a plan: `tiles.Tiles`, with `row` numbers from one sequence to the next; int32.

    Args:
        reach: of every TILE queries, [2, B, H, ⌈T / TILE⌉]; None = not wanted.
        order: [B·H]: the heads of all sequences, the heaviest first; None = not wanted.
        arrived: [B·H + 1] zeros: how many programs of a head have finished, later its `octave`; and how many heads.
    """

    bands: object
    outliers: object
    beside: object
    weight: object
    row: object
    reach: object
    order: object
    arrived: object


class Labels(NamedTuple):
    """Summaries of the masks for every TILE keys, or queries.

    Args:
        least, most: [B, tiles] int64: the smallest and the largest segment.
        uniform: [B, tiles] int32: 1 if these are equal and nothing is hidden.
        edges: [2, B, tiles] int32: the half-open range from the first to the last visible key (S and 0 if there is none).
    """

    least: object
    most: object
    uniform: object
    edges: object


class Norms(NamedTuple):
    """Bounds on the norms of keys and values, per tile or overall; fp32.

    Args:
        tiles: [3, B, K, tiles]: the largest of the visible keys, and the largest and the smallest of their values.
        each_value: [B, K, S]: every value's norm.
        known_keys, known_values: [B, K, known] fp64: norms of the first tiles, which `tiles` then lacks; None = none.
        known: how many.
        sums: [sides, B, H, tiles], with a key bias: log2 Σ 2^(rest ± slope·(j − first of the tile)) over the visible keys.
    """

    tiles: object
    each_value: object
    known_keys: object
    known_values: object
    known: object
    sums: object = None


class Survey(NamedTuple):
    """What blocks of queries at each tile need of the norms of a key head; see `survey` of `certificate.py`.

    Args:
        longest: [sides, CHOICES, B, K, tiles] fp32: the largest norm up to each tile, and from it on, without the outlier tiles.
        latest: [B, K, tiles] int32: the last tile with a visible key up to each tile, else −1.
        outliers: [B, K, OUTLIERS] int32.
        of_values: [2, B, K] fp32: the largest and the smallest norm of a visible value.
    """

    longest: object
    latest: object
    outliers: object
    of_values: object


class Head(NamedTuple):
    """Inside a kernel: the numbers that the scores of a head depend on, in log2 units; in decoding some are columns, one per row.
    With a table everything is in natural units, because a finite number of it may overflow in units of log2.

    Args:
        number: b·H + h.
        right: the slope of keys to the right; None = the same.
        window: as in `Call`.
        dropout: None = every weight is kept.
        bias: the biases of its keys, for one block of queries; None = no biases.
        numbers: None = queries and keys are in order.
        table: the address of the table's number for distance 0; None = no table.
    """

    number: object
    slope: object
    right: object
    scale: object
    window: object
    dropout: HeadDropout | None
    bias: BlockBias | None = None
    numbers: Numbers | None = None
    table: object = None


class Outputs(NamedTuple):
    """Inside a kernel: what backward gets for the outputs of a block of queries.

    Args:
        do: [BM, DP] their gradient.
        lse: [BM] in log2 units; +inf if a query sees no key.
        origin: the pair of [BM] that it is relative to; None without key biases.
        delta: [BM] δ.
    """

    do: object
    lse: object
    origin: object
    delta: object


class Queries(NamedTuple):
    """Inside a kernel: a block of queries.

    Args:
        q: [BM, DP]; zeros past the last query.
        i: [BM] the index of each query in its sequence.
        position: [BM]; `start` is the first.
        segments: [BM]; None = no segments.
        sequence: the index in the batch.
        first_key: [BM] the first key that each may see; None = all keys before it.
    """

    q: object
    i: object
    position: object
    start: object
    segments: object
    sequence: object
    first_key: object


class Band(NamedTuple):
    """Inside a kernel: an interval of tiles, and those in it that are seen in full: [low, high) to the left of the queries, and
    [after, until) to their right. For keys, the same with blocks of queries.
    """

    first: object
    last: object
    low: object
    high: object
    after: object
    until: object
