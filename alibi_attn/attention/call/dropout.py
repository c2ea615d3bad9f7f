"""Which attention weights dropout keeps: a counter-based generator, so that each backend, chunk, rank and backward pass agrees.

A weight belongs to a sequence b, a head h, a query position i and a key position j. All are global: if a call is a part of a
larger computation, they count from the beginning of the whole. With φ(key; x, y) the two words of Philox 2x32 with seven rounds,
with s₀ and s₁ the low and the high word of the seed, and everything modulo 2³²,

    (x, y) = φ(s₀; b, h)        (k, o) = φ(s₁; x, y)        (w₀, w₁) = φ(k; i + o, ⌊(j mod 2³²) / 2⌋)

keep the weight if w_{j mod 2} ≥ threshold of `spec.dropout_numbers`, times its factor 1 / (1 − p). One call of φ serves two
neighboring keys. No two heads share (k, o). Positions that differ by 2³² draw the same number. `jax/call/dropout.py` and the
kernels implement the same rule.
Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"; seven rounds are the fewest that
pass BigCrush.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn.attention.call.spec import AttentionSpec, dropout_numbers
from alibi_attn.attention.call.transforms import is_traced, transforms
from alibi_attn.attention.call.visibility import first_positions

MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
ROUNDS = 7
WORD = 2**32 - 1

_AT_A_TIME = 2**16  # weights; their random numbers fit into a core's cache


def drawn_seed(device: torch.device) -> Tensor:
    """[1, 4] int64: a seed from the device's torch generator, with first indices of 0; see `AttentionSpec`."""
    return functional.pad(torch.randint(2**62, (1, 1), device=device), (0, 3))


def dropped(spec: AttentionSpec[Tensor], weights: Tensor) -> Tensor:
    """Weights [B, H, T, S] after dropout: dropped ones are 0, the others times 1 / (1 − p). NaN stays NaN, as in torch."""
    if spec.dropout_p == 0:
        return weights
    return weights * kept(spec, weights.device) * dropout_numbers(spec.dropout_p)[1]


def kept(spec: AttentionSpec[Tensor], device: torch.device) -> Tensor:
    """[B, H, T, S] bool: whether dropout keeps a weight."""
    assert spec.dropout_seed is not None, "dropout needs a seed"
    key, shift, first_key = head_keys(spec, spec.dropout_seed)  # [B, H], [B, H], [B]
    threshold = dropout_numbers(spec.dropout_p)[0]
    i, j = (x + first_key[:, None] for x in numbers(spec, device))  # [B, T], [B, S]
    i = i[:, None] + shift[..., None]  # [B, H, T]
    key = key[..., None].expand_as(i)

    def rows(key: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """[..., S] of key and i [...] and j [..., S]."""
        even, odd = philox(key[..., None] & WORD, i[..., None] & WORD, (j & WORD) >> 1)
        return torch.where(j & 1 == 0, even, odd) >= threshold

    if is_traced() or transforms():
        return rows(key, i, j[:, None, None])  # lengths may be symbolic, and a compiler fuses it into one loop
    step = max(1, _AT_A_TIME // max(1, spec.key_len))
    b = torch.arange(spec.batch, device=device)[:, None, None].expand_as(i)
    parts = zip(*(x.flatten().split(step) for x in (key, i, b)), strict=True)
    return torch.cat([rows(key, i, j[b]) for key, i, b in parts]).view(*i.shape, -1)


def numbers(spec: AttentionSpec[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """(i [B, T], j [B, S]) int64, the numbers of queries and keys, relative to the first key."""
    if spec.query_numbers is not None and spec.key_numbers is not None:
        return spec.query_numbers, spec.key_numbers
    i = first_positions(spec, device)[:, None] + torch.arange(spec.query_len, device=device)
    return i.expand(spec.batch, -1), torch.arange(spec.key_len, device=device).expand(spec.batch, -1)


def numbered(spec: AttentionSpec[Tensor], device: torch.device) -> AttentionSpec[Tensor]:
    """The same call, whose queries and keys keep their numbers in dropout when they are moved."""
    if spec.dropout_p == 0 or spec.key_numbers is not None:
        return spec
    i, j = numbers(spec, device)
    return dataclasses.replace(spec, query_numbers=i, key_numbers=j)


def head_keys(spec: AttentionSpec[Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(k [B, H], o [B, H], the number of key 0 [B]) int64 from a `dropout_seed` [R, 4]."""
    alike = spec.batch // seed.shape[0]
    b = torch.arange(spec.batch, device=seed.device) % alike
    seed = seed[:, None].expand(-1, alike, -1).flatten(0, 1)[:, :, None]  # [B, 4, 1]
    b = b[:, None] + seed[:, 1]  # [B, 1]
    h = torch.arange(spec.num_heads, device=seed.device) + seed[:, 2]  # [B, H]
    x, y = philox(seed[:, 0] & WORD, b & WORD, h & WORD)
    k, o = philox(seed[:, 0] >> 32 & WORD, x, y)
    return k, o, seed[:, 3, 0]


def philox(key: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """φ(key; x, y): both words of Philox 2x32-7. Arguments and results are int64 in [0, 2³²); shapes broadcast."""
    for _ in range(ROUNDS):
        product = x * MULTIPLIER  # wraps around as an unsigned product does, bit for bit
        x, y = (product >> 32 & WORD) ^ key ^ y, product & WORD
        key = key + WEYL & WORD
    return x, y
