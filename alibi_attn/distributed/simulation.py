"""`halo`: what ranks would ask of one another, with all of them simulated in one process."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.attention.bias import Slopes
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.validation import make_spec
from alibi_attn.distributed.biased_need import TilesTold, asked_with_biases, tell_tiles
from alibi_attn.distributed.halos import Halo
from alibi_attn.distributed.need import Shard, Told, asked, halo_of, tell

Spec = AttentionSpec[Tensor]


@torch.no_grad()
def halo(
    query: Tensor, key: Tensor, value: Tensor, slopes: Slopes | None = None, *, lengths: Sequence[int], causal: bool = True,
    right_slopes: Slopes | None = None, window: int | None = None, scale: float | None = None,
    key_mask: Tensor | None = None, segment_ids: Tensor | None = None, key_bias: Tensor | None = None,
    tolerance: float | None = None,
) -> Halo:  # fmt: skip
    """Which rows the ranks would send, had each a shard of this call: what `context_parallel_attention` sends.

    Args:
        query: [B, H, S, D]; key, value: [B, K, S, D]: the whole sequence.
        lengths: rows of each rank's shard, [R], which add up to S.
        slopes, causal, right_slopes, window, scale, key_mask, segment_ids, key_bias, tolerance: as for `alibi_attention`.

    Raises:
        ValueError, TypeError: as for `alibi_attention`, and lengths that do not add up.

    >>> q = k = v = torch.randn(1, 8, 1000, 32)
    >>> print(halo(q, k, v, lengths=[500, 500]).rows[1, 0, 0] < 100)
    True
    """
    spec = make_spec(
        query, key, value, slopes, causal=causal, right_slopes=right_slopes, window=window, scale=scale, key_mask=key_mask,
        segment_ids=segment_ids, key_bias=key_bias, tolerance=tolerance,
    )  # fmt: skip
    shards = tuple(int(n) for n in lengths)
    if not shards or min(shards) < 0 or not sum(shards) == spec.query_len == spec.key_len:
        raise ValueError(
            f"lengths is {list(shards)} but must add up to the {spec.query_len} queries and {spec.key_len} keys"
        )
    parts = list(zip(*(x.split(shards, dim=2) for x in (query, key, value)), strict=True))
    specs = [shard_of(spec, sum(shards[:rank]), length) for rank, length in enumerate(shards)]
    told = Told.of(spec, torch.stack([tell(one, k, v) for one, (_, k, v) in zip(specs, parts, strict=True)]))
    found = []
    if spec.key_bias is not None:
        count = -(-max(shards) // TILE)
        numbers = [tell_tiles(one, k, count) for one, (_, k, _) in zip(specs, parts, strict=True)]
        tiles = TilesTold.of(spec, torch.stack(numbers))
    for rank, (one, part) in enumerate(zip(specs, parts, strict=True)):
        shard = Shard(rank, shards)
        needs = asked(one, told, shard, *part) if spec.key_bias is None else (
            asked_with_biases(one, told, tiles, shard, *part)
        )  # fmt: skip
        found.append(needs.tolist())
    return halo_of(found, shards, row_bytes(spec, key))


def row_bytes(spec: Spec, key: Tensor) -> int:
    """One row of keys and one of values of one key head, over the batch."""
    return 2 * spec.batch * spec.head_dim * key.element_size()


def shard_of(spec: Spec, start: int, length: int) -> Spec:
    """The call of one shard, for some rows of a whole call."""

    def rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[..., start : start + length]

    return dataclasses.replace(
        spec, query_len=length, key_len=length, query_offset=0, key_mask=rows(spec.key_mask),
        query_segments=rows(spec.query_segments), key_segments=rows(spec.key_segments), key_bias=rows(spec.key_bias),
    )  # fmt: skip
