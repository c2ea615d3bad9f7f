"""The arguments of a call that most kernels get."""

from collections.abc import Callable

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.kernels.arguments import (
    Call,
    Dropout,
    Masks,
    QueryOffset,
    Slopes,
    Table,
)
from alibi_attn.attention.backends.fused.key_bias import parts_of, split
from alibi_attn.attention.backends.fused.launch import (
    NONE,
    Argument,
    Varying,
    grouped,
    number,
    one_or_more,
    pointer,
    real,
    varying,
)
from alibi_attn.attention.call.spec import AttentionSpec, dropout_numbers
from alibi_attn.attention.call.transforms import in_memory

Spec = AttentionSpec[Tensor]

# The fields of a spec that may be tensors here, and what makes them fit for kernels; each returns what fits as it is.
FIELDS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("slopes", "right_slopes", "key_mask", "query_segments", "key_segments"), Tensor.contiguous),
    **dict.fromkeys(("table", "dropout_seed", "query_numbers", "key_numbers"), Tensor.contiguous),
    "query_offset": lambda first: first.contiguous() if first.ndim == 1 else first.reshape(1),
    "key_bias": lambda bias: bias,
    "query_bias": lambda bias: bias.double().contiguous(),
    "query_start": lambda start: start.long().contiguous(),
}


def in_place(spec: Spec) -> Spec:
    """The spec with tensors that kernels can read by their addresses."""
    fields, changed = vars(spec), {}
    for name, fitted in FIELDS.items():
        given = fields[name]
        if given is not None and isinstance(given, Tensor) and (fit := fitted(in_memory(given))) is not given:
            changed[name] = fit
    return spec.changed(**changed) if changed else spec


def call_of(spec: Spec, device: torch.device, *, planned: bool = True) -> Argument:
    """The `Call` of a spec.

    Args:
        planned: False = `FullTiles`, which makes the plan of this call, splits its key bias.
    """
    spec = in_place(spec)
    key_bias = NONE
    if spec.key_bias is not None:
        key_bias = split(spec, spec.key_bias) if planned else parts_of(spec, device)
    return grouped(
        Call,
        _slopes(spec, spec.slopes),
        NONE if spec.right_slopes is None else _slopes(spec, spec.right_slopes),
        _offset(spec),
        grouped(Masks, pointer(spec.key_mask, torch.int8), pointer(spec.query_segments), pointer(spec.key_segments)),
        real(spec.scale),
        NONE if spec.window is None else number(spec.window),
        NONE if spec.dropout_seed is None else _dropout(spec, spec.dropout_seed),
        key_bias,
        number(spec.batch),
        number(spec.num_heads),
        one_or_more(spec.group),
        number(spec.query_len),
        varying(spec.key_len, Varying.KEY_LEN),
        pointer(spec.query_bias),
        pointer(spec.query_start),
        pointer(spec.query_numbers),
        pointer(spec.key_numbers),
        NONE if spec.table is None else _table(spec, spec.table),
    )


def _offset(spec: Spec) -> Argument:
    """The `QueryOffset`; a tensor is never read on the host."""
    first = spec.query_offset
    if not isinstance(first, Tensor):
        return grouped(QueryOffset, NONE, number(0), varying(first, Varying.QUERY_OFFSET))
    return grouped(QueryOffset, pointer(first), number(0 if first.numel() == 1 else 1), number(0))


def _dropout(spec: Spec, seed: Tensor) -> Argument:
    threshold, factor = dropout_numbers(spec.dropout_p)
    return grouped(Dropout, number(threshold), real(factor), pointer(seed), number(spec.batch // len(seed)))


def _table(spec: Spec, table: Tensor) -> Argument:
    return grouped(Table, pointer(table), number(table.shape[1]), number(spec.table_first))


def _slopes(spec: Spec, slopes: Tensor) -> Argument:
    return grouped(Slopes, pointer(slopes), number(spec.num_heads if slopes.ndim == 2 else 0))
