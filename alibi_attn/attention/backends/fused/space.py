"""Small tensors of a call in one allocation, and where the parts of a plan lie in it."""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS
from alibi_attn.attention.backends.fused.launch import NONE, Argument, pointer_kind, scratch
from alibi_attn.attention.certificate.constants import OUTLIER_TILES, TILE


class Space:
    """Parts of an int32 tensor, as arguments of kernels; each part begins at a multiple of 16 bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._address = None if tensor.device.type == "cpu" else tensor.data_ptr()

    def at(self, word: int, dtype: torch.dtype = torch.int32) -> Argument:
        """The pointer to the part from this word on."""
        if self._address is None:
            return Argument(self.tensor.view(-1)[word:].view(dtype), None)
        return Argument(self._address + 4 * word, pointer_kind(dtype), self.tensor)


@functools.lru_cache(maxsize=1024)
def layout_of(heads: int, blocks: int, key_len: int, heads_of_masks: int) -> "Layout":
    """`Layout.of`, for numbers that are known."""
    return Layout.of(heads, blocks, key_len, heads_of_masks)


def allotted(device: torch.device, *parts: tuple[int, torch.dtype]) -> list[Argument]:
    """Scratch memory in one allocation: for each part, how many numbers of which dtype."""
    at = starts(*(count * dtype.itemsize // 4 for count, dtype in parts))
    space = Space(scratch(at[-1], device))
    return [space.at(word, dtype) for word, (_, dtype) in zip(at, parts, strict=False)]


def starts(*words: int) -> list[int]:
    """The first word of each part, and after them the number of all words."""
    return [0, *itertools.accumulate((n + 3) // 4 * 4 for n in words)]


class Layout(NamedTuple):
    """The first word of each part of a plan, within the `row` words of a sequence; see `tiles.Tiles` and `Visited`.

    Every sequence has a row, because torch.func maps plans over their first axis.
    """

    bands: int
    outliers: int
    beside: int
    weight: int
    measured: int
    full_blocks: int
    full_tiles: int
    row: int

    @classmethod
    def of(cls, heads: int, blocks: int, key_len: int, heads_of_masks: int) -> "Layout":
        """For `blocks` blocks of queries. `heads_of_masks`: how many heads have masks of their own; 0 = there are no masks."""
        tiles = (key_len + TILE - 1) // TILE
        return cls(
            *starts(
                heads * blocks * 4,
                heads * OUTLIER_TILES,
                heads * blocks * OUTLIER_TILES,
                heads,
                heads * blocks * (PLAN_ROWS // TILE) * 4,
                heads_of_masks * blocks * 2,
                heads_of_masks * tiles * 2,
            )
        )


class Plan:
    """The tiles that N blocks of queries visit, as kernels read them: `tiles.Tiles` in one tensor, and the tiles without masks.

    Args:
        tensor: [B, row] int32.
        rows: queries per block.
        order: the heads of all sequences, the heaviest first; None = as they are.
        norms, allowance, online: those of the certificate; None = there is none.
    """

    def __init__(self, tensor: Tensor, layout: Layout, heads: int, rows: int) -> None:
        self.space, self.layout, self.heads, self.rows = Space(tensor), layout, heads, rows
        self.order = self.norms = self.allowance = self.online = NONE

    @property
    def masked(self) -> bool:
        return self.layout.full_blocks < self.layout.full_tiles

    @property
    def bands(self) -> Tensor:
        return self._part(self.layout.bands, self.layout.outliers, 4).unflatten(1, (self.heads, -1))

    @property
    def outlier_tiles(self) -> Tensor:
        return self._part(self.layout.outliers, self.layout.beside, OUTLIER_TILES)

    @property
    def beside(self) -> Tensor:
        return self._part(self.layout.beside, self.layout.weight, OUTLIER_TILES).unflatten(1, (self.heads, -1))

    @property
    def weight(self) -> Tensor:
        return self.space.tensor[:, self.layout.weight : self.layout.weight + self.heads]

    @property
    def measured(self) -> Tensor:
        """[B, H, N·rows / TILE, 4] int32: the `bands` of every TILE queries for backward, which forward writes."""
        at, blocks = self.layout.measured, self.bands.shape[2] * (self.rows // TILE)
        return self.space.tensor[:, at : at + 4 * self.heads * blocks].unflatten(1, (self.heads, blocks, 4))

    def _part(self, start: int, end: int, width: int) -> Tensor:
        return self.space.tensor[:, start:end].unflatten(1, (-1, width))
