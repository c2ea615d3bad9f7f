"""Decoding: the last few queries of a long text read only the keys within their reach.

`alibi_attention` reads every key once to know how long it is. Where that is remembered (`norms.py`) a new query's reach is
known before any far key is touched. On a GPU the kernels get their plan from there, also for the parts of a long prompt. On a CPU
each head attends to a slice: its last keys, and the outlier tiles before them.
"""

import torch
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.certificate.bounds import bounds, worth_leaving_out
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.validation import make_spec

MAX_QUERIES = 16  # on a CPU
LONG = 2**23  # elements of the cached keys of a sequence, on a CPU: with fewer, reading them all is as fast
FEW = 1024  # keys that cost less than a call of their own: heads that need no more are answered together


def reads_near(query: Tensor, key: Tensor, slopes: Tensor) -> bool:
    """Whether `attend_near` takes such queries and keys, and is worth it; told without reading a tensor.

    It has no gradient, and torch.compile does not trace it.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if _on_cpu(query):
        return query.shape[2] <= MAX_QUERIES and key.shape[1:].numel() >= LONG
    return fused.why_not(make_spec(query, key, key, slopes), query, key, key) is None


def attend_near(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, known_norms: Norms, *, window: int | None = None,
    scale: float | None = None, tolerance: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of the last T positions, [B, H, T, D], where `reads_near` says so; on a CPU reads the reach on the host.

    Args:
        query, key, value, slopes, window, scale, tolerance: as for `alibi_attention`.
        known_norms: what is known of the keys and values, of all but the last few.
    """
    spec = make_spec(query, key, value, slopes, window=window, scale=scale, tolerance=tolerance)
    with torch.no_grad():
        if not _on_cpu(query):
            return fused.decode(spec, query, key, value, known_norms)
        norms = known_norms.tile_norms(key, value)
        found = bounds(spec, query, key, value, tile_norms=norms, outlier_choices=worth_leaving_out(norms[0], times=2))
    far = spec.key_len if window is None else min(spec.key_len, window)
    # Keys that the first query needs, and those between it and the last.
    reach = found.left.amax(-1).clamp(max=far) + spec.query_len - 1
    needed = reach.unflatten(1, (spec.num_kv_heads, spec.group)).amax(-1).clamp(max=spec.key_len).tolist()
    outlier_tiles = found.outlier_tiles.unflatten(1, (spec.num_kv_heads, spec.group)).flatten(2).tolist()
    output = torch.empty_like(query)
    for b in range(spec.batch):
        for keys, members in _buckets(needed[b]).items():
            heads = _span([k * spec.group + g for k in members for g in range(spec.group)])
            start = spec.key_len - min(keys, spec.key_len)
            tiles = sorted({tile for k in members for tile in outlier_tiles[b][k] if 0 <= tile * TILE < start})
            spans = [(start, spec.key_len), *((tile * TILE, min((tile + 1) * TILE, start)) for tile in tiles)]
            of_heads = slopes[heads] if slopes.ndim == 1 else slopes[b : b + 1, heads]
            one = slice(b, b + 1)
            output[one, heads] = _attend(
                query[one, heads], key[one], value[one], _span(members), of_heads, spans, window, spec.scale
            )
    return output


def _on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _buckets(needed: list[int]) -> dict[int, list[int]]:
    """Key heads that need about as many keys, to the next power of two from FEW on, by the most that any of them needs."""
    by_power: dict[int, list[int]] = {}
    for head, keys in enumerate(needed):
        by_power.setdefault((max(keys, FEW) - 1).bit_length(), []).append(head)
    return {max(needed[h] for h in heads): heads for heads in by_power.values()}


def _span(indices: list[int]) -> list[int] | slice:
    """The indices as a slice where they are one, which reads without a copy."""
    low, high = indices[0], indices[-1] + 1
    return slice(low, high) if indices == list(range(low, high)) else indices


def _attend(
    query: Tensor, key: Tensor, value: Tensor, members: list[int] | slice, slopes: Tensor, spans: list[tuple[int, int]],
    window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    """Some key heads over some spans of keys; nothing in them is skipped."""

    def part(low: int, high: int) -> tuple[Tensor, Tensor, int]:
        return key[:, :, low:high][:, members], value[:, :, low:high][:, members], key.shape[2] - query.shape[2] - low

    if len(spans) == 1:
        keys, values, offset = part(*spans[0])
        return alibi_attention(
            query, keys, values, slopes, window=window, scale=scale, query_offset=offset, tolerance=0.0
        )
    outputs, lses = [], []
    for span in spans:
        keys, values, offset = part(*span)
        output, lse = alibi_attention(
            query, keys, values, slopes, window=window, scale=scale, query_offset=offset, tolerance=0.0, return_lse=True
        )
        outputs.append(output)
        lses.append(lse)
    lse = torch.stack(lses)
    share = (lse - lse.logsumexp(0)).exp()[..., None]
    return (torch.stack(outputs) * share).sum(0).to(query.dtype)
