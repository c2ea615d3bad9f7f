"""Validates the tensors that split a call into parts (`merging.py`): windows per head, prefixes and positions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alibi_attn.attention.call import query_positions
from alibi_attn.attention.call.checks import Checked, check_windows
from alibi_attn.attention.call.transforms import in_memory, is_traced, may_read

Window = int | Sequence[int] | NDArray[np.integer] | Tensor


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


def part_fields(given: Mapping[str, Any], sizes: Checked) -> dict[str, Any]:
    """The fields of a call's spec; empty for most calls. Errors are those of `query_positions.part_fields`."""
    for name in ("positions", "query_positions"):
        if given[name] is not None:
            check_no_gradient(name, given[name])
    fields = query_positions.part_fields(given, sizes, _values)
    if "prefix_len" in fields:
        fields["prefix_len"] = fields["prefix_len"].to(torch.int64)
    return fields


def check_prefix_values(prefix_len: Tensor, most: int, of: str) -> None:
    """`query_positions.check_prefix_values` of a tensor."""
    query_positions.check_prefix_values(_values(prefix_len), most, of)


def check_sorted(name: str, positions: Tensor) -> None:
    """Positions are finite and do not decrease; they need no gradient."""
    check_no_gradient(name, positions)
    if (values := _values(positions)) is not None:
        query_positions.check_order(name, values)


def check_no_gradient(name: str, positions: Tensor) -> None:
    if positions.requires_grad:
        raise ValueError(f"{name} receives no gradient; pass {name}.detach()")


def _values(x: Tensor) -> NDArray[Any] | None:
    # Inside torch.func, `numpy` would read a wrapper without memory.
    return np.from_dlpack(in_memory(x)) if may_read(x) else None
