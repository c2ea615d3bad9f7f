"""The description of a call: frozen, validated once (`checks.py`, `validation.py`) and trusted afterwards.

The legend of shapes, for the whole repository:

    B  batch            H  query heads        K  key/value heads, K divides H; query head h reads key head h // (H / K)
    T  query length     S  key length         D  head size

PyTorch:  query [B, H, T, D]   key, value [B, K, S, D]   output [B, H, T, D]   lse [B, H, T]
JAX:      query [B, T, H, D]   key, value [B, S, K, D]   output [B, T, H, D]   lse [B, H, T]

The score of query i (0 ≤ i − offset < T) and key j (0 ≤ j < S) is scale·q_i·k_j − m·|i − j| + b_j, with m the slope of the head
(its right slope if j > i) and b_j the bias of the key, 0 without one. Positions matter only through i − j. No framework is
imported, so `alibi_attn.jax` shares this type.
Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Generic, TypeVar

Array = TypeVar("Array")

MAX_POSITION = 2**60  # the largest |position| and window; sums of two stay within int64
# The fields of a spec that receive gradients, in the order in which backward returns them.
DIFFERENTIABLE = ("slopes", "right_slopes", "key_bias", "query_bias", "table")
# The axes of the fields that are arrays, by the letters of the legend; slopes may lack the batch. N and C are other axes.
AXES = {
    **dict.fromkeys(("slopes", "right_slopes"), "BH"),
    "sink_logits": "H",
    "table": "HN",
    "prefix_len": "B",
    **dict.fromkeys(("positions", "key_mask", "key_segments", "key_numbers"), "BS"),
    **dict.fromkeys(("query_positions", "query_segments", "query_numbers"), "BT"),
    "coordinates": "BSC",
    "query_coordinates": "BTC",
    "key_bias": "BHS",
    **dict.fromkeys(("query_bias", "query_start"), "BHT"),
}
# The fields that decide how far apart a query and a key are, except their indices.
DISTANCES = frozenset({"positions", "query_positions", "by_position", "coordinates", "query_coordinates", "registers"})
# A gate below e^(−2²⁰) counts as e^(−2²⁰): no weight passes it in any dtype. Whole multiples of GATE_STEP are summed separately,
# without rounding; the total of n such gates still has only the digits that its dtype has at n·2²⁰.
GATE_FLOOR, GATE_STEP = -(2.0**20), 2.0**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(Generic[Array]):
    """Everything that determines the result, except query, key and value themselves.

    Args:
        batch, num_heads, num_kv_heads, query_len, key_len, head_dim: B, H, K, T, S, D.
        slopes: [H] or [B, H], fp32 (fp64 for fp64 input).
        right_slopes: the same for keys to the right, only if not causal; None = the same slopes; inf = hides all of them.
        query_offset: position of query 0: an int, or an integer array, 0-d or [B].
        window: how many keys a query may see, including its own; None = all.
        head_windows: H windows, instead of `window`.
        sinks: the first keys, which the window does not hide.
        prefix_len: [B] integers: keys before it are visible to every query, although the call is causal.
        positions, query_positions: [B, S] and [B, T], fp32 or fp64, both or neither: the bias is −m·|p_i − p_j|.
        by_position: the positions, not the indices, decide which keys are to the right of a query.
        coordinates, query_coordinates: [B, S, C] and [B, T, C], C = 2 or 3, fp32 or fp64, both or neither, not causal: the bias
            is −m·‖p_i − p_j‖. In self-attention both are the same array.
        registers: the number of first tokens without a bias, as queries and as keys.
        right_window: the window of the keys to the right, if it differs from `window`, that of the keys to the left.
        key_mask: [B, S] bool, True = visible.
        query_segments, key_segments: [B, T] and [B, S] integers, both or neither: a query sees its own segment only.
        key_bias: [B, H, S], fp32 or fp64, added to the scores of each key; −inf hides the key.
        query_bias: [B, H, T] in key_bias's dtype, only with a key_bias: added to all scores of a query. lse includes it, and its
            gradients are the sums of ds over keys as they were computed (`forgetting_attention` needs both).
        query_start: [B, H, T] int64, only with a query_bias: the first key that each query may see; the masks still apply.
            `cuts.py` translates it for kernels that do not read it.
        table: [H, N], in the slopes' dtype, added to the scores by head and distance i − j: column c is for the distance
            table_first + c, and every distance that occurs has a column. Only with slopes of 0.
        sink_logits: [H], exp(sink) joins the softmax denominator of a head. Backends compute the call without it;
            `execution.attend` scales their output.
        dropout_p: the share of the weights that are dropped; `dropout.py` defines which.
        dropout_seed: [R, 4] int64, R divides B: a seed, and the indices of the call's first sequence, head and key in the whole
            computation that it is a part of. With R rows the batch is R groups of B / R sequences, and each group counts from its
            own row. None = not drawn yet; JAX has a key instead.
        query_numbers, key_numbers: [B, T] and [B, S] integers, both or neither: the numbers i and j with which dropout counts
            queries and keys that are not in their order, relative to the first key.
        tolerance: the largest share of a query's softmax mass that skipping may drop; 0 = skip masked keys only.
    """

    PLAIN: ClassVar[tuple[tuple[str, Any], ...]]  # the fields that a call may leave out, with their defaults

    batch: int
    num_heads: int
    num_kv_heads: int
    query_len: int
    key_len: int
    head_dim: int
    slopes: Array
    right_slopes: Array | None = None
    causal: bool = True
    window: int | None = None
    head_windows: tuple[int, ...] | None = None
    sinks: int = 0
    prefix_len: Array | None = None
    positions: Array | None = None
    query_positions: Array | None = None
    by_position: bool = False
    coordinates: Array | None = None
    query_coordinates: Array | None = None
    registers: int = 0
    right_window: int | None = None
    scale: float
    query_offset: int | Array
    key_mask: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    key_bias: Array | None = None
    query_bias: Array | None = None
    query_start: Array | None = None
    table: Array | None = None
    sink_logits: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: Array | None = None
    query_numbers: Array | None = None
    key_numbers: Array | None = None
    tolerance: float
    return_lse: bool = False

    def used(self) -> frozenset[str]:
        """The fields in which it differs from a plain call: those without their defaults, and an offset that is no int.

        Whatever consumes a call compares them with the fields that it reads, see `reads.py`.
        """
        used = [
            name
            for name, plain in self.PLAIN
            if (value := getattr(self, name)) is not plain and (plain is None or value != plain)
        ]
        # The compiler supports no hasattr of a traced int.
        if not isinstance(self.query_offset, int) and hasattr(self.query_offset, "shape"):
            used.append("query_offset")
        return frozenset(used)

    def changed(self, **fields: Any) -> "AttentionSpec[Array]":
        """The same call but for some fields. It initializes no field again, and so takes a tenth of `dataclasses.replace`.

        Not for code that torch.compile traces.
        """
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **fields)
        return changed

    def along(self, axis: str, change: Callable[[Any, int], Any]) -> dict[str, Any]:
        """The arrays that have an axis, a letter of `AXES`, changed.

        Args:
            change: (array, axis, counted from the end) -> the changed array.
        """
        given = [
            (name, getattr(self, name), axes.find(axis) - len(axes)) for name, axes in AXES.items() if axis in axes
        ]
        return {name: change(x, at) for name, x, at in given if x is not None}

    def on_keys(self, start: int, stop: int, **fields: Any) -> "AttentionSpec[Array]":
        """The call over keys [start, stop) only, also changed in these fields."""
        given: Any = self
        return dataclasses.replace(
            self,
            key_len=stop - start,
            query_offset=given.query_offset - start,
            prefix_len=None if self.prefix_len is None else given.prefix_len - start,
            **self.along("S", lambda x, axis: _cut(x, axis, start, stop)),
            **fields,
        )

    def on_queries(self, start: int, stop: int) -> "AttentionSpec[Array]":
        """The call of queries [start, stop) only."""
        given: Any = self
        cut = self.along("T", lambda x, axis: _cut(x, axis, start, stop))
        return dataclasses.replace(self, query_len=stop - start, query_offset=given.query_offset + start, **cut)

    def reversed(self, flip: Callable[[Any, int], Any], key_mask: Array | None) -> "AttentionSpec[Array]":
        """The causal call that sees the keys after each query: key j becomes key S − 1 − j, and the queries are moved by one.

        Args:
            flip: (array, axis) -> the array in reverse.
            key_mask: of the keys in their old order, instead of the spec's.
        """
        given: Any = self
        masked = dataclasses.replace(self, key_mask=key_mask)
        arrays = masked.along("S", flip) | masked.along("T", flip)
        arrays |= {name: -arrays[name] for name in ("positions", "query_positions") if name in arrays}
        return dataclasses.replace(
            masked,
            causal=True,
            slopes=self.slopes if self.right_slopes is None else self.right_slopes,
            right_slopes=None,
            prefix_len=None,
            window=None if self.window is None else self.window - 1,
            query_offset=self.key_len - self.query_len - 1 - given.query_offset,
            **arrays,
        )

    def of_heads(self, heads: Sequence[int], taken: Callable[[Any, int], Any], **fields: Any) -> "AttentionSpec[Array]":
        """The call of some query heads only, also changed in these fields.

        Args:
            taken: (array, axis) -> its entries of these heads.
        """
        return dataclasses.replace(
            self,
            num_heads=len(heads),
            num_kv_heads=len(key_heads(heads, self.group)),
            head_windows=None,
            **self.along("H", taken),
            **fields,
        )

    def without_bias(self, zeros: Callable[[Any], Any]) -> "AttentionSpec[Array]":
        """The call with distances of 0.

        Args:
            zeros: slopes -> zeros without a gradient, but inf, which hides keys, stays.
        """
        slopes = {name: zeros(m) for name in ("slopes", "right_slopes") if (m := getattr(self, name)) is not None}
        return dataclasses.replace(self, **slopes, **self.defaults(DISTANCES))

    @classmethod
    def defaults(cls, names: Collection[str]) -> dict[str, Any]:
        """The values with which these fields change nothing."""
        return {name: plain for name, plain in cls.PLAIN if name in names}

    def on_one_axis(
        self,
        positions: Array,
        key_mask: Array,
        of_keys: Callable[[Any, int], Any],
        of_queries: Callable[[Any, int], Any],
    ) -> "AttentionSpec[Array]":
        """The call of S + T queries and keys at these positions, [B, S + T].

        Args:
            key_mask: of the keys, instead of the spec's.
            of_keys, of_queries: (array, axis) -> the array with the axis of keys, or of queries, placed on that axis.
        """
        masked = dataclasses.replace(self, key_mask=key_mask, positions=None, query_positions=None)
        length = self.query_len + self.key_len
        arrays = masked.along("S", of_keys) | masked.along("T", of_queries)
        arrays |= {"positions": positions, "query_positions": positions}
        return dataclasses.replace(
            masked, query_len=length, key_len=length, query_offset=0, by_position=False, **arrays
        )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head, H / K."""
        return self.num_heads // self.num_kv_heads

    @property
    def table_first(self) -> int:
        """The distance of the table's first column: 0 if causal, else the middle column is for 0."""
        table: Any = self.table
        return 0 if self.causal else -(table.shape[1] // 2)

    @property
    def hides_keys(self) -> bool:
        """Whether a key mask or segments may hide keys."""
        return self.key_mask is not None or self.key_segments is not None


def plain_fields(kind: type[AttentionSpec[Any]]) -> tuple[tuple[str, Any], ...]:
    """`PLAIN` of a kind of spec. A new field needs a default with which the call is what it was before."""
    return tuple((x.name, x.default) for x in dataclasses.fields(kind) if x.default is not dataclasses.MISSING)


AttentionSpec.PLAIN = plain_fields(AttentionSpec)
# The fields that may be arrays.
ARRAYS = tuple(x.name for x in dataclasses.fields(AttentionSpec) if Array in getattr(x.type, "__args__", (x.type,)))


def _cut(x: Any, axis: int, start: int, stop: int) -> Any:
    """[start, stop) of an axis, counted from the end."""
    return x[(..., slice(start, stop), *[slice(None)] * (-1 - axis))]


def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """(threshold, factor): a random uint32 below the threshold drops a weight, and the factor rescales the others.

    The share that is dropped is threshold / 2³², within 2⁻³³ of dropout_p, and the factor compensates exactly that share.

    >>> dropout_numbers(0.25)
    (1073741824, 1.3333333333333333)
    """
    threshold = min(round(dropout_p * 2**32), 2**32 - 1)
    return threshold, 2**32 / (2**32 - threshold)


def query_heads(key_heads: Sequence[int], group: int) -> list[int]:
    """The query heads that read these key heads, in order; `group` per key head.

    >>> query_heads([1, 3], group=2)
    [2, 3, 6, 7]
    """
    return [head * group + at for head in key_heads for at in range(group)]


def key_heads(query_heads: Sequence[int], group: int) -> list[int]:
    """The key heads that these query heads read: each once if all of its readers are there, else one per query head.

    >>> key_heads([2, 3, 6, 7], group=2), key_heads([2, 6], group=2)
    ([1, 3], [1, 3])
    >>> key_heads([2, 3, 6], group=2)
    [1, 1, 3]
    """
    owners = sorted({head // group for head in query_heads})
    return owners if len(owners) * group == len(query_heads) else [head // group for head in query_heads]


def index_of(heads: list[int]) -> list[int] | slice:
    """The heads as a slice if they are consecutive, because slices need no copy.

    >>> index_of([2, 3, 4]), index_of([2, 4])
    (slice(2, 5, None), [2, 4])
    """
    low, high = heads[0], heads[-1] + 1
    return slice(low, high) if heads == list(range(low, high)) else heads


def heads_by_window(windows: Sequence[int], *, runs: bool) -> list[tuple[tuple[int, ...], int]]:
    """(heads, their window): one entry per window or, with `runs`, which dropout needs, per run of heads.

    >>> heads_by_window([7, 9, 7], runs=False), heads_by_window([7, 9, 7], runs=True)
    ([((0, 2), 7), ((1,), 9)], [((0,), 7), ((1,), 9), ((2,), 7)])
    """
    found: list[tuple[tuple[int, ...], int]] = []
    for head, window in enumerate(windows):
        at = next((n for n, (_, other) in enumerate(found) if other == window), None)
        if runs and at != len(found) - 1:
            at = None
        if at is None:
            found.append(((head,), window))
        else:
            found[at] = ((*found[at][0], head), window)
    return found
