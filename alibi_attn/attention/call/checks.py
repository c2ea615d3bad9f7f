"""The checks of a call's shapes, dtypes and Python numbers, for arrays of any framework; no framework is imported.

`check_call` runs all that `alibi_attention` needs, in PyTorch and JAX. The checks of devices and values need the framework and
are in `validation.py` and `jax/call/validation.py`. Shapes are those of `spec.py`.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from alibi_attn.attention.call.spec import MAX_POSITION, AttentionSpec

# Of the supported dtypes.
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class ArrayLike(Protocol):
    """The attributes that the checks need from an array of any framework."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...


class Checked(NamedTuple):
    """The sizes of a call, named as in `AttentionSpec`, and its numbers with their defaults."""

    batch: int
    num_heads: int
    num_kv_heads: int
    query_len: int
    key_len: int
    head_dim: int
    scale: float
    tolerance: float


def check_call(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: Mapping[str, Any],
    *,
    slopes: ArrayLike | None,
    right_slopes: ArrayLike | None,
    layout: str = "BHTD",
    dtype: object = None,
) -> Checked:
    """The sizes and numbers of a call whose shapes, dtypes and Python numbers are valid.

    Args:
        options: all options of `alibi_attention`. What is not a Python number has a shape and a dtype.
        slopes, right_slopes: the given ones, as arrays.
        layout: the order of query's axes, by letter; key and value have K in place of H, and S in place of T.
        dtype: that of the computation, if it is not query's.
    """
    b, h, _, t, s, d = sizes = check_shapes(query, key, value, layout=layout)
    name = dtype_name(query.dtype if dtype is None else dtype)
    scale, tolerance = check_numbers(options, head_dim=d, dtype=name)
    for name, array in (("slopes", slopes), ("right_slopes", right_slopes)):
        if array is not None:
            check_slopes(name, array.shape, batch=b, num_heads=h, query_len=t)
    if options["key_mask"] is not None:
        check_key_mask(options["key_mask"], batch=b, key_len=s)
    offset = options["query_offset"]
    # The compiler supports no hasattr of a traced int.
    if not isinstance(offset, int | None) and hasattr(offset, "shape"):
        check_query_offset(offset, batch=b)
    segment_ids = options["segment_ids"]
    if isinstance(segment_ids, tuple | list):
        check_segments("segment_ids[0]", segment_ids[0], batch=b, length=t, axis="T")
        check_segments("segment_ids[1]", segment_ids[1], batch=b, length=s, axis="S")
    elif segment_ids is not None:
        check_segments("segment_ids", segment_ids, batch=b, length=s, axis="S")
    if options["key_bias"] is not None:
        check_key_bias(options["key_bias"], batch=b, num_heads=h, key_len=s)
    if options["sink_logits"] is not None:
        check_sink_logits(options["sink_logits"], num_heads=h)
    return Checked(*sizes, scale, tolerance)


def check_shapes(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, layout: str = "BHTD"
) -> tuple[int, int, int, int, int, int]:
    """(B, H, K, T, S, D), or an error that names the shape that does not fit; for the layout see `check_call`."""
    of_query, of_key = query.shape, key.shape
    if not len(of_query) == len(of_key) == len(value.shape) == 4:
        for name, array, axes in (
            ("query", query, _axes(layout)),
            ("key", key, _key_axes(layout)),
            ("value", value, _key_axes(layout)),
        ):
            if len(array.shape) != 4:
                raise ValueError(f"{name} has shape {list(array.shape)} but must have four axes {axes}")
    of_batch, of_heads, of_length, of_row = map(layout.index, "BHTD")
    b, h, t, d = of_query[of_batch], of_query[of_heads], of_query[of_length], of_query[of_row]
    k, s = of_key[of_heads], of_key[of_length]
    if of_key[of_batch] != b or of_key[of_row] != d:
        raise ValueError(
            f"key has shape {list(of_key)} but query {list(of_query)}: batch and head size must be equal "
            f"(query {_axes(layout)}, key {_key_axes(layout)})"
        )
    if tuple(value.shape) != tuple(of_key):
        raise ValueError(f"value has shape {list(value.shape)} but must have key's, {list(of_key)}")
    if d < 1:
        raise ValueError(f"query has shape {list(of_query)}: D, the size of a head, must be at least 1")
    if h < 1 or k < 1 or h % k != 0:
        raise ValueError(
            f"query has {h} heads and key {k}, but the number of key heads must divide that of query heads"
        )
    dtypes = query.dtype, key.dtype, value.dtype
    if dtypes[0] != dtypes[1] or dtypes[0] != dtypes[2] or dtype_name(dtypes[0]) not in EPS:
        raise TypeError(
            f"query, key and value are {', '.join(map(dtype_name, dtypes))} but must share one dtype of {', '.join(EPS)}"
        )
    return b, h, k, t, s, d


def default_tolerance(dtype: object) -> float:
    """The tolerance by default: eps / 32 of the dtype, far below its rounding."""
    return EPS[dtype_name(dtype)] / 32


