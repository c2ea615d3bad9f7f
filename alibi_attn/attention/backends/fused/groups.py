"""Decoding with groups of heads that keep different numbers of keys: for the host, all groups together are one call."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.backend import forward, plan
from alibi_attn.attention.backends.fused.call import call_of
from alibi_attn.attention.backends.fused.launch import begin, in_rows, part_of, scratch
from alibi_attn.attention.backends.fused.recording import replayed
from alibi_attn.attention.backends.fused.split_keys import reads_whole
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import TILE

Heads = tuple[tuple[int, int], ...]  # the first of each group, and the one after its last


def decode_groups(
    query: Tensor,
    slopes: Tensor,
    cached: Sequence[tuple[Tensor, ...]],
    heads: Heads,
    options: tuple[object, ...],
    spec_of: Callable[..., AttentionSpec[Tensor]],
    offsets: Tensor | None = None,
) -> Tensor:
    """Causal attention of up to DECODE_QUERIES positions, by default the last.

    Args:
        cached: the keys and values of each group.
        options: what `spec_of` depends on, except for tensors.
        spec_of: makes the spec of a group from its number, queries, keys, values and slopes; without masks and biases of keys.
        offsets: [groups] int64: the position of the first query in each group, and then lengths do not change.
    """
    query, *pairs = in_rows(query, *(x for pair in cached for x in pair))
    output, queries = torch.empty_like(query), query.shape[2]
    lengths = [key.shape[2] for key in pairs[::2]]

    def launched(query: Tensor, slopes: Tensor, output: Tensor, offsets: Tensor | None, *pairs: Tensor) -> None:
        for group, (first, end) in enumerate(heads):
            begin(group)
            some, into, own = (part_of(x, slice(first, end)) for x in (query, output, slopes))
            key, value = pairs[2 * group : 2 * group + 2]
            spec = spec_of(group, some, key, value, own)
            if offsets is not None:
                spec = spec.changed(query_offset=part_of(offsets, slice(group, group + 1)))
            call, rows = call_of(spec, query.device), some.shape[:3].numel()
            lse, given_lse = (scratch(rows, query.device, torch.float32) for _ in range(2))
            tiles = None if reads_whole(spec, key) else plan(spec, some, key, value, call=call)
            forward(spec, some, key, value, tiles, call=call, given_lse=given_lse, into=(into, lse))

    tensors = query, slopes, output, offsets, *pairs
    if offsets is not None:
        replayed(("groups", heads, options), tensors, launched)
        return output
    kind = "groups", heads, options, *(-(-length // TILE) for length in lengths)
    varying = [x for length in lengths for x in (length, length - queries)]
    replayed(kind, tensors, launched, tuple(varying), range(4, 4 + len(pairs)))
    return output
