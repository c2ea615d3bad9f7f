"""What a cache cannot do, with a sentence for each; checks of row numbers and of pickles. Read next: `cache.py`."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

_FORGETTING = ("max_tokens", "reach", "forgetting by gates")
_IN_PLACE = (
    "a cache in a file works without gradients, forget gates and torch.compile; use no_grad, or a cache in memory"
)
_MOVED = "a cache in a file cannot be reordered, which would copy the file; for beams pass copy.deepcopy(cache)"
_LOST = "a cache with max_tokens would lose the gates between the tokens it keeps, so a layer with forget gates needs KVCache()"
_SUMS = "forget gates need the number of tokens on the host, which a fixed capacity never reads; use KVCache() or reach_cache()"
_FIXED = "a cache of a fixed capacity supports no prefix_len, positions, sinks and windows per head; use KVCache(), which does"
_BEAMS = "a cache of a fixed capacity has no beams, whose rows would move; use a cache that grows"
_WRITTEN = "a cache of a fixed capacity is written in place and has no gradients; call the layer in torch.no_grad()"
_FORGETS = (
    "a cache that forgets supports no key_mask, segment_ids, prefix_len or positions; use KVCache(), which keeps all"
)
_SAVED = "caches with forget gates, max_tokens or a capacity, or with forgotten tokens, cannot be saved to a file"
_GATED, _GATELESS = (
    f"the layer has {layer} and the cache forgets {cache}; create it with the layer's reach_cache(), or use KVCache()"
    for layer, cache in (("forget gates", "without them"), ("no gates", "by gates"))
)

# How a cache stores and forgets, what a call or a layer needs that excludes it, and the error; {} is the latter.
_TABLE = (
    (("path",), ("max_tokens", "capacity", "reach"), "a cache in a file keeps all tokens: pass path or {}, not both"),
    (("path",), ("forgetting by gates", "forget gates", "gradients", "torch.compile"), _IN_PLACE),
    (("path",), ("another order",), _MOVED),
    (("max_tokens",), ("capacity",), "max_tokens moves tokens, which a fixed capacity cannot; pass one of them"),
    (("max_tokens",), ("reach",), "max_tokens counts distances without the tokens in between; pass one of them"),
    (("max_tokens",), ("forgetting by gates", "forget gates"), _LOST),
    (("reach",), ("forget gates",), _GATED),
    (("forgetting by gates",), ("no forget gates",), _GATELESS),
    (("capacity",), ("forgetting by gates", "forget gates"), _SUMS),
    (("capacity",), ("gradients",), _WRITTEN),
    (("capacity",), ("another order",), _BEAMS),
    (("capacity",), ("prefix_len", "positions", "sinks", "a window per head"), _FIXED),
    (_FORGETTING, ("key_mask", "segment_ids", "prefix_len", "positions"), _FORGETS),
    ((*_FORGETTING, "forget gates", "capacity"), ("saving",), _SAVED),
)
REFUSED = {frozenset((how, what)): text.format(what) for hows, whats, text in _TABLE for how in hows for what in whats}


def refuse(*traits: str) -> None:
    """Raises ValueError with the sentence of the table if two of these exclude one another."""
    for pair in itertools.combinations(traits, 2):
        if (sentence := REFUSED.get(frozenset(pair))) is not None:
            raise ValueError(sentence)


def checked_rows(indices: Tensor | Sequence[int], key: Tensor) -> Tensor:
    """The row numbers as a tensor on the key's device, or an error."""
    rows = torch.as_tensor(indices, device=key.device)
    if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool:
        raise TypeError(f"indices are {rows.dtype} but must be integers: row b becomes row indices[b]")
    batch = key.shape[0]
    if rows.ndim != 1 or rows.numel() == 0:
        raise ValueError(f"indices has shape {list(rows.shape)} but must be [B], one row number per new row")
    if rows.device.type == "cpu" and not bool(((rows >= 0) & (rows < batch)).all()):
        raise ValueError(f"indices are {rows.tolist()} but the cache has rows 0 … {batch - 1}")
    return rows


def described(tensor: Tensor, length: int | None = None) -> str:
    """Shape, with this length if it is given, dtype and device."""
    batch, heads, held, size = tensor.shape
    return f"{[batch, heads, held if length is None else length, size]} {tensor.dtype} on {tensor.device}"


def check_format(kind: str, state: Mapping[str, object], *, reads: Iterable[int]) -> None:
    """Raises an error for a pickled cache that another version of the package wrote.

    Args:
        kind: the name of the class.
        state: the unpickled state; its "format" is an int.
        reads: the formats that this version reads.

    Raises:
        ValueError: another format, or none.
    """
    received = state.get("format")
    if type(received) is not int or received not in reads:
        words = "no format" if received is None else f"format {received!r}"
        raise ValueError(
            f"the pickled {kind} has {words} but this version of alibi-attn reads format {' and '.join(map(str, reads))}; "
            f"unpickle it with the version that wrote it, or make a new {kind} and pass the text through the model again"
        )
