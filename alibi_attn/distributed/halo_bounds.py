"""Which rows of other shards the queries of a shard need: certified, from a few numbers that every rank shares.

Let a query at row t of its shard have scores of at most rate·κ with rows on other ranks, and a log-sum-exp of at least λ. It
needs only the last w rows before the shard if all rows at distance ≥ t + w + 1 together weigh at most ε, that is, if
w ≥ reach − t − 1, with the reach of `attention/certificate/bounds.py`: where gradients are needed, that of the key rule too. κ is
the largest key norm on the ranks to that side; a few outlier tiles are treated separately. With key biases there is no reach; see
`biased_halo_bounds.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions
from alibi_attn.attention.certificate.bounds import longer_values, numerator_parts, reach_of_nats
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES, TILE
from alibi_attn.attention.certificate.lse_bound import lower_bound
from alibi_attn.attention.certificate.norms import norm_bound, tile_maxima
from alibi_attn.distributed.halos import Halo, Span
from alibi_attn.reach import UNLIMITED

Spec = AttentionSpec[Tensor]

CANDIDATES = OUTLIER_TILES + 1  # tiles that a rank reports; the extra one gives κ if it owns all outlier tiles
NOWHERE = -1.0  # the position of the last visible key if no key is visible
SIDES = 2  # left and right
FIELDS = 2 * SIDES + 2 * OUTLIER_TILES  # numbers in a rank's request


@dataclasses.dataclass(frozen=True)
class RankSummary:
    """Summaries of the rows of all R ranks, in fp64.

    Args:
        norms: [R, K, CANDIDATES]: the largest key norm of each tile, for the tiles with the largest, descending; visible keys
            only, padded with 0.
        tiles: [R, K, CANDIDATES]: the first row of each of these tiles, counted from the shard's first row.
        shortest_key: [R, K]: the smallest norm of a visible key; inf if there is none.
        longest, shortest: [R, K]: the largest and smallest norms of visible values; 0 and inf if there are none.
        first, last: [R, B]: the first and last visible key, counted from the shard's first row; inf and −1 if there are none.
        segments: [R, B, 2]: the smallest and the largest segment id; inf and −inf without rows.
    """

    norms: Tensor
    tiles: Tensor
    shortest_key: Tensor
    longest: Tensor
    shortest: Tensor
    first: Tensor
    last: Tensor
    segments: Tensor

    @classmethod
    def of(cls, spec: Spec, numbers: Tensor) -> Self:
        """Unpacks the gathered numbers, [R, n]."""
        heads, batch = (spec.num_kv_heads,), (spec.batch,)
        shapes = [(*heads, CANDIDATES)] * 2 + [heads] * 3 + [batch] * 2 + [(*batch, 2)]
        parts = numbers.split([math.prod(shape) for shape in shapes], dim=1)
        return cls(*(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)))


def rank_summary(spec: Spec, key: Tensor, value: Tensor) -> Tensor:
    """This rank's part of `RankSummary`, [n] fp64; spec, key and value are those of its shard."""
    batch, heads, length = spec.batch, spec.num_kv_heads, spec.key_len
    device = key.device
    keys, values = (norm_bound(x.detach()).nan_to_num(nan=math.inf, posinf=math.inf) for x in (key, value))
    seen = torch.ones(batch, length, dtype=torch.bool, device=device) if spec.key_mask is None else spec.key_mask
    hidden = ~seen[:, None]
    tiles = tile_maxima(keys.masked_fill(hidden, 0.0)).amax(0) if length else keys.new_zeros(heads, 0)
    norms, indices = torch.nn.functional.pad(tiles, (0, CANDIDATES)).topk(CANDIDATES, dim=-1)
    # The padded column keeps reductions defined when the shard has no rows.
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
    """The rows of one rank, and the summaries of all R ranks.

    Args:
        spec, query, key, value: this rank's rows only.
        rank: this process's rank.
        lengths: rows of each rank, [R].
        summary: the summaries of all ranks.
        for_gradients: whether keys must obey the key rule (`key_rule.py`).
    """

    spec: Spec
    rank: int
    lengths: tuple[int, ...]
    summary: RankSummary
    query: Tensor
    key: Tensor
    value: Tensor
    for_gradients: bool = True

    @property
    def start(self) -> int:
        """Rows before the shard."""
        return sum(self.lengths[: self.rank])

    def sides(self) -> tuple[Tensor, Tensor]:
        """The ranks to the left and to the right that may hold keys for this rank's queries, [R] bool each.

        With segments, ranks beyond the farthest one that shares a segment with this rank are excluded.
        """
        ranks = torch.arange(len(self.lengths), device=self.query.device)
        left, right = ranks < self.rank, ranks > self.rank
        if self.spec.key_segments is not None:
            low, high = self.summary.segments.unbind(-1)
            shared = ((low <= high[self.rank]) & (high >= low[self.rank])).any(-1)
            left = (left & shared).cummax(0).values & left
            right = (right & shared).flip(0).cummax(0).values.flip(0) & right
        return left, torch.zeros_like(right) if self.spec.causal else right

    def rows_of(self, ranks: Tensor) -> Tensor:
        """The total number of rows on these ranks, 0-d int64."""
        return (torch.tensor(self.lengths, device=ranks.device) * ranks).sum()

    def slopes(self, *, left: bool) -> Tensor:
        """The slopes for keys on that side, [B or 1, H, 1] fp64."""
        spec = self.spec
        slopes = spec.slopes if left or spec.right_slopes is None else spec.right_slopes
        return slopes.detach().double().reshape(-1, spec.num_heads, 1)


