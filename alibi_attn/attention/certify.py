"""The bounds of plain causal calls on a GPU, from two kernels; whatever is not plain goes through `attention/bounds.py`.

Some three hundred small torch operations, however fast each, keep the host busy for longer than short attention takes.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from alibi_attn.attention.bounds import KEPT, PIN_CHOICES, TILE, VALUE_RATIO, Bounds, bounds, first_positions
from alibi_attn.attention.lengths import Lengths
from alibi_attn.attention.spec import AttentionSpec

Spec = AttentionSpec[Tensor]

_WARPS = 8


def certified(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, lengths: Lengths | None = None, *,
    pin_choices: tuple[int, ...] = PIN_CHOICES,
) -> Bounds:  # fmt: skip
    """What must be visited; reads nothing on the host, and with `lengths` only the keys that those leave out or that are near.

    Args:
        value: None = the values are taken to be of like length.
        lengths: what is known of keys and values; only for plain calls, as `is_plain` says.
    """
    if is_plain(spec) and spec.tolerance > 0 and spec.query_len > 0 and spec.key_len > 0:
        return _from_kernels(spec, query, key, value, lengths, pin_choices)
    return bounds(spec, query, key, value)


def is_plain(spec: Spec) -> bool:
    """Causal, and no mask but a window."""
    return spec.causal and spec.key_mask is None and spec.key_segments is None


def _from_kernels(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, lengths: Lengths | None, pin_choices: tuple[int, ...]
) -> Bounds:
    from alibi_attn.attention.kernels.certificate import reach_kernel

    b, h, device = spec.batch, spec.num_heads, query.device
    unknown = value is None
    query, key, value = in_rows(query, key, key if value is None else value)
    tiles, longest, shortest = _norms(spec, key, value, lengths)
    if unknown:
        longest = torch.zeros_like(longest)
    count = min(max(pin_choices), tiles.shape[-1])
    chosen = tiles.topk(count, dim=-1).indices
    kappa = torch.stack([tiles.scatter(-1, chosen[..., :pins], 0.0) for pins in pin_choices]).cummax(-1).values
    blocks = -(-spec.query_len // TILE)
    left = torch.empty((len(pin_choices), b, h, blocks), dtype=torch.int32, device=device)
    first, slopes = first_positions(spec, device).contiguous(), spec.slopes.detach().contiguous()
    with on(query):
        reach_kernel[(b * h * blocks,)](
            query, key, value, slopes, first, kappa, longest, shortest, left,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            h if slopes.ndim == 2 else 0, 0 if first.numel() == 1 else 1,
            spec.scale, -math.log(spec.tolerance), VALUE_RATIO, min(spec.window or 0, 2**31 - 1),
            b, h, spec.group, spec.query_len, spec.key_len, tiles.shape[-1],
            CHOICES=len(pin_choices), KEPT=KEPT, HAS_WINDOW=spec.window is not None, **row_constants(spec), num_warps=_WARPS,
        )  # fmt: skip
    found, pins = _cheapest(spec, left, chosen, first, pin_choices)
    return Bounds(found, found, pins)


def on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which may be another than the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()


def in_rows(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors with a last stride of 1, which kernels count on."""
    return (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _cheapest(
    spec: Spec, left: Tensor, chosen: Tensor, first: Tensor, pin_choices: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """(reach, pins) of each head's cheapest choice; see `bounds._cost`."""
    device, blocks = left.device, left.shape[-1]
    pins = torch.nn.functional.pad(
        chosen.repeat_interleave(spec.group, 1), (0, max(PIN_CHOICES) - chosen.shape[-1]), value=-1
    )
    pinned = torch.cat([torch.full((1,), count, device=device) for count in pin_choices])  # a list would be waited for
    end = first[:, None, None] + torch.arange(TILE, TILE * blocks + 1, TILE, device=device)
    asked = torch.minimum(left, end.clamp(0, spec.key_len)).sum(-1)
    best = (asked + pinned[:, None, None] * (2 * TILE * blocks)).argmin(0)
    found = left.gather(0, best[None, :, :, None].expand(-1, -1, -1, blocks))[0]
    return found.long(), pins.masked_fill(torch.arange(max(PIN_CHOICES), device=device) >= pinned[best][..., None], -1)


def _norms(spec: Spec, key: Tensor, value: Tensor, lengths: Lengths | None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest norm of every tile of keys, [B, K, N]; of all values, the largest and one that none is below, [B, K]; fp32."""
    from alibi_attn.attention.kernels.certificate import lengths_kernel

    n, known = -(-spec.key_len // TILE), 0
    norms = torch.empty((3, spec.batch, spec.num_kv_heads, n), dtype=torch.float32, device=key.device)
    if lengths is not None:
        known = lengths.keys.shape[-1]
        for at, norm in enumerate((lengths.keys, lengths.values)):
            norms[at, ..., :known] = norm * (1.0 + 2.0**-22)  # rounded up
        norms[2, ..., :known] = 0.0
    if known < n:
        with on(key):
            lengths_kernel[(spec.batch * spec.num_kv_heads * (n - known),)](
                key, value, *norms, *key.stride()[:3], *value.stride()[:3], known, n - known, spec.num_kv_heads, spec.key_len, n,
                **row_constants(spec), num_warps=_WARPS,
            )  # fmt: skip
    return norms[0], norms[1].amax(-1), norms[2].amin(-1)


def row_constants(spec: Spec) -> dict[str, int]:
    """What every kernel is told of rows and tiles."""
    return {"D": spec.head_dim, "DP": max(16, 1 << (spec.head_dim - 1).bit_length()), "TILE": TILE}
