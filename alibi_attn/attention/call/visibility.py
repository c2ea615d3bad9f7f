"""Which query may see which key, as dense [T, S] masks; and the handling of queries that see no key.

The dense masks are for the backends `reference` and `dense`, and for `alibi_bias`. See `spec.py` for the shapes.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import MAX_POSITION, AttentionSpec
from alibi_attn.attention.call.transforms import surely

Spec = AttentionSpec[Tensor]


def distances(query_len: int, key_len: int, query_offset: int | Tensor, device: torch.device | None) -> Tensor:
    """i − j, int64: [1, T, S], or [B, T, S] if every sequence has its own offset. Positive = the key is to the left."""
    i = torch.arange(query_len, device=device)
    i = i + (query_offset.reshape(-1, 1) if isinstance(query_offset, Tensor) else query_offset)
    return i.reshape(-1, query_len, 1) - torch.arange(key_len, device=device)


def first_positions(spec: Spec, device: torch.device) -> Tensor:
    """[B], or [1] if all sequences agree, int64: the position of query 0."""
    if isinstance(spec.query_offset, Tensor):
        return spec.query_offset.reshape(-1)
    return torch.full((1,), spec.query_offset, device=device)


def plain_offset(first: Tensor) -> int | Tensor:
    """First positions as a spec holds them: a single number becomes an int."""
    return int(first) if first.numel() == 1 else first


def with_plain_offset(spec: Spec) -> Spec:
    """The spec with an offset tensor that holds one number as an int; reads it on the host."""
    if not isinstance(spec.query_offset, Tensor):
        return spec
    return dataclasses.replace(spec, query_offset=plain_offset(spec.query_offset.reshape(-1)))


def largest_distance(spec: Spec, device: torch.device) -> Tensor:
    """[B] int64: 1 + the largest |i − j| that causality and the window allow; 0 if no key is allowed."""
    first = first_positions(spec, device).expand(spec.batch)
    if spec.query_len == 0 or spec.key_len == 0:
        return torch.zeros_like(first)
    most = first + spec.query_len  # of the last query and key 0
    if not spec.causal:
        most = torch.maximum(most, spec.key_len - first)
    if spec.prefix_len is not None:
        most = torch.maximum(most, spec.prefix_len - first)
    windows = [x for x in (spec.window, spec.right_window) if x is not None]
    return most.clamp(min=0, max=max(windows) if windows and spec.window is not None and spec.sinks == 0 else None)


def largest_distances(spec: Spec, device: torch.device) -> Tensor:
    """[B, H] int64: `largest_distance` of each head."""
    windows = spec.head_windows or (spec.window,)
    of_windows = [
        largest_distance(dataclasses.replace(spec, window=window, head_windows=None), device) for window in windows
    ]
    return torch.stack(of_windows, 1).expand(-1, spec.num_heads)


def visible(spec: Spec, distance: Tensor) -> Tensor:
    """[B|1, H|1, T, S] bool: True if the query may see the key. `distance` comes from `distances`."""
    seen = distance >= 0 if spec.causal else torch.ones_like(distance, dtype=torch.bool)

    def keys() -> Tensor:
        return torch.arange(spec.key_len, device=distance.device)

    if spec.prefix_len is not None:
        seen = seen | (keys() < spec.prefix_len[:, None])[:, None]
    if spec.window is not None or spec.right_window is not None:
        most = (x for x in (spec.window, spec.window if spec.right_window is None else spec.right_window))
        left, right = (MAX_POSITION if x is None else x for x in most)
        seen = seen & (((distance < left) & (distance > -right)) | (keys() < spec.sinks))
    if spec.query_segments is not None and spec.key_segments is not None:
        seen = seen & (spec.query_segments[:, :, None] == spec.key_segments[:, None, :])
    if spec.key_mask is not None:
        seen = seen & spec.key_mask[:, None, :]
    seen = seen[:, None]
    if spec.head_windows is not None:
        is_sink = keys() < spec.sinks
        within = [(distance.abs() < window) | is_sink for window in spec.head_windows]
        seen = seen & torch.stack(within, 1)
    if spec.right_slopes is not None:
        never_right = torch.isinf(spec.right_slopes).reshape(-1, spec.num_heads, 1, 1)
        if spec.by_position and spec.positions is not None and spec.query_positions is not None:
            distance = spec.query_positions[:, :, None] - spec.positions[:, None]
        seen = seen & ~(never_right & (distance < 0)[:, None])
    if spec.key_bias is not None:
        seen = seen & (spec.key_bias.detach() > -torch.inf)[:, :, None]
    if spec.query_start is not None:
        seen = seen & (keys() >= spec.query_start[..., None])
    return seen


def keys_within_sight(spec: Spec, device: torch.device) -> Tensor:
    """[B, 1 or K, S] bool: False only if positions, biases, mask and segments show that no query sees the key."""
    first = first_positions(spec, device).expand(spec.batch)[:, None]
    at = torch.arange(spec.key_len, device=device)[None]
    within = torch.ones(spec.batch, spec.key_len, dtype=torch.bool, device=device)
    if spec.causal:
        within &= at < first + spec.query_len
    if spec.window is not None:
        within &= (at > first - spec.window) & (at < first + spec.query_len - 1 + spec.window)
    if spec.query_segments is not None and spec.key_segments is not None:
        pairs = zip(spec.key_segments, spec.query_segments, strict=True)
        within &= torch.stack([torch.isin(of_keys, of_queries) for of_keys, of_queries in pairs])
    shown = shown_keys(spec)
    if shown is None:
        return within[:, None]
    return within[:, None] & (shown if spec.key_bias is None else shown.unflatten(1, (-1, spec.group)).any(2))


def shown_keys(spec: Spec) -> Tensor | None:
    """[B, H or 1, S] bool: the keys that the key mask and biases of −inf leave visible; None = all of them."""
    shown = None if spec.key_mask is None else spec.key_mask[:, None]
    if spec.key_bias is None:
        return shown
    biased = spec.key_bias.detach() != -math.inf
    return biased if shown is None else biased & shown


def may_see_nothing(spec: Spec) -> bool:
    """False only if every query is certain to see its own key; decided without reading a tensor."""
    if spec.hides_keys or spec.key_bias is not None or isinstance(spec.query_offset, Tensor):
        return True
    if spec.by_position and spec.right_slopes is not None:  # a right slope of inf may hide the key
        return True
    return not (surely(spec.query_offset >= 0) and surely(spec.query_offset + spec.query_len <= spec.key_len))


def per_query_head(spec: Spec, tensor: Tensor) -> Tensor:
    """[B, K, …] -> [B, H, …]: for every query head the key head that it reads."""
    if spec.group == 1:
        return tensor
    if torch.compiler.is_exporting():
        # Before torch 2.13, merging two axes of symbolic strides restricts the lengths of the exported program.
        return tensor.index_select(1, torch.arange(spec.num_heads, device=tensor.device) // spec.group)
    return tensor.repeat_interleave(spec.group, dim=1)


def rows_that_see(spec: Spec, keys: Tensor, *, rows: int = 256) -> Tensor:
    """[B, H, T] bool: the queries that may see any of these keys [B, H, S]; `rows` queries at a time, so memory is linear."""
    parts = (visible(part, distance) & keys[:, :, None] for part, distance in few_queries(spec, rows, keys.device))
    return torch.cat([seen.any(-1) for seen in parts], dim=-1)


def visible_count(spec: Spec, *, rows: int = 256) -> Tensor:
    """[B] int64: the query-key pairs of all heads that positions, windows, mask and segments allow; linear memory."""
    plain = dataclasses.replace(spec, right_slopes=None, key_bias=None)
    total = torch.zeros(spec.batch, dtype=torch.int64, device=spec.slopes.device)
    for part, distance in few_queries(plain, rows, spec.slopes.device):
        total += visible(part, distance).sum((2, 3)).expand(-1, spec.num_heads).sum(1)
    return total


def few_queries(spec: Spec, rows: int, device: torch.device) -> Iterator[tuple[Spec, Tensor]]:
    """The call in parts of at most `rows` queries, without their biases, and the distances of each part."""
    for start in range(0, spec.query_len, rows):
        count = min(rows, spec.query_len - start)
        part = dataclasses.replace(spec.on_queries(start, start + count), query_bias=None)
        yield part, distances(count, spec.key_len, part.query_offset, device)


def chosen_queries(spec: Spec, at: Tensor) -> tuple[Spec, Tensor]:
    """(the call of the queries at these indices [R] only, their distances to the keys [B|1, R, S]).

    The part has no query_offset of its own: its positions are in the distances.
    """
    part = dataclasses.replace(spec, query_len=len(at), **spec.along("T", lambda x, axis: x.index_select(axis, at)))
    position = first_positions(spec, at.device)[:, None] + at
    return part, position[..., None] - torch.arange(spec.key_len, device=at.device)
