"""Validates windows per head, sinks, prefixes, positions and registers, which split a call, for arrays of any framework.

`own` is [B, T], the positions of the queries, and `positions` [B, S] those of the keys; neither decreases along a row.
Coordinates have one more axis and any order. What depends on values is checked where reading them is free.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from alibi_attn.attention.call.checks import Checked, check_positions, check_prefix_len, check_sinks, dtype_name
from alibi_attn.attention.call.spec import MAX_POSITION


def windows_of_heads(
    window: Any, num_heads: int, values: Callable[[Any], NDArray[Any] | None]
) -> tuple[int | None, tuple[int, ...] | None]:
    """(the window of all heads, None), or (None, one per head); a single integer is checked elsewhere.

    Args:
        values: array -> its values, or None if reading them is not free.
    """
    if window is None or isinstance(window, int):
        return window, None
    windows = window
    if hasattr(window, "dtype"):
        if not dtype_name(window.dtype).startswith(("int", "uint")):
            raise TypeError(f"window is {dtype_name(window.dtype)} but must hold integers, one window per head")
        array = window if isinstance(window, np.ndarray | np.generic) else values(window)
        if array is None:
            raise TypeError("window is an array that is traced or on another device; pass a list of integers")
        windows = array.tolist()
    if not isinstance(windows, Sequence):
        raise TypeError(f"window must be an integer, one integer per head, or None but is {window!r}")
    given = [x for x in windows if isinstance(x, SupportsIndex) and not isinstance(x, bool)]
    if len(given) != len(windows) or len(given) != num_heads:
        raise ValueError(f"window is {list(windows)} but must be an integer, or [H] = {num_heads} integers")
    numbers = [min(operator.index(x), MAX_POSITION) for x in given]
    if min(numbers) < 1:
        raise ValueError(f"window is {numbers} but counts the query itself, so each must be at least 1")
    return (numbers[0], None) if len(set(numbers)) == 1 else (None, tuple(numbers))


def check_layer(
    embed_dim: int, num_heads: int, num_kv_heads: int, *, window: Any, sinks: int, registers: int, dropout_p: float,
    causal: bool, forget_gate: bool, values: Callable[[Any], NDArray[Any] | None],
) -> int | tuple[int, ...] | None:  # fmt: skip
    """The arguments of an attention layer fit together. Returns the window, or one per head; `values` as above."""
    one_window, windows = windows_of_heads(window, num_heads, values)
    for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if operator.index(size) < 1:
            raise ValueError(f"{name} is {size} but must be at least 1")
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim is {embed_dim} but must be a multiple of num_heads, {num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads} but must divide num_heads, {num_heads}")
    if one_window is not None and operator.index(one_window) < 1:
        raise ValueError(f"window is {one_window} but counts the query itself: at least 1, or None for no limit")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p} but must be in [0, 1)")
    if forget_gate and not causal:
        raise ValueError("forget_gate needs causal=True: gates multiply from a key to the queries after it")
    check_sinks(sinks)
    if registers != 0:
        check_registers(registers, causal=causal)
    if forget_gate and (sinks or windows is not None):
        raise ValueError("forget_gate supports one window for all heads and no sinks; omit one of them")
    return windows or one_window


def part_fields(
    given: Mapping[str, Any], sizes: Checked, values: Callable[[Any], NDArray[Any] | None]
) -> dict[str, Any]:
    """The fields of a call's spec that come from these arguments, as they were given; empty for most calls.

    Args:
        given: all options of `alibi_attention`.
        values: array -> its values, or None if reading them is not free.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or values, or arguments that exclude one another.
    """
    fields: dict[str, Any] = {}
    causal, prefix_len, positions = given["causal"], given["prefix_len"], given["positions"]
    check_sinks(given["sinks"])
    if given["sinks"] > 0 and given["window"] is not None:
        fields["sinks"] = given["sinks"]
    if prefix_len is not None:
        check_prefix_len(prefix_len, batch=sizes.batch, causal=causal)
        check_prefix_values(values(prefix_len), sizes.key_len, "S")
        fields["prefix_len"] = prefix_len
    if given["registers"] != 0:
        check_registers(given["registers"], causal=causal, query_offset=given["query_offset"])
    if positions is not None:
        fields.update(_positions(given, sizes, values))
    elif given["query_positions"] is not None:
        raise ValueError("query_positions is given without positions [B, S], those of the keys; pass both")
    return fields


def _positions(
    given: Mapping[str, Any], sizes: Checked, values: Callable[[Any], NDArray[Any] | None]
) -> dict[str, Any]:
    """The positions or coordinates of keys and of queries, which are the last T keys' by default."""
    positions, own, query_len, key_len = given["positions"], given["query_positions"], sizes.query_len, sizes.key_len
    in_space = positions.ndim == 3
    if in_space:
        check_coordinates(given, batch=sizes.batch, query_len=query_len, key_len=key_len)
    else:
        if given["query_offset"] is not None:
            raise ValueError("positions and query_offset exclude one another: pass query_positions [B, T] instead")
        check_positions("positions", positions, batch=sizes.batch, length=key_len, axis="S")
        if own is not None:
            check_positions("query_positions", own, batch=sizes.batch, length=query_len, axis="T")
        elif query_len > key_len:
            raise ValueError(
                f"there are {query_len} queries and {key_len} keys, so not every query has a key's position; pass "
                "query_positions [B, T]"
            )
    of_keys, of_queries = (None if x is None else values(x) for x in (positions, own))
    for name, numbers in (("positions", of_keys), ("query_positions", of_queries)):
        if numbers is not None:
            check_order(name, numbers, decreasing=in_space)
    # The same array in self-attention in space; elsewhere comparing lengths would be a guard of exported programs.
    last = positions if in_space and query_len == key_len else positions[:, key_len - query_len :]
    both = {"positions": positions, "query_positions": last if own is None else own}
    if in_space:
        return {"coordinates": both["positions"], "query_coordinates": both["query_positions"]}
    if own is None:
        return both
    known = of_keys is not None and of_queries is not None
    if known and given["causal"]:
        check_not_before(of_queries, of_keys)
        prefix_len = None if given["prefix_len"] is None else values(given["prefix_len"])
        if prefix_len is not None:
            check_inside_prefix(of_queries, of_keys, np.arange(key_len) < prefix_len[:, None])
    if given["causal"] or (known and follow_indices(of_queries, of_keys)):
        return both
    if given["window"] is not None:
        raise ValueError("window counts indices, but query_positions are not those of keys; omit window")
    return {**both, "by_position": True}


