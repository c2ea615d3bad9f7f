"""Key biases in a form for GPU kernels: in fp32, without losing a digit of their differences.

In a tile whose biases are close to one another, b = base of the tile + rest. A query's scores are relative to the base of a tile
that weighs much for it, and it changes to another base that weighs much more, so a score is off by the rounding of b_j − b_ref,
however large both are. In all other tiles each bias is a pair of numbers, and scores are relative to about the query's largest.
Everything is in units of log2, as scores are.
"""

import math

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS
from alibi_attn.attention.backends.fused.kernels.arguments import KeyBias
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import first_positions

Spec = AttentionSpec[Tensor]

_MOST = 2e38  # the largest finite bias: in units of log2 it must fit fp32


def split(spec: Spec, key_bias: Tensor) -> KeyBias:
    """Splits key_bias [B, H, S] into its parts; reads nothing on the host."""
    b = key_bias.detach()
    hidden = b == -torch.inf
    b = (b.double().clamp(-_MOST, _MOST) / math.log(2)).masked_fill(hidden, -torch.inf)
    b = torch.nn.functional.pad(b, (0, -spec.key_len % TILE), value=-torch.inf).unflatten(-1, (-1, TILE))
    # The median of the finite biases: a few large numbers, of either sign, cost the others no digit.
    middle = (TILE + (b == -torch.inf).sum(-1)) // 2
    base = b.sort(-1).values.gather(-1, middle.clamp(max=TILE - 1)[..., None]).squeeze(-1)
    some = base > -torch.inf
    base = base.masked_fill(~some, 0.0).float()
    rest = (b - base[..., None]).float().flatten(-2)[..., : spec.key_len].contiguous()
    b = b.flatten(-2)[..., : spec.key_len]
    high = b.float()
    pairs = torch.stack([high, (b - high).float().masked_fill(high == -torch.inf, 0.0)], 2)
    return KeyBias(rest, pairs, base, _references(spec, base, some))


def unshifted(lse: Tensor) -> Tensor:
    """[B, H, T] fp64: the natural lse, from one in units of log2 and the pair that it is relative to."""
    return lse.sum(1, dtype=torch.float64) * math.log(2)


def _references(spec: Spec, bases: Tensor, some: Tensor) -> Tensor:
    """[B, H, N]: the base of the tile where a block's first TILE queries end, or of the last tile before it with a finite
    bias, or of the first one after it.
    """
    tiles, blocks = some.shape[-1], -(-spec.query_len // PLAN_ROWS)
    if tiles == 0:
        return bases.new_zeros((*bases.shape[:2], blocks))
    at = torch.arange(tiles, device=bases.device)
    before = torch.where(some, at, -1).cummax(-1).values
    after = torch.where(some, at, tiles).flip(-1).cummin(-1).values.flip(-1)
    nearest = torch.where(before >= 0, before, after % tiles)  # [B, H, tiles]
    end = first_positions(spec, bases.device)[:, None] + torch.arange(blocks, device=bases.device) * PLAN_ROWS
    tile = (end + min(TILE, spec.query_len) - 1).clamp(0, spec.key_len - 1) // TILE
    nearest = nearest.gather(-1, tile[:, None].expand(*bases.shape[:2], -1))
    return bases.gather(-1, nearest)
