"""Checks of the inputs of a cache: keys and values, beam indices, and pickles. Read next: `cache.py`."""

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def check_pair(
    key: Tensor, value: Tensor, cached: tuple[Tensor, Tensor] | None, start: int = 0, length: int = 0
) -> None:
    """Raises ValueError unless key and value are [B, K, T, D] and continue `length` cached ones from `start` on."""
    if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key has shape {list(key.shape)} and value {list(value.shape)} but both must be [B, K, T, D]")
    for name, new, old in zip(("key", "value"), (key, value), cached or (), strict=False):
        fits = new.ndim == 4 and new.shape[:2] == old.shape[:2] and new.shape[3] == old.shape[3]
        if not (fits and new.dtype == old.dtype and new.device == old.device):
            raise ValueError(
                f"{name} is {described(new)} but the cache holds {described(old[:, :, start : start + length])}: only the length "
                "may differ; a new batch needs a new KVCache()"
            )


def check_gates(key: Tensor, log_fgate: Tensor | None, *, gated: bool, filled: bool, streams: bool) -> None:
    """Raises ValueError unless every cached token has gates or none has, and gates are [B, H, T] for these keys.

    Args:
        gated, filled, streams: whether the cache holds gates, holds tokens, and forgets the oldest.
    """
    if (log_fgate is None) == gated and filled:
        held = "gates" if gated else "no gates"
        raise ValueError(f"the cache holds keys with {held}: pass log_fgate for every token or for none")
    if log_fgate is None:
        return
    if streams:
        raise ValueError(
            "a cache with max_tokens would lose the gates between the tokens it keeps; use KVCache(), which keeps all"
        )
    if log_fgate.ndim != 3 or log_fgate.shape[::2] != (key.shape[0], key.shape[2]):
        raise ValueError(
            f"log_fgate has shape {list(log_fgate.shape)} but must be [B, H, T] to match key's {list(key.shape)}"
        )


def check_stream(max_tokens: int | None, sinks: int, *, in_file: bool) -> None:
    """Raises ValueError unless a stream of `max_tokens` has room for its sinks and one more token."""
    if max_tokens is not None and not 0 <= operator.index(sinks) < operator.index(max_tokens):
        raise ValueError(
            f"max_tokens is {max_tokens} and sinks {sinks} but sinks must be from 0 to max_tokens − 1: "
            "the newest token needs a place"
        )
    if max_tokens is not None and in_file:
        raise ValueError("a cache in a file keeps all tokens: pass path or max_tokens, not both")


def check_order_in_file(rows: Tensor, key: Tensor) -> None:
    """Raises ValueError unless the rows stay where they are."""
    if rows.tolist() != list(range(key.shape[0])):
        raise ValueError(
            "a cache in a file cannot be reordered, which would copy the file; for beams pass copy.deepcopy(cache)"
        )


def check_append_to_file(*, gated: bool) -> None:
    """Raises ValueError if keys cannot be appended to a file here."""
    if gated or torch.compiler.is_compiling() or torch.is_grad_enabled():
        raise ValueError(
            "a cache in a file works without gradients, forget gates and torch.compile; use no_grad, or a cache in memory"
        )


def checked_crop(length: int, *, held: int, forgotten: int) -> int:
    """The length as an int, or ValueError if a cache that holds and has forgotten this many tokens cannot be cropped to it."""
    length = operator.index(length)
    if not 0 <= length <= held:
        raise ValueError(f"length is {length} but the cache holds {held} positions: crop to 0 … {held}")
    if forgotten and 0 < length < held:
        raise ValueError(
            f"the cache has forgotten {forgotten} tokens, so cropping to {length} would leave out some that a "
            "cache of that length holds; crop(0) empties it"
        )
    return length


def check_assignable(fits: bool) -> None:
    """Raises ValueError unless the keys and values of a cache may be replaced."""
    if not fits:
        raise ValueError(
            "keys and values can be assigned only to a cache in memory that keeps all tokens and has no gates; to shorten "
            "another cache use crop(length)"
        )


def check_savable(fits: bool) -> None:
    """Raises ValueError unless a file can hold the cache."""
    if not fits:
        raise ValueError("caches with forget gates or max_tokens, or with forgotten tokens, cannot be saved to a file")


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


def described(tensor: Tensor) -> str:
    """Shape, dtype and device."""
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def check_format(kind: str, state: Mapping[str, object], *, reads: int) -> None:
    """Raises an error for a pickled cache that another version of the package wrote.

    Args:
        kind: the name of the class.
        state: the unpickled state; its "format" is an int.
        reads: the format that this version writes and reads.

    Raises:
        ValueError: another format, or none.
    """
    received = state.get("format")
    if type(received) is not int or received != reads:
        words = "no format" if received is None else f"format {received!r}"
        raise ValueError(
            f"the pickled {kind} has {words} but this version of alibi-attn reads format {reads}; unpickle it with the version "
            f"that wrote it, or make a new {kind} and pass the text through the model again"
        )
