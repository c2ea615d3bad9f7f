"""The description of a call: frozen, validated once and trusted afterwards.

The legend of shapes, for the whole repository:

    B  batch            H  query heads        K  key/value heads, K divides H; query head h reads key head h // (H / K)
    T  query length     S  key length         D  head size

PyTorch:  query [B, H, T, D]   key, value [B, K, S, D]   output [B, H, T, D]   lse [B, H, T]
JAX:      query [B, T, H, D]   key, value [B, S, K, D]   output [B, T, H, D]   lse [B, H, T]

The score of query i (0 ≤ i − offset < T) and key j (0 ≤ j < S) is scale·q_i·k_j − m·|i − j| + b_j, with m the slope of the head
(its right slope if j > i) and b_j the bias of the key, 0 without one. Positions matter only through i − j. No framework is
imported, so `alibi_attn.jax` shares these checks.
Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
"""

import dataclasses
import operator
import sys
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

Array = TypeVar("Array")

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
FARTHEST = 2**60  # the largest |position| and window; sums of two stay within int64
# The fields of a spec that receive gradients, in the order in which backward returns them.
DIFFERENTIABLE = ("slopes", "right_slopes", "key_bias", "query_bias", "table")


class ArrayLike(Protocol):
    """The attributes that the checks need from an array of any framework."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(Generic[Array]):
    """Everything that determines the result, except query, key and value themselves.

    Args:
        batch, num_heads, num_kv_heads, query_len, key_len, head_dim: B, H, K, T, S, D.
        slopes: [H] or [B, H], fp32 (fp64 for fp64 input).
        right_slopes: the same for keys to the right, only if not causal; None = the same slopes; inf = hides all of them.
        query_offset: position of query 0: an int, or an integer array, 0-d or [B].
        window: how many keys a query may see, including its own; None = all.
        key_mask: [B, S] bool, True = visible.
        query_segments, key_segments: [B, T] and [B, S] integers, both or neither: a query sees its own segment only.
        key_bias: [B, H, S], fp32 or fp64, added to the scores of each key; −inf hides the key.
        query_bias: [B, H, T] in key_bias's dtype, only with a key_bias: added to all scores of a query. lse includes it, and its
            gradients are the sums of ds over keys as they were computed (`forgetting_attention` needs both).
        query_start: [B, H, T] int64, only with a query_bias: the first key that each query may see; the masks still apply.
            `cuts.py` translates it for kernels that do not read it.
        table: [H, N], in the slopes' dtype, added to the scores by head and distance i − j: column c is for the distance
            table_first + c, and every distance that occurs has a column. Only with slopes of 0, and a tolerance of 0.
        table_first: the distance of the first column.
        sink_logits: [H], exp(sink) joins the softmax denominator of a head. Backends compute the call without it;
            `execution.attend` scales their output.
        dropout_p: the share of the weights that are dropped; `dropout.py` defines which.
        dropout_seed: [R, 4] int64, R divides B: a seed, and the indices of the call's first sequence, head and key in the whole
            computation that it is a part of. With R rows the batch is R groups of B / R sequences, and each group counts from its
            own row. None = not drawn yet; JAX has a key instead.
        tolerance: the largest share of a query's softmax mass that skipping may drop; 0 = skip masked keys only.
    """

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
    scale: float
    query_offset: int | Array
    key_mask: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    key_bias: Array | None = None
    query_bias: Array | None = None
    query_start: Array | None = None
    table: Array | None = None
    table_first: int = 0
    sink_logits: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: Array | None = None
    tolerance: float
    return_lse: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key/value head, H / K."""
        return self.num_heads // self.num_kv_heads

    @property
    def hides_keys(self) -> bool:
        """Whether a key mask or segments may hide keys."""
        return self.key_mask is not None or self.key_segments is not None


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