def dtype_name(dtype: object) -> str:
    """ "float32" for torch.float32, jnp.float32, numpy's dtype("float32") and the string itself."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def check_numbers(options: Mapping[str, Any], *, head_dim: int, dtype: str) -> tuple[float, float]:
    """(scale, tolerance) with their defaults, after validating Python numbers and flags of all options."""
    causal, window, scale = options["causal"], options["window"], options["scale"]
    dropout_p, tolerance = options["dropout_p"], options["tolerance"]
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False but is {causal!r}")
    if options["right_slopes"] is not None and causal:
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
    return float(scale), usable_tolerance(tolerance)


def usable_tolerance(tolerance: float) -> float:
    """The tolerance, or 0 if it is so small that half of it, for one side of a query, would round up or to 0."""
    return tolerance if tolerance >= sys.float_info.min else 0.0


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
    fits = len(shape) <= 3 and all(n == 1 or n == m for n, m in zip(reversed(shape), reversed(wanted), strict=False))
    if not fits or not shape or shape[-1] != key_len:
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


def check_sinks(sinks: object) -> None:
    """sinks is a number of keys."""
    if isinstance(sinks, bool) or not isinstance(sinks, int):
        kind = "a tensor" if hasattr(sinks, "shape") else repr(sinks)
        raise TypeError(f"sinks is {kind} but must be an integer, a number of keys; learned logits are sink_logits")
    if sinks < 0:
        raise ValueError(f"sinks is {sinks} but must be at least 0, a number of first keys that are always seen")


def check_prefix_len(prefix_len: ArrayLike, *, batch: int, causal: bool) -> None:
    """prefix_len is [B] integers, and the call is causal."""
    if not causal:
        raise ValueError("prefix_len is for causal attention: with causal=False all keys are visible already; omit one")
    if not dtype_name(prefix_len.dtype).startswith(("int", "uint")):
        raise TypeError(f"prefix_len is {dtype_name(prefix_len.dtype)} but must hold integers, one length per sequence")
    if tuple(prefix_len.shape) != (batch,):
        raise ValueError(f"prefix_len has shape {list(prefix_len.shape)} but must be [B] = [{batch}]")


def check_positions(
    name: str, positions: ArrayLike, *, batch: int, length: int, axis: str, dims: tuple[int, ...] = ()
) -> None:
    """Positions are fp32 or fp64, [B, S] for keys and [B, T] for queries; coordinates have one more axis of one of `dims`."""
    if dtype_name(positions.dtype) not in ("float32", "float64"):
        raise TypeError(
            f"{name} is {dtype_name(positions.dtype)} but must be float32 or float64; pass {name}.double() for large integers"
        )
    shape = tuple(positions.shape)
    if shape[:2] != (batch, length) or len(shape) != (3 if dims else 2) or (dims and shape[2] not in dims):
        last = f", {' or '.join(map(str, dims))}" if dims else ""
        raise ValueError(f"{name} has shape {list(shape)} but must be [B, {axis}{last}] = [{batch}, {length}{last}]")


BIAS_RULE = "key_bias has NaN or +inf in it but must be finite, or −inf for a hidden key"
SINKS_RULE = (
    "sink_logits must be finite, or −inf for a head without a sink, but it contains NaN or +inf, which would leave no weight for "
    "any key"
)


def check_log_fgate(log_fgate: ArrayLike, spec: AttentionSpec[Any], query_offset: int | None) -> int:
    """Gates are fp32 or fp64, [B, H, S] or [B, K, S], and all queries are among the keys. Returns the position of query 0."""
    batch, num_heads, num_kv_heads, key_len = spec.batch, spec.num_heads, spec.num_kv_heads, spec.key_len
    if dtype_name(log_fgate.dtype) not in ("float32", "float64"):
        raise TypeError(
            f"log_fgate is {dtype_name(log_fgate.dtype)} but must be float32 or float64: it is summed over the sequence"
        )
    shape = tuple(log_fgate.shape)
    # Not `shape[1] not in (…)`: torch.compile finds no number of unknown size in a tuple.
    fits = len(shape) == 3 and shape[0] == batch and (shape[1] == num_heads or shape[1] == num_kv_heads)
    if not fits or shape[2] != key_len:
        raise ValueError(
            f"log_fgate has shape {list(shape)} but must be [B, H, S] = [{batch}, {num_heads}, {key_len}], the logarithm of one "
            f"gate per query head and key position, or [B, K, S] with K = {num_kv_heads}"
        )
    first = key_len - spec.query_len if query_offset is None else query_offset
    if first < 0 or first + spec.query_len > key_len:
        raise ValueError(
            f"the queries are at positions {first} to {first + spec.query_len - 1} but log_fgate has the gates of 0 to "
            f"{key_len - 1}: every query must be among the keys"
        )
    return first


GATES_RULE = (
    "log_fgate must be at most 0, the natural logarithm of a gate in [0, 1] (the logsigmoid of a number, or −inf for a cut) "
    "but it contains NaN, +inf or a positive number"
)


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
    if not -MAX_POSITION <= position <= MAX_POSITION:
        raise ValueError(f"{name} is {position} but positions lie between −2⁶⁰ and 2⁶⁰")


def _axes(layout: str) -> str:
    return f"[{', '.join(layout)}]"


def _key_axes(layout: str) -> str:
    return _axes(layout).replace("H", "K").replace("T", "S")


def _is_number(value: object) -> bool:
    return type(value) is float or (isinstance(value, int | float) and not isinstance(value, bool))
