"""Some of the heads of a call, where the others are computed another way."""

from collections.abc import Sequence


def query_heads(key_heads: Sequence[int], group: int) -> list[int]:
    """The query heads that read these key heads, in order; `group` of them each.

    >>> query_heads([1, 3], group=2)
    [2, 3, 6, 7]
    """
    return [head * group + at for head in key_heads for at in range(group)]


def index_of(heads: list[int]) -> list[int] | slice:
    """The heads as a slice where they are neighbors, which reads without a copy.

    >>> index_of([2, 3, 4]), index_of([2, 4])
    (slice(2, 5, None), [2, 4])
    """
    low, high = heads[0], heads[-1] + 1
    return slice(low, high) if heads == list(range(low, high)) else heads