def index_of(heads: list[int]) -> list[int] | slice:
    """The heads as a slice if they are consecutive, because slices need no copy.

    >>> index_of([2, 3, 4]), index_of([2, 4])
    (slice(2, 5, None), [2, 4])
    """
    low, high = heads[0], heads[-1] + 1
    return slice(low, high) if heads == list(range(low, high)) else heads


def default_tolerance(dtype: object) -> float:
    """The tolerance by default: eps / 32 of the dtype, far below its rounding."""
    return EPS[dtype_name(dtype)] / 32


def dtype_name(dtype: object) -> str:
    """ "float32" for torch.float32, jnp.float32, numpy's dtype("float32") and the string itself."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def check_shapes(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, layout: str = "BHTD"
) -> tuple[int, int, int, int, int, int]:
    """(B, H, K, T, S, D), or an error that names the shape that does not fit.

    Args:
        layout: order of query's axes, by letter; key and value have K in place of H, and S in place of T.
    """
    query_axes = "[" + ", ".join(layout) + "]"
    key_axes = query_axes.replace("H", "K").replace("T", "S")
    for name, array, expected in (("query", query, query_axes), ("key", key, key_axes), ("value", value, key_axes)):
        if len(array.shape) != 4:
            raise ValueError(f"{name} has shape {list(array.shape)} but must have four axes {expected}")
    at = {letter: layout.index(letter) for letter in "BHTD"}
    b, h, t, d = (query.shape[at[letter]] for letter in "BHTD")
    k, s = key.shape[at["H"]], key.shape[at["T"]]
    if key.shape[at["B"]] != b or key.shape[at["D"]] != d:
        raise ValueError(
            f"key has shape {list(key.shape)} but query {list(query.shape)}: batch and head size must be equal "
            f"(query {query_axes}, key {key_axes})"
        )
    if tuple(value.shape) != tuple(key.shape):
        raise ValueError(f"value has shape {list(value.shape)} but must have key's, {list(key.shape)}")
    if h < 1 or k < 1 or d < 1 or h % k != 0:
        raise ValueError(f"query has {h} heads and key {k}: the key heads must divide the query heads (and D ≥ 1)")
    names = {dtype_name(array.dtype) for array in (query, key, value)}
    if len(names) > 1 or any(name not in EPS for name in names):
        raise TypeError(
            f"query, key and value are {', '.join(dtype_name(a.dtype) for a in (query, key, value))} "
            f"but must share one dtype of {', '.join(EPS)}"
        )
    return b, h, k, t, s, d


def check_numbers(
    *,
    causal: bool,
    has_right_slopes: bool,
    window: int | None,
    scale: float | None,
    dropout_p: float,
    tolerance: float | None,
    head_dim: int,
    dtype: str,
) -> tuple[float, float]:
    """(scale, tolerance) with their defaults, after validating Python numbers and flags."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False but is {causal!r}")
    if has_right_slopes and causal:
        raise ValueError("right_slopes is for keys to the right, which causal attention never sees; pass causal=False")
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"window must be an integer or None but is {window!r}")
        if window < 1:
            raise ValueError(f"window is {window} but counts the query itself, so it is at least 1 (None = no window)")
    if scale is None:
        scale = head_dim**-0.5
    elif not _is_number(scale):
        raise TypeError(f"scale must be a Python number or None but is {scale!r}")
    elif not -sys.float_info.max <= scale <= sys.float_info.max:  # a Python int may be larger than any float
        raise ValueError(f"scale is {scale} but must be finite (None = 1/√D)")
    if not _is_number(dropout_p):
        raise TypeError(f"dropout_p must be a Python number but is {dropout_p!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p} but must be a probability in [0, 1)")
    if tolerance is None:
        tolerance = default_tolerance(dtype)
    elif not _is_number(tolerance):
        raise TypeError(f"tolerance must be a Python number or None but is {tolerance!r}")
    if not 0.0 <= tolerance < 1.0:
        raise ValueError(
            f"tolerance is {tolerance} but is a share of softmax mass in [0, 1): "
            f"None = {default_tolerance(dtype):.1e} for {dtype}, 0 = skip masked keys only"
        )
    # Half of it, for one side of a query, would round up or to 0 if it were smaller.
    return float(scale), tolerance if tolerance >= sys.float_info.min else 0.0