def requested_rows(shard: Shard) -> Tensor:
    """The request of this rank, [K, FIELDS] int64.

    Rows to the left, rows to the right, the reach to the left and to the right, and (rank, first row) of each outlier tile
    beyond these rows, −1 = none. At a distance of the reach or more, a query needs no row of another rank, not even an outlier
    tile.
    """
    spec, request = shard.spec, no_request(shard.spec, shard.query.device)
    if spec.query_len == 0 or (spec.causal and shard.start == 0):
        return request
    sides = shard.sides()
    if spec.tolerance == 0.0:
        for at, ranks in enumerate(sides):
            rows = shard.rows_of(ranks)
            request[:, at] = rows if spec.window is None else rows.clamp(max=spec.window - 1)
            request[:, SIDES + at] = UNLIMITED if spec.window is None else spec.window
        return request
    rate, constant = _numerator(shard)
    for at, ranks in enumerate(sides):
        largest = shard.summary.norms[:, :, 0].masked_fill(~ranks[:, None], 0.0).amax(0)
        reach = _reach(shard, rate, constant, largest, left=at == 0)
        of_group = (
            torch.where(reach > _distance(shard, left=at == 0), reach, 0).amax((0, 2)).unflatten(0, (-1, spec.group))
        )
        request[:, SIDES + at] = of_group.amax(-1)
    best, cost = request, torch.full((spec.num_kv_heads,), math.inf, dtype=torch.float64, device=shard.query.device)
    for count in OUTLIER_CHOICES:
        candidate, price = _with_outliers(shard, sides, rate, constant, count)
        candidate = torch.cat([candidate[:, :SIDES], request[:, SIDES : 2 * SIDES], candidate[:, SIDES:]], 1)
        best = torch.where((price < cost)[:, None], candidate, best)
        cost = torch.minimum(price, cost)
    return best


def no_request(spec: Spec, device: torch.device) -> Tensor:
    """The request of a rank that needs no rows, [K, FIELDS] int64."""
    nothing = torch.full((spec.num_kv_heads, FIELDS), -1, device=device)
    nothing[:, : 2 * SIDES] = 0
    return nothing


def halo_from_requests(requests: Sequence[Sequence[Sequence[int]]], lengths: tuple[int, ...], row_bytes: int) -> Halo:
    """Combines the requests of all ranks, [R][K][FIELDS]."""
    left, right = (tuple(tuple(int(head[at]) for head in heads) for heads in requests) for at in (0, 1))
    plain = Halo(
        lengths=lengths,
        left=left,
        right=right,
        outliers=tuple(((),) * len(heads) for heads in requests),
        row_bytes=row_bytes,
    )
    outliers = tuple(
        tuple(tuple(_beyond(plain, rank, at, head[2 * SIDES :])) for at, head in enumerate(heads))
        for rank, heads in enumerate(requests)
    )
    return dataclasses.replace(plain, outliers=outliers)


def _beyond(halo: Halo, rank: int, head: int, tiles: Sequence[int]) -> Iterator[Span]:
    """The parts of outlier tiles outside the halo, as ascending spans; adjacent tiles are merged."""
    (low, start), (_, high) = halo.spans(rank, head)
    merged: list[Span] = []
    for owner, first in sorted((o, f) for o, f in zip(tiles[::2], tiles[1::2], strict=True) if o >= 0):
        begin = halo.offsets[owner] + first
        end = min(begin + TILE, halo.offsets[owner] + halo.lengths[owner])
        begin, end = (begin, min(end, low)) if begin < start else (max(begin, high), end)
        if merged and begin <= merged[-1][1] and begin < end:
            begin, _ = merged.pop()
        if begin < end:
            merged.append((begin, end))
    yield from merged


def _numerator(shard: Shard) -> tuple[Tensor, Tensor]:
    """(rate, constant), each [B, H, T]: the numerator of a query's reach is rate·κ + constant for keys of norm ≤ κ."""
    spec, summary = shard.spec, shard.summary
    query, key, value = shard.query.detach(), shard.key.detach(), shard.value.detach()
    first = first_positions(spec, query.device)
    lower = lower_bound(spec, query, key, first, stretches=False, text_len=sum(shard.lengths))
    largest = summary.norms[:, :, 0].amax(0)
    blind = None
    if spec.key_mask is not None and spec.key_segments is None:
        far, blind = _nearest_visible(shard, spec.key_mask, largest)
        lower = torch.maximum(lower, far)
    longer = longer_values(spec, value, first, elsewhere=(summary.longest.amax(0), summary.shortest.amin(0)))
    rate, constant = numerator_parts(spec, query, lower, longer, largest[None])
    return rate, constant if blind is None else constant.masked_fill(blind[:, None], -math.inf)


