"""What the queries of a shard need of other shards, certified, from a few numbers that every rank tells all others.

A query at row t of its shard, whose scores with rows elsewhere are at most rate·κ and whose log-sum-exp is at least λ, needs of
the rows before the shard only the last w, if those at distance ≥ t + w + 1 together weigh at most ε: w ≥ reach − t − 1, with the
reach of `attention/certificate/bounds.py`. κ is the largest norm of a key on the ranks to that side, with a few outlier tiles
apart. With biases of keys there is no reach; see `biased_need.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from alibi_attn.attention.certificate.bounds import longer_values, numerator_parts, reach_of_nats
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES, TILE
from alibi_attn.attention.certificate.lse_bound import lower_bound
from alibi_attn.attention.certificate.norms import norm_bound, tile_maxima
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import first_positions
from alibi_attn.distributed.halos import Halo, Span

Spec = AttentionSpec[Tensor]

CANDIDATES = OUTLIER_TILES + 1  # tiles a rank tells of: where all outlier tiles are its own, the next is its κ
NOWHERE = -1.0  # the position of a visible key where there is none before
FIELDS = 2 + 2 * OUTLIER_TILES  # of what a rank asks for


@dataclasses.dataclass(frozen=True)
class Told:
    """What all R ranks tell of their rows, in fp64; one row of numbers a rank.

    Args:
        norms: [R, K, CANDIDATES]: the largest key norms of its longest tiles of visible keys, descending, 0 beyond the last.
        tiles: [R, K, CANDIDATES]: the position of the first row of each, counted from the shard's first.
        shortest_key: [R, K]: the smallest norm of a visible key; inf where there is none.
        longest, shortest: [R, K]: the extreme norms of visible values; 0 and inf where there are none.
        first, last: [R, B]: the extreme visible keys, counted from the shard's first; inf and −1 where there are none.
        segments: [R, B, 2]: the smallest and the largest segment; inf and −inf without rows.
    """

    norms: Tensor
    tiles: Tensor
    shortest_key: Tensor
    longest: Tensor
    shortest: Tensor
    first: Tensor
    last: Tensor
    segments: Tensor

    @staticmethod
    def width(spec: Spec) -> int:
        """Numbers a rank tells."""
        return spec.num_kv_heads * (2 * CANDIDATES + 3) + 4 * spec.batch

    @classmethod
    def of(cls, spec: Spec, numbers: Tensor) -> Self:
        """From [R, width]."""
        heads, batch = (spec.num_kv_heads,), (spec.batch,)
        shapes = [(*heads, CANDIDATES)] * 2 + [heads] * 3 + [batch] * 2 + [(*batch, 2)]
        parts = numbers.split([math.prod(shape) for shape in shapes], dim=1)
        return cls(*(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)))


def tell(spec: Spec, key: Tensor, value: Tensor) -> Tensor:
    """[width] fp64: this rank's part of `Told`; `spec` is that of its shard, key and value its rows."""
    batch, heads, length = spec.batch, spec.num_kv_heads, spec.key_len
    device = key.device
    keys, values = (norm_bound(x.detach()).nan_to_num(nan=math.inf, posinf=math.inf) for x in (key, value))
    seen = torch.ones(batch, length, dtype=torch.bool, device=device) if spec.key_mask is None else spec.key_mask
    hidden = ~seen[:, None]
    tiles = tile_maxima(keys.masked_fill(hidden, 0.0)).amax(0) if length else keys.new_zeros(heads, 0)
    norms, indices = torch.nn.functional.pad(tiles, (0, CANDIDATES)).topk(CANDIDATES, dim=-1)
    # A last column stands for no rows at all.
    pad = torch.nn.functional.pad
    longest = pad(values.masked_fill(hidden, 0.0), (0, 1)).amax((0, 2))
    shortest_key, shortest = (
        pad(x.masked_fill(hidden, math.inf), (0, 1), value=math.inf).amin((0, 2)) for x in (keys, values)
    )
    at = torch.arange(length, device=device, dtype=torch.float64)
    first = pad(torch.where(seen, at, math.inf), (0, 1), value=math.inf).amin(-1)
    last = pad(torch.where(seen, at, NOWHERE), (0, 1), value=NOWHERE).amax(-1)
    ids = torch.zeros(batch, length, device=device) if spec.key_segments is None else spec.key_segments
    low, high = (pad(ids.double(), (0, 1), value=fill) for fill in (math.inf, -math.inf))
    segments = torch.stack([low.amin(-1), high.amax(-1)], -1)
    parts = (norms, indices.double() * TILE, shortest_key, longest, shortest, first, last, segments)
    return torch.cat([part.flatten() for part in parts])


