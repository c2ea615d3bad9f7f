"""What the queries of a shard need of other shards where every key has a bias, gates among them (docs/maths.md, step 10).

There is no geometric series then, so every rank tells of each of its tiles the largest norm and the largest bias: two numbers for
64 rows of a head. Of tiles that are all seen from one shard, with R the largest |scale|·‖q‖ of its queries,

    F(n) = ln Σ_{tiles ≤ n} rows·exp(R·norm + bias + m·(last row)) ,    and a query at row i skips them if F(n) − m·i ≤ ln ε + λ_i

as in `attention/certificate/biased.py`; to the right the same from the other end. Everything is fp64, and positions count from
the shard's own first row. No tile is an outlier here: a spike far off is reached by a wider halo.
"""

import dataclasses
import math

import torch
from torch import Tensor

from alibi_attn.attention.certificate.biased import ROUNDING, biased_numerator_parts
from alibi_attn.attention.certificate.bounds import longer_values
from alibi_attn.attention.certificate.constants import KEPT, TILE
from alibi_attn.attention.certificate.lse_bound import biased_lower_bound
from alibi_attn.attention.certificate.norms import norm_bound, tile_maxima
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import first_positions
from alibi_attn.distributed.need import Shard, Told, asked_nothing

Spec = AttentionSpec[Tensor]


@dataclasses.dataclass(frozen=True)
class TilesTold:
    """What all R ranks tell of their tiles, N of the longest shard, in fp64.

    Args:
        norms: [R, B, K, N]: the largest norm of a visible key, 0 where there is none.
        biases: [R, B, H, N]: the largest bias, −inf where no key may be seen.
    """

    norms: Tensor
    biases: Tensor

    @staticmethod
    def width(spec: Spec, tiles: int) -> int:
        """Numbers that a rank tells of that many tiles."""
        return spec.batch * (spec.num_kv_heads + spec.num_heads) * tiles

    @classmethod
    def of(cls, spec: Spec, numbers: Tensor) -> "TilesTold":
        """From [R, width]."""
        found = numbers.unflatten(1, (spec.batch, spec.num_kv_heads + spec.num_heads, -1))
        return cls(*found.split([spec.num_kv_heads, spec.num_heads], dim=2))


def tell_tiles(spec: Spec, key: Tensor, tiles: int) -> Tensor:
    """[width] fp64: this rank's part of `TilesTold`, with room for that many tiles."""
    assert spec.key_bias is not None
    hidden = torch.zeros((), dtype=torch.bool, device=key.device)
    if spec.key_mask is not None:
        hidden = ~spec.key_mask[:, None]
    norms = norm_bound(key.detach()).nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(hidden, 0.0)
    biases = spec.key_bias.detach().double().masked_fill(hidden, -math.inf)
    rows = tiles * TILE - spec.key_len
    pad = torch.nn.functional.pad
    biases = pad(biases, (0, rows), value=-math.inf).unflatten(-1, (tiles, TILE)).amax(-1) if tiles else biases
    return torch.cat([tile_maxima(pad(norms, (0, rows))), biases], 1).flatten()


def asked_with_biases(
    spec: Spec, told: Told, tiles: TilesTold, shard: Shard, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """[K, FIELDS] int64, as `need.asked`."""
    found = asked_nothing(spec, query.device)
    if spec.query_len == 0:
        return found
    beside = shard.ranks_beside(spec, told)
    rate, constant = _numerator(spec, told, query.detach(), key.detach(), value.detach())
    for at, ranks in enumerate(beside):
        room = shard.rows_of(ranks)
        rows = room.expand(spec.num_kv_heads)
        if spec.tolerance > 0.0:
            rows = _rows_beside(spec, tiles, shard, ranks, rate, constant, side=1 if at == 0 else -1)
        if spec.window is not None:
            rows = rows.clamp(max=spec.window - 1)
        found[:, at] = torch.minimum(rows, room)
    return found


def _numerator(spec: Spec, told: Told, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(|scale|·‖q‖, nats to be added to the largest exponents of the keys), each [B, H, T]."""
    first = first_positions(spec, query.device)
    longer = longer_values(spec, value, first, elsewhere=(told.longest.amax(0), told.shortest.amin(0)))
    longest, shortest = (
        x.repeat_interleave(spec.group)[:, None] for x in (told.norms[:, :, 0].amax(0), told.shortest_key.amin(0))
    )
    lower = biased_lower_bound(spec, query, key, first)
    return biased_numerator_parts(spec, query, lower, longer, longest, shortest)


def _rows_beside(
    spec: Spec, tiles: TilesTold, shard: Shard, ranks: Tensor, rate: Tensor, constant: Tensor, *, side: int
) -> Tensor:
    """[K] int64: rows next to the shard, to the left (side 1) or right (−1), that some query of some head of the group needs."""
    slopes = spec.slopes if side > 0 or spec.right_slopes is None else spec.right_slopes
    m = slopes.detach().double().reshape(-1, spec.num_heads, 1)
    never = m.isinf()
    m = m.masked_fill(never, 0.0)
    begin, end = _positions(tiles, shard)
    near_edge = torch.where(side * m > 0, end - 1, begin) if side > 0 else torch.where(m > 0, begin, end - 1)
    rows = (end - begin).clamp(min=1)
    norms = tiles.norms.repeat_interleave(spec.group, 2)
    there = (ranks[:, None] & (end > begin).unflatten(0, (len(shard.lengths), -1)))[:, None, None]
    nats = (rate.amax(-1)[None, ..., None] * norms + tiles.biases).nan_to_num(
        nan=math.inf, posinf=math.inf, neginf=-math.inf
    )
    nats = nats.masked_fill(~there, -math.inf).movedim(0, 2).flatten(2) + side * m * near_edge + rows.log()
    weights = nats if side > 0 else nats.flip(-1)
    sums = weights.logcumsumexp(-1).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).cummax(-1).values
    size = nats.masked_fill(nats.isinf(), 0.0).abs().amax(-1, keepdim=True) + 64.0
    away = side * m * torch.arange(spec.query_len, device=m.device)
    worst = constant - away + ROUNDING * (nats.shape[-1] + 64) * (size + away.abs())
    room = math.log(spec.tolerance if spec.causal else spec.tolerance / 2) - worst.amax(-1, keepdim=True)
    count = torch.searchsorted(sums.contiguous(), room.contiguous(), right=True).masked_fill(~room.isfinite(), 0)
    edges = -begin if side > 0 else (end - spec.query_len).flip(0)  # rows up to a tile's far edge
    kept = torch.cat([edges, edges.new_zeros(1)])[count[..., 0]]
    kept = kept.clamp(min=KEPT - 1).masked_fill(never.expand(spec.batch, -1, -1)[..., 0], 0)
    return kept.amax(0).unflatten(0, (-1, spec.group)).amax(-1).long()


def _positions(tiles: TilesTold, shard: Shard) -> tuple[Tensor, Tensor]:
    """(first row, row behind the last) of all tiles of all ranks, [R·N] fp64, counted from the shard's first row."""
    device, count = tiles.norms.device, tiles.norms.shape[-1]
    lengths = torch.tensor(shard.lengths, device=device, dtype=torch.float64)[:, None]
    offsets = lengths.cumsum(0) - lengths - shard.start
    at = torch.arange(count, device=device, dtype=torch.float64) * TILE
    begin = torch.minimum(at, lengths)
    return (begin + offsets).flatten(), (torch.minimum(begin + TILE, lengths) + offsets).flatten()
