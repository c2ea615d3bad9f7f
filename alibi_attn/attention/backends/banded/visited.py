"""Which keys the pieces read, and which of them backward needs: no sections that weigh nothing (docs/certificate.md, 11).

The share of a piece in the softmax over all keys visited so far bounds its share over all keys, because the sum only grows.
Backward leaves out a section if its share obeys the key rule for every query of a tile (`certificate/key_rule.py`).
"""

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.backends.banded.pieces import Piece
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions
from alibi_attn.attention.certificate.bounds import Bounds, longer_values
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.key_rule import largest_share
from alibi_attn.attention.certificate.norms import in_tiles

Spec = AttentionSpec[Tensor]
Array = np.ndarray


def reach_and_scores(spec: Spec, plans: list[list[list[Piece]]]) -> tuple[Tensor, Tensor]:
    """[B, H] each: 1 + the largest |i − j| that the pieces read, and the scores that they compute."""
    device = spec.slopes.device
    first = first_positions(spec, device).expand(spec.batch).tolist()
    reach = [[farthest(spec, pieces, first[b]) for pieces in heads] for b, heads in enumerate(plans)]
    scores = [[sum(piece.scores for piece in pieces) for pieces in heads] for heads in plans]
    return torch.tensor(reach, device=device), torch.tensor(scores, device=device)


def farthest(spec: Spec, pieces: list[Piece], first: int) -> int:
    """1 + the largest |i − j| that the pieces read; 0 if they read nothing."""
    distance = 0
    for p in pieces:
        for b in (0, p.count - 1):
            top, low = first + p.query + b * p.stride, p.key + b * p.step
            ends = (top + p.rows - 1 - low, low + p.keys - 1 - top)
            distance = max(distance, 1 + ends[0], 0 if spec.causal else 1 + ends[1])
    return distance if spec.window is None else min(distance, spec.window)


def tile_tolerances(spec: Spec, value: Tensor | None) -> Tensor:
    """[B, H, N] fp64: the tolerance of the key rule for each tile of queries, less if far values are long."""
    tolerance = 0.99 * spec.tolerance
    if value is None:
        blocks = -(-spec.query_len // TILE)
        return torch.full((spec.batch, spec.num_heads, blocks), tolerance, dtype=torch.float64)
    longer = longer_values(spec, value, first_positions(spec, value.device))
    return in_tiles(longer).amax(-1).neg().exp() * tolerance


def narrow(
    spec: Spec, kept: Bounds, b: int, h: int, *, pieces: list[Piece], shares: list[Tensor | None], tolerances: Tensor
) -> None:
    """Lowers the reach `kept` of head h of sequence b.

    Args:
        shares: of every piece, [count, rows] in the softmax of its queries; None = unknown.
        tolerances: [N], of the key rule.
    """
    parts = [_in_tiles(*x) for x in zip(pieces, shares, strict=True) if not x[0].is_outlier]
    tile, low, high, share = (np.concatenate(x) for x in zip(*parts, strict=True))
    left, right, tolerance = kept.left[b, h], kept.right[b, h], tolerances.numpy()[tile]
    first = int(first_positions(spec, left.device).expand(spec.batch)[b])
    start = first + np.arange(len(left)) * TILE
    last = np.minimum(start + TILE, first + spec.query_len) - 1
    # The largest distance of a query and a key counts.
    light = share <= largest_share((last[tile] - low).clip(0), tolerance)
    to_left = last - _nearest_kept(tile, low, light, len(left)) + 1
    torch.minimum(left, torch.from_numpy(to_left.clip(1)), out=left)
    if not spec.causal:
        light = share <= largest_share((high - 1 - start[tile]).clip(0), tolerance)
        to_right = -_nearest_kept(tile, -high, light, len(left)) - start
        torch.minimum(right, torch.from_numpy(to_right.clip(1)), out=right)


def _in_tiles(piece: Piece, share: Tensor | None) -> tuple[Array, ...]:
    """(tile of queries, first key, end of keys, largest share) of every block of the piece, flat."""
    ahead, block = piece.query % TILE, np.arange(piece.count)[:, None]
    if piece.count == 1 or (ahead, piece.rows % TILE, piece.stride % TILE) == (0, 0, 0):
        row = np.arange(0, ahead + piece.rows, TILE)
        if share is not None:  # [count, rows] -> [count, tiles]
            share = torch.nn.functional.pad(share, (ahead, -(ahead + piece.rows) % TILE))
            share = share.unflatten(1, (-1, TILE)).amax(-1)
    else:
        row = np.arange(piece.rows)
    tile = (piece.query + block * piece.stride + row) // TILE
    low = np.broadcast_to(piece.key + block * piece.step, tile.shape)
    largest = np.full(tile.shape, np.inf) if share is None else share.numpy()
    return tile.ravel(), low.ravel(), low.ravel() + piece.keys, largest.ravel()


def _nearest_kept(tile: Array, begin: Array, light: Array, tiles: int) -> Array:
    """[tiles]: where the first part begins, in the order of `begin`, that is not light and that a tile of queries needs."""
    order = np.lexsort((begin, tile))
    tile, begin, light = tile[order], begin[order], light[order]
    rank = np.arange(len(tile)) - np.searchsorted(tile, tile)
    lights = np.zeros((tiles, rank.max(initial=0) + 2), dtype=bool)
    begins = np.zeros_like(lights, dtype=np.int64)
    lights[tile, rank], begins[tile, rank] = light, begin
    return begins[np.arange(tiles), np.argmin(lights, 1)]