@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's place: which rank of which, by the rows of all.

    Args:
        rank: this one.
        lengths: rows of each, [R].
    """

    rank: int
    lengths: tuple[int, ...]

    @property
    def start(self) -> int:
        """Rows before the shard."""
        return sum(self.lengths[: self.rank])

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.lengths)

    def ranks_beside(self, spec: Spec, told: Told) -> tuple[Tensor, Tensor]:
        """The ranks to the left and to the right that may hold keys for this one's queries, [R] bool each.

        Causality decides, and segments do: where a rank has none of ours, neither have those behind it, if it matters at all.
        """
        ranks = torch.arange(len(self.lengths), device=told.norms.device)
        left, right = ranks < self.rank, ranks > self.rank
        if spec.key_segments is not None:
            low, high = told.segments.unbind(-1)
            shared = ((low <= high[self.rank]) & (high >= low[self.rank])).any(-1)
            left = (left & shared).cummax(0).values & left
            right = (right & shared).flip(0).cummax(0).values.flip(0) & right
        return left, torch.zeros_like(right) if spec.causal else right

    def rows_of(self, ranks: Tensor) -> Tensor:
        """How many rows these ranks have, 0-d int64."""
        return (torch.tensor(self.lengths, device=ranks.device) * ranks).sum()


def asked(spec: Spec, told: Told, shard: Shard, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[K, FIELDS] int64: rows to the left and to the right, and (rank, first row) of outlier tiles beyond, −1 = none.

    `spec` is that of the shard, and query, key and value are its rows.
    """
    nothing = asked_nothing(spec, query.device)
    if spec.query_len == 0 or (spec.causal and shard.start == 0):
        return nothing
    beside = shard.ranks_beside(spec, told)
    if spec.tolerance == 0.0:
        for at, ranks in enumerate(beside):
            nothing[:, at] = shard.rows_of(ranks).clamp(max=shard.total if spec.window is None else spec.window - 1)
        return nothing
    rate, constant = _numerator(spec, told, shard, query, key, value)
    best, cost = nothing, torch.full((spec.num_kv_heads,), math.inf, dtype=torch.float64, device=query.device)
    for count in OUTLIER_CHOICES:
        found, price = _with_outliers(spec, told, shard, beside, rate, constant, count)
        best = torch.where((price < cost)[:, None], found, best)
        cost = torch.minimum(price, cost)
    return best


def asked_nothing(spec: Spec, device: torch.device) -> Tensor:
    """[K, FIELDS] of a rank that needs no rows."""
    nothing = torch.full((spec.num_kv_heads, FIELDS), -1, device=device)
    nothing[:, :2] = 0
    return nothing


def halo_of(asked_by: Sequence[Sequence[Sequence[int]]], lengths: tuple[int, ...], row_bytes: int) -> Halo:
    """From what all ranks ask for, [R][K][FIELDS]."""
    left, right = (tuple(tuple(int(head[at]) for head in heads) for heads in asked_by) for at in (0, 1))
    plain = Halo(
        lengths=lengths, left=left, right=right, outliers=tuple(((),) * len(heads) for heads in asked_by), row_bytes=row_bytes
    )  # fmt: skip
    outliers = tuple(
        tuple(tuple(_beyond(plain, rank, at, head[2:])) for at, head in enumerate(heads))
        for rank, heads in enumerate(asked_by)
    )
    return dataclasses.replace(plain, outliers=outliers)


def _beyond(halo: Halo, rank: int, head: int, tiles: Sequence[int]) -> Iterator[Span]:
    """The spans of outlier tiles as far as they lie outside of the halo, ascending, neighbors as one."""
    (low, start), (_, high) = halo.spans(rank, head)
    found: list[Span] = []
    for owner, first in sorted((o, f) for o, f in zip(tiles[::2], tiles[1::2], strict=True) if o >= 0):
        begin = halo.offsets[owner] + first
        end = min(begin + TILE, halo.offsets[owner] + halo.lengths[owner])
        begin, end = (begin, min(end, low)) if begin < start else (max(begin, high), end)
        if found and begin <= found[-1][1] and begin < end:
            begin, _ = found.pop()
        if begin < end:
            found.append((begin, end))
    yield from found


