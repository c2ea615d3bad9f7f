"""Appends to a cache whose length is a tensor: one kernel in place of some twenty torch operations."""

from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.backend import why_not_rows
from alibi_attn.attention.backends.fused.configs import MAX_HEAD_DIM
from alibi_attn.attention.backends.fused.launch import constants, in_rows, launch, number, pointer, rows_of
from alibi_attn.attention.backends.fused.recording import replayed
from alibi_attn.attention.call.transforms import are_ordinary
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms


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


def _launch(*tensors: Tensor) -> None:
    from alibi_attn.attention.backends.fused.kernels.append import append_kernel

    (b, heads, count, d), value, keys = tensors[0].shape, tensors[1], tensors[2]
    parts = (count + TILE - 2) // TILE + 1
    rows = min(TILE, 1 << (count - 1).bit_length())
    of_kernel = constants(N=rows, DK=d, DV=value.shape[3], num_warps=1 if rows < 8 else 4)
    arguments = (
        *map(rows_of, tensors[:4]),
        *map(pointer, tensors[4:]),
        *map(number, (count, heads, keys.shape[2], parts)),
    )
    launch(value.device, append_kernel, (b * heads * parts, 1, 1), of_kernel, *arguments)


class Ring(NamedTuple):
    """Where the last keys of a head lie, in rows: row `start` + b·`step` begins the ring of sequence b.

    The ring has `size` rows. If `again`, it is followed by a copy of itself, so that up to `size` consecutive tokens lie next
    to each other; else nothing is ever overwritten, and keys beyond `size` are NaN. `group`: of the heads with the same
    numbers, the first has their number, the others −1.
    """

    start: int
    step: int
    size: int
    again: bool
    group: int


def append_to_rings(
    key: Tensor,
    value: Tensor,
    held: tuple[Tensor, Tensor],
    rings: Tensor,
    groups: int,
    length: Tensor,
    arrived: Tensor,
) -> Tensor:
    """Writes one key and value per head, [B, K, 1, D]; returns the row of the new token in each group's rings, [groups] int64.

    Args:
        held: all keys and all values, contiguous.
        rings: [K, 5] int64, the `Ring` of each head.
        length, arrived: as for `append`.
    """
    first = torch.empty(groups, dtype=torch.int64, device=length.device)
    with torch.no_grad():
        key, value = in_rows(key.detach(), value.detach())
        replayed("rings", (key, value, *held, rings, length, first, arrived), _launch_rings)
    return first


def _launch_rings(*tensors: Tensor) -> None:
    from alibi_attn.attention.backends.fused.kernels.append import append_to_rings_kernel

    (b, heads, _, d), value, rings = tensors[0].shape, tensors[1], tensors[4]
    of_kernel = constants(DK=d, DV=value.shape[3], num_warps=1)
    arguments = *map(rows_of, tensors[:2]), *map(pointer, tensors[2:]), *map(number, (heads, rings.shape[1]))
    launch(value.device, append_to_rings_kernel, (b * heads, 1, 1), of_kernel, *arguments)
