"""Lengths: what a cache remembers of keys and values, so that the certificate of a new query need not read them again."""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.certificate.bounds import TILE, norm_bound, tile_maxima


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Upper bounds of the norms in every whole tile of keys, and of values; TILE positions are a tile.

    Args:
        keys, values: [B, K, N] fp64, of positions 0 … N·TILE − 1.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> "Lengths":
        """Of the whole tiles of key and value, [B, K, S, D]."""
        whole = key.shape[2] // TILE * TILE
        return cls(*(tile_maxima(norm_bound(x.detach()[:, :, :whole])) for x in (key, value)))

    @property
    def covered(self) -> int:
        """Positions, from the first on, of which something is known."""
        return self.keys.shape[2] * TILE

    def extended(self, key: Tensor, value: Tensor) -> "Lengths":
        """With the tiles that are whole by now; key and value are all of them, [B, K, S, D], S ≥ covered."""
        if key.shape[2] - self.covered < TILE:
            return self
        more = Lengths.of(key[:, :, self.covered :], value[:, :, self.covered :])
        return Lengths(torch.cat([self.keys, more.keys], 2), torch.cat([self.values, more.values], 2))

    def cropped(self, length: int) -> "Lengths":
        """Of the first `length` positions."""
        tiles = length // TILE
        return Lengths(self.keys[:, :, :tiles], self.values[:, :, :tiles])

    def reordered(self, rows: Tensor) -> "Lengths":
        """Row b of the batch becomes what row `rows[b]` was."""
        return Lengths(self.keys[rows], self.values[rows])

    def tile_norms(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K, ⌈S / TILE⌉] each: what is known, and the norms of the keys and values behind."""
        keys, values = (tile_maxima(norm_bound(x.detach()[:, :, self.covered :])) for x in (key, value))
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