def check_prefix_values(prefix_len: NDArray[Any] | None, most: int, of: str) -> None:
    """A prefix has at most this many keys, the number of what `of` says; None = the lengths cannot be read."""
    if prefix_len is not None and prefix_len.size:
        low, high = int(prefix_len.min()), int(prefix_len.max())
        if low < 0 or high > most:
            raise ValueError(
                f"prefix_len is {low if low < 0 else high} for a sequence but must be from 0 to {most}, {of}"
            )


def check_order(name: str, positions: NDArray[Any], *, decreasing: bool = False) -> None:
    """Positions are finite and, unless they may be `decreasing`, do not decrease."""
    if decreasing and not np.isfinite(positions).all():
        raise ValueError(f"{name} must be finite")
    if not decreasing and not ((positions[:, 1:] >= positions[:, :-1]).all() and np.isfinite(positions).all()):
        raise ValueError(f"{name} must be finite and must not decrease along a row; sort the tokens by position")


def check_not_before(own: Any, positions: Any) -> None:
    """In a causal call no query precedes its key, the one of the same index counted from the end."""
    common = min(own.shape[1], positions.shape[1])
    if not bool((own[:, own.shape[1] - common :] >= positions[:, positions.shape[1] - common :]).all()):
        raise ValueError(
            "query_positions must not precede the positions of the last T keys, one for one, because causal attention is "
            "decided by index; pass causal=False for queries anywhere"
        )


def check_inside_prefix(own: Any, positions: Any, inside: Any) -> None:
    """Inside a prefix no query lies after a key to its right by index, because the distance of parts has one sign per side.

    Args:
        inside: [B, S] bool, whether a key is in the prefix.
    """
    query_len, key_len = own.shape[1], positions.shape[1]
    first = max(key_len - query_len + 1, 0)  # the key after query 0
    too_far = own[:, max(query_len - key_len - 1, 0) : query_len - 1] > positions[:, first:]
    if bool((too_far & inside[:, first:]).any()):
        raise ValueError(
            "query_positions has a query after the next key of its prefix, but left and right go by index there; pass positions "
            "of queries up to that key"
        )


def follow_indices(own: Any, positions: Any) -> bool:
    """Whether each query lies between its key, the one of the same index counted from the end, and the next key."""
    query_len, key_len = own.shape[1], positions.shape[1]
    if query_len > key_len:
        return False
    not_before = own >= positions[:, key_len - query_len :]
    not_after = own[:, : query_len - 1] < positions[:, key_len - query_len + 1 :]
    return bool(not_before.all()) and bool(not_after.all())


def check_registers(registers: object, *, causal: bool, query_offset: object = None) -> None:
    """A number of tokens, not causal, and the position of the first query is known."""
    if type(registers) is not int or registers < 0:
        raise ValueError(
            f"registers is {registers!r} but must be an int of at least 0: the first tokens without a bias"
        )
    if causal:
        raise ValueError("registers are symmetric: the tokens before one attend to it too; pass causal=False")
    if hasattr(query_offset, "shape"):
        raise ValueError("registers and a tensor as query_offset exclude one another; pass an int")


def check_coordinates(given: Mapping[str, Any], *, batch: int, query_len: int, key_len: int) -> None:
    """The shapes of coordinates, and what excludes them, but not their values."""
    positions, own = given["positions"], given["query_positions"]
    without = ("window", "prefix_len", "query_offset", "right_slopes")
    refused = [name for name in without if given[name] is not None] + ["sinks"] * (given["sinks"] > 0)
    if given["causal"]:
        raise ValueError("positions [B, S, C] in the plane or in space have no left and right: pass causal=False")
    if refused:
        raise ValueError(f"positions [B, S, C] in the plane or in space exclude {', '.join(refused)}; omit them")
    check_positions("positions", positions, batch=batch, length=key_len, axis="S", dims=(2, 3))
    if own is not None:
        dims = (positions.shape[2],)
        check_positions("query_positions", own, batch=batch, length=query_len, axis="T", dims=dims)
    elif query_len > key_len:
        raise ValueError(
            f"there are {query_len} queries and {key_len} keys, so not every query has a key's position; pass "
            "query_positions [B, T, C]"
        )
