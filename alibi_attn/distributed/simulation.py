"""`plan_halo`: the rows that ranks would request from one another, computed in one process."""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from alibi_attn.attention.call.bias import Slopes
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.operators.operator import requires_gradient
from alibi_attn.distributed.argument_check import ShardOptions, shard_spec
from alibi_attn.distributed.biased_halo_bounds import biased_requested_rows, tile_summary
from alibi_attn.distributed.halo_bounds import RankSummary, Shard, halo_from_requests, rank_summary, requested_rows
from alibi_attn.distributed.halos import Halo

Spec = AttentionSpec[Tensor]


@torch.no_grad()
def plan_halo(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = None,
    *,
    lengths: Sequence[int],
    **options: Unpack[ShardOptions],
) -> Halo:
    """The rows that `context_parallel_attention` would send if this call were split over ranks.

    Of tensors that require gradients it is the halo of training, which is wider.

    Args:
        query: [B, H, S, D], the whole sequence.
        key, value: [B, K, S, D].
        lengths: rows of each rank's shard, [R]; they must add up to S.
        slopes, options: as for `context_parallel_attention`.

    Raises:
        ValueError, TypeError: as for `alibi_attention`; lengths that do not add up to S.

    >>> q = k = v = torch.randn(1, 8, 1000, 32)
    >>> print(plan_halo(q, k, v, lengths=[500, 500]).rows[1, 0, 0] < 100)
    True
    """
    spec = shard_spec(query, key, value, slopes, **options)
    requests, shards = planned_requests(spec, query, key, value, lengths)
    return halo_from_requests(requests, shards, row_bytes(spec, key))


def planned_requests(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]
) -> tuple[list[list[list[int]]], tuple[int, ...]]:
    """(the requests of all ranks, as `requested_rows` describes them; the lengths)."""
    shards = tuple(int(n) for n in lengths)
    if not shards or min(shards) < 0 or sum(shards) != spec.query_len:
        raise ValueError(f"lengths is {list(shards)} but must add up to the {spec.query_len} queries and keys")
    parts = list(zip(*(x.split(shards, dim=2) for x in (query, key, value)), strict=True))
    specs = [shard_of(spec, sum(shards[:rank]), length) for rank, length in enumerate(shards)]
    summary = RankSummary.of(
        spec, torch.stack([rank_summary(one, k, v) for one, (_, k, v) in zip(specs, parts, strict=True)])
    )
    for_gradients = requires_gradient(spec, query, key, value)
    cut = [
        Shard(one, rank, shards, summary, q, k, v, for_gradients)
        for rank, (one, (q, k, v)) in enumerate(zip(specs, parts, strict=True))
    ]
    if spec.key_bias is None:
        requests = [requested_rows(shard) for shard in cut]
    else:
        numbers = torch.stack([tile_summary(shard) for shard in cut])
        requests = [biased_requested_rows(shard, numbers) for shard in cut]
    return [request.tolist() for request in requests], shards


def row_bytes(spec: Spec, key: Tensor) -> int:
    """The bytes of one row of keys and one of values, for one key head and the whole batch."""
    return 2 * spec.batch * spec.head_dim * key.element_size()


def shard_of(spec: Spec, start: int, length: int) -> Spec:
    """The part of a call that belongs to one shard."""

    def rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[..., start : start + length]

    return dataclasses.replace(
        spec,
        query_len=length,
        key_len=length,
        query_offset=0,
        key_mask=rows(spec.key_mask),
        query_segments=rows(spec.query_segments),
        key_segments=rows(spec.key_segments),
        key_bias=rows(spec.key_bias),
    )
