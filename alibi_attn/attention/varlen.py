"""`alibi_attention_varlen`: sequences of different lengths, packed consecutively into one row, without padding.

It is `alibi_attention` of one row whose segments are the sequences. Backends that skip keys stop at the border of a segment, so
a packed row costs as much as its sequences, but only the overhead of one call.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.call.bias import Slopes
from alibi_attn.attention.call.checks import check_positions, dtype_name
from alibi_attn.attention.call.dropout import drawn_seed
from alibi_attn.attention.call.hints import check_known, shows
from alibi_attn.attention.call.options import VarlenOptions
from alibi_attn.attention.call.reads import DROPOUT, Reads
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import autocast, is_traced, may_read
from alibi_attn.attention.call.validation import check_tensor, make_spec
from alibi_attn.attention.run import dispatch
from alibi_attn.attention.run.execution import attend

_READS = Reads(
    "alibi_attention_varlen",
    DROPOUT
    | {"causal", "right_slopes", "window", "query_segments", "key_segments", "positions", "query_positions"}
    | {"key_bias", "sink_logits", "return_lse"},
)
# Scores of all heads of a packed row: up to this many, computing the whole row is faster than one call per sequence.
FEW_SCORES = 2**19
_OPTIONS = VarlenOptions.__optional_keys__


@overload
def alibi_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    **options: Unpack[VarlenOptions[Tensor]],
) -> Tensor: ...


@overload
def alibi_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: Literal[True],
    backend: str = ...,
    **options: Unpack[VarlenOptions[Tensor]],
) -> tuple[Tensor, Tensor]: ...


@overload
def alibi_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: bool = ...,
    backend: str = ...,
    **options: Unpack[VarlenOptions[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]: ...


@shows(VarlenOptions[Tensor])
def alibi_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    slopes: Slopes | None = None,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[VarlenOptions[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each packed sequence, softmax(scale·q·kᵀ − m·|i − j| + b_j)·v, [N, H, D] in query's dtype.

    Exact up to rounding. Differentiable once in query, key, value, slopes and key_bias, and through lse. The packed row is read
    in place, without a copy.

    Args:
        query: [N, H, D], the N tokens of all sequences, one sequence after the other.
        key, value: [N, K, D], K divides H; [N_k, K, D] with cu_seqlens_k.
        cu_seqlens: int32 or int64 [B + 1], the start of each sequence and then N, as in flash-attn. A sequence may be empty. The
            values are checked on a CPU. On other devices they are never read on the host: wrong values give wrong segments.
        cu_seqlens_k: the same for keys, if sequences have other numbers of queries and keys, T and S, aligned at the end:
            query t is at position S − T + t. Its values are read on the host, also on a GPU, and sequences are separate calls;
            not in compiled code, and without positions.
        slopes, right_slopes: [H], shared by all sequences.
        key_bias: [H, N_k] or broadcastable to it, fp32 or fp64.
        positions: [N], as for `alibi_attention`; those of each sequence are independent of the others'.
        causal, window, scale, sink_logits, dropout_p, tolerance, backend: as for `alibi_attention`. "dense" and "reference"
            compute one sequence at a time if cu_seqlens can be read for free, and a row of N × N scores otherwise.
        return_lse: also return the log-sum-exp of the scores, [H, N].

    Returns:
        The output, or (output, lse).

    Raises:
        ValueError, TypeError: wrong shapes, dtypes, numbers or cu_seqlens, or a named backend that cannot run this call.

    >>> q = k = v = torch.randn(10, 8, 64)
    >>> alibi_attention_varlen(q, k, v, torch.tensor([0, 3, 10], dtype=torch.int32)).shape
    torch.Size([10, 8, 64])

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    check_known("alibi_attention_varlen", options, _OPTIONS)
    given: dict[str, Any] = {**options}
    cu_seqlens_k, positions = given.pop("cu_seqlens_k", None), given.get("positions")
    key_bias = given.get("key_bias")
    _check_packed(query, key, value, self_attention=cu_seqlens_k is None)
    bounds = key_bounds = None
    if cu_seqlens_k is None:
        bounds = _checked_bounds("cu_seqlens", cu_seqlens, query)
    else:
        bounds, key_bounds = packed_bounds(cu_seqlens, cu_seqlens_k, query, key)
    for name, of_heads in (("slopes", slopes), ("right_slopes", given.get("right_slopes"))):
        axes = of_heads.ndim if isinstance(of_heads, Tensor | np.ndarray) else 1
        if isinstance(of_heads, list | tuple) and any(isinstance(slope, list | tuple) for slope in of_heads):
            axes = 2
        if axes != 1:
            raise ValueError(
                f"{name} has {axes} axes but must be [H], shared by all packed sequences; for [B, H] use alibi_attention"
            )
    if isinstance(key_bias, Tensor) and key_bias.ndim > 2:
        raise ValueError(
            f"key_bias has shape {list(key_bias.shape)} but must be [H, N] = [{query.shape[1]}, {key.shape[0]}] or "
            "broadcastable to it: [N] or [1, N]"
        )
    query, key, value = (x.transpose(0, 1)[None] for x in autocast(query, key, value))
    if cu_seqlens_k is not None and positions is not None:
        raise ValueError("positions and cu_seqlens_k exclude one another; call alibi_attention for each sequence")
    segments = _segments(cu_seqlens, query.shape[2]) if cu_seqlens_k is None else None
    if positions is not None and segments is not None:
        given["positions"] = _along_the_row(positions, segments)
    spec = make_spec(query, key, value, slopes, segment_ids=segments, return_lse=return_lse, **given)
    _READS.check(spec)
    if bounds is not None and key_bounds is not None:
        return _packed(attend_packed(spec, query, key, value, bounds, key_bounds, backend))
    name, off = dispatch.choose(backend, spec, query, key, value)
    scores = spec.num_heads * spec.query_len**2
    if bounds is not None and name in dispatch.WITHOUT_SKIPPING and scores > FEW_SCORES:
        result = attend_packed(spec, query, key, value, bounds, bounds, name)
    else:
        result = attend(spec, query, key, value, backend if off else name)
    return _packed(result)


def _packed(result: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    if isinstance(result, tuple):
        return result[0][0].transpose(0, 1), result[1][0]
    return result[0].transpose(0, 1)


def _segments(cu_seqlens: Tensor, length: int) -> Tensor:
    """[1, N]: the number of sequences that end before each token."""
    at = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(at, cu_seqlens[1:].contiguous(), right=True)[None]


def _along_the_row(positions: Tensor, segments: Tensor) -> Tensor:
    """[1, N] fp64: the same distances within each sequence, in positions that never decrease along the row."""
    if isinstance(positions, Tensor) and positions.ndim != 1:
        raise ValueError(
            f"positions has shape {list(positions.shape)} but must be [N] = [{segments.shape[1]}], one per token"
        )
    check_tensor("positions", positions, segments.device)
    check_positions("positions", positions[None], batch=1, length=segments.shape[1], axis="N")
    begins = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    first = torch.where(begins, torch.arange(segments.shape[1], device=segments.device), 0).cummax(1).values
    wide = positions.double()[None]
    own = wide - wide.gather(1, first)
    before = torch.nn.functional.pad(own[:, :-1], (1, 0))[:, : own.shape[1]]
    return own + torch.where(begins, before, 0.0).cumsum(1)


def attend_packed(
    spec: AttentionSpec[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Sequence[int],
    key_bounds: Sequence[int],
    backend: str,
    slopes: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The output of the packed row [1, H, N, D], or (output, lse), with one call per sequence, aligned at the end.

    Args:
        bounds, key_bounds: the start of each of B sequences, and then N and N_k.
        slopes: [B, H], one row per sequence; None = those of the spec.
    """
    outputs, lses = [], []
    seed = drawn_seed(query.device) if spec.dropout_p > 0 else None
    for at, ((low, high), (start, stop)) in enumerate(zip(*map(itertools.pairwise, (bounds, key_bounds)), strict=True)):
        if low == high:
            continue
        part = dataclasses.replace(
            spec.on_queries(low, high).on_keys(start, stop),
            query_segments=None,
            key_segments=None,
            query_offset=stop - start - (high - low),
            slopes=spec.slopes if slopes is None else slopes[at],
            # Positions of the whole row.
            dropout_seed=None if seed is None else seed + seed.new_tensor([0, 0, 0, start]),
        )
        result = attend(part, query[:, :, low:high], key[:, :, start:stop], value[:, :, start:stop], backend)
        outputs.append(result[0] if isinstance(result, tuple) else result)
        if isinstance(result, tuple):
            lses.append(result[1])
    if not outputs:
        return attend(spec, query, key, value, backend)
    output = torch.cat(outputs, dim=2)
    return (output, torch.cat(lses, dim=2)) if lses else output


