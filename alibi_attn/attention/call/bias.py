"""The bias as a dense tensor: −m·|i − j|, and −inf for hidden keys (Press et al. 2022, sec. 3, arXiv:2108.12409)."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alibi_attn.attention.call.checks import check_position, check_query_offset, check_slopes
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import is_traced, may_read, transforms
from alibi_attn.attention.call.visibility import distances, few_queries, visible

Slopes = Sequence[float] | NDArray[np.floating] | Tensor

# Nats per token: with a steeper slope, the scores would lose digits if the key next to the query is hidden.
EXTREME_SLOPE = 64.0
WITHOUT_FP64 = frozenset({"mps"})  # torch's devices that do not have fp64
CHUNK = 128  # queries whose visible keys are materialized at a time


def alibi_bias(
    slopes: Slopes,
    query_len: int,
    key_len: int | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    query_offset: int | Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The bias that is added to the scaled scores, [H, T, S]; −inf for hidden keys.

        bias[h, i, j] = −slopes[h]·|i − j|      for j ≤ i
                        −right_slopes[h]·|i − j| for j > i, or −inf if causal

    It is computed in fp32 (fp64 for fp64) from integer distances and rounded once, at the end. It is not multiplied by
    the softmax scale. `alibi_attention` never builds it: this function is for inspection, and for other attention functions.

    Args:
        slopes: [H], for example `alibi_slopes(H)`.
        query_len, key_len: T and S; S = T by default. The queries are the last T of the S positions.
        right_slopes: [H], slopes of keys to the right (default: the same); inf = the head never attends to the right.
        query_offset: the position of query 0, if it is not S − T; an int or a 0-d integer tensor.
        dtype: default float32.

    Raises:
        ValueError, TypeError: lengths below 1, slopes that are not [H], or right_slopes with causal=True.

    >>> alibi_bias([0.5], 3)
    tensor([[[ 0.0000,    -inf,    -inf],
             [-0.5000,  0.0000,    -inf],
             [-1.0000, -0.5000,  0.0000]]])

    Source: Press et al. 2022, sec. 3, figure 3 (arXiv:2108.12409).
    """
    if isinstance(slopes, int):
        raise TypeError(
            f"slopes is the number {slopes} but must be [H], one slope per head: alibi_bias(alibi_slopes({slopes}), "
            f"{query_len}); pass dtype and device by name"
        )
    key_len = query_len if key_len is None else key_len
    for name, length in (("query_len", query_len), ("key_len", key_len)):
        if isinstance(length, bool) or not isinstance(length, int | np.integer | torch.SymInt):
            raise TypeError(f"{name} must be an integer, a number of positions, but is {type(length).__name__}")
        if length < 1:
            raise ValueError(f"{name} is {length} but must be at least 1")
        if not is_traced():
            check_position(name, int(length))
    if right_slopes is not None and causal:
        raise ValueError("right_slopes is for keys to the right, which causal attention never sees; pass causal=False")
    dtype = torch.float32 if dtype is None else dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    left = torch.as_tensor(slopes, device=device).to(work)
    if left.ndim != 1 or left.numel() == 0:
        raise ValueError(
            f"slopes has shape {list(left.shape)} but must be [H], one slope per head, such as alibi_slopes(H)"
        )
    right = None if right_slopes is None else torch.as_tensor(right_slopes, device=left.device).to(work)
    if right is not None:
        check_slopes("right_slopes", right.shape, batch=-1, num_heads=left.numel())
    if isinstance(query_offset, Tensor):
        check_query_offset(query_offset, batch=-1)
    elif query_offset is not None and not is_traced():
        check_position("query_offset", query_offset)
    spec = AttentionSpec(
        batch=1,
        num_heads=left.numel(),
        num_kv_heads=1,
        query_len=query_len,
        key_len=key_len,
        head_dim=1,
        slopes=left,
        right_slopes=right,
        causal=causal,
        scale=1.0,
        tolerance=0.0,
        query_offset=key_len - query_len if query_offset is None else query_offset,
    )
    distance = distances(query_len, key_len, spec.query_offset, left.device)
    # Adding 0 turns −0 into 0, which prints better.
    bias = _of_slopes(spec, distance, work).masked_fill(~visible(spec, distance), -math.inf)
    return (bias[0] + 0.0).to(dtype)


