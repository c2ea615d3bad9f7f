"""From reach to keys: the interval of keys that every block of queries meets, and pinned tiles beside it, for loops on the CPU.

`tiles.py` says the same in whole tiles, for kernels on a GPU.
"""

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.bounds import TILE, Bounds, first_positions
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.tiles import key_intervals

Spec = AttentionSpec[Tensor]


@dataclasses.dataclass(frozen=True)
class Ranges:
    """What is met by N = ⌈T / TILE⌉ blocks of queries.

    Args:
        keys: [B, H, N, 4] int32: the first key of the certified band and the first after it, then of all that the masks allow.
        pins: [B, H, P] int32: tiles of keys that are met wherever the masks allow it, −1 = none; the heads that share a key
            head have the same tiles in the same places, or −1.
        first: [B, 1] position of query 0.
    """

    keys: np.ndarray
    pins: np.ndarray
    first: np.ndarray
    query_len: int

    @classmethod
    def of(cls, spec: Spec, found: Bounds) -> "Ranges":
        near, far, low, high = (x.clamp(0, spec.key_len) for x in key_intervals(spec, found))
        keys = torch.stack([near, torch.maximum(near, far), low, torch.maximum(low, high)], -1).to(torch.int32)
        pins = found.pins[..., : int((found.pins >= 0).sum(-1).max())]
        if spec.group > 1:
            # Pins are the tiles with the largest norms, so the choices are nested and the longest holds them all.
            of_group = pins.unflatten(1, (spec.num_kv_heads, spec.group))
            most = (of_group >= 0).sum(-1).argmax(2)[..., None, None].expand(-1, -1, 1, pins.shape[-1])
            longest = of_group.gather(2, most)
            is_own = (longest[..., None] == of_group[..., None, :]).any(-1)
            pins = torch.where(is_own, longest, -1).flatten(1, 2)
        first = first_positions(spec, keys.device).expand(spec.batch).reshape(-1, 1).numpy()
        return cls(keys.contiguous().numpy(), pins.to(torch.int32).contiguous().numpy(), first, spec.query_len)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """[N]: queries of every block."""
        start = np.arange(self.keys.shape[2]) * TILE
        return np.minimum(TILE, self.query_len - start)

    @functools.cached_property
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """(low, high), each [B, H, N, 1 + 2P]: the intervals of keys that are met, some of them empty."""
        near, far, low, high = (self.keys[..., at, None] for at in range(4))
        pins = self.pins[:, :, None]
        start = np.where(pins < 0, 0, np.maximum(low, pins * TILE))
        stop = np.where(pins < 0, 0, np.minimum(high, (pins + 1) * TILE))
        empty = near >= far
        before = np.where(empty, stop, np.minimum(stop, near))
        after = np.where(empty, stop, np.maximum(start, far))
        lows, highs = np.concatenate([near, start, after], -1), np.concatenate([far, before, stop], -1)
        return lows, np.maximum(lows, highs)

    @functools.cached_property
    def met(self) -> np.ndarray:
        """[B, H, N] int64: keys that every block meets."""
        low, high = self.pieces
        total: np.ndarray = (high - low).sum(-1, dtype=np.int64)
        return total

    def reach_and_scores(self, spec: Spec) -> tuple[Tensor, Tensor]:
        """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is met, and the query-key pairs."""
        low, high = (x.astype(np.int64) for x in self.pieces)
        top = (self.first + np.arange(self.keys.shape[2]) * TILE)[:, None, :, None]
        reach = top + self.rows[:, None] - low
        if not spec.causal:
            reach = np.maximum(reach, high - top)
        reach = np.where(low < high, reach, 0).max((-1, -2))
        if spec.window is not None:
            reach = np.minimum(reach, spec.window)
        return torch.from_numpy(reach), torch.from_numpy((self.met * self.rows).sum(-1))
