"""The arguments of a call that most kernels get."""

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.kernels.arguments import (
    Call,
    Dropout,
    Masks,
    QueryOffset,
    Slopes,
)
from alibi_attn.attention.backends.fused.key_bias import split
from alibi_attn.attention.backends.fused.launch import NONE, Argument, grouped, number, one_or_more, pointer, real
from alibi_attn.attention.spec import AttentionSpec, dropout_numbers
from alibi_attn.attention.visibility import first_positions

Spec = AttentionSpec[Tensor]


def call_of(spec: Spec, device: torch.device) -> Argument:
    """The `Call` of a spec."""
    query_bias, query_start = spec.query_bias, spec.query_start
    return grouped(
        Call,
        _slopes(spec, spec.slopes),
        NONE if spec.right_slopes is None else _slopes(spec, spec.right_slopes),
        offset_of(spec),
        masks_of(spec),
        real(spec.scale),
        NONE if spec.window is None else number(spec.window),
        NONE if spec.dropout_seed is None else _dropout(spec, spec.dropout_seed),
        NONE if spec.key_bias is None else split(spec, spec.key_bias.detach()),
        number(spec.batch),
        number(spec.num_heads),
        one_or_more(spec.group),
        number(spec.query_len),
        number(spec.key_len),
        NONE if query_bias is None else pointer(query_bias.detach().double().contiguous()),
        NONE if query_start is None else pointer(query_start.long().contiguous()),
    )


def offset_of(spec: Spec) -> Argument:
    """The `QueryOffset`; a tensor is never read on the host."""
    if not isinstance(spec.query_offset, Tensor):
        return grouped(QueryOffset, NONE, number(0), number(spec.query_offset))
    first = first_positions(spec, spec.query_offset.device).contiguous()
    return grouped(QueryOffset, pointer(first), number(0 if first.numel() == 1 else 1), number(0))


def masks_of(spec: Spec, keys: Tensor | None = None) -> Argument:
    """The `Masks`; `keys` in place of the spec's key mask."""
    shown = spec.key_mask if keys is None else keys
    segments = spec.query_segments, spec.key_segments
    return grouped(
        Masks,
        NONE if shown is None else pointer(shown.contiguous().view(torch.int8)),
        *(NONE if x is None else pointer(x.contiguous()) for x in segments),
    )


def _dropout(spec: Spec, seed: Tensor) -> Argument:
    threshold, factor = dropout_numbers(spec.dropout_p)
    return grouped(
        Dropout, number(threshold), real(factor), pointer(seed.contiguous()), number(spec.batch // len(seed))
    )


def _slopes(spec: Spec, slopes: Tensor) -> Argument:
    slopes = slopes.detach().contiguous()
    return grouped(Slopes, pointer(slopes), number(spec.num_heads if slopes.ndim == 2 else 0))