def check_slopes(name: str, shape: Sequence[int], *, batch: int, num_heads: int, query_len: int | None = None) -> None:
    """Slopes are [H] or [B, H]; given T, the error mentions that heads and positions may be swapped."""
    # Compare one by one: the symbolic lengths of torch.compile and torch.export have no hash.
    of_heads = len(shape) in (1, 2) and shape[-1] == num_heads
    if not of_heads or (len(shape) == 2 and shape[0] != batch):
        if len(shape) == 1:
            remedy = f"; pass alibi_slopes({num_heads})"
            if shape[0] == query_len:
                remedy = (
                    f" and {query_len} positions: if these axes are swapped, pass query.swapaxes(1, 2), and the same for key "
                    f"and value; otherwise pass alibi_slopes({num_heads})"
                )
            raise ValueError(f"{name} has {shape[0]} entries but query has {num_heads} heads{remedy}")
        raise ValueError(
            f"{name} has shape {list(shape)} but must be [H] = [{num_heads}] or [B, H] = [{batch}, {num_heads}]"
        )


def check_layer(
    embed_dim: int, num_heads: int, num_kv_heads: int, *, window: int | None, dropout_p: float, causal: bool,
    forget_gate: bool,
) -> None:  # fmt: skip
    """The arguments of an attention layer fit together."""
    for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if operator.index(size) < 1:
            raise ValueError(f"{name} is {size} but must be at least 1")
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim is {embed_dim} but must be a multiple of num_heads, {num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads} but must divide num_heads, {num_heads}")
    if window is not None and operator.index(window) < 1:
        raise ValueError(f"window is {window} but counts the query itself: at least 1, or None for no limit")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p} but must be in [0, 1)")
    if forget_gate and not causal:
        raise ValueError("forget_gate needs causal=True: gates multiply from a key to the queries after it")


def check_key_mask(key_mask: ArrayLike, *, batch: int, key_len: int) -> None:
    """key_mask is boolean and [B, S]."""
    if dtype_name(key_mask.dtype) != "bool":
        raise TypeError(
            f"key_mask is {dtype_name(key_mask.dtype)} but must be bool, True = visible; pass key_mask.bool() "
            "if 1 means visible (a float mask of −inf is a bias, not a mask)"
        )
    if tuple(key_mask.shape) != (batch, key_len):
        raise ValueError(
            f"key_mask has shape {list(key_mask.shape)} but must be [B, S] = [{batch}, {key_len}], one flag per key "
            "for all queries; for masks that differ between queries use causal, window and segment_ids"
        )


def check_segments(name: str, segments: ArrayLike, *, batch: int, length: int, axis: str) -> None:
    """Segment ids are integers, [B, S] for keys and [B, T] for queries."""
    if not dtype_name(segments.dtype).startswith(("int", "uint")):
        raise TypeError(
            f"{name} is {dtype_name(segments.dtype)} but must hold integers, one segment number per position"
        )
    if tuple(segments.shape) != (batch, length):
        raise ValueError(f"{name} has shape {list(segments.shape)} but must be [B, {axis}] = [{batch}, {length}]")


def check_key_bias(key_bias: ArrayLike, *, batch: int, num_heads: int, key_len: int) -> None:
    """key_bias is fp32 or fp64, and [B, H, S] or broadcastable to it."""
    if dtype_name(key_bias.dtype) not in ("float32", "float64"):
        raise TypeError(
            f"key_bias is {dtype_name(key_bias.dtype)} but must be float32 or float64: sums of gates reach 10⁵, where half "
            "precision has no digits left"
        )
    shape = tuple(key_bias.shape)
    wanted = (batch, num_heads, key_len)
    fits = len(shape) <= 3 and all(n in (1, m) for n, m in zip(reversed(shape), reversed(wanted), strict=False))
    if not fits or shape[-1:] != (key_len,):
        raise ValueError(
            f"key_bias has shape {list(shape)} but must be [B, H, S] = {list(wanted)} or broadcastable to it: "
            "[H, S], [B, 1, S], [S]"
        )


