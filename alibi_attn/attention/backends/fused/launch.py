"""The arguments of a call that every Triton kernel gets, and how kernels are launched."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS
from alibi_attn.attention.backends.fused.kernels.arguments import (
    Call,
    Dropout,
    KeyBias,
    Masks,
    QueryOffset,
    Rows,
    Slopes,
)
from alibi_attn.attention.backends.fused.key_bias import split
from alibi_attn.attention.spec import AttentionSpec, dropout_numbers
from alibi_attn.attention.transforms import in_memory
from alibi_attn.attention.visibility import first_positions

Spec = AttentionSpec[Tensor]

FARTHEST_ROW = 2**31 // PLAN_ROWS  # elements from one row to the next; no tile has more rows than PLAN_ROWS


def on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, because Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()


def in_rows(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors with a last stride of 1, and rows so near to each other that addresses within a tile fit int32."""
    return (x if x.stride(-1) == 1 and x.stride(-2) < FARTHEST_ROW else x.contiguous() for x in map(in_memory, tensors))


def rows_of(tensor: Tensor) -> Rows:
    """The `Rows` of a tensor [B, heads, rows, D] with a last stride of 1."""
    batch, head, row, _ = tensor.stride()
    return Rows(tensor, batch, head, row)


def call_of(spec: Spec, device: torch.device, key_bias: KeyBias | None = None) -> Call:
    """The arguments of a call.

    Args:
        key_bias: the key bias of `spec`, if it was split before.
    """
    if spec.key_bias is not None and key_bias is None:
        key_bias = split(spec, spec.key_bias)
    offset, masks = first_positions(spec, device).contiguous(), (spec.query_segments, spec.key_segments)
    return Call(
        slopes=_slopes(spec, spec.slopes),
        right_slopes=None if spec.right_slopes is None else _slopes(spec, spec.right_slopes),
        query_offset=QueryOffset(offset, 0 if offset.numel() == 1 else 1),
        masks=Masks(
            None if spec.key_mask is None else spec.key_mask.contiguous().view(torch.int8),
            *(None if segments is None else in_memory(segments).contiguous() for segments in masks),
        ),
        scale=spec.scale,
        window=spec.window,
        dropout=None if spec.dropout_seed is None else _dropout(spec, spec.dropout_seed),
        key_bias=key_bias,
        H=spec.num_heads, G=spec.group, T=spec.query_len, S=spec.key_len,
    )  # fmt: skip


def bias_of_move(spec: Spec, device: torch.device) -> Tensor:
    """[B or 1, H, 1] fp64: the bias of the distance by which kernels move queries that are all beyond the keys."""
    first = first_positions(spec, device)[:, None]
    moved = (first - first.clamp(-spec.query_len, spec.key_len)).double()
    slopes = spec.slopes.detach()
    if spec.right_slopes is not None:
        slopes = torch.where(moved < 0, spec.right_slopes.detach(), slopes)
    return (-slopes * moved.abs()).masked_fill(moved == 0, 0.0)[..., None]


def precision() -> str:
    """The precision of matrix products in fp32."""
    return "ieee" if torch.version.hip else "tf32x3"


def width_for(count: int) -> int:
    """How many of `count` tiles, or blocks, a small program handles at a time."""
    return min(256, max(16, 1 << (count - 1).bit_length()))


def _dropout(spec: Spec, seed: Tensor) -> Dropout:
    return Dropout(*dropout_numbers(spec.dropout_p), seed.contiguous(), spec.batch // len(seed))


def _slopes(spec: Spec, slopes: Tensor) -> Slopes:
    slopes = in_memory(slopes.detach()).contiguous()
    return Slopes(slopes, spec.num_heads if slopes.ndim == 2 else 0)
