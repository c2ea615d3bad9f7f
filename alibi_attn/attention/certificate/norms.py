"""Norms of keys and values: a cache keeps them, so that the certificate of a new query need not read the keys again."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from alibi_attn.attention.certificate.constants import NORM_UNITS, TILE, UNIT, VANISHING

HUGE = 2.0**20


def has_huge_scores(scale: float, query: Tensor, key: Tensor) -> bool:
    """Whether some |scale·q·k| may exceed `HUGE`; reads the tensors on the host.

    The backward pass of torch's fused attention recomputes scores slightly differently and uses exp(score − lse): above
    10⁶ its weights are off by more than a hundredth, and above 10⁹ they may be inf.
    """
    if query.numel() == 0 or key.numel() == 0:
        return False
    extremes = (torch.aminmax(x.detach()) for x in (query, key))  # reads each once
    largest = [max(-float(low), float(high)) for low, high in extremes]
    return abs(scale) * query.shape[-1] * largest[0] * largest[1] > HUGE


def norm_bound(tensor: Tensor) -> Tensor:
    """An upper bound on the Euclidean norms over the last axis, fp64: valid for finite input, inf if unknown.

    Squares below the smallest normal number may be lost, each entry less than 2^−63 in fp32; a sum of D squares is off by less
    than (D + 2) units; squares that overflow give inf, and then nothing is skipped. fp64 is scaled by its largest entry first.
    """
    d = tensor.shape[-1]
    if tensor.dtype == torch.float64:
        largest = tensor.abs().amax(-1, keepdim=True)
        scaled = tensor / largest.masked_fill(largest == 0, 1.0)
        length = torch.linalg.vector_norm(scaled, dim=-1) * largest.squeeze(-1)
        return length * (1.0 + (d + NORM_UNITS) * UNIT["float64"]) + math.sqrt(d) * VANISHING["float64"]
    length = torch.linalg.vector_norm(tensor.float(), dim=-1).double()
    return length * (1.0 + (d + NORM_UNITS) * UNIT["float32"]) + math.sqrt(d) * VANISHING["float32"]


def tile_maxima(length: Tensor) -> Tensor:
    """[B, K, ⌈S / TILE⌉]"""
    return in_tiles(length).amax(-1)


def in_tiles(x: Tensor, fill: float = 0.0) -> Tensor:
    """[..., n] -> [..., ⌈n / TILE⌉, TILE], padded with `fill`."""
    tiles = -(-x.shape[-1] // TILE)
    return torch.nn.functional.pad(x, (0, tiles * TILE - x.shape[-1]), value=fill).unflatten(-1, (tiles, TILE))


@dataclasses.dataclass(frozen=True)
class Norms:
    """Upper bounds on the norms in every whole tile of TILE keys, and of values.

    Args:
        keys, values: [B, K, N] fp64, for positions 0 … N·TILE − 1.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> "Norms":
        """The norms of the whole tiles of key and value, [B, K, S, D]."""
        whole = key.shape[2] // TILE * TILE
        return cls(*(tile_maxima(norm_bound(x.detach()[:, :, :whole])) for x in (key, value)))

    @property
    def covered(self) -> int:
        """The number of positions, counted from the first, whose norms are known."""
        return self.keys.shape[2] * TILE

    def extended(
        self, key: Tensor, value: Tensor, measure: "Callable[[Tensor, Tensor], Norms] | None" = None
    ) -> "Norms":
        """Adds the tiles that have become whole; key and value are the whole cache, [B, K, S, D], S ≥ covered.

        Args:
            measure: computes the new norms, `Norms.of` by default.
        """
        if key.shape[2] - self.covered < TILE:
            return self
        more = (measure or Norms.of)(key[:, :, self.covered :], value[:, :, self.covered :])
        return Norms(torch.cat([self.keys, more.keys], 2), torch.cat([self.values, more.values], 2))

    def cropped(self, length: int) -> "Norms":
        """The norms of the first `length` positions."""
        tiles = length // TILE
        return Norms(self.keys[:, :, :tiles], self.values[:, :, :tiles])

    def reordered(self, rows: Tensor) -> "Norms":
        """Row b of the batch becomes the former row `rows[b]`."""
        return Norms(self.keys[rows], self.values[rows])

    def tile_norms(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K, ⌈S / TILE⌉] each: the known norms, followed by those of the remaining keys and values."""
        keys, values = (tile_maxima(norm_bound(x.detach()[:, :, self.covered :])) for x in (key, value))
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
