"""The keys and values that heads attend to, and the one way to attend to them, with a cache or without.

Few queries over many known keys read only what is near (`run/decoding.py`); all other calls are those of the public functions.
Shapes are those of `call/spec.py`.
"""

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.call.spec import index_of
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.attention.run import decoding
from alibi_attn.attention.run.decoding import Kept as Kept
from alibi_attn.attention.run.merging import merged
from alibi_attn.attention.toeplitz import toeplitz_attention

_DEFAULTS = {"dropout_p": 0.0, "sinks": 0, "registers": 0, "backend": "auto", "causal": True}


def attend(query: Tensor, kept: Sequence[Kept], slopes: Tensor | None = None, **options: Any) -> Tensor:
    """Attention [B, H, T, D] of the queries over the keys kept for their heads.

    Args:
        query: [B, H, T, D].
        kept: one per group of heads, or two that merge: the window then hides keys of the former only.
        slopes: [H] fp32; None = the default, or with gates none.
        options: of `alibi_attention`, `forgetting_attention` if there are gates, or `toeplitz_attention` if `table` is given.
    """
    given = {
        name: x for name, x in options.items() if x is not None and not (name in _DEFAULTS and x == _DEFAULTS[name])
    }
    if len(kept) == 1:
        return _one(query, kept[0], slopes, given)
    assert slopes is not None or kept[0].log_fgate is not None
    windows = _windows_of_one_call(query, kept, given)
    if windows is not None:
        assert slopes is not None
        runs = tuple((group.select.start, group.select.stop) for group in kept if isinstance(group.select, slice))
        pairs = [(group.key, group.value) for group in kept]
        return decoding.attend_groups(query, pairs, slopes, runs, windows=windows, offsets=kept[0].firsts)
    mixed: list[tuple[slice | Tensor | list[int], Tensor]] = []
    for heads, found in itertools.groupby(kept, key=lambda group: group.heads):
        near, *rest = found
        assert heads is not None
        index = index_of(list(heads)) if near.select is None else near.select
        own, of_heads = (None if slopes is None else slopes[index]), dict(given)
        if isinstance(window := given.get("window"), tuple):
            of_heads["window"] = [window[head] for head in heads]
        if rest:
            of_heads.pop("sinks", None)
            mixed.append((index, _two(query[:, index], near, rest[0], own, of_heads)))
        else:
            mixed.append((index, _one(query[:, index], near, own, of_heads)))
    return _joined(query, mixed)


def _windows_of_one_call(query: Tensor, kept: Sequence[Kept], given: dict[str, Any]) -> tuple[int | None, ...] | None:
    """The window of each group if one call of the device's kernels supports all groups; else None."""
    window = given.get("window")
    if not given.keys() <= {"window"} or isinstance(window, tuple) or not decoding.reads_groups(query):
        return None
    plain = all(isinstance(x.select, slice) and x.log_fgate is None and x.exists is None for x in kept)
    if not plain or any(a.heads == b.heads for a, b in itertools.pairwise(kept)):
        return None
    return tuple(min((x for x in (group.window, window) if x is not None), default=None) for group in kept)


def _one(query: Tensor, kept: Kept, slopes: Tensor | None, given: dict[str, Any]) -> Tensor:
    mixed = None if kept.exists is not None else decoding.attend_if_near(query, kept, slopes, given)
    return cast("Tensor", _all(query, kept, slopes, given)) if mixed is None else mixed


def _all(query: Tensor, kept: Kept, slopes: Tensor | None, given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by the public functions."""
    given = dict(given)
    at_the_end = not isinstance(kept.first, Tensor) and kept.first + query.shape[2] == kept.key.shape[2]
    if not at_the_end and "positions" not in given:
        given["query_offset"] = kept.first
    if kept.exists is not None:
        given["key_mask"] = kept.exists
    if kept.window is not None:
        given["window"] = min(kept.window, given.get("window", kept.window))
    if kept.log_fgate is not None:
        return forgetting_attention(query, kept.key, kept.value, kept.log_fgate, slopes, **given)
    if "table" in given:
        return toeplitz_attention(query, kept.key, kept.value, **given)
    return alibi_attention(query, kept.key, kept.value, slopes, **given)


def _two(query: Tensor, near: Kept, far: Kept, slopes: Tensor | None, given: dict[str, Any]) -> Tensor:
    """Attention over two disjoint sets of keys; the window hides keys of the former."""
    without = {name: x for name, x in given.items() if name != "window"}
    one = _all(query, near, slopes, {**given, "return_lse": True})
    other = _all(query, far, slopes, {**without, "return_lse": True})
    return merged(*one, *other)[0].to(query.dtype)


def _joined(query: Tensor, mixed: list[tuple[slice | Tensor | list[int], Tensor]]) -> Tensor:
    """The outputs of groups of heads as one tensor, in the order of heads."""
    slices = [(index.start, output) for index, output in mixed if isinstance(index, slice)]
    if len(slices) == len(mixed):
        return torch.cat([output for _, output in sorted(slices, key=lambda one: one[0])], dim=1)
    result = query.new_empty(*query.shape[:3], mixed[0][1].shape[3])
    for index, output in mixed:
        result[:, index] = output
    return result
