"""Validates a call in JAX once, when it is traced, with the checks of `attention/call/checks.py`."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from alibi_attn.attention.call.checks import BIAS_RULE, SINKS_RULE, Checked, check_call, dtype_name
from alibi_attn.attention.call.hints import check_known
from alibi_attn.attention.call.options import DEFAULTS, UNCHANGED, SpecOptions, named_arrays
from alibi_attn.attention.call.query_positions import part_fields, windows_of_heads
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.jax.call.plan import Array
from alibi_attn.slopes import alibi_slopes

MAX_INT32_POSITION = 2**28  # positions lie within ± this, so that int32 holds every sum and difference of two limits

Slopes = Sequence[float] | NDArray[np.floating] | Array
SegmentIds = Array | tuple[Array, Array]


def make_spec(
    query: Array, key: Array, value: Array, slopes: Slopes | None = None, **options: Unpack[SpecOptions[Array]]
) -> AttentionSpec[Array]:
    """The validated spec of a call; options and defaults are those of `alibi_attention`."""
    check_known("alibi_attention", options)
    given = cast(SpecOptions[Array], {**DEFAULTS, **options})
    for name, array in (("query", query), ("key", key), ("value", value), *named_arrays(given, "array")):
        check_array(name, array)
    dtype = jax.dtypes.canonicalize_dtype(query.dtype)  # numpy's fp64 becomes fp32 unless x64 is enabled
    left = None if slopes is None else _given_slopes("slopes", slopes)
    right = None if given["right_slopes"] is None else _given_slopes("right_slopes", given["right_slopes"])
    window, head_windows = windows_of_heads(given["window"], query.shape[2] if query.ndim == 4 else 0, readable_values)
    options_of_all = {**given, "window": window}
    sizes = check_call(query, key, value, options_of_all, slopes=left, right_slopes=right, layout="BTHD", dtype=dtype)
    offset = _offset(given["query_offset"], sizes)
    query_segments, key_segments = _segments(given["segment_ids"], offset, sizes)
    work = jnp.promote_types(dtype, jnp.float32)
    key_bias, sink_logits = given["key_bias"], given["sink_logits"]
    if key_bias is not None:
        of_keys = sizes.batch, sizes.num_heads, sizes.key_len
        key_bias = jnp.broadcast_to(jnp.asarray(_below_inf(key_bias, BIAS_RULE)), of_keys)
    unchanged = {name: x for name, x in given.items() if name in UNCHANGED}
    fields: dict[str, Any] = {**sizes._asdict(), **_part_fields(given, sizes), **unchanged}
    return AttentionSpec(
        slopes=jnp.asarray(alibi_slopes(sizes.num_heads) if left is None else left, work),
        right_slopes=None if right is None else jnp.asarray(right, work),
        window=window,
        head_windows=head_windows,
        query_offset=offset,
        query_segments=query_segments,
        key_segments=key_segments,
        key_bias=key_bias,
        sink_logits=None if sink_logits is None else jnp.asarray(_below_inf(sink_logits, SINKS_RULE)),
        **fields,
    )


def _part_fields(given: SpecOptions[Array], sizes: Checked) -> dict[str, Any]:
    """`query_positions.part_fields` as arrays. In numpy's fp64, which JAX may not have, positions are relative to one of them."""
    fields = part_fields(given, sizes, readable_values)
    for kind, reference in (("positions", slice(-1, None)), ("coordinates", slice(1))):
        pair = {name: fields[name] for name in (kind, f"query_{kind}") if name in fields}
        if pair and all(isinstance(x, np.ndarray) for x in pair.values()) and sizes.key_len > 0:
            pair = {name: x - fields[kind][:, reference] for name, x in pair.items()}
        fields |= {name: jnp.asarray(x) for name, x in pair.items()}
    if "prefix_len" in fields:
        fields["prefix_len"] = jnp.asarray(fields["prefix_len"], jnp.int32)
    return fields


def checked_dropout_key(dropout_p: float, dropout_key: Array | None) -> Array | None:
    if dropout_p == 0.0:
        return None
    if dropout_key is None:
        raise ValueError(f"dropout_p is {dropout_p} but there is no dropout_key; pass dropout_key=jax.random.key(seed)")
    check_array("dropout_key", dropout_key)
    if jnp.issubdtype(dropout_key.dtype, jax.dtypes.prng_key):
        alone = dropout_key.shape == ()
    else:
        alone = dropout_key.dtype == jnp.uint32 and dropout_key.ndim == 1
    if not alone:
        raise ValueError(
            f"dropout_key is {dropout_key.dtype} {list(dropout_key.shape)} but must be one key; pass jax.random.key(seed)"
        )
    return dropout_key


