"""The weights that dropout keeps, by the formula of docs/maths.md in plain Python, independent of the package."""

import numpy as np
import torch
from torch import Tensor

# Random123's vectors of Philox 2x32 with seven rounds: (key, counter, words), for 0 bits, 1 bits and digits of π.
PUBLISHED = (
    (0, (0, 0), (0x257A3673, 0xCD26BE2A)),
    (0xFFFFFFFF, (0xFFFFFFFF, 0xFFFFFFFF), (0xAB302C4D, 0x3DC9D239)),
    (0x13198A2E, (0x243F6A88, 0x85A308D3), (0xBEDBBE6B, 0xE4C770B3)),
)


def words(key, x, y):
    """φ(key; x, y): Python's integers, or numpy's uint64."""
    for turn in range(7):
        product = 0xD256D193 * x
        x, y = product // 2**32 ^ (key + turn * 0x9E3779B9) % 2**32 ^ y, product % 2**32
    return x, y


def keeps(seed: int, b: int, h: int, i: int, j: int, p: float) -> bool:
    """Whether the weight of query position i and key position j is kept, in head h of sequence b."""
    key, shift = words(seed // 2**32, *words(seed % 2**32, b, h))
    return words(key, (i + shift) % 2**32, j % 2**32 // 2)[j % 2] >= round(p * 2**32)


def drawn_seed(torch_seed: int) -> int:
    """The seed that a call draws from torch's generator after torch.manual_seed(torch_seed): a 62-bit number."""
    return int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(torch_seed)))


def factors(
    seed: int,
    p: float,
    *,
    batch: int,
    heads: int,
    positions: np.ndarray,
    key_len: int,
    origin: tuple[int, ...] = (0, 0, 0),
) -> Tensor:
    """[B, H, T, S] float64: 1 / (1 − p), with p rounded to 32 bits, where a weight is kept, else 0.

    Args:
        positions: [B, T], of the queries.
        origin: the numbers of the first sequence, head and key.
    """
    threshold = round(p * 2**32)
    found = np.empty((batch, heads, positions.shape[1], key_len))
    j = (np.arange(key_len) + origin[2]) % 2**32
    for b in range(batch):
        for h in range(heads):
            key, shift = words(seed // 2**32, *words(seed % 2**32, (b + origin[0]) % 2**32, h + origin[1]))
            i = (positions[b] + origin[2] + shift) % 2**32
            even, odd = words(key, i[:, None].astype(np.uint64), (j // 2)[None].astype(np.uint64))
            found[b, h] = np.where(j % 2 == 0, even, odd) >= threshold
    return torch.from_numpy(found * (2**32 / (2**32 - threshold)))
