"""The tile sizes of each kernel, by device, dtype and head size.

Chosen from compiled code (no spills in the innermost loop, few instructions per score); those of forward for Hopper by timing
too: two programs of 64 queries share a processor. Hopper and Blackwell multiply from shared memory and have a lot of it. Other
devices hold one operand in registers, and their tiles fit into the 99 KiB of shared memory of a consumer card. JAX uses these
sizes too, so no framework is imported.
"""

from typing import Literal, NamedTuple, Protocol

from alibi_attn.attention.certificate.constants import TILE

MAX_HEAD_DIM = 256
DECODE_QUERIES = 8  # up to this many queries are decoding
WHOLE_BYTES = 80 << 20  # decoding reads up to this many bytes of keys and values whole: to find the reach takes longer
WHOLE_KEYS = 1024  # up to this many keys a call without gradients scores all of them, for the same reason
PLAN_ROWS = 128  # queries that share one plan of tiles; no tile has more


class DType(Protocol):
    """A floating-point dtype of torch or numpy."""

    @property
    def itemsize(self) -> int: ...


class Shape(NamedTuple):
    """Queries and keys of one tile, and the compiler's warps and stages."""

    queries: int
    keys: int
    warps: int
    stages: int


Kernel = Literal["forward", "decode", "query", "key"]

# By head size: forward, decode, query, key.
_ORDER = ("forward", "decode", "query", "key")
_LARGE_HALF = {
    64: (Shape(64, 64, 4, 3), Shape(16, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 4, 2)),
    128: (Shape(64, 64, 4, 3), Shape(16, 64, 4, 3), Shape(128, 64, 8, 3), Shape(32, 64, 4, 3)),
    256: (Shape(128, 32, 8, 2), Shape(16, 32, 4, 2), Shape(128, 32, 8, 2), Shape(32, 64, 4, 2)),
}
# With rows that the device fetches by itself, no register holds their addresses.
_DESCRIBED = Shape(64, 64, 4, 2)
_LARGE_FP32 = {
    64: (Shape(64, 32, 4, 2), Shape(16, 32, 4, 2), Shape(64, 32, 4, 2), Shape(32, 32, 4, 2)),
    128: (Shape(64, 32, 4, 2), Shape(16, 32, 4, 2), Shape(32, 32, 4, 2), Shape(32, 32, 4, 2)),
}
_SMALL_HALF = {
    64: (Shape(128, 64, 8, 3), Shape(16, 64, 4, 3), Shape(64, 64, 4, 2), Shape(32, 64, 4, 2)),
    128: (Shape(128, 64, 8, 2), Shape(16, 64, 4, 3), Shape(128, 32, 8, 2), Shape(32, 64, 4, 2)),
    256: (Shape(64, 32, 8, 2), Shape(16, 32, 4, 2), Shape(32, 32, 4, 2), Shape(16, 32, 4, 2)),
}
_SMALL_FP32 = {
    64: (Shape(64, 32, 4, 2), Shape(16, 32, 4, 2), Shape(32, 32, 4, 2), Shape(32, 32, 4, 2)),
    128: (Shape(32, 32, 4, 1), Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 2)),
    256: (Shape(16, 16, 4, 1), Shape(16, 16, 4, 1), Shape(16, 16, 4, 1), Shape(16, 16, 4, 1)),
}


def may_describe(dtype: DType, head_dim: int, *, large: bool) -> bool:
    """Whether backward gets descriptors of rows that can be described: the kernel for keys of queries; on Hopper, and without
    a key bias, also the one for queries of keys.
    """
    return large and dtype.itemsize < 4 and 32 < head_dim <= 128


def may_fix(dtype: DType, head_dim: int) -> bool:
    """Whether forward has a loop without online softmax too. fp32 hardly gains from it, and wider heads would spill."""
    return dtype.itemsize < 4 and head_dim <= 128


def tile_shape(
    kernel: Kernel, dtype: DType, head_dim: int, *, large: bool, described: bool = False, rows: int = PLAN_ROWS
) -> Shape:
    """The tile of a kernel.

    Args:
        large: the result of `is_large` for the device.
        described: with descriptors, see `may_describe`; only for "query" and "key".
        rows: queries that share one plan; a tile with more would read and write beyond what belongs to its head.

    Raises:
        ValueError: the table has a tile with which the kernel would skip keys or queries.
    """
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else MAX_HEAD_DIM
    shapes = _LARGE_HALF if large else _SMALL_HALF
    if dtype.itemsize == 4:
        # With larger tiles of the widest rows, the compiler runs out of registers on every device.
        shapes = _LARGE_FP32 if large and width < MAX_HEAD_DIM else _SMALL_FP32
    shape = _DESCRIBED if described else shapes[width][_ORDER.index(kernel)]
    # The kernels read an isolated tile of keys in TILE // keys parts, and the keys of a part share its visitors.
    if TILE % shape.keys:
        raise ValueError(f"the tile table has {shape.keys} keys for the {kernel} kernel; pass a divisor of {TILE}")
    most = TILE if kernel == "key" else PLAN_ROWS
    if most % shape.queries:
        raise ValueError(
            f"the tile table has {shape.queries} queries for the {kernel} kernel; pass a divisor of {most}"
        )
    return shape._replace(queries=min(shape.queries, rows))


def width_for(count: int, most: int = 256) -> int:
    """How many of `count` tiles, or blocks, a small program handles at a time."""
    return min(most, max(16, 1 << (count - 1).bit_length()))