def _nearest_visible(shard: Shard, key_mask: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """(λ [B, H, T] from the nearest visible keys, blind [B, T]: no key is visible), for queries whose own key may be hidden."""
    spec, summary, query = shard.spec, shard.summary, shard.query.detach()
    rows = torch.arange(spec.query_len, device=query.device, dtype=torch.float64)
    offsets = torch.tensor([0, *shard.lengths[:-1]], device=query.device).cumsum(0)
    elsewhere = (offsets - shard.start)[:, None]
    upper = abs(spec.scale) * norm_bound(query) * largest.repeat_interleave(spec.group)[:, None]
    lower, seen = torch.full_like(upper, -math.inf), torch.zeros_like(key_mask)
    for side in (1,) if spec.causal else (1, -1):
        # The right side is mirrored, so that the nearest visible key is always the largest position up to the query's.
        known, near = (summary.last, key_mask) if side > 0 else (summary.first, key_mask.flip(-1))
        ranks = slice(None, shard.rank) if side > 0 else slice(shard.rank + 1, None)
        there = torch.where((known >= 0) & known.isfinite(), side * (known + elsewhere), -math.inf)[ranks]
        far = torch.nn.functional.pad(there, (0, 0, 1, 0), value=-math.inf).amax(0)
        at = rows if side > 0 else -rows.flip(0)
        here = torch.where(near, at, -math.inf).cummax(-1).values
        distance = at - torch.maximum(here, far[:, None])
        distance = distance if side > 0 else distance.flip(-1)
        met = distance.isfinite() if spec.window is None else distance < spec.window
        away = shard.slopes(left=side > 0) * distance.masked_fill(~met, 1.0)[:, None]
        lower = torch.maximum(lower, torch.where(met[:, None], -upper - away, -math.inf))
        seen = seen | met
    return lower, ~seen


def _with_outliers(
    shard: Shard, sides: tuple[Tensor, Tensor], rate: Tensor, constant: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """(rows and tiles of the request, its cost in rows [K]) if the `count` tiles of largest norm, on both sides, are not in κ."""
    summary = shard.summary
    norms = summary.norms.masked_fill(~(sides[0] | sides[1])[:, None, None], 0.0).transpose(0, 1).flatten(1)
    count = min(count, norms.shape[1])
    chosen = norms.topk(count, dim=-1)
    rest = norms.scatter(-1, chosen.indices, 0.0).unflatten(1, (-1, CANDIDATES)).amax(-1)
    needs = []
    for at, ranks in enumerate(sides):
        kappa = rest.masked_fill(~ranks, 0.0).amax(-1)
        rows = _neighboring_rows(shard, rate, constant, kappa, left=at == 0)
        needs.append(rows.clamp(max=shard.rows_of(ranks)))
    used = chosen.values > 0
    owners = torch.where(used, chosen.indices // CANDIDATES, -1)
    firsts = torch.where(used, summary.tiles.transpose(0, 1).flatten(1).gather(1, chosen.indices).long(), -1)
    tiles = torch.stack([owners, firsts], -1).flatten(1)
    tiles = torch.nn.functional.pad(tiles, (0, 2 * (OUTLIER_TILES - count)), value=-1)
    # A separate tile costs about twice its rows: one more call and one more merge.
    price = needs[0] + needs[1] + 2 * TILE * used.sum(-1)
    return torch.cat([needs[0][:, None], needs[1][:, None], tiles], -1), price.double()


def _neighboring_rows(shard: Shard, rate: Tensor, constant: Tensor, kappa: Tensor, *, left: bool) -> Tensor:
    """The rows next to the shard on one side that any query of a key head's group needs, [K] int64."""
    reach = _reach(shard, rate, constant, kappa, left=left)
    rows = (reach - _distance(shard, left=left)).amax((0, 2)).unflatten(0, (-1, shard.spec.group)).amax(-1).clamp(min=0)
    return rows.masked_fill(kappa == 0, 0)  # no visible key on that side


def _reach(shard: Shard, rate: Tensor, constant: Tensor, kappa: Tensor, *, left: bool) -> Tensor:
    """The distance from which on the rows of other ranks, of norms up to κ [K], cannot matter to a query, [B, H, T] int64."""
    spec, m = shard.spec, shard.slopes(left=left)
    each = rate * kappa.repeat_interleave(spec.group)[:, None] + constant
    together = each - torch.log(-torch.expm1(-m))
    reach = reach_of_nats(spec, each, together, m, for_gradients=shard.for_gradients)
    return reach if spec.window is None else reach.clamp(max=spec.window)


def _distance(shard: Shard, *, left: bool) -> Tensor:
    """How far each query is from the nearest row of other ranks on one side, [T]."""
    row = torch.arange(shard.spec.query_len, device=shard.query.device)
    return row + 1 if left else shard.spec.query_len - row
