"""Which rows of other shards the queries of a shard need if keys have biases, such as gates (docs/certificate.md, step 10).

Biased keys do not form a geometric series. Instead, every rank shares the largest norm and the largest bias of each of its
tiles: two numbers per 64 rows of a head. With R the largest |scale|·‖q‖ of a shard's queries,

    F(n) = ln Σ_{tiles ≤ n} rows·exp(R·norm + bias + m·(last row)) ,    and a query at row i skips them if F(n) − m·i ≤ ln ε + λ_i

as in `attention/certificate/biased.py`; the right side is the mirror image. Everything is fp64, and positions count from the
shard's first row. There are no outlier tiles here: a distant spike widens the halo instead.
"""

import dataclasses
import math
from typing import Self

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions
from alibi_attn.attention.certificate.biased import ROUNDING, biased_numerator_parts
from alibi_attn.attention.certificate.bounds import longer_values
from alibi_attn.attention.certificate.constants import KEPT, TILE
from alibi_attn.attention.certificate.key_rule import largest_share
from alibi_attn.attention.certificate.lse_bound import biased_lower_bound
from alibi_attn.attention.certificate.norms import in_tiles, norm_bound, tile_maxima
from alibi_attn.distributed.halo_bounds import SIDES, Shard, no_request
from alibi_attn.reach import UNLIMITED

Spec = AttentionSpec[Tensor]


@dataclasses.dataclass(frozen=True)
class TileSummary:
    """The tiles of all R ranks, N per rank (the count of the longest shard), in fp64.

    Args:
        norms: [R, B, K, N]: the largest norm of a visible key, 0 if there is none.
        biases: [R, B, H, N]: the largest bias of a visible key, −inf if there is none.
    """

    norms: Tensor
    biases: Tensor

    @classmethod
    def of(cls, spec: Spec, numbers: Tensor) -> Self:
        """Unpacks the gathered numbers, [R, n]."""
        parts = numbers.unflatten(1, (spec.batch, spec.num_kv_heads + spec.num_heads, -1))
        return cls(*parts.split([spec.num_kv_heads, spec.num_heads], dim=2))


