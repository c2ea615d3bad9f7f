"""Cuts, gates of −inf, for backends that do not read `query_start`: as segments, or as large steps of the biases of keys.

Sums of gates leave cuts out, so that they keep the digits of all other gates. Segments between cuts hide the keys before a cut
exactly. If cuts differ between heads, each head becomes a sequence of the batch. Steps of 2²⁰ need no reading on the host and
let a certificate skip the keys before a cut, but scores, biases or slopes of that size pass them, and results lose precision.
"""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AXES, GATE_FLOOR, AttentionSpec
from alibi_attn.attention.call.visibility import per_query_head

Spec = AttentionSpec[Tensor]


def with_segments(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Spec, Tensor, Tensor, Tensor]:
    """The same call, with cuts as segments; its results are [B, H, …] or, with heads as sequences, [B·H, 1, …]."""
    start = spec.query_start
    assert start is not None
    if not bool(start.any()):
        return dataclasses.replace(spec, query_start=None), query, key, value
    if bool((start != start[:, :1]).any()):
        key, value = per_query_head(spec, key), per_query_head(spec, value)
        spec = _heads_as_sequences(spec)
        query, key, value = (x.flatten(0, 1)[:, None] for x in (query, key, value))
        start = start.flatten(0, 1)[:, None]
    of_query = start[:, 0]
    of_key = _last_cuts(of_query, spec.key_len)
    if spec.query_segments is not None and spec.key_segments is not None:
        numbers = torch.cat([spec.query_segments, spec.key_segments], -1).long().unique(return_inverse=True)[1]
        given = numbers.split([spec.query_len, spec.key_len], -1)
        of_query, of_key = (x * spec.key_len + y for x, y in zip(given, (of_query, of_key), strict=True))
    return dataclasses.replace(spec, query_start=None, query_segments=of_query, key_segments=of_key), query, key, value


def with_steps(spec: Spec) -> Spec:
    """The same call, with biases that rise by 2²⁰ at each cut; reads no tensor on the host."""
    if spec.query_start is None:
        return spec
    assert spec.key_bias is not None
    assert spec.query_bias is not None
    last = _last_cuts(spec.query_start, spec.key_len)
    rises = torch.nn.functional.pad(last[..., 1:] != last[..., :-1], (1, 0))
    steps = rises.cumsum(-1) * -int(GATE_FLOOR)
    of_query = steps.gather(-1, spec.query_start)
    return dataclasses.replace(spec, key_bias=spec.key_bias + steps, query_bias=spec.query_bias - of_query)


def _last_cuts(start: Tensor, key_len: int) -> Tensor:
    """[..., S] from `query_start` [..., T]: each key's last cut, among those that are the last cut of a query."""
    return start.new_zeros(*start.shape[:-1], key_len).scatter(-1, start, start).cummax(-1).values


def _heads_as_sequences(spec: Spec) -> Spec:
    """The call with [B·H, 1, …] in place of [B, H, …]."""
    arrays = spec.along("B", lambda x, _: x) | {"slopes": spec.slopes.expand(spec.batch, -1)}
    arrays = {
        name: x.flatten(0, 1)[:, None] if "H" in AXES[name] else x.repeat_interleave(spec.num_heads, 0)
        for name, x in arrays.items()
    }
    seed = spec.dropout_seed
    if seed is not None:
        rows = seed.repeat_interleave(spec.batch // len(seed), 0).repeat_interleave(spec.num_heads, 0)
        at = torch.arange(len(rows), device=rows.device)
        sequence, head = at // spec.num_heads % (spec.batch // len(seed)), at % spec.num_heads
        seed = rows + torch.stack([0 * at, sequence, head, 0 * at], -1)
    arrays |= {"batch": spec.batch * spec.num_heads, "num_heads": 1, "num_kv_heads": 1, "dropout_seed": seed}
    return dataclasses.replace(spec, **arrays)