def score_bias(spec: AttentionSpec[Tensor], distance: Tensor, seen: Tensor) -> tuple[Tensor, Tensor | None]:
    """(bias, origin): the bias added to the scores, [B|1, H, T, S] in the slopes' dtype, and the shift for `unshifted_lse`.

    The bias is −m·|i − j| (or the table's number) + b_j, and −inf where not `seen`; differentiable in all of them. With
    a key bias or an extreme slope, each query's biases are relative to the bias of its best visible key, which is
    origin [B, H, T]: only the difference is rounded, however large both are. Otherwise origin is None.
    """
    origin = None
    if spec.key_bias is not None or spec.positions is not None or _has_extreme_slopes(spec):
        bias, origin = _from_best_key(spec, distance, seen)
    else:
        bias = _bias_of_distance(spec, distance, spec.slopes.dtype)
    # In place if shapes allow: the bias is the largest tensor of a short call, and copying it is expensive. Shapes do not show a
    # vmapped axis.
    fits = "Vmap" not in transforms() and all(
        n == 1 or n == size for n, size in zip(seen.shape, bias.shape, strict=True)
    )
    bias = bias.masked_fill_(~seen, float("-inf")) if fits else bias.masked_fill(~seen, float("-inf"))
    return bias, origin


def unshifted_lse(spec: AttentionSpec[Tensor], lse: Tensor, origin: Tensor | None) -> Tensor:
    """The lse [B, H, T] of the actual scores, from the lse with the bias of `score_bias`, in the same dtype."""
    if origin is None:
        return lse
    if spec.query_bias is not None:
        origin = origin + spec.query_bias.detach()
    dtype = lse.dtype if spec.key_bias is None else torch.promote_types(lse.dtype, spec.key_bias.dtype)
    largest = torch.finfo(dtype).max
    whole = lse.to(origin.dtype) + origin
    # Clamp numbers that overflow the dtype, because −inf means that a query sees no key.
    return whole.clamp(-largest, largest).to(dtype).masked_fill(whole == -math.inf, -math.inf)


def bias_that_matters(spec: AttentionSpec[Tensor], key_bias: Tensor) -> Tensor:
    """[B, H, T]: the bias of each query's visible key with the largest b_j − m·|i − j|; 0 if a query sees no key.

    Without a window and segments it comes from running maxima; otherwise the scores are materialized for a few queries at a time.
    """
    b = key_bias.detach().to(widest(key_bias))
    if spec.key_mask is not None:
        b = b.masked_fill(~spec.key_mask[:, None], -math.inf)
    if spec.key_len == 0 or spec.query_len == 0:
        return b.new_zeros((*b.shape[:2], spec.query_len))
    if spec.window is not None or spec.key_segments is not None:
        parts = []
        for part, distance in few_queries(spec, CHUNK, b.device):
            nats = b[:, :, None] + _of_slopes(part, distance, b.dtype).detach()
            parts.append(nats.masked_fill(~visible(part, distance), -math.inf).argmax(-1))
        best = torch.cat(parts, -1)
    else:
        best = _best_of_all_keys(spec, b)
    reference = b.gather(-1, best)
    return reference.masked_fill(reference == -math.inf, 0.0)


def _best_of_all_keys(spec: AttentionSpec[Tensor], b: Tensor) -> Tensor:
    """[B, H, T]: the keys of `bias_that_matters` if only causality and −inf in b [B, H, S] hide keys."""
    at = torch.arange(spec.key_len, device=b.device)
    first = spec.query_offset.reshape(-1, 1) if isinstance(spec.query_offset, Tensor) else spec.query_offset
    position = (torch.arange(spec.query_len, device=b.device) + first).reshape(-1, 1, spec.query_len)
    near = position.clamp(0, spec.key_len - 1).expand(*b.shape[:2], -1)
    left, right = (x.detach().reshape(-1, spec.num_heads, 1).to(b.dtype) for x in _two_slopes(spec))
    sees_right = (position < spec.key_len) & (right < math.inf)
    right = right.masked_fill(right.isinf(), 0.0)
    most, where = (b + left * at).cummax(-1)
    nats, best = most.gather(-1, near) - left * position, where.gather(-1, near)
    nats = nats.masked_fill(position < 0, -math.inf)
    if spec.causal:
        return best
    most, where = (b - right * at).flip(-1).cummax(-1)
    to_right = most.flip(-1).gather(-1, near) + right * position
    is_better = sees_right & (to_right > nats)
    return torch.where(is_better, spec.key_len - 1 - where.flip(-1).gather(-1, near), best)


def _two_slopes(spec: AttentionSpec[Tensor]) -> tuple[Tensor, Tensor]:
    return spec.slopes, spec.slopes if spec.right_slopes is None else spec.right_slopes


def _has_extreme_slopes(spec: AttentionSpec[Tensor]) -> bool:
    """Whether some slope is extreme; False if the slopes cannot be read for free."""
    if spec.table is not None or not may_read(*_two_slopes(spec)):
        return False
    return any(bool((x.abs().masked_fill(x.isinf(), 0.0) > EXTREME_SLOPE).any()) for x in {*_two_slopes(spec)})


