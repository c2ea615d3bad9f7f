"""The definition, densely: −m·|i − j|, and −inf where a query may not look (Press et al. 2022, sec. 3, arXiv:2108.12409)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alibi_attn.attention.spec import AttentionSpec, check_query_offset, check_slopes
from alibi_attn.attention.transforms import transforms
from alibi_attn.attention.visibility import distances, visible

Slopes = Sequence[float] | NDArray[np.floating] | Tensor

FAR_MORE = 1000.0  # nats: a weight of e^−1000 is none


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
    """The bias that is added to the scaled scores, [H, T, S]; −inf where the query may not look.

        bias[h, i, j] = −slopes[h]·|i − j|      for j ≤ i
                        −right_slopes[h]·|i − j| for j > i, or −inf if causal

    It is computed in fp32 (fp64 for fp64) from integer distances and rounded once, at the end. It is not multiplied by
    the softmax scale. `alibi_attention` never builds it: this is for looking, and for other people's attention.

    Args:
        slopes: [H], for example `alibi_slopes(H)`.
        query_len, key_len: T and S; S = T by default. The queries are the last T of the S positions.
        right_slopes: [H], slopes of keys to the right (default: the same); inf = never looks right.
        query_offset: the position of query 0 where it is not S − T; an int or a 0-d integer tensor.
        dtype: default float32.

    Raises:
        ValueError, TypeError: lengths below 1, slopes that are not [H], right slopes with causal=True.

    >>> alibi_bias([0.5], 3)
    tensor([[[ 0.0000,    -inf,    -inf],
             [-0.5000,  0.0000,    -inf],
             [-1.0000, -0.5000,  0.0000]]])

    Source: Press et al. 2022, sec. 3, figure 3 (arXiv:2108.12409).
    """
    key_len = query_len if key_len is None else key_len
    for name, length in (("query_len", query_len), ("key_len", key_len)):
        if isinstance(length, bool) or not isinstance(length, int | np.integer | torch.SymInt):
            raise TypeError(f"{name} must be an integer, a number of positions, but is {type(length).__name__}")
        if length < 1:
            raise ValueError(f"{name} is {length} but must be at least 1")
    if right_slopes is not None and causal:
        raise ValueError("right_slopes is for keys to the right, which causal attention never sees; pass causal=False")
    dtype = torch.float32 if dtype is None else dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    left = torch.as_tensor(slopes, device=device).to(work)
    if left.ndim != 1 or left.numel() == 0:
        raise ValueError(
            f"slopes has shape {list(left.shape)} but must be [H], one slope a head, as alibi_slopes(H) is"
        )
    right = None if right_slopes is None else torch.as_tensor(right_slopes, device=left.device).to(work)
    if right is not None:
        check_slopes("right_slopes", right.shape, batch=-1, num_heads=left.numel())
    if isinstance(query_offset, Tensor):
        check_query_offset(query_offset, batch=-1)
    spec = AttentionSpec(
        batch=1, num_heads=left.numel(), num_kv_heads=1, query_len=query_len, key_len=key_len, head_dim=1,
        slopes=left, right_slopes=right, causal=causal, scale=1.0, tolerance=0.0,
        query_offset=key_len - query_len if query_offset is None else query_offset,
    )  # fmt: skip
    distance = distances(query_len, key_len, spec.query_offset, left.device)
    # Adding 0 turns −0 into 0, for whoever prints it.
    return (score_bias(spec, distance, visible(spec, distance))[0] + 0.0).to(dtype)


def score_bias(spec: AttentionSpec[Tensor], distance: Tensor, seen: Tensor) -> Tensor:
    """[B|1, H, T, S] in the slopes' dtype: −m·|i − j|, and −inf where not `seen`; differentiable in the slopes.

    With a table its numbers instead, differentiable in them. With a key bias also b_j − r_i, differentiable in b; `unshifted_lse`
    puts back what the lse of such scores lacks.
    """
    bias = _of_slopes(spec, distance) if spec.table is None else _of_distances(spec, spec.table)
    if spec.key_bias is not None:
        bias = bias + _relative_key_bias(spec, spec.key_bias).to(bias.dtype)
    # In place where it fits: the bias is the largest tensor of a short call, and every copy of it is felt. Shapes do not show an
    # axis of vmap.
    fits = "Vmap" not in transforms() and all(seen.shape[axis] in (1, size) for axis, size in enumerate(bias.shape))
    return bias.masked_fill_(~seen, float("-inf")) if fits else bias.masked_fill(~seen, float("-inf"))


def unshifted_lse(spec: AttentionSpec[Tensor], lse: Tensor) -> Tensor:
    """The lse [B, H, T] of scores with the bias of `score_bias`, with what that left out; fp64 where one of them is."""
    if spec.key_bias is None:
        return lse
    shift = bias_that_matters(spec, spec.key_bias)
    if spec.query_bias is not None:
        shift = shift + spec.query_bias.detach()
    return lse.to(torch.promote_types(lse.dtype, shift.dtype)) + shift


def bias_that_matters(spec: AttentionSpec[Tensor], key_bias: Tensor) -> Tensor:
    """r [B, H, T], from which biases count: the b of the last key up to the query that may be seen, else of the first after it.

    That of a key farther away where it counts so much more that the near one has no weight, which may be padding, with −10⁹
    (looked for where neither a window nor segments may hide it). 0 where none is finite.
    """
    b = key_bias.detach()
    if spec.key_mask is not None:
        b = b.masked_fill(~spec.key_mask[:, None], -math.inf)
    at = torch.arange(spec.key_len, device=b.device)
    finite = b > -math.inf
    before = torch.where(finite, at, -1).cummax(-1).values
    after = torch.where(finite, at, spec.key_len).flip(-1).cummin(-1).values.flip(-1)
    nearest = torch.where(before >= 0, before, after % spec.key_len)
    first = spec.query_offset.reshape(-1, 1) if isinstance(spec.query_offset, Tensor) else spec.query_offset
    position = (torch.arange(spec.query_len, device=b.device) + first).reshape(-1, 1, spec.query_len)
    key = position.clamp(0, spec.key_len - 1).expand(*b.shape[:2], -1)
    found = b.gather(-1, nearest.gather(-1, key))
    if spec.window is None and spec.key_segments is None:
        slopes = spec.slopes.detach().reshape(-1, spec.num_heads, 1).to(b.dtype)
        right = (
            slopes
            if spec.right_slopes is None
            else spec.right_slopes.detach().reshape(-1, spec.num_heads, 1).to(b.dtype)
        )
        enough = found + FAR_MORE
        for flip, m in (
            ((False, slopes),) if spec.causal else ((False, slopes), (True, right.masked_fill(right.isinf(), 0.0)))
        ):
            nats = b + (-m if flip else m) * at
            most, where = (nats.flip(-1) if flip else nats).cummax(-1)
            if flip:
                most, where = most.flip(-1), spec.key_len - 1 - where.flip(-1)
            counts = most.gather(-1, key) - (-m if flip else m) * position
            found = torch.where(counts > enough, b.gather(-1, where.gather(-1, key)), found)
            enough = torch.maximum(enough, counts)
    return found.masked_fill(found == -math.inf, 0.0)


def _of_slopes(spec: AttentionSpec[Tensor], distance: Tensor) -> Tensor:
    """[B|1, H, T, S], a tensor of its own: −m·|i − j|."""
    left = spec.slopes.reshape(-1, spec.num_heads, 1, 1)
    away = distance.abs().to(left.dtype)[:, None]
    bias = -left * away
    if spec.right_slopes is None:
        return bias
    right = spec.right_slopes.reshape(-1, spec.num_heads, 1, 1)
    # An infinite slope forbids (see `visible`); as a factor it would make 0·inf, and a NaN gradient.
    right = right.masked_fill(right.isinf(), 0.0)
    return torch.where((distance < 0)[:, None], -right * away, bias)


def columns_of(spec: AttentionSpec[Tensor], table: Tensor, first: int, count: int) -> Tensor:
    """[count] int64: the table's columns for the distances `first`, `first` + 1, …, and the nearest one for those it has not."""
    at = torch.arange(first - spec.table_first, first - spec.table_first + count, device=table.device)
    return at.clamp(0, table.shape[1] - 1)


def _of_distances(spec: AttentionSpec[Tensor], table: Tensor) -> Tensor:
    """[1, H, T, S], a tensor of its own: the table's number for every query and key."""
    assert not isinstance(spec.query_offset, Tensor)
    first, lengths = spec.query_offset - spec.key_len + 1, spec.query_len + spec.key_len - 1
    by_distance = table.index_select(1, columns_of(spec, table, first, lengths))
    return by_distance.flip(1).unfold(1, spec.key_len, 1).flip(1)[None]


def _relative_key_bias(spec: AttentionSpec[Tensor], key_bias: Tensor) -> Tensor:
    """[B, H, T, S] in fp64 where the device has it: b_j − r_i, so that no digit is lost however large b is.

    The gradients of b and of the query's bias are sums of the very same numbers then, over queries and over keys.
    """
    wide = key_bias if key_bias.device.type == "mps" else key_bias.double()
    relative = wide[:, :, None] - bias_that_matters(spec, key_bias)[..., None].to(wide.dtype)
    if spec.query_bias is None:
        return relative
    own = spec.query_bias.to(wide.dtype)
    return relative + (own - own.detach())[..., None]
