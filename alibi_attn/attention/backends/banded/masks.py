"""Bias and mask of one piece of work (see `pieces.py`), and the strided views of its blocks and their keys."""

import math

import torch
from torch import Tensor

from alibi_attn.attention.backends.banded.pieces import Piece
from alibi_attn.attention.call.bias import EXTREME_SLOPE
from alibi_attn.attention.call.spec import AttentionSpec

Spec = AttentionSpec[Tensor]
Masks = dict[tuple[float, ...], tuple[Tensor, bool]]


class HeadMasks:
    """One head of one sequence: its slopes, and the masks that its pieces share.

    Args:
        masks: the cache of masks; the same head of all sequences may share it.
    """

    def __init__(self, spec: Spec, b: int, h: int, masks: Masks) -> None:
        self.spec, self.b = spec, b
        self.slope = _of_head(spec.slopes, b, h)
        self.right_slope = self.slope if spec.right_slopes is None else _of_head(spec.right_slopes, b, h)
        offset = spec.query_offset
        self.first = int(offset[b]) if isinstance(offset, Tensor) else offset
        self.dtype, self.device = spec.slopes.dtype, spec.slopes.device
        self._masks = masks

    @property
    def is_extreme(self) -> bool:
        """Whether a slope is so steep that scores would lose their digits."""
        slopes = self.slope, 0.0 if math.isinf(self.right_slope) else self.right_slope
        return max(map(abs, slopes)) > EXTREME_SLOPE

    def distance(self, piece: Piece, block: int | None = None) -> Tensor:
        """i − j: [1, rows, keys] if all blocks agree or one is selected, else [count, rows, keys]."""
        shift = piece.stride - piece.step
        steps, i, j = (torch.arange(n, device=self.device) for n in (piece.count, piece.rows, piece.keys))
        blocks = steps if block is None else steps[block : block + 1]
        if shift == 0:
            blocks = blocks[:1]
        start = self.first + piece.query - piece.key + blocks * shift
        return start[:, None, None] + i[:, None] - j

    def tile_mask(self, piece: Piece) -> tuple[Tensor, bool]:
        """The additive mask of a "tile" piece, [count|1, 1, rows, keys], and whether some row of it sees no key."""
        spec = self.spec
        dense = spec.key_mask is not None or spec.key_segments is not None
        shift = piece.stride - piece.step
        place = (self.first + piece.query - piece.key, shift, piece.count if shift else 1, piece.rows, piece.keys)
        name = self.slope, self.right_slope, *place
        if not dense and name in self._masks:
            return self._masks[name]
        distance = self.distance(piece)
        bias = distance.abs().to(self.dtype).mul_(-self.slope)
        if not spec.causal and self.right_slope != self.slope:
            finite = 0.0 if math.isinf(self.right_slope) else self.right_slope
            bias = torch.where(distance < 0, distance.to(self.dtype) * finite, bias)
        hidden = self.hidden(piece, distance)
        bias = bias.masked_fill(hidden, -math.inf)
        blind = bool((bias.amax(-1) == -math.inf).any())
        mask = bias[:, None]
        if not dense:
            self._masks[name] = mask, blind
        return mask, blind

    def hidden(self, piece: Piece, distance: Tensor, block: int | None = None) -> Tensor:
        """The keys that are hidden from a query of the piece, [count|1, rows, keys] bool."""
        spec = self.spec
        hidden = (distance < 0) & (spec.causal or math.isinf(self.right_slope))
        if spec.window is not None:
            hidden = hidden | (distance.abs() >= spec.window)
        if spec.key_mask is not None:
            hidden = hidden | ~key_view(spec.key_mask[self.b], piece, block)[:, None]
        if spec.key_segments is not None and spec.query_segments is not None:
            own = query_view(spec.query_segments[self.b], piece, block)
            hidden = hidden | (own[..., None] != key_view(spec.key_segments[self.b], piece, block)[:, None])
        return hidden

    def key_bias(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """(mask [1, 1, 1, keys] with m·(j − r), shift [rows] with m·(i − r)) of block 0 of a "diagonal" or "left" piece."""
        reference = (piece.keys - 1) / 2 if piece.kind == "diagonal" else piece.keys
        i, j = (torch.arange(n, dtype=self.dtype, device=self.device) for n in (piece.rows, piece.keys))
        mask = (j - reference) * self.slope
        start = 0 if piece.kind == "diagonal" else self.first + piece.query - piece.key
        shift = (i + (start - reference)) * self.slope
        return mask[None, None, None], shift


def query_view(row: Tensor, piece: Piece, block: int | None = None) -> Tensor:
    """[T, ...] -> [count, rows, ...], or [1, rows, ...] of one block; a view."""
    return _view(row, piece.query, piece.rows, piece.stride, piece.count, block)


def key_view(row: Tensor, piece: Piece, block: int | None = None) -> Tensor:
    """[S, ...] -> [count, keys, ...], or [1, keys, ...] of one block: overlapping bands, as a view."""
    return _view(row, piece.key, piece.keys, piece.step, piece.count, block)


def _view(row: Tensor, start: int, size: int, step: int, count: int, block: int | None) -> Tensor:
    if block is not None:
        start, count = start + block * step, 1
    strides = row.stride()
    offset = row.storage_offset() + start * strides[0]
    return row.as_strided((count, size, *row.shape[1:]), (step * strides[0], *strides), offset)


def _of_head(slopes: Tensor, b: int, h: int) -> float:
    return float(slopes[h] if slopes.ndim == 1 else slopes[b, h])
