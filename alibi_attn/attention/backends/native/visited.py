"""Which keys every block of queries met on the CPU: one interval, and outlying tiles beside it; see `native/certificate.hpp`."""

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.certificate.bounds import TILE, first_positions
from alibi_attn.attention.certificate.tiles import allowed_keys
from alibi_attn.attention.spec import AttentionSpec

Spec = AttentionSpec[Tensor]

OUTLIERS = 4  # tiles with the longest keys of a key head


@dataclasses.dataclass(frozen=True)
class Ranges:
    """What N = ⌈T / TILE⌉ blocks of queries meet.

    Args:
        keys: [B, H, N, 4] int32: the first key of the band and the first after it, then of all that the masks allow.
        pins: [B, H, N] int32: which outlying tiles are met where they reach beyond the band, as bits.
        outliers: [B, K, OUTLIERS] int32: those tiles of TILE keys, −1 = none.
        first: [B] position of query 0.
        query_len: T.
    """

    keys: np.ndarray
    pins: np.ndarray
    outliers: np.ndarray
    first: np.ndarray
    query_len: int

    @classmethod
    def open(cls, spec: Spec) -> "Ranges":
        """Ranges in which the kernels write bands and outliers; what the masks allow is there already."""
        b, h, n = spec.batch, spec.num_heads, -(-spec.query_len // TILE)
        first = first_positions(spec, spec.slopes.device).expand(b)
        start = first[:, None] + torch.arange(n) * TILE
        allowed = allowed_keys(spec, start, torch.minimum(start + TILE, first[:, None] + spec.query_len))
        keys = np.zeros((b, h, n, 4), np.int32)
        keys[..., 2:] = torch.stack(allowed, -1).clamp(0, spec.key_len).numpy()[:, None]
        outliers = np.full((b, spec.num_kv_heads, OUTLIERS), -1, np.int32)
        return cls(keys, np.zeros((b, h, n), np.int32), outliers, first.numpy(), spec.query_len)

    @classmethod
    def again(cls, spec: Spec, keys: Tensor, pins: Tensor, outliers: Tensor) -> "Ranges":
        """What `tensors` gave."""
        first = first_positions(spec, spec.slopes.device).expand(spec.batch)
        return cls(keys.numpy(), pins.numpy(), outliers.numpy(), first.numpy(), spec.query_len)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.from_numpy(self.keys), torch.from_numpy(self.pins), torch.from_numpy(self.outliers)

    @functools.cached_property
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """(low, high), each [B, H, N, 1 or 1 + 2·OUTLIERS]: the intervals of keys that are met, some of them empty."""
        near, far, low, high = (self.keys[..., at, None] for at in range(4))
        if not self.pins.any():
            return near, far
        group = self.pins.shape[1] // self.outliers.shape[1]
        tiles = self.outliers.repeat(group, 1)[:, :, None]
        is_met = (self.pins[..., None] >> np.arange(OUTLIERS) & 1).astype(bool)
        start = np.where(is_met, np.maximum(low, tiles * TILE), 0)
        stop = np.where(is_met, np.minimum(high, (tiles + 1) * TILE), 0)
        lows = np.concatenate([near, start, np.maximum(start, far)], -1)
        return lows, np.maximum(lows, np.concatenate([far, np.minimum(stop, near), stop], -1))

    @functools.cached_property
    def met(self) -> np.ndarray:
        """[B, H, N] int64: keys that every block meets."""
        low, high = self.pieces
        total: np.ndarray = (high - low).sum(-1, dtype=np.int64)
        return total

    def reach_and_scores(self, spec: Spec) -> tuple[Tensor, Tensor]:
        """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is met, and the query-key pairs."""
        low, high = (x.astype(np.int64) for x in self.pieces)
        start = np.arange(self.keys.shape[2]) * TILE
        rows = np.minimum(TILE, self.query_len - start)
        top = (self.first[:, None] + start)[:, None, :, None]
        reach = top + rows[:, None] - low
        if not spec.causal:
            reach = np.maximum(reach, high - top)
        reach = np.where(low < high, reach, 0).max((-1, -2))
        if spec.window is not None:
            reach = np.minimum(reach, spec.window)
        return torch.from_numpy(reach), torch.from_numpy((self.met * rows).sum(-1))
