"""Where queries with their own positions may be; on readable arrays of numpy or tensors alike, so that JAX shares it.

`own` is [B, T], the positions of the queries, and `positions` [B, S] those of the keys; neither decreases along a row.
"""

from typing import Any

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
