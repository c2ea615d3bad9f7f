"""From reach to tiles: which tiles of 64 keys every block of queries visits, as small integer tensors that stay on the device.

`bounds.py` says how far a block must look; masks, segments and windows say where it may look. Both are intervals of tiles, so a
kernel's loop has its first and last tile before it starts. Nothing here reads a value on the host or grows with T·S.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from alibi_attn.attention.bounds import TILE, Bounds, first_positions
from alibi_attn.attention.spec import AttentionSpec

Spec = AttentionSpec[Tensor]

NEVER = 2**28  # the first tile of a block that visits none; small enough to be multiplied


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What is visited, N = ⌈T / rows⌉ blocks of queries; half-open intervals of tiles of TILE keys.

    Args:
        plan: [B, H, N, 4] int32: first and last tile of the certified band, then of all that the masks allow.
        pins: [B, H, P] int32: tiles that are visited wherever the masks allow it, −1 = none.
        rows: queries a block.
    """

    plan: Tensor
    pins: Tensor
    rows: int

    @functools.cached_property
    def besides(self) -> Tensor:
        """[B, H, N, P] int32: the pinned tiles that a block visits besides its band, −1 after the last."""
        first, last, low, high = (x[..., None] for x in self.plan.unbind(-1))
        pins = self.pins[:, :, None]
        besides = (pins >= low) & (pins < high) & ((pins < first) | (pins >= last))
        return torch.where(besides, pins, -1).sort(-1, descending=True).values.contiguous()

    @functools.cached_property
    def visited(self) -> Tensor:
        """[B, H, N] int64: tiles that every block visits."""
        first, last = self.plan[..., 0].long(), self.plan[..., 1].long()
        return (last - first).clamp(min=0) + (self.besides >= 0).sum(-1)


