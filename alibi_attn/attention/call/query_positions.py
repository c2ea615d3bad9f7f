"""Where queries with their own positions may be; on readable arrays of numpy or tensors alike, so that JAX shares it.

`own` is [B, T], the positions of the queries, and `positions` [B, S] those of the keys; neither decreases along a row.
Coordinates have one more axis and any order.
"""

from collections.abc import Mapping
from typing import Any

from alibi_attn.attention.call.checks import check_positions

WINDOW_RULE = "window counts indices, but query_positions are not those of keys; omit window"


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