def tile_summary(shard: Shard) -> Tensor:
    """This rank's part of `TileSummary`, [n] fp64."""
    spec, key, tiles = shard.spec, shard.key, -(-max(shard.lengths) // TILE)
    assert spec.key_bias is not None
    hidden = torch.zeros((), dtype=torch.bool, device=key.device)
    if spec.key_mask is not None:
        hidden = ~spec.key_mask[:, None]
    norms = norm_bound(key.detach()).nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(hidden, 0.0)
    biases = spec.key_bias.detach().double().masked_fill(hidden, -math.inf)
    rows = tiles * TILE - spec.key_len
    pad = torch.nn.functional.pad
    biases = in_tiles(pad(biases, (0, rows), value=-math.inf)).amax(-1) if tiles else biases
    return torch.cat([tile_maxima(pad(norms, (0, rows))), biases], 1).flatten()


def biased_requested_rows(shard: Shard, numbers: Tensor) -> Tensor:
    """The request of this rank, [K, FIELDS] int64, as in `halo_bounds.requested_rows`.

    Args:
        numbers: `tile_summary` of all ranks, [R, n].
    """
    spec, request = shard.spec, no_request(shard.spec, shard.query.device)
    tiles = TileSummary.of(spec, numbers)
    if spec.query_len == 0:
        return request
    rate, constant = _numerator(shard)
    for at, ranks in enumerate(shard.sides()):
        room = shard.rows_of(ranks)
        rows, reach = room.expand(spec.num_kv_heads), torch.full_like(request[:, at], UNLIMITED)
        if spec.tolerance > 0.0:
            rows, reach = _neighboring_rows(shard, tiles, ranks, rate, constant, left=at == 0)
        if spec.window is not None:
            rows, reach = rows.clamp(max=spec.window - 1), reach.clamp(max=spec.window)
        request[:, at], request[:, SIDES + at] = torch.minimum(rows, room), reach
    return request


def _numerator(shard: Shard) -> tuple[Tensor, Tensor]:
    """(|scale|·‖q‖, nats to add to the largest exponents of the keys), each [B, H, T]."""
    spec, summary = shard.spec, shard.summary
    query, key, value = shard.query.detach(), shard.key.detach(), shard.value.detach()
    first = first_positions(spec, query.device)
    longer = longer_values(spec, value, first, elsewhere=(summary.longest.amax(0), summary.shortest.amin(0)))
    longest, shortest = (
        x.repeat_interleave(spec.group)[:, None] for x in (summary.norms[:, :, 0].amax(0), summary.shortest_key.amin(0))
    )
    lower = biased_lower_bound(spec, query, key, first)
    return biased_numerator_parts(spec, query, lower, longer, longest, shortest)


def _neighboring_rows(
    shard: Shard, tiles: TileSummary, ranks: Tensor, rate: Tensor, constant: Tensor, *, left: bool
) -> tuple[Tensor, Tensor]:
    """(the rows next to the shard on one side that any query of a key head's group needs, the group's reach), [K] int64 each.

    A query needs no row of another rank if the nearest one on that side is at a distance of the reach or more.
    """
    spec, m, side = shard.spec, shard.slopes(left=left), 1 if left else -1
    never = m.isinf()
    m = m.masked_fill(never, 0.0)
    begin, end = _positions(tiles, shard)
    near_edge = torch.where(m > 0, end - 1, begin) if left else torch.where(m > 0, begin, end - 1)
    rows = (end - begin).clamp(min=1)
    norms = tiles.norms.repeat_interleave(spec.group, 2)
    there = (ranks[:, None] & (end > begin).unflatten(0, (len(shard.lengths), -1)))[:, None, None]
    nats = (rate.amax(-1)[None, ..., None] * norms + tiles.biases).nan_to_num(
        nan=math.inf, posinf=math.inf, neginf=-math.inf
    )
    nats = nats.masked_fill(~there, -math.inf).movedim(0, 2).flatten(2) + side * m * near_edge + rows.log()
    weights = nats if left else nats.flip(-1)
    sums = weights.logcumsumexp(-1).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).cummax(-1).values
    size = nats.masked_fill(nats.isinf(), 0.0).abs().amax(-1, keepdim=True) + 64.0
    away = side * m * torch.arange(spec.query_len, device=m.device)
    worst = constant - away + ROUNDING * (nats.shape[-1] + 64) * (size + away.abs())
    rooms = math.log(spec.tolerance if spec.causal else spec.tolerance / 2) - worst
    if shard.for_gradients:
        rooms = torch.minimum(rooms, largest_share(_farthest(shard, ranks, left=left), spec.tolerance).log() - worst)
    room = rooms.amin(-1, keepdim=True)
    count = torch.searchsorted(sums.contiguous(), room.contiguous(), right=True).masked_fill(~room.isfinite(), 0)
    edges = -begin if left else (end - spec.query_len).flip(0)  # rows up to a tile's far edge
    needed = torch.cat([edges, edges.new_zeros(1)])[count[..., 0]]
    needed = needed.clamp(min=KEPT - 1).masked_fill(never.expand(spec.batch, -1, -1)[..., 0], 0)
    row = torch.arange(spec.query_len, device=m.device)
    reaches = torch.where(
        (sums[..., -1:] <= rooms) & rooms.isfinite(), 0, row + 2 if left else spec.query_len - row + 1
    )
    needed, reach = (x.amax(0).unflatten(0, (-1, spec.group)).amax(-1).long() for x in (needed, reaches.amax(-1)))
    return needed, reach.clamp(min=KEPT)


def _farthest(shard: Shard, ranks: Tensor, *, left: bool) -> Tensor:
    """[B, 1, T] fp64: how far each query is from the farthest visible key on these ranks, to one side; 0 if there is none."""
    offsets = torch.tensor([0, *shard.lengths[:-1]], device=ranks.device).cumsum(0) - shard.start
    known = shard.summary.first if left else shard.summary.last
    seen = ranks[:, None] & known.isfinite() & (known >= 0)
    row = torch.arange(shard.spec.query_len, device=ranks.device, dtype=torch.float64)
    away = row - (known + offsets[:, None])[..., None] if left else (known + offsets[:, None])[..., None] - row
    return torch.where(seen[..., None], away, 0.0).amax(0)[:, None]


def _positions(tiles: TileSummary, shard: Shard) -> tuple[Tensor, Tensor]:
    """The half-open row range (begin, end) of all tiles of all ranks, [R·N] fp64, counted from the shard's first row."""
    device, count = tiles.norms.device, tiles.norms.shape[-1]
    lengths = torch.tensor(shard.lengths, device=device, dtype=torch.float64)[:, None]
    offsets = lengths.cumsum(0) - lengths - shard.start
    at = torch.arange(count, device=device, dtype=torch.float64) * TILE
    begin = torch.minimum(at, lengths)
    return (begin + offsets).flatten(), (torch.minimum(begin + TILE, lengths) + offsets).flatten()
