"""`toeplitz_attention`: attention with any bias that depends on head and distance, given as a table of numbers."""

import dataclasses
import math
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from alibi_attn.attention.call.checks import dtype_name
from alibi_attn.attention.call.hints import check_known, shows
from alibi_attn.attention.call.options import ToeplitzOptions
from alibi_attn.attention.call.reads import DROPOUT, Reads
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import autocast, may_read
from alibi_attn.attention.call.validation import check_tensor, make_spec
from alibi_attn.attention.run.execution import attend

# No offset as a tensor: it determines which distances the table must have.
_READS = Reads(
    "toeplitz_attention", DROPOUT | {"causal", "window", "key_mask", "query_segments", "key_segments", "return_lse"}
)
_OPTIONS = ToeplitzOptions.__optional_keys__


@overload
def toeplitz_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    *,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    **options: Unpack[ToeplitzOptions[Tensor]],
) -> Tensor: ...


@overload
def toeplitz_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    *,
    return_lse: Literal[True],
    backend: str = ...,
    **options: Unpack[ToeplitzOptions[Tensor]],
) -> tuple[Tensor, Tensor]: ...


@overload
def toeplitz_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    *,
    return_lse: bool = ...,
    backend: str = ...,
    **options: Unpack[ToeplitzOptions[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]: ...


@shows(ToeplitzOptions[Tensor])
def toeplitz_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[ToeplitzOptions[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a bias by head and distance, softmax(scale·q·kᵀ + t[h, i − j])·v, [B, H, T, D] in query's dtype.

    T5's buckets, KERPLE, Sandwich, TISA and √-ALiBi are such tables. `native` (CPU) and `fused` (CUDA) compute it with memory
    linear in the length, forward and backward. `native` skips far keys as for `alibi_attention`, unless the table needs a
    gradient, which every pair contributes to; `fused` reads all that the masks allow. Where neither can run, and inside
    torch.func, `dense` materializes the T × S bias. Differentiable once in all tensors, and through lse.

    Args:
        table: t, floating point and finite, used in fp32 (fp64 for fp64 input). Causal [H, N]: column d is for the distance
            d = i − j, 0 … N − 1. Not causal [H, 2·N − 1]: column N − 1 + d is for d, −(N − 1) … N − 1, keys to the right first.
            It must cover every distance that causality and the window allow; further columns are not used.
        query_offset: position of query 0, an int; S − T by default.
        query, key, value, causal, window, scale, key_mask, segment_ids, dropout_p, tolerance, return_lse: as for
            `alibi_attention`.
        backend: "auto", "native", "fused", "dense" or "reference"; the others do not support tables.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or numbers, a table that ends too early, or a named backend that cannot run
            this call.

    >>> q = k = v = torch.randn(1, 8, 128, 64)
    >>> kerple = -torch.log1p(torch.arange(128.0)).expand(8, 128)
    >>> toeplitz_attention(q, k, v, kerple).shape
    torch.Size([1, 8, 128, 64])

    Source: Raffel et al. 2020, sec. 2.1 (arXiv:1910.10683), for a table of learned numbers.
    """
    check_known("toeplitz_attention", options, _OPTIONS)
    query, key, value = autocast(query, key, value)
    heads = query.shape[1] if isinstance(query, Tensor) and query.ndim == 4 else 0
    spec = make_spec(query, key, value, [0.0] * heads, return_lse=return_lse, **options)
    _READS.check(spec)
    check_tensor("table", table, query.device)
    _check_table(spec, table)
    # The gradient of a distance is a sum over all queries.
    tolerance = 0.0 if table.requires_grad and torch.is_grad_enabled() else spec.tolerance
    spec = dataclasses.replace(spec, tolerance=tolerance, table=table.to(spec.slopes.dtype))
    return attend(spec, query, key, value, backend)


def _check_table(spec: AttentionSpec[Tensor], table: Tensor) -> None:
    if not torch.is_floating_point(table):
        raise TypeError(f"table is {dtype_name(table.dtype)} but must be floating point: it is added to scores")
    words = "[H, N]" if spec.causal else "[H, 2·N − 1]"
    fits = table.ndim == 2 and table.shape[0] == spec.num_heads and (spec.causal or table.shape[1] % 2 == 1)
    if not fits:
        raise ValueError(
            f"table has shape {list(table.shape)} but must be {words} for the N distances from 0 on"
            f"{'' if spec.causal else ', to both sides'}, with H = {spec.num_heads}"
        )
    assert not isinstance(spec.query_offset, Tensor)
    most = spec.query_offset + spec.query_len
    if not spec.causal:
        most = max(most, spec.key_len - spec.query_offset)
    # The distances that occur; at least one, so that a table has a column.
    needed = max(1, most if spec.window is None else min(most, spec.window))
    if (available := (table.shape[1] if spec.causal else table.shape[1] // 2 + 1)) < needed:
        raise ValueError(
            f"table has the distances 0 to {available - 1} but a query and a key are {needed - 1} apart; pass one with "
            f"{needed if spec.causal else 2 * needed - 1} columns"
        )
    if may_read(table) and not all(math.isfinite(extreme) for extreme in torch.aminmax(table.detach())):
        raise ValueError(
            "table has NaN or inf in it but must be finite; to hide keys use window, key_mask or segment_ids"
        )
