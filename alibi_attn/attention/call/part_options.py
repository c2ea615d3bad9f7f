"""Validates the tensors that split a call into parts (`merging.py`): prefixes and positions."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alibi_attn.attention.call import query_positions
from alibi_attn.attention.call.checks import Checked
from alibi_attn.attention.call.transforms import in_memory, may_read


def part_fields(given: Mapping[str, Any], sizes: Checked) -> dict[str, Any]:
    """The fields of a call's spec; empty for most calls. Errors are those of `query_positions.part_fields`."""
    for name in ("positions", "query_positions"):
        if given[name] is not None:
            check_no_gradient(name, given[name])
    fields = query_positions.part_fields(given, sizes, free_values)
    if "prefix_len" in fields:
        fields["prefix_len"] = fields["prefix_len"].to(torch.int64)
    return fields


def check_prefix_values(prefix_len: Tensor, most: int, of: str) -> None:
    """`query_positions.check_prefix_values` of a tensor."""
    query_positions.check_prefix_values(free_values(prefix_len), most, of)


def check_sorted(name: str, positions: Tensor) -> None:
    """Positions are finite and do not decrease; they need no gradient."""
    check_no_gradient(name, positions)
    if (values := free_values(positions)) is not None:
        query_positions.check_order(name, values)


def check_no_gradient(name: str, positions: Tensor) -> None:
    if positions.requires_grad:
        raise ValueError(f"{name} receives no gradient; pass {name}.detach()")


def free_values(x: Tensor) -> NDArray[Any] | None:
    """The values if reading them is possible and free; else None."""
    # Inside torch.func, `numpy` would read a wrapper without memory.
    return np.from_dlpack(in_memory(x)) if may_read(x) else None
