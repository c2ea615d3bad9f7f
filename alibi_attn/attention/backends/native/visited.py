"""Which keys every block of queries visited: one interval, and outlier tiles outside it; `Visited` in `call.hpp`."""

import dataclasses
import functools
from typing import Any

import numpy as np

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import OUTLIER_TILES, TILE


def numbers_of_visited(*, num_heads: int, num_kv_heads: int, query_len: int) -> int:
    """The number of int32 numbers that record the keys that one sequence visited."""
    return num_heads * -(-query_len // TILE) * 8 + num_kv_heads * OUTLIER_TILES


@dataclasses.dataclass(frozen=True)
class Visited:
    """The keys that N = ⌈T / TILE⌉ blocks of queries visited.

    Args:
        keys: [B, H, N, 4] int32: the band as [first, end), then the keys that the masks allow as [low, high).
        outlier_bits: [B, H, N] int32: which outlier tiles are visited outside the band.
        outlier_tiles: [B, K, OUTLIER_TILES] int32, −1 = none.
        first: [B] position of query 0.
        query_len: T.
        kept, kept_outlier_bits: the same for backward: [B, H, N, 2] int32, its band, and [B, H, N] int32.
    """

    keys: np.ndarray
    outlier_bits: np.ndarray
    outlier_tiles: np.ndarray
    first: np.ndarray
    query_len: int
    kept: np.ndarray
    kept_outlier_bits: np.ndarray

    @classmethod
    def of(cls, spec: AttentionSpec[Any], first: np.ndarray, visited: np.ndarray) -> "Visited":
        """Decodes the numbers that the kernels wrote, [B, …]; `first` [B] or [1] is the position of query 0."""
        b, h, n = spec.batch, spec.num_heads, -(-spec.query_len // TILE)
        parts = np.split(visited, np.cumsum([4 * h * n, h * n, 2 * h * n, h * n]), axis=1)
        shapes = (b, h, n, 4), (b, h, n), (b, h, n, 2), (b, h, n), (b, spec.num_kv_heads, OUTLIER_TILES)
        keys, bits, kept, kept_bits, tiles = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        return cls(keys, bits, tiles, np.broadcast_to(first, b), spec.query_len, kept, kept_bits)

    @property
    def for_backward(self) -> "Visited":
        """The keys that backward visits."""
        keys = np.concatenate([self.kept, self.keys[..., 2:]], -1)
        return dataclasses.replace(self, keys=keys, outlier_bits=self.kept_outlier_bits)

    @functools.cached_property
    def intervals(self) -> tuple[np.ndarray, np.ndarray]:
        """(low, high), each [B, H, N, 1 or 1 + 2·OUTLIER_TILES]: the intervals of visited keys; some are empty."""
        near, far, low, high = (self.keys[..., at, None] for at in range(4))
        if not self.outlier_bits.any():
            return near, far
        group = self.outlier_bits.shape[1] // self.outlier_tiles.shape[1]
        tiles = self.outlier_tiles.repeat(group, 1)[:, :, None]
        is_visited = (self.outlier_bits[..., None] >> np.arange(OUTLIER_TILES) & 1).astype(bool)
        start = np.where(is_visited, np.maximum(low, tiles * TILE), 0)
        stop = np.where(is_visited, np.minimum(high, (tiles + 1) * TILE), 0)
        lows = np.concatenate([near, start, np.maximum(start, far)], -1)
        return lows, np.maximum(lows, np.concatenate([far, np.minimum(stop, near), stop], -1))

    def reach_and_scores(self, spec: AttentionSpec[Any]) -> tuple[np.ndarray, np.ndarray]:
        """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is visited, and the query-key pairs.

        In space the kernels write the number of visited keys in place of the outlier bits, and all indices may be far.
        """
        if spec.coordinates is not None:
            rows = np.minimum(TILE, self.query_len - np.arange(self.keys.shape[2]) * TILE)
            scores = (self.outlier_bits.astype(np.int64) * rows).sum(-1)
            return np.full(scores.shape, max(spec.query_len, spec.key_len)), scores
        low, high = (x.astype(np.int64) for x in self.intervals)
        start = np.arange(self.keys.shape[2]) * TILE
        rows = np.minimum(TILE, self.query_len - start)
        top = (self.first[:, None] + start)[:, None, :, None]
        reach = top + rows[:, None] - low
        if not spec.causal:
            reach = np.maximum(reach, high - top)
        reach = np.where(low < high, reach, 0).max((-1, -2))
        if spec.window is not None:
            reach = np.minimum(reach, spec.window)
        return reach, ((high - low).sum(-1) * rows).sum(-1)