def _from_best_key(spec: AttentionSpec[Tensor], distance: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(bias [B, H, T, S], origin [B, H, T]) of `score_bias`, unmasked; computed in fp64 if the device has it.

    The gradients of b and of the query's bias are then sums of the same numbers, over queries and over keys.
    """
    wide = widest(spec.slopes)
    taken = -_bias_of_distance(spec, distance, wide)
    if spec.key_bias is None:
        own = torch.zeros((), dtype=wide, device=taken.device)
    else:
        own = spec.key_bias.to(wide).masked_fill(spec.key_bias == -math.inf, 0.0)[:, :, None]
    own, taken = (x.expand(spec.batch, spec.num_heads, spec.query_len, spec.key_len) for x in (own, taken))
    best = (own - taken).detach().masked_fill(~seen, -math.inf).argmax(-1, keepdim=True)
    of_best, taken_from_best = (x.detach().gather(-1, best) for x in (own, taken))
    relative = (own - of_best) - (taken - taken_from_best)
    # Next to a large bias the distance may have been rounded away, so another key may be better after all.
    better = relative.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    better = better.masked_fill(better == -math.inf, 0.0)
    relative = relative - better
    if spec.query_bias is not None:
        query_bias = spec.query_bias.to(wide)
        relative = relative + (query_bias - query_bias.detach())[..., None]
    return relative.to(spec.slopes.dtype), ((of_best - taken_from_best) + better).squeeze(-1)


def widest(x: Tensor) -> torch.dtype:
    """fp64 if the tensor's device has it, else the tensor's dtype."""
    return x.dtype if x.device.type in WITHOUT_FP64 else torch.float64


def _bias_of_distance(spec: AttentionSpec[Tensor], distance: Tensor, dtype: torch.dtype) -> Tensor:
    """[B|1, H, T, S], a new tensor: −m·|i − j|, or the table's numbers."""
    return _of_slopes(spec, distance, dtype) if spec.table is None else _of_distances(spec, spec.table).to(dtype)


def _of_slopes(spec: AttentionSpec[Tensor], distance: Tensor, dtype: torch.dtype) -> Tensor:
    """[B|1, H, T, S], a new tensor: −m·|i − j|."""
    left, by_index = spec.slopes.to(dtype).reshape(-1, spec.num_heads, 1, 1), distance
    if spec.positions is not None and spec.query_positions is not None:
        wide = widest(spec.positions)
        distance = spec.query_positions.to(wide)[:, :, None] - spec.positions.to(wide)[:, None]
    away = _in_space(spec, spec.coordinates).to(dtype) if spec.coordinates is not None else distance.abs().to(dtype)
    if spec.registers > 0:
        keys = torch.arange(spec.key_len, device=away.device)
        is_register = (by_index[..., :1] < spec.registers) | (keys < spec.registers)
        away = away.masked_fill(is_register, 0.0)
    away = away[:, None]
    bias = -left * away
    if spec.right_slopes is None:
        return bias
    right = spec.right_slopes.to(dtype).reshape(-1, spec.num_heads, 1, 1)
    # An infinite slope forbids (see `visible`); as a factor it would make 0·inf, and a NaN gradient.
    right = right.masked_fill(right.isinf(), 0.0)
    return torch.where((distance < 0)[:, None], -right * away, bias)


def _in_space(spec: AttentionSpec[Tensor], coordinates: Tensor) -> Tensor:
    """[B, T, S]: ‖p_i − p_j‖, in fp64 if the device has it."""
    assert spec.query_coordinates is not None
    wide = widest(coordinates)
    axes = zip(spec.query_coordinates.to(wide).unbind(-1), coordinates.to(wide).unbind(-1), strict=True)
    squares = [(of_query[:, :, None] - of_key[:, None]).square() for of_query, of_key in axes]
    return functools.reduce(torch.add, squares).sqrt_()


def columns_of(spec: AttentionSpec[Tensor], table: Tensor, first: int, count: int) -> Tensor:
    """[count] int64: the table's columns for the distances `first`, `first` + 1, …; the nearest column for missing ones."""
    at = torch.arange(first - spec.table_first, first - spec.table_first + count, device=table.device)
    return at.clamp(0, table.shape[1] - 1)


def _of_distances(spec: AttentionSpec[Tensor], table: Tensor) -> Tensor:
    """[1, H, T, S], a new tensor: the table's number for every query and key."""
    assert not isinstance(spec.query_offset, Tensor)
    first, lengths = spec.query_offset - spec.key_len + 1, spec.query_len + spec.key_len - 1
    by_distance = table.index_select(1, columns_of(spec, table, first, lengths))
    return by_distance.flip(1).unfold(1, spec.key_len, 1).flip(1)[None]
