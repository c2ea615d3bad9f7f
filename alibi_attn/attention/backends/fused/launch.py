"""What every Triton kernel is told of a call, and how it is launched."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.spec import AttentionSpec

Spec = AttentionSpec[Tensor]


def on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which may be another than the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()


def in_rows(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors with a last stride of 1, which kernels count on."""
    return (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def row_constants(spec: Spec) -> dict[str, int]:
    """What every kernel is told of rows and tiles."""
    return {"D": spec.head_dim, "DP": max(16, 1 << (spec.head_dim - 1).bit_length()), "TILE": TILE}


def mask_arguments(spec: Spec, unused: Tensor) -> dict[str, Any]:
    """What every kernel is told of key mask and segments."""
    return {
        "MASK": unused if spec.key_mask is None else spec.key_mask.contiguous().view(torch.int8),
        "QUERY_SEGMENTS": unused if spec.query_segments is None else spec.query_segments.contiguous(),
        "KEY_SEGMENTS": unused if spec.key_segments is None else spec.key_segments.contiguous(),
        "HAS_MASK": spec.key_mask is not None, "HAS_SEGMENTS": spec.key_segments is not None,
    }  # fmt: skip


def window_of(spec: Spec) -> int:
    return min(spec.window or 0, 2**30)


def strides(name: str, axes: str, tensor: Tensor) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, tensor.stride(), strict=False)}


def width_for(count: int) -> int:
    """How many of `count` tiles, or blocks, a small program takes at a time."""
    return min(256, max(16, 1 << (count - 1).bit_length()))