def check_sink_logits(sink_logits: ArrayLike, *, num_heads: int) -> None:
    """sink_logits is floating point, and [H]."""
    if dtype_name(sink_logits.dtype) not in EPS:
        raise TypeError(f"sink_logits is {dtype_name(sink_logits.dtype)} but must be one of {', '.join(EPS)}")
    if len(sink_logits.shape) != 1 or sink_logits.shape[0] != num_heads:
        raise ValueError(
            f"sink_logits has shape {list(sink_logits.shape)} but must be [H] = [{num_heads}], one logit per query head"
        )


SINKS_RULE = (
    "sink_logits must be finite, or −inf for a head without a sink, but it contains NaN or +inf, which would leave no weight for "
    "any key"
)


def check_log_fgate(
    log_fgate: ArrayLike,
    *,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    key_len: int,
    query_len: int,
    query_offset: object,
) -> int:
    """Gates are fp32 or fp64, [B, H, S] or [B, K, S], and all queries are among the keys. Returns the position of query 0."""
    if dtype_name(log_fgate.dtype) not in ("float32", "float64"):
        raise TypeError(
            f"log_fgate is {dtype_name(log_fgate.dtype)} but must be float32 or float64: it is summed over the sequence"
        )
    shape = tuple(log_fgate.shape)
    if len(shape) != 3 or shape[0] != batch or shape[1] not in (num_heads, num_kv_heads) or shape[2] != key_len:
        raise ValueError(
            f"log_fgate has shape {list(shape)} but must be [B, H, S] = [{batch}, {num_heads}, {key_len}], the logarithm of one "
            f"gate per query head and key position, or [B, K, S] with K = {num_kv_heads}"
        )
    if query_offset is not None and (isinstance(query_offset, bool) or not isinstance(query_offset, int)):
        raise TypeError(
            f"query_offset is {query_offset!r} but with gates must be an int or None: it selects the gates of the queries"
        )
    first = key_len - query_len if query_offset is None else query_offset
    if first < 0 or first + query_len > key_len:
        raise ValueError(
            f"the queries are at positions {first} to {first + query_len - 1} but log_fgate has the gates of 0 to "
            f"{key_len - 1}: every query must be among the keys"
        )
    return first


GATES_RULE = (
    "log_fgate must be at most 0, the natural logarithm of a gate in [0, 1] (the logsigmoid of a number, or −inf for a cut) "
    "but it contains NaN, +inf or a positive number"
)
# A gate below e^(−2²⁰) counts as e^(−2²⁰): no weight passes it in any dtype. Whole multiples of GATE_STEP are summed separately,
# without rounding; the total of n such gates still has only the digits that its dtype has at n·2²⁰.
GATE_FLOOR, GATE_STEP = -(2.0**20), 2.0**10


def check_query_offset(query_offset: ArrayLike, *, batch: int) -> None:
    """An offset given as an array holds integers, 0-d or [B]."""
    if not dtype_name(query_offset.dtype).startswith(("int", "uint")):
        raise TypeError(f"query_offset is {dtype_name(query_offset.dtype)} but a position is an integer")
    shape = query_offset.shape
    if len(shape) > 1 or (len(shape) == 1 and shape[0] != batch):
        raise ValueError(
            f"query_offset has shape {list(query_offset.shape)} but must be an int, 0-d, or one per sequence [B] = [{batch}]"
        )


def check_position(name: str, position: int) -> None:
    """A position, or a number of positions, is small enough for sums in int64."""
    if not -FARTHEST <= position <= FARTHEST:
        raise ValueError(f"{name} is {position} but positions lie between −2⁶⁰ and 2⁶⁰")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