def _numerator(
    spec: Spec, told: Told, shard: Shard, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """(rate, constant), each [B, H, T]: a query's reach beyond norms κ is that of rate·κ + constant nats."""
    query, key, value = query.detach(), key.detach(), value.detach()
    first = first_positions(spec, query.device)
    lower = lower_bound(spec, query, key, first, stretches=False, text_len=shard.total)
    largest = told.norms[:, :, 0].amax(0)
    blind = None
    if spec.key_mask is not None and spec.key_segments is None:
        far, blind = _nearest_visible(spec, told, shard, query, largest)
        lower = torch.maximum(lower, far)
    longer = longer_values(spec, value, first, elsewhere=(told.longest.amax(0), told.shortest.amin(0)))
    rate, constant = numerator_parts(spec, query, lower, longer, largest[None])
    return rate, constant if blind is None else constant.masked_fill(blind[:, None], -math.inf)


def _nearest_visible(spec: Spec, told: Told, shard: Shard, query: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """(λ [B, H, T] of the nearest visible key to a side, blind [B, T]: there is none), where own keys may be hidden."""
    assert spec.key_mask is not None
    rows = torch.arange(spec.query_len, device=query.device, dtype=torch.float64)
    offsets = torch.tensor(shard.lengths, device=query.device).cumsum(0) - torch.tensor(
        shard.lengths, device=query.device
    )
    elsewhere = (offsets - shard.start)[:, None]
    upper = abs(spec.scale) * norm_bound(query) * largest.repeat_interleave(spec.group)[:, None]
    lower, seen = torch.full_like(upper, -math.inf), torch.zeros_like(spec.key_mask)
    for side in (1,) if spec.causal else (1, -1):
        # Mirrored, what is to the right is to the left: the nearest visible key is the largest position that is not beyond.
        known, near = (told.last, spec.key_mask) if side > 0 else (told.first, spec.key_mask.flip(-1))
        ranks = slice(None, shard.rank) if side > 0 else slice(shard.rank + 1, None)
        there = torch.where((known >= 0) & known.isfinite(), side * (known + elsewhere), -math.inf)[ranks]
        far = torch.nn.functional.pad(there, (0, 0, 1, 0), value=-math.inf).amax(0)
        at = rows if side > 0 else -rows.flip(0)
        here = torch.where(near, at, -math.inf).cummax(-1).values
        distance = at - torch.maximum(here, far[:, None])
        distance = distance if side > 0 else distance.flip(-1)
        met = distance.isfinite() if spec.window is None else distance < spec.window
        slopes = spec.slopes if side > 0 or spec.right_slopes is None else spec.right_slopes
        m = slopes.detach().double().reshape(-1, spec.num_heads, 1)
        away = m * distance.masked_fill(~met, 1.0)[:, None]
        lower = torch.maximum(lower, torch.where(met[:, None], -upper - away, -math.inf))
        seen = seen | met
    return lower, ~seen


def _with_outliers(
    spec: Spec, told: Told, shard: Shard, beside: tuple[Tensor, Tensor], rate: Tensor, constant: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """(what to ask for [K, FIELDS], rows that it costs [K]) with the `count` longest tiles beside the shard left out of κ."""
    norms = told.norms.masked_fill(~(beside[0] | beside[1])[:, None, None], 0.0).transpose(0, 1).flatten(1)
    count = min(count, norms.shape[1])
    chosen = norms.topk(count, dim=-1)
    rest = norms.scatter(-1, chosen.indices, 0.0).unflatten(1, (-1, CANDIDATES)).amax(-1)
    needs = []
    for at, ranks in enumerate(beside):
        kappa = rest.masked_fill(~ranks, 0.0).amax(-1)
        needs.append(_rows_beside(spec, at == 0, rate, constant, kappa).clamp(max=shard.rows_of(ranks)))
    used = chosen.values > 0
    owners = torch.where(used, chosen.indices // CANDIDATES, -1)
    firsts = torch.where(used, told.tiles.transpose(0, 1).flatten(1).gather(1, chosen.indices).long(), -1)
    tiles = torch.stack([owners, firsts], -1).flatten(1)
    tiles = torch.nn.functional.pad(tiles, (0, 2 * (OUTLIER_TILES - count)), value=-1)
    # A tile on its own costs about twice its rows: it is one more call, and one more merge.
    price = needs[0] + needs[1] + 2 * TILE * used.sum(-1)
    return torch.cat([needs[0][:, None], needs[1][:, None], tiles], -1), price.double()


def _rows_beside(spec: Spec, left: bool, rate: Tensor, constant: Tensor, kappa: Tensor) -> Tensor:
    """[K] int64: rows next to the shard, to one side, that some query of some head of the group needs."""
    slopes = spec.slopes if left or spec.right_slopes is None else spec.right_slopes
    m = slopes.detach().double().reshape(-1, spec.num_heads, 1)
    nats = rate * kappa.repeat_interleave(spec.group)[:, None] + constant - torch.log(-torch.expm1(-m))
    reach = reach_of_nats(nats, m, spec.tolerance if spec.causal else spec.tolerance / 2)
    if spec.window is not None:
        reach = reach.clamp(max=spec.window)
    row = torch.arange(spec.query_len, device=rate.device)
    between = row + 1 if left else spec.query_len - row
    rows = (reach - between).amax((0, 2)).unflatten(0, (-1, spec.group)).amax(-1).clamp(min=0)
    return rows.masked_fill(kappa == 0, 0)  # no key there may be seen
