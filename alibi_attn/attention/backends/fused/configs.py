"""The size of the tiles that each kernel works on, by device, dtype and size of heads.

Chosen by what the compiler makes of them (no spill in the innermost loop, few instructions a score), not yet by a clock. Hopper
and Blackwell multiply from shared memory, of which they have much; all others hold one side in registers, and their tiles fit
into the 99 KiB of shared memory that a consumer's card has.
"""

import functools
from typing import Literal, NamedTuple

import torch

MAX_HEAD_DIM = 256
PLAN_ROWS = 128  # queries that share one plan of tiles; no tile has more


class Shape(NamedTuple):
    """Queries and keys of one tile, and what the compiler is told."""

    queries: int
    keys: int
    warps: int
    stages: int


Kernel = Literal["forward", "decode", "query", "key"]

# By size of heads: forward, decode, query, key.
_ORDER = ("forward", "decode", "query", "key")
_LARGE_HALF = {
    64: (Shape(128, 64, 8, 3), Shape(16, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 128, 8, 2)),
    128: (Shape(128, 64, 8, 3), Shape(16, 64, 4, 3), Shape(128, 64, 8, 2), Shape(32, 128, 8, 2)),
    256: (Shape(128, 32, 8, 2), Shape(16, 32, 4, 2), Shape(128, 32, 8, 2), Shape(32, 64, 4, 2)),
}
_LARGE_FP32 = {
    64: (Shape(64, 32, 4, 2), Shape(16, 32, 4, 2), Shape(64, 32, 4, 2), Shape(32, 32, 4, 2)),
    128: (Shape(64, 32, 4, 2), Shape(16, 32, 4, 2), Shape(32, 32, 4, 2), Shape(32, 32, 4, 2)),
}
_SMALL_HALF = {
    64: (Shape(128, 64, 8, 3), Shape(16, 64, 4, 3), Shape(64, 64, 4, 2), Shape(32, 128, 8, 2)),
    128: (Shape(128, 64, 8, 2), Shape(16, 64, 4, 3), Shape(128, 32, 8, 2), Shape(32, 64, 4, 2)),
    256: (Shape(64, 32, 8, 2), Shape(16, 32, 4, 2), Shape(32, 32, 4, 2), Shape(16, 32, 4, 2)),
}
_SMALL_FP32 = {
    64: (Shape(64, 32, 4, 2), Shape(16, 32, 4, 2), Shape(32, 32, 4, 2), Shape(32, 32, 4, 2)),
    128: (Shape(32, 32, 4, 1), Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 2)),
    256: (Shape(16, 16, 4, 1), Shape(16, 16, 4, 1), Shape(16, 16, 4, 1), Shape(16, 16, 4, 1)),
}


def tile_shape(kernel: Kernel, dtype: torch.dtype, head_dim: int, *, large: bool) -> Shape:
    """The tile of a kernel; its queries divide PLAN_ROWS, and its keys the tiles of the certificate or the other way round.

    Args:
        large: the device is one of those that `is_large` says.
    """
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else MAX_HEAD_DIM
    shapes = _LARGE_HALF if large else _SMALL_HALF
    if dtype == torch.float32:
        # Larger tiles of the widest rows leave the compiler without registers on any device.
        shapes = _LARGE_FP32 if large and width < MAX_HEAD_DIM else _SMALL_FP32
    return shapes[width][_ORDER.index(kernel)]


def is_large(device: torch.device) -> bool:
    """Whether a device has the matrix units and the 227 KiB of shared memory of Hopper and Blackwell; so has the interpreter."""
    return device.type != "cuda" or _capability(device.index) in (9, 10)


@functools.cache
def _capability(index: int | None) -> int:
    if torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(index)[0]
