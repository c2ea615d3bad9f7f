"""Validates windows per head, sinks, prefixes and positions: the arguments that split a call into parts (`merging.py`)."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alibi_attn.attention.call.checks import (
    Checked,
    check_positions,
    check_prefix_len,
    check_sinks,
    check_windows,
)
from alibi_attn.attention.call.query_positions import (
    WINDOW_RULE,
    check_coordinates,
    check_inside_prefix,
    check_not_before,
    check_registers,
    follow_indices,
)
from alibi_attn.attention.call.transforms import is_traced, may_read

Window = int | Sequence[int] | NDArray[np.integer] | Tensor


class PartFields(TypedDict, total=False):
    """The fields of an `AttentionSpec` that come from these arguments."""

    sinks: int
    prefix_len: Tensor
    positions: Tensor
    query_positions: Tensor
    by_position: bool
    coordinates: Tensor
    query_coordinates: Tensor


def windows_of_heads(window: Window | None, num_heads: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(the window of all heads, None), or (None, one per head); a single window is checked elsewhere.

    Raises:
        ValueError, TypeError: not [H] integers of at least 1, or a tensor that cannot be read for free.
    """
    if window is None or isinstance(window, int):
        return window, None
    if isinstance(window, Tensor):
        if is_traced() or not window.is_cpu:
            raise TypeError(
                f"window is a tensor on {window.device}, which cannot be read here without waiting; pass a list of integers"
            )
        if window.is_floating_point() or window.is_complex() or window.dtype == torch.bool:
            raise TypeError(f"window is {window.dtype} but must hold integers, one window per head")
        window = window.tolist()
    if isinstance(window, np.ndarray):
        window = window.tolist()
    return check_windows(window, num_heads)


def part_fields(given: Mapping[str, Any], sizes: Checked) -> PartFields:
    """The fields of a call's spec; empty for most calls.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or values, or arguments that exclude one another.
    """
    fields: PartFields = {}
    sinks, prefix_len, positions = given["sinks"], given["prefix_len"], given["positions"]
    check_sinks(sinks)
    if sinks > 0 and given["window"] is not None:
        fields["sinks"] = sinks
    if prefix_len is not None:
        check_prefix_len(prefix_len, batch=sizes.batch, causal=given["causal"])
        check_prefix_values(prefix_len, sizes.key_len, "S")
        fields["prefix_len"] = prefix_len.to(torch.int64)
    if (registers := given["registers"]) != 0:
        check_registers(registers, causal=given["causal"], query_offset=given["query_offset"])
    if positions is not None and positions.ndim == 3:
        fields["coordinates"], fields["query_coordinates"] = _coordinates(given, sizes)
    elif positions is not None:
        fields["positions"] = positions
        fields["query_positions"] = _query_positions(given, sizes)
        own, causal = given["query_positions"], given["causal"]
        if own is not None and prefix_len is not None and may_read(own, positions, prefix_len):
            inside = torch.arange(sizes.key_len, device=own.device) < prefix_len[:, None]
            check_inside_prefix(own, positions, inside)
        if own is not None and not causal and not (may_read(own, positions) and follow_indices(own, positions)):
            fields["by_position"] = True
            if given["window"] is not None:
                raise ValueError(WINDOW_RULE)
    elif given["query_positions"] is not None:
        raise ValueError("query_positions is given without positions [B, S], those of the keys; pass both")
    return fields


def check_prefix_values(prefix_len: Tensor, most: int, of: str) -> None:
    """A prefix has at most this many keys, the number of what `of` says; checked where reading is free."""
    if may_read(prefix_len) and prefix_len.numel():
        low, high = (int(x) for x in torch.aminmax(prefix_len))
        if low < 0 or high > most:
            raise ValueError(
                f"prefix_len is {low if low < 0 else high} for a sequence but must be from 0 to {most}, {of}"
            )


def check_sorted(name: str, positions: Tensor, *, decreasing: bool = False) -> None:
    """Positions are finite and, unless they may be `decreasing`, do not decrease; they need no gradient."""
    if positions.requires_grad:
        raise ValueError(f"{name} receives no gradient; pass {name}.detach()")
    if not may_read(positions):
        return
    if decreasing and not bool(positions.isfinite().all()):
        raise ValueError(f"{name} must be finite")
    if not decreasing and not bool((positions[:, 1:] >= positions[:, :-1]).all() & positions.isfinite().all()):
        raise ValueError(f"{name} must be finite and must not decrease along a row; sort the tokens by position")


def _coordinates(given: Mapping[str, Any], sizes: Checked) -> tuple[Tensor, Tensor]:
    """Of keys and queries, [B, S, C] and [B, T, C]; the same tensor in self-attention."""
    positions: Tensor = given["positions"]
    own: Tensor | None = given["query_positions"]
    check_coordinates(given, batch=sizes.batch, query_len=sizes.query_len, key_len=sizes.key_len)
    check_sorted("positions", positions, decreasing=True)
    if own is not None:
        check_sorted("query_positions", own, decreasing=True)
        return positions, own
    return positions, positions if sizes.query_len == sizes.key_len else positions[:, sizes.key_len - sizes.query_len :]


def _query_positions(given: Mapping[str, Any], sizes: Checked) -> Tensor:
    """[B, T]: the given positions of queries, or those of the last T keys."""
    positions: Tensor = given["positions"]
    own: Tensor | None = given["query_positions"]
    if given["query_offset"] is not None:
        raise ValueError("positions and query_offset exclude one another: pass query_positions [B, T] instead")
    check_positions("positions", positions, batch=sizes.batch, length=sizes.key_len, axis="S")
    check_sorted("positions", positions)
    if own is not None:
        check_positions("query_positions", own, batch=sizes.batch, length=sizes.query_len, axis="T")
        check_sorted("query_positions", own)
        if given["causal"] and may_read(own, positions):
            check_not_before(own, positions)
        return own
    if sizes.query_len > sizes.key_len:
        raise ValueError(
            f"there are {sizes.query_len} queries and {sizes.key_len} keys, so not every query has a key's position; pass "
            "query_positions [B, T]"
        )
    return positions[:, sizes.key_len - sizes.query_len :]
