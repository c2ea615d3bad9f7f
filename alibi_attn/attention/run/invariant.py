"""Calls whose queries have the same bits whatever else is computed with them. No framework is imported: JAX shares it.

`native` sums each query's scores in tiles that begin at multiples of 64 keys, from the nearest outward, so its bits do not
depend on the number of queries, nor on later keys. They depend on two other things. A bias is rounded relative to the first
query of the block, so blocks must begin at multiples of 64 too: zeros precede the queries of a chunk. And what a block skips
depends on all of its queries, while a text may end within a block, so nothing is skipped.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from alibi_attn.attention.call.reads import Reads
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import TILE

Array = TypeVar("Array")

READS = Reads(
    "invariant=True",
    frozenset({"window", "key_mask", "query_segments", "key_segments", "return_lse"}),
    instead="invariant=False",
)


def invariant_spec(
    spec: AttentionSpec[Array], tolerance: float | None, backend: str, before: Callable[[Array, int], Array]
) -> tuple[AttentionSpec[Array], int]:
    """(the call that `native` must compute, how many queries of zeros it has before the given ones).

    Args:
        before: (array [B, T], count) -> [B, count + T], with zeros in front.

    Raises:
        ValueError: another backend, a tolerance, or an argument whose result depends on other queries or keys.
    """
    if backend not in ("auto", "native"):
        raise ValueError(
            f"backend {backend!r} cannot run this: its sums depend on the lengths of the call, but invariant=True promises that "
            "bits do not; use backend='native'"
        )
    if tolerance is not None and tolerance > 0:
        raise ValueError(
            f"tolerance is {tolerance} but invariant=True computes every visible score, because what a block of queries skips "
            "depends on all of them; omit it"
        )
    READS.check(spec)
    assert isinstance(spec.query_offset, int)
    count = spec.query_offset % TILE
    return dataclasses.replace(
        spec,
        tolerance=0.0,
        query_len=spec.query_len + count,
        query_offset=spec.query_offset - count,
        query_segments=None if spec.query_segments is None else before(spec.query_segments, count),
    ), count
