"""The weights that dropout keeps, by the formula of docs/maths.md in plain Python, and masks of calls in parts to compare."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend

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


_TIMES = np.random.default_rng(2).random((2, 75)).cumsum(-1)
# Calls that `merging.py` splits: the number of queries, and options.
PARTS = {
    "prefix": (75, {"prefix_len": np.array([50, 75])}),
    "prefix, few queries, window, sinks": (40, {"prefix_len": np.array([43, 70]), "window": [9, 50], "sinks": 3}),
    "prefix, an offset a sequence": (40, {"prefix_len": np.array([50, 75]), "query_offset": np.array([3, 30])}),
    "positions": (40, {"positions": _TIMES}),
    "positions on both sides": (40, {"positions": _TIMES, "causal": False, "right_slopes": [0.0, np.inf]}),
    "queries anywhere": (40, {"positions": _TIMES, "query_positions": 1.4 * _TIMES[:, :40], "causal": False}),
}


def masks_of_part(kind: str, backend: str, seed: int = 2**61 + 12345) -> tuple[Tensor, Tensor]:
    """[B, H, T, S] bool: the weights that a backend keeps in a call of `PARTS`, read with one-hot values, and the formula's."""
    (t, options), s, p = PARTS[kind], _TIMES.shape[1], 0.3
    given = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    query, key = torch.zeros(2, 2, t, s), torch.zeros(2, 1, s, s)
    plain = make_spec(query, key, key, [0.0, 0.0], **given)
    origin = (3, 1, -5)
    spec = dataclasses.replace(plain, dropout_p=p, dropout_seed=torch.tensor([[seed, *origin]]))
    value = torch.eye(s).expand_as(key)
    seen, found = (attend(x, query, key, value, backend) != 0 for x in (plain, spec))
    first = np.reshape(options.get("query_offset", s - t), (-1, 1)) * np.ones((2, 1), int)
    kept = factors(seed, p, batch=2, heads=2, positions=first + np.arange(t), key_len=s, origin=origin) != 0
    return found, kept & seen
