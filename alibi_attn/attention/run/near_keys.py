"""Which keys the last few queries of a long text read, per row and key head; computed from remembered norms (`norms.py`).

A row reads its last keys, as many as its queries' certified reach, and the outlier tiles before them. Rows may be padded: each is
then relative to its last visible key.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.biased import gated_bounds
from alibi_attn.attention.certificate.bounds import bounds, worth_leaving_out
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms, norm_bound

FEW = 1024  # keys that cost less than a separate call: heads that need at most this many share a call

Runs = Sequence[tuple[int, int]]  # [start, stop) of the visible keys, per row


def visible_runs(key_mask: Tensor) -> Runs | None:
    """[start, stop) of the visible keys in each row of a key mask [B, S], (0, 0) for none; None if some row has a hole.

    Reads the mask on the host.
    """
    flags = key_mask.view(torch.uint8)
    starts, stops = flags.argmax(1), key_mask.shape[1] - flags.flip(1).argmax(1)
    rows = torch.stack([starts, stops, key_mask.sum(1)], dim=1).tolist()
    if any(count not in (0, stop - start) for start, stop, count in rows):
        return None
    return [(start, stop) if count else (0, 0) for start, stop, count in rows]


@dataclasses.dataclass
class Row:
    """The keys that one row reads.

    Args:
        start, stop: the range of its visible keys.
        needed: for each key head, how many of the last visible keys are read.
        outlier_tiles: for each key head, the tiles that are read in addition; −1 = none.
    """

    start: int
    stop: int
    needed: list[int]
    outlier_tiles: list[list[int]]

    def spans(self, keys: int, members: Sequence[int]) -> list[tuple[int, int]]:
        """The ranges of keys that these key heads read, if none needs more than the last `keys`."""
        low = max(self.start, self.stop - keys)
        tiles = sorted({tile for k in members for tile in self.outlier_tiles[k] if tile >= 0})
        spans = [(max(tile * TILE, self.start), min((tile + 1) * TILE, low)) for tile in tiles]
        return [(low, self.stop), *(span for span in spans if span[0] < span[1])]


def needed_keys(
    spec: AttentionSpec[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    known_norms: Norms,
    visible: Runs,
    log_fgate: Tensor | None = None,
) -> list[Row]:
    """The keys that each row must read: all visible ones if they are few, else those within its queries' certified reach.

    The log-sum-exp is bounded by the last keys of a row alone, which are visible, and no norm includes hidden keys. Only calls
    without gradients come here, so the key rule does not apply.
    """
    rows = [Row(start, stop, [stop - start] * spec.num_kv_heads, [[]] * spec.num_kv_heads) for start, stop in visible]
    many = [b for b, row in enumerate(rows) if row.stop - row.start > FEW]
    if not many:
        return rows
    norms, in_sight = _norms_in_sight(spec, key, value, known_norms, visible)
    far = spec.key_len if spec.window is None else min(spec.key_len, spec.window)
    if any(rows[b].stop == spec.key_len for b in many):
        if log_fgate is None:
            outliers = worth_leaving_out(norms[0], times=2, count=in_sight)
            certified = bounds(spec, query, key, value, tile_norms=norms, outliers=outliers, for_gradients=False)
        else:
            certified = gated_bounds(spec, query, key, value, log_fgate, tile_norms=norms)
        # Keys that the first query needs, and those between it and the last.
        needed = _of_key_heads(spec, certified.left.amax(-1).clamp(max=far) + spec.query_len - 1).amax(-1).tolist()
        outlier_tiles = _of_key_heads(spec, certified.outlier_tiles).flatten(2).tolist()
    for b in many:
        row = rows[b]
        if row.stop == spec.key_len:
            row.needed = [min(keys, row.stop - row.start) for keys in needed[b]]
            row.outlier_tiles = outlier_tiles[b]
        elif spec.window is None:
            of_row = (norms[0][b : b + 1], norms[1][b : b + 1])
            one = query[b : b + 1], key[b : b + 1], value[b : b + 1]
            rows[b] = _after_last_visible_key(spec, one, of_row, row, b)
        else:
            within = max(row.stop - max(row.start, spec.key_len - spec.query_len - far + 1), 0)
            row.needed = [within] * spec.num_kv_heads
    return rows


def _after_last_visible_key(
    spec: AttentionSpec[Tensor], tensors: tuple[Tensor, Tensor, Tensor], norms: tuple[Tensor, Tensor], row: Row, b: int
) -> Row:
    """The keys needed by a row whose last positions are hidden, such as a finished sequence.

    Moving a query from there to the last visible position shortens the distance to every key by the same amount, so the softmax
    does not change: without a window, the reach is the same as for a query at the position of its last visible key.
    """
    query, key, value = tensors
    one_query = spec.changed(
        batch=1, query_len=1, slopes=spec.slopes if spec.slopes.ndim == 1 else spec.slopes[b : b + 1]
    )
    needed, outlier_tiles = torch.ones(spec.num_kv_heads, dtype=torch.int64, device=query.device), []
    for t in range(spec.query_len):
        stop = min(spec.key_len - spec.query_len + t, row.stop - 1) + 1
        known = norms[0][..., : -(-stop // TILE)], norms[1][..., : -(-stop // TILE)]
        one = query[:, :, t : t + 1], key[:, :, :stop], value[:, :, :stop]
        at = one_query.changed(key_len=stop, query_offset=stop - 1)
        certified = bounds(at, *one, tile_norms=known, for_gradients=False)
        reach = _of_key_heads(spec, certified.left.amax(-1)).amax(-1)[0]
        needed = torch.maximum(needed, reach.clamp(max=stop) + row.stop - stop)
        outlier_tiles.append(_of_key_heads(spec, certified.outlier_tiles).flatten(2)[0])
    most = row.stop - row.start
    return dataclasses.replace(
        row, needed=needed.clamp(max=most).tolist(), outlier_tiles=torch.cat(outlier_tiles, 1).tolist()
    )


def _norms_in_sight(
    spec: AttentionSpec[Tensor], key: Tensor, value: Tensor, known_norms: Norms, visible: Runs
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """(norms of the visible keys and values per tile; the number of tiles with visible keys, [B, 1], None for all)."""
    norms = known_norms.tile_norms(key, value)
    if all(run == (0, spec.key_len) for run in visible):
        return norms, None
    tile = torch.arange(norms[0].shape[-1], device=key.device)
    start, stop = torch.tensor(visible, device=key.device).T[..., None]
    hidden = ((tile + 1) * TILE <= start) | (tile * TILE >= stop)
    keys, values = (of_tiles.masked_fill(hidden[:, None], 0.0) for of_tiles in norms)
    for b, (first, end) in enumerate(visible):
        edges = {edge // TILE for edge in (first, end) if first < end and edge % TILE and edge < spec.key_len}
        for at in edges:  # part of the tile is visible
            seen = slice(max(first, at * TILE), min(end, (at + 1) * TILE))
            keys[b, :, at], values[b, :, at] = (norm_bound(x[b, :, seen]).amax(-1) for x in (key, value))
    return (keys, values), (~hidden).sum(-1, keepdim=True)


def buckets(needed: list[int]) -> list[tuple[int, list[int]]]:
    """(the most keys that any head of a group needs, the key heads of the group): grouped by powers of two from FEW on.

    Above FEW only neighboring heads are grouped, because their keys can be read without a copy.
    """
    by_power: dict[int, list[int]] = {}
    for head, keys in enumerate(needed):
        by_power.setdefault((max(keys, FEW) - 1).bit_length(), []).append(head)
    few = (FEW - 1).bit_length()
    together = [by_power.pop(few)] if few in by_power else []
    for heads in by_power.values():
        starts = [at for at, head in enumerate(heads) if at == 0 or heads[at - 1] != head - 1]
        together += [heads[start:stop] for start, stop in itertools.pairwise([*starts, len(heads)])]
    return [(max(needed[h] for h in heads), heads) for heads in together]


def _of_key_heads(spec: AttentionSpec[Tensor], of_heads: Tensor) -> Tensor:
    """[B, H, ...] -> [B, K, H / K, ...]"""
    return of_heads.unflatten(1, (spec.num_kv_heads, spec.group))
