"""Decoding with groups of heads that keep different numbers of keys: for the host, all groups together are one call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.backend import forward, plan
from alibi_attn.attention.backends.fused.call import call_of
from alibi_attn.attention.backends.fused.launch import begin, in_rows, part_of, scratch
from alibi_attn.attention.backends.fused.recording import replayed
from alibi_attn.attention.backends.fused.split_keys import reads_whole
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import TILE


@torch.no_grad()
def attend_groups(
    query: Tensor,
    cached: Sequence[tuple[Tensor, ...]],
    slopes: Tensor,
    heads: tuple[tuple[int, int], ...],
    *,
    windows: tuple[int | None, ...],
    offsets: Tensor | None = None,
) -> Tensor:
    """`alibi_attention` of the last T ≤ DECODE_QUERIES positions, [B, H, T, D], if `decoding.reads_groups` allows it.

    Args:
        cached: the keys and values of each group of consecutive heads, [B, members, S, D], where S differs.
        slopes: [H] fp32.
        heads: of each group, its first query head and the one after its last.
        windows: of each group.
        offsets: [groups] int64: the position of the first query in each group, and then lengths do not change; None = the
            queries are the last.
    """
    query, *pairs = in_rows(query, *(x for pair in cached for x in pair))
    output, queries = torch.empty_like(query), query.shape[2]
    lengths = [key.shape[2] for key in pairs[::2]]

    def launched(query: Tensor, slopes: Tensor, output: Tensor, offsets: Tensor | None, *pairs: Tensor) -> None:
        for group, (first, end) in enumerate(heads):
            begin(group)
            some, into, own = (part_of(x, slice(first, end)) for x in (query, output, slopes))
            key, value = pairs[2 * group : 2 * group + 2]
            spec = make_spec(some, key, value, own, window=windows[group])
            if offsets is not None:
                spec = spec.changed(query_offset=part_of(offsets, slice(group, group + 1)))
            call, rows = call_of(spec, query.device), some.shape[:3].numel()
            lse, given_lse = (scratch(rows, query.device, torch.float32) for _ in range(2))
            tiles = None if reads_whole(spec, key) else plan(spec, some, key, value, call=call)
            forward(spec, some, key, value, tiles, call=call, given_lse=given_lse, into=(into, lse))

    tensors = query, slopes, output, offsets, *pairs
    if offsets is not None:
        replayed(("groups", heads, windows), tensors, launched)
        return output
    kind = "groups", heads, windows, *(-(-length // TILE) for length in lengths)
    varying = [x for length in lengths for x in (length, length - queries)]
    replayed(kind, tensors, launched, tuple(varying), range(4, 4 + len(pairs)))
    return output
