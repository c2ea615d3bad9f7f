"""Appends to a cache whose length is a tensor: one kernel in place of some twenty torch operations."""

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.backend import why_not_rows
from alibi_attn.attention.backends.fused.configs import MAX_HEAD_DIM
from alibi_attn.attention.backends.fused.launch import constants, in_rows, launch, number, pointer, rows_of
from alibi_attn.attention.backends.fused.recording import replayed
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.transforms import are_ordinary


def appends(key: Tensor, value: Tensor) -> bool:
    """Whether `append` supports these keys and values, which the cache can hold."""
    fits = key.numel() > 0 and 0 < value.shape[3] <= MAX_HEAD_DIM and value.dtype == key.dtype
    return fits and are_ordinary(key, value) and why_not_rows(key) is None


def append(
    key: Tensor, value: Tensor, held: tuple[Tensor, Tensor], norms: Norms, length: Tensor, arrived: Tensor
) -> Tensor:
    """Writes key and value, [B, K, T, D], from position `length` on; returns the former length.

    With more tokens than the capacity the keys become NaN.

    Args:
        held: the keys and values of the cache, [B, K, capacity, D].
        norms: of all tiles of the tensors held; they become bounds of the new rows too.
        length: 0-d int64; grows by T.
        arrived: 0-d int32, zero, for the kernel only.
    """
    first = torch.empty((), dtype=torch.int64, device=length.device)
    with torch.no_grad():
        key, value = in_rows(key.detach(), value.detach())
        tensors = key, value, *held, norms.keys, norms.values, length, first, arrived
        replayed("append", tensors, _launch)
    return first


def _launch(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    key_norms: Tensor,
    value_norms: Tensor,
    length: Tensor,
    first: Tensor,
    arrived: Tensor,
) -> None:
    from alibi_attn.attention.backends.fused.kernels.append import append_kernel

    b, heads, count, d = key.shape
    parts = (count + TILE - 2) // TILE + 1
    rows = min(TILE, 1 << (count - 1).bit_length())
    launch(
        key.device,
        append_kernel,
        (b * heads * parts, 1, 1),
        constants(N=rows, DK=d, DV=value.shape[3], num_warps=1 if rows < 8 else 4),
        *map(rows_of, (key, value, keys, values)),
        *map(pointer, (key_norms, value_norms, length, first, arrived)),
        *map(number, (count, heads, keys.shape[2], parts)),
    )