def _given_slopes(name: str, slopes: Slopes) -> Array | NDArray[np.floating]:
    array = slopes if isinstance(slopes, jax.Array) else np.asarray(slopes)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name} is {dtype_name(array.dtype)} but must hold real numbers")
    values, may_be_inf = readable_values(array), name == "right_slopes"
    if values is not None and not (np.isfinite(values) | ((values == np.inf) & may_be_inf)).all():
        rule = "finite, or inf for a head that never attends to the right" if may_be_inf else "finite"
        raise ValueError(f"{name} must be {rule} but is {values.tolist()}")
    return array


def _offset(query_offset: int | Array | None, sizes: Checked) -> int | Array:
    if query_offset is None:
        return sizes.key_len - sizes.query_len
    if isinstance(query_offset, jax.Array | np.ndarray | np.integer):
        values = readable_values(query_offset) if isinstance(query_offset, jax.Array) else np.asarray(query_offset)
        if values is not None:
            for value in values.reshape(-1).tolist():
                _check_position(int(value), sizes.query_len + sizes.key_len)
        return jnp.asarray(query_offset, jnp.int32)
    if isinstance(query_offset, bool) or not isinstance(query_offset, int):
        raise TypeError(f"query_offset must be an int or an integer array but is {query_offset!r}")
    _check_position(query_offset, sizes.query_len + sizes.key_len)
    return query_offset


def _check_position(query_offset: int, length: int) -> None:
    """Positions are int32 in JAX, and a larger offset would wrap around."""
    if abs(query_offset) + length >= MAX_INT32_POSITION:
        raise ValueError(f"query_offset is {query_offset} but positions must lie between −2^28 and 2^28")


def _segments(segment_ids: SegmentIds | None, offset: int | Array, sizes: Checked) -> tuple[Array | None, Array | None]:
    """(query's [B, T], key's [B, S]); given one array, each query must be at a key's position, and has its segment."""
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, tuple | list):
        of_query, of_key = _small_numbers(*segment_ids)
        return of_query, of_key
    (of_key,) = _small_numbers(segment_ids)
    query_len, key_len = sizes.query_len, sizes.key_len
    first = readable_values(offset) if isinstance(offset, jax.Array) else np.asarray(offset)
    if first is not None and first.size and (first.min() < 0 or first.max() + query_len > key_len):
        raise ValueError(
            f"the queries are at positions {first.min()} to {first.max() + query_len - 1} but segment_ids covers only the keys' "
            f"positions 0 to {key_len - 1}; pass a pair ([B, T], [B, S]) of segment ids for queries and keys"
        )
    return _segments_at(query_len, jnp.asarray(offset, jnp.int32), of_key), of_key


@partial(jax.jit, static_argnums=0)
def _segments_at(query_len: int, offset: Array, of_key: Array) -> Array:
    """[B, T] the segments at the positions of the queries."""
    position = jnp.reshape(offset, (-1, 1)) + jnp.arange(query_len, dtype=jnp.int32)
    position = jnp.broadcast_to(position, (len(of_key), query_len))
    outside = (position < 0) | (position >= of_key.shape[1])
    of_query = jnp.take_along_axis(of_key, position, axis=1, mode="clip")
    # If values cannot be read, a query outside gets a segment that no key has, and sees no key.
    return jnp.where(outside, of_key.max(1, keepdims=True, initial=-1) + 1, of_query)


def _below_inf(array: Array, rule: str) -> Array:
    """The array; raises a ValueError with the rule for NaN and +inf, if the values can be read."""
    values = readable_values(array)
    if values is not None and not (values < np.inf).all():
        raise ValueError(rule)
    return array


def _small_numbers(*segment_ids: object) -> list[Array]:
    """Segment ids that fit a JAX array: only equality matters, so large numpy integers are renumbered."""
    limits = np.iinfo(np.int32)
    of_numpy = [x for x in segment_ids if isinstance(x, np.ndarray) and x.size]
    if all(x.min() >= limits.min and x.max() < limits.max for x in of_numpy):
        return [x if x.dtype == jnp.int64 else jnp.asarray(x, jnp.int32) for x in map(jnp.asarray, segment_ids)]
    if len(of_numpy) < len(segment_ids):
        raise ValueError(
            "segment_ids has numbers that do not fit int32, next to a jax.Array; pass both as numpy arrays, or smaller numbers"
        )
    numbers = np.unique(np.concatenate([x.ravel() for x in of_numpy]), return_inverse=True)[1].astype(np.int32)
    parts = np.split(numbers, np.cumsum([x.size for x in of_numpy])[:-1])
    return [jnp.asarray(part.reshape(x.shape)) for part, x in zip(parts, of_numpy, strict=True)]


def check_array(name: str, array: object) -> None:
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be a jax.Array or numpy array but is {type(array).__name__}")


def readable_values(array: Array | NDArray[Any]) -> NDArray[Any] | None:
    """The values if reading them is free: a numpy array, or an array on the CPU that is not traced; else None."""
    if isinstance(array, jax.Array) and (
        isinstance(array, jax.core.Tracer) or {d.platform for d in array.devices()} != {"cpu"}
    ):
        return None
    return np.asarray(array)