def _check_packed(query: Tensor, key: Tensor, value: Tensor, *, self_attention: bool) -> None:
    """Checks that each has three axes and, in self-attention, the same number of tokens; `alibi_attention` checks the rest."""
    for name, tensor, shape in (
        ("query", query, "[N, H, D]"),
        ("key", key, "[N, K, D]"),
        ("value", value, "[N, K, D]"),
    ):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor but is {type(tensor).__name__}")
        if tensor.ndim != 3:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} but must have three axes {shape}: the tokens of all sequences, packed; "
                "for a batch use alibi_attention"
            )
    if (
        (self_attention and key.shape[0] != query.shape[0])
        or key.shape[2] != query.shape[2]
        or value.shape != key.shape
    ):
        raise ValueError(
            f"query has shape {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} but must be [N, H, D], "
            "[N, K, D] and [N, K, D]: every token has a query, a key and a value; other lengths of keys need cu_seqlens_k"
        )


def _checked_bounds(name: str, cu_seqlens: Tensor, query: Tensor, *, read: bool = False) -> list[int] | None:
    """The values of cu_seqlens, validated; None if they cannot be read for free, unless they must be `read`."""
    check_tensor(name, cu_seqlens, query.device)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {dtype_name(cu_seqlens.dtype)} but must be int32 or int64")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{name} has shape {list(cu_seqlens.shape)} but must be [B + 1]: the start of each of B sequences, then N"
        )
    if not read and not may_read(cu_seqlens):
        return None
    bounds: list[int] = cu_seqlens.tolist()
    length = query.shape[0]
    if bounds[0] != 0 or bounds[-1] != length or any(x > y for x, y in itertools.pairwise(bounds)):
        text = f"{bounds}" if len(bounds) <= 16 else f"[{', '.join(map(str, bounds[:8]))}, …, {bounds[-1]}]"
        raise ValueError(f"{name} is {text} but must begin with 0, never decrease, and end with N = {length}")
    return bounds


def packed_bounds(cu_seqlens: Tensor, cu_seqlens_k: Tensor, query: Tensor, key: Tensor) -> tuple[list[int], list[int]]:
    """The values of cu_seqlens and cu_seqlens_k, validated; both are read on the host."""
    if is_traced():
        raise ValueError(
            "cu_seqlens_k is not supported in compiled or transformed code, because its values decide the shapes; call "
            "alibi_attention_varlen outside"
        )
    bounds = _checked_bounds("cu_seqlens", cu_seqlens, query, read=True)
    key_bounds = _checked_bounds("cu_seqlens_k", cu_seqlens_k, key, read=True)
    assert bounds is not None
    assert key_bounds is not None
    if len(bounds) != len(key_bounds):
        raise ValueError(
            f"cu_seqlens has {len(bounds) - 1} sequences but cu_seqlens_k {len(key_bounds) - 1}; each has queries and keys"
        )
    return bounds, key_bounds