def key_intervals(spec: Spec, found: Bounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(near, far, low, high), each [B, H, N]: the certified band of every block of TILE queries, and all the keys it may see.

    Keys from the first on and before the second; both within 0 and S, and none where the second is not larger.
    """
    device = found.left.device
    first = first_positions(spec, device)[:, None]
    start = first + torch.arange(found.left.shape[-1], device=device) * TILE
    end = torch.minimum(start + TILE, first + spec.query_len)
    low, high = (x[:, None].expand(spec.batch, spec.num_heads, -1) for x in allowed_keys(spec, start, end))
    near = torch.maximum(low, start[:, None] - found.left + 1)
    far = high if spec.causal else torch.minimum(high, end[:, None] - 1 + found.right)
    return near, far, low, high


def key_tiles(spec: Spec, found: Bounds, *, rows: int, shared: bool = False) -> Tiles:
    """The tiles that every block of `rows` queries (a multiple of TILE) visits.

    Args:
        shared: all query heads of a key head visit the same tiles, those of the widest.
    """
    near, far, low, high = key_intervals(spec, found)
    parts = [*_in_tiles(near, far), *_in_tiles(low, high)]
    # On a GPU every operation here is a launch: those that would change nothing are left out.
    shared = shared and spec.group > 1
    short = -found.left.shape[-1] % (rows // TILE)
    for at, (fill, reduce) in enumerate([(NEVER, torch.amin), (0, torch.amax)] * 2):
        if rows > TILE:
            wide = torch.nn.functional.pad(parts[at], (0, short), value=fill) if short else parts[at]
            parts[at] = reduce(wide.unflatten(-1, (-1, rows // TILE)), -1)
        if shared:
            of_group = parts[at].unflatten(1, (spec.num_kv_heads, spec.group))
            parts[at] = reduce(of_group, 2, keepdim=True).expand_as(of_group).flatten(1, 2)
    pins = found.pins
    if shared:
        # Pins are the tiles with the largest norms, so the choices are nested and the longest holds them all.
        of_group = pins.unflatten(1, (spec.num_kv_heads, spec.group))
        most = (of_group >= 0).sum(-1).argmax(2)[..., None, None].expand(-1, -1, spec.group, pins.shape[-1])
        pins = of_group.gather(2, most).flatten(1, 2)
    return Tiles(torch.stack(parts, -1).to(torch.int32), pins.to(torch.int32), rows)


def query_blocks(tiles: Tiles, *, count: int) -> Tensor:
    """[B, H, count, 3] int32, for every tile of keys: first and last block of queries to be asked, and 1 where it is pinned.

    Some blocks in between may not visit the tile; their plan says so.
    """
    first, last, low, high = (x.contiguous() for x in tiles.plan.unbind(-1))
    at = torch.arange(count, device=first.device, dtype=torch.int32)
    at = at.expand(*first.shape[:2], count).contiguous()
    pinned = torch.zeros_like(at).scatter(-1, tiles.pins.clamp(min=0).long(), 1)
    # A −1 among the pins marked tile 0; it is pinned only if it is there itself.
    real = (tiles.pins == 0).any(-1, keepdim=True)
    pinned = torch.where((at == 0) & ~real, 0, pinned)
    ranges = [_asked(at, first, last), _asked(at, low, high)]
    start = torch.where(pinned == 1, ranges[1][0], ranges[0][0])
    stop = torch.where(pinned == 1, ranges[1][1], ranges[0][1])
    return torch.stack([start, stop, pinned], -1).to(torch.int32)


def heaviest_first(tiles: Tiles) -> Tensor:
    """[B·H] int32: the heads of all sequences, those with the most tiles first, so that none of them starts last."""
    return tiles.visited.sum(-1).flatten().argsort(descending=True, stable=True).to(torch.int32)


def reach_and_scores(spec: Spec, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """(reach, scores), each [B, H] int64: 1 + the largest |i − j| among whole visited tiles, and the scores they hold."""
    device = tiles.plan.device
    start = first_positions(spec, device)[:, None] + torch.arange(tiles.plan.shape[2], device=device) * tiles.rows
    end = torch.minimum(start + tiles.rows, first_positions(spec, device)[:, None] + spec.query_len)[:, None]
    start = start[:, None]
    extra = tiles.besides.long()
    low = torch.cat([tiles.plan[..., :1].long(), extra], -1)
    high = torch.cat([tiles.plan[..., 1:2].long(), extra + 1], -1)
    used = (low >= 0) & (low < high)
    low, high = low * TILE, (high * TILE).clamp(max=spec.key_len)
    farthest = end[..., None] - low
    if not spec.causal:
        farthest = torch.maximum(farthest, high - start[..., None])
    farthest = torch.where(used, farthest, 0).amax((-1, -2))
    if spec.window is not None:
        farthest = farthest.clamp(max=spec.window)
    scores = torch.where(used, high - low, 0).sum(-1) * (end - start)
    return farthest, scores.sum(-1)


def open_tiles(spec: Spec, *, rows: int) -> tuple[Tensor, Tensor]:
    """([B, N, 2], [B, ⌈S / TILE⌉, 2]) int32: for every block of `rows` queries an interval of tiles, and for every tile an
    interval of blocks, in which key mask and segments hide nothing; of several, the one beside the block, or the tile.
    """
    device = spec.slopes.device
    blocks, tiles = -(-spec.query_len // rows), -(-spec.key_len // TILE)
    of_blocks, of_tiles = (torch.zeros((spec.batch, n), dtype=torch.int64, device=device) for n in (blocks, tiles))
    whole_blocks, whole_tiles = of_blocks == 0, of_tiles == 0
    if spec.query_segments is not None and spec.key_segments is not None:
        of_blocks, most = _range_of(spec.query_segments, rows)
        of_tiles, key_most = _range_of(spec.key_segments, TILE)
        whole_blocks, whole_tiles = of_blocks == most, of_tiles == key_most
    if spec.key_mask is not None:
        whole_tiles = whole_tiles & (_range_of(spec.key_mask.to(torch.int8), TILE)[0] == 1)
    first = first_positions(spec, device)[:, None]
    begin = first + torch.arange(blocks, device=device) * rows
    tile_begin = torch.arange(tiles, device=device) * TILE - first
    to_blocks = _run_beside(
        of_tiles, whole_tiles, of_blocks, whole_blocks, (begin + 1) // TILE - 1, (begin + rows + TILE - 2) // TILE
    )
    to_tiles = _run_beside(
        of_blocks,
        whole_blocks,
        of_tiles,
        whole_tiles,
        (tile_begin + TILE + rows - 2) // rows,
        (tile_begin + 1) // rows - 1,
    )
    return to_blocks, to_tiles


def allowed_keys(spec: Spec, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """(low, high) [B, blocks]: outside of these keys, the queries at [start, end) may see none."""
    low, high = torch.zeros_like(start), torch.full_like(end, spec.key_len)
    if spec.window is not None:
        low, high = torch.maximum(low, start - spec.window + 1), torch.minimum(high, end - 1 + spec.window)
    if spec.causal:
        high = torch.minimum(high, end)
    low, high = low.expand(spec.batch, -1), high.expand(spec.batch, -1)
    if spec.key_mask is not None:
        at = torch.arange(spec.key_len, device=start.device)
        low = torch.maximum(low, torch.where(spec.key_mask, at, spec.key_len).amin(-1, keepdim=True))
        high = torch.minimum(high, torch.where(spec.key_mask, at + 1, 0).amax(-1, keepdim=True))
    if spec.query_segments is not None and spec.key_segments is not None:
        (least, most), (key_least, key_most) = _range_of(spec.query_segments, TILE), _range_of(spec.key_segments, TILE)
        tiles = key_least.shape[-1]
        # Prefix extremes are sorted: a search finds the first tile that can hold a block's segments, and the last.
        below = torch.searchsorted(key_most.cummax(-1).values, least)
        above = torch.searchsorted(-key_least.cummin(-1).values, -most)
        low = torch.maximum(low, torch.maximum(below, above) * TILE)
        below = torch.searchsorted(key_most.flip(-1).cummax(-1).values, least)
        above = torch.searchsorted(-key_least.flip(-1).cummin(-1).values, -most)
        high = torch.minimum(high, (tiles - torch.maximum(below, above)) * TILE)
    return low, high


def _range_of(numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(smallest, largest) of every `width` of [B, n] numbers, [B, ⌈n / width⌉]."""
    short = -numbers.shape[1] % width
    padded = torch.cat([numbers, numbers[:, -1:].expand(-1, short)], 1).unflatten(1, (-1, width))
    return padded.amin(-1).contiguous(), padded.amax(-1).contiguous()


def _run_beside(labels: Tensor, whole: Tensor, own: Tensor, own_whole: Tensor, near: Tensor, other: Tensor) -> Tensor:
    """[B, n, 2] int32: for every one of `own` the run of equal, whole labels that holds index `near`, or else index `other`.

    Args:
        labels: [B, m], of which only those that are `whole` count; own: [B, n], the same.
        near: [B or 1, n], may lie outside.
    """
    count, at = labels.shape[1], torch.arange(labels.shape[1], device=labels.device)
    goes_on = torch.zeros_like(whole)
    goes_on[:, 1:] = whole[:, 1:] & whole[:, :-1] & (labels[:, 1:] == labels[:, :-1])
    start = torch.where(goes_on, 0, at).cummax(-1).values
    stops = torch.nn.functional.pad(~goes_on[:, 1:], (0, 1), value=True)
    stop = torch.where(stops, at + 1, count).flip(-1).cummin(-1).values.flip(-1)
    low, high = torch.zeros_like(own), torch.zeros_like(own)
    for place in (other, near):
        place = place.expand(own.shape)
        there = place.clamp(0, count - 1)
        fits = own_whole & whole.gather(1, there) & (labels.gather(1, there) == own) & (place == there)
        low, high = torch.where(fits, start.gather(1, there), low), torch.where(fits, stop.gather(1, there), high)
    return torch.stack([low, high], -1).to(torch.int32)


def _in_tiles(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    empty = low >= high
    first = torch.div(low, TILE, rounding_mode="floor").masked_fill(empty, NEVER)
    return first, torch.div(high + TILE - 1, TILE, rounding_mode="floor").masked_fill(empty, 0)


def _asked(at: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """(start, stop): before `start` no interval [first, last) ends beyond the tile, from `stop` on none begins before it."""
    start = torch.searchsorted(last.cummax(-1).values, at, right=True)
    stop = torch.searchsorted(first.flip(-1).cummin(-1).values.flip(-1).contiguous(), at, right=True)
    return start, stop
