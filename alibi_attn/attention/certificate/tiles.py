"""From reach to tiles: which tiles of 64 keys every block of queries visits, as small integer tensors that stay on the device.

`bounds.py` computes the keys that a block must visit; masks, segments and windows determine the keys that it may see.
Both are intervals of tiles, so a kernel reads its first and last tile before its loop starts. Nothing here reads a
value on the host or grows with T·S.
"""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions
from alibi_attn.attention.certificate.bounds import Bounds
from alibi_attn.attention.certificate.constants import NO_TILE, TILE

Spec = AttentionSpec[Tensor]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles that N = ⌈T / rows⌉ blocks of queries visit, as half-open intervals of tiles of TILE keys; everything int32.

    Args:
        bands: [B, H, N, 4]: the certified band, then the interval that the masks allow.
        outlier_tiles: [B, H, P]: tiles that are visited if the masks allow it, −1 = none.
        beside: [B, H, N, P]: the outlier tiles that a block visits outside its band, −1 after the last.
        weight: [B, H]: the number of tiles that all blocks visit.
        rows: queries per block.
        norms: fp32 [3, B, K, ⌈S / TILE⌉]: the largest norm of the keys in a tile, then of their values, not finite if
            some element is not; None if they were not computed.
    """

    bands: Tensor
    outlier_tiles: Tensor
    beside: Tensor
    weight: Tensor
    rows: int
    norms: Tensor | None = None

    @classmethod
    def of(cls, bands: Tensor, outlier_tiles: Tensor, rows: int) -> "Tiles":
        """Computes `beside` and `weight` from the bands and the outlier tiles."""
        first, last, low, high = (x[..., None] for x in bands.unbind(-1))
        tile = outlier_tiles[:, :, None]
        beside = (tile >= low) & (tile < high) & ((tile < first) | (tile >= last))
        beside = torch.where(beside, tile, -1).sort(-1, descending=True).values.contiguous()
        visited = (last - first).clamp(min=0).squeeze(-1) + (beside >= 0).sum(-1)
        return cls(bands, outlier_tiles, beside, visited.sum(-1).to(torch.int32), rows)


def key_intervals(spec: Spec, certified: Bounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(near, far, low, high), each [B, H, N]: the certified band of every block of TILE queries, and all the keys it may see.

    Half-open intervals [near, far) and [low, high) within 0 and S; empty if the second is not larger.
    """
    device = certified.left.device
    first = first_positions(spec, device)[:, None]
    start = first + torch.arange(certified.left.shape[-1], device=device) * TILE
    end = torch.minimum(start + TILE, first + spec.query_len)
    low, high = (x[:, None].expand(spec.batch, spec.num_heads, -1) for x in allowed_keys(spec, start, end))
    near = torch.maximum(low, start[:, None] - certified.left + 1)
    far = high if spec.causal else torch.minimum(high, end[:, None] - 1 + certified.right)
    return near, far, low, high


def key_tiles(spec: Spec, certified: Bounds, *, rows: int) -> Tiles:
    """The tiles that every block of `rows` queries (a multiple of TILE) visits."""
    near, far, low, high = key_intervals(spec, certified)
    parts = [*_in_tiles(near, far), *_in_tiles(low, high)]
    short = -certified.left.shape[-1] % (rows // TILE)
    for at, (fill, reduce) in enumerate([(NO_TILE, torch.amin), (0, torch.amax)] * 2):
        wide = torch.nn.functional.pad(parts[at], (0, short), value=fill)
        parts[at] = reduce(wide.unflatten(-1, (-1, rows // TILE)), -1)
    return Tiles.of(torch.stack(parts, -1).to(torch.int32), certified.outlier_tiles.to(torch.int32), rows)


def reach_and_scores(spec: Spec, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """(reach, scores), each [B, H] int64: 1 + the largest |i − j| among whole visited tiles, and the scores they hold."""
    device = tiles.bands.device
    start = first_positions(spec, device)[:, None] + torch.arange(tiles.bands.shape[2], device=device) * tiles.rows
    end = torch.minimum(start + tiles.rows, first_positions(spec, device)[:, None] + spec.query_len)[:, None]
    start = start[:, None]
    extra = tiles.beside.long()
    low = torch.cat([tiles.bands[..., :1].long(), extra], -1)
    high = torch.cat([tiles.bands[..., 1:2].long(), extra + 1], -1)
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


def allowed_keys(spec: Spec, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """(low, high) [B, blocks]: the queries at [start, end) may see no key outside this interval."""
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
        # Unlike −x, ~x reverses the order of all integers: −(−2⁶³) would overflow.
        below = torch.searchsorted(key_most.cummax(-1).values, least)
        above = torch.searchsorted(~key_least.cummin(-1).values, ~most)
        low = torch.maximum(low, torch.maximum(below, above) * TILE)
        below = torch.searchsorted(key_most.flip(-1).cummax(-1).values, least)
        above = torch.searchsorted(~key_least.flip(-1).cummin(-1).values, ~most)
        high = torch.minimum(high, (tiles - torch.maximum(below, above)) * TILE)
    return low, high


def _range_of(numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(smallest, largest) of every `width` consecutive numbers, [B, n] -> [B, ⌈n / width⌉] each."""
    short = -numbers.shape[1] % width
    padded = torch.cat([numbers, numbers[:, -1:].expand(-1, short)], 1).unflatten(1, (-1, width))
    return padded.amin(-1).contiguous(), padded.amax(-1).contiguous()


def _in_tiles(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    empty = low >= high
    first = torch.div(low, TILE, rounding_mode="floor").masked_fill(empty, NO_TILE)
    return first, torch.div(high + TILE - 1, TILE, rounding_mode="floor").masked_fill(empty, 0)
