"""How a bias of every key travels to the kernels of a GPU: in fp32, and yet no digit of a difference is lost.

b = base of its tile + rest, the base as two numbers; what a block of queries counts from is the base of a tile near it. So a
score is off by the rounding of b_j − b_ref, however large both are, and by no more. All in units of log2, as scores are.
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

_MOST = 1e30  # of what is finite; beyond it differences could overflow


def split(spec: Spec, key_bias: Tensor) -> KeyBias:
    """key_bias [B, H, S] in parts; nothing is read on the host."""
    b = key_bias.detach()
    hidden = b == -torch.inf
    b = (b.double().clamp(-_MOST, _MOST) / math.log(2)).masked_fill(hidden, -torch.inf)
    b = torch.nn.functional.pad(b, (0, -spec.key_len % TILE), value=-torch.inf).unflatten(-1, (-1, TILE))
    # The middle one of those that are finite: a few large numbers, of either sign, cost the others no digit.
    middle = (TILE + (b == -torch.inf).sum(-1)) // 2
    base = b.sort(-1).values.gather(-1, middle.clamp(max=TILE - 1)[..., None]).squeeze(-1)
    some = base > -torch.inf
    base = base.masked_fill(~some, 0.0)
    rest = (b - base[..., None]).float().flatten(-2)[..., : spec.key_len].contiguous()
    bases = _in_two(base)
    return KeyBias(rest, bases, _references(spec, bases, some))


def unshifted(lse: Tensor, key_bias: KeyBias) -> Tensor:
    """[B, H, T] fp64: the lse of the scores as they are, from one in units of log2 that counts from the references."""
    references = key_bias.references.sum(-1, dtype=torch.float64).repeat_interleave(PLAN_ROWS, -1)  # type: ignore[attr-defined]
    return (lse + references[..., : lse.shape[-1]]) * math.log(2)


def _references(spec: Spec, bases: Tensor, some: Tensor) -> Tensor:
    """[B, H, N, 2]: of the tile where a block's first TILE queries end, or the last before it that has a finite bias, or the
    first after it."""
    tiles, blocks = some.shape[-1], -(-spec.query_len // PLAN_ROWS)
    if tiles == 0:
        return bases.new_zeros((*bases.shape[:2], blocks, 2))
    at = torch.arange(tiles, device=bases.device)
    before = torch.where(some, at, -1).cummax(-1).values
    after = torch.where(some, at, tiles).flip(-1).cummin(-1).values.flip(-1)
    nearest = torch.where(before >= 0, before, after % tiles)  # [B, H, tiles]
    end = first_positions(spec, bases.device)[:, None] + torch.arange(blocks, device=bases.device) * PLAN_ROWS
    tile = (end + min(TILE, spec.query_len) - 1).clamp(0, spec.key_len - 1) // TILE
    nearest = nearest.gather(-1, tile[:, None].expand(*bases.shape[:2], -1))
    return bases.gather(2, nearest[..., None].expand(-1, -1, -1, 2)).contiguous()


def _in_two(x: Tensor) -> Tensor:
    """[…, 2] fp32: x, and what its rounding leaves."""
    high = x.float()
    return torch.stack([high, (x - high).float()], -1)
