"""Cuts, gates of −inf, as segments: for calls where biases that are lower by 2²⁰ do not hide the keys before a cut.

Kernels see a cut as a bias. That is not enough for a query whose keys since the cut are all masked, nor for scores, biases or
slopes beyond 2²⁰, nor for NaN. Such a call is computed with a segment between every two cuts instead. If cuts differ between
heads, each head becomes a sequence of the batch.
"""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.transforms import may_read
from alibi_attn.attention.visibility import first_visible, last_keys, per_query_head, shown_keys

Spec = AttentionSpec[Tensor]

HIDDEN_NATS = -1024.0  # a key this much below another weighs 0 in every dtype


def leaks(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether biases may not hide the keys before a cut; False if that cannot be known without waiting for a device."""
    start = spec.query_start
    if start is None or spec.key_bias is None or not may_read(query, key, value, start) or not bool(start.any()):
        return False
    shown = shown_keys(spec)
    assert shown is not None
    own, least = last_keys(spec, shown), first_visible(spec)
    if bool((own < least).any()):
        return True
    bias = spec.key_bias.detach().masked_fill(~shown, -torch.inf)
    before = bias.cummax(-1).values.gather(-1, (start - 1).clamp(min=0)).masked_fill(start == 0, -torch.inf)
    longest = [torch.linalg.vector_norm(x.detach().double(), dim=-1).amax() for x in (query, key, value)]
    scores = 2 * abs(spec.scale) * longest[0] * longest[1] + 0.0 * longest[2]  # NaN if anything is NaN or inf
    rising = (-spec.slopes.detach().double()).clamp(min=0.0).amax() * spec.key_len
    return not bool((before - bias.gather(-1, own) + scores + rising < HIDDEN_NATS).all())


def with_segments(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Spec, Tensor, Tensor, Tensor]:
    """The same call, with cuts as segments; its results are [B, H, …] or, with heads as sequences, [B·H, 1, …]."""
    start = spec.query_start
    assert start is not None
    if bool((start != start[:, :1]).any()):
        key, value = per_query_head(spec, key), per_query_head(spec, value)
        spec = _heads_as_sequences(spec)
        query, key, value = (x.flatten(0, 1)[:, None] for x in (query, key, value))
        start = start.flatten(0, 1)[:, None]
    # A key belongs to the last cut up to its position that is some query's last cut; other cuts separate nothing.
    of_query = start[:, 0]
    of_key = of_query.new_zeros(of_query.shape[0], spec.key_len).scatter(-1, of_query, of_query).cummax(-1).values
    if spec.query_segments is not None and spec.key_segments is not None:
        numbers = torch.cat([spec.query_segments, spec.key_segments], -1).long().unique(return_inverse=True)[1]
        given = numbers.split([spec.query_len, spec.key_len], -1)
        of_query, of_key = (x * spec.key_len + y for x, y in zip(given, (of_query, of_key), strict=True))
    return dataclasses.replace(spec, query_start=None, query_segments=of_query, key_segments=of_key), query, key, value


def _heads_as_sequences(spec: Spec) -> Spec:
    """The call with [B·H, 1, …] in place of [B, H, …]; its query_start does not change."""
    heads = spec.batch, spec.num_heads

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.flatten(0, 1)[:, None]

    def repeated(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(spec.num_heads, 0)

    seed = spec.dropout_seed
    if seed is not None:
        rows = seed.repeat_interleave(spec.batch // len(seed), 0).repeat_interleave(spec.num_heads, 0)
        at = torch.arange(len(rows), device=rows.device)
        sequence, head = at // spec.num_heads % (spec.batch // len(seed)), at % spec.num_heads
        seed = rows + torch.stack([0 * at, sequence, head, 0 * at], -1)
    return dataclasses.replace(
        spec, batch=spec.batch * spec.num_heads, num_heads=1, num_kv_heads=1, slopes=spec.slopes.expand(heads).reshape(-1, 1),
        key_mask=repeated(spec.key_mask), query_segments=repeated(spec.query_segments),
        key_segments=repeated(spec.key_segments), key_bias=flat(spec.key_bias), query_bias=flat(spec.query_bias),
        dropout_seed=seed,
    )  # fmt: skip
