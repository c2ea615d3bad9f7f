"""Launches the kernels of calls with a table (`kernels/table.py`); `backend.py` plans the tiles that they visit."""

from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.devices import is_large, processors
from alibi_attn.attention.backends.fused.kernels.arguments import Rows, Table
from alibi_attn.attention.backends.fused.launch import (
    NONE,
    Argument,
    Constants,
    constants,
    grouped,
    launch,
    number,
    pointer,
    precision,
    rows_of,
    scratch,
)
from alibi_attn.attention.backends.fused.space import Space
from alibi_attn.attention.backends.fused.split_keys import memory_of_parts, merge
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import TILE

Spec = AttentionSpec[Tensor]

FEWEST_QUERIES = 16  # of a tile: matrix units multiply no fewer rows
COLUMNS = 256  # of a table's gradient per program


class Between(NamedTuple):
    """What all kernels of a backward pass share: [B, H, T] fp32, and the arguments of the same names in `kernels/`.

    Args:
        grad_lse: may be None.
        delta: memory for the δ of every query.
    """

    lse: Argument
    grad_lse: Argument
    delta: Argument
    call: Argument
    visited: Argument
    visitors: Argument


class Widths(NamedTuple):
    """The queries and keys of a tile for each kernel: (queries, keys), and both on a diagonal."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    diagonal: int


def widths(query: Tensor) -> Widths:
    """As many as registers hold with the addresses of a tile's biases, and as shared memory holds."""
    row_bytes = (1 << (query.shape[3] - 1).bit_length()) * query.element_size()
    has_room = query.dtype != torch.float32 and is_large(query.device)
    if row_bytes <= (256 if has_room else 128) and query.dtype != torch.float32:
        return Widths((64, 64 if row_bytes <= 128 else 32), (32, 64), 64)
    side = 32 if row_bytes <= (512 if has_room else 256) else 16
    return Widths((side, side), (side, side), side)


def forward(
    spec: Spec,
    call: Argument,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visited: Argument,
    rows: int,
    output: Tensor,
    lse: Tensor,
    given_lse: Tensor | None,
) -> None:
    """Fills output and the natural lse, twice; `rows` queries share one plan. Few programs split the keys of few queries."""
    from alibi_attn.attention.backends.fused.kernels.table import table_forward_kernel

    (b, h, t, d), device, (queries, keys) = query.shape, query.device, widths(query).rows
    queries = FEWEST_QUERIES if t <= FEWEST_QUERIES else queries
    most = 2 * processors(device) if t <= TILE else 0
    parts = max(1, min(most // (b * h), -(-spec.key_len // (4 * TILE)), 64))
    given = rows_of(output), pointer(lse), pointer(given_lse)
    into, outputs, lses = given, NONE, NONE
    if parts > 1:
        outputs, lses = memory_of_parts(parts, query, lse)
        into = grouped(Rows, outputs, number(h * t * d), number(t * d), number(d)), lses, NONE
    launch(
        device,
        table_forward_kernel,
        (b * h * -(-t // queries), parts, 1),
        _constants(spec, rows, queries, keys),
        *(rows_of(x) for x in (query, key, value)),
        *into,
        _table(spec),
        call,
        visited,
    )
    if parts > 1:
        merge(call, query, parts, outputs, lses, given)


def backward(
    spec: Spec,
    rows: tuple[Argument, ...],
    gradients: tuple[Argument, ...],
    between: Between,
    plan_rows: int,
    tile: Widths,
    dtable: Tensor | None,
) -> None:
    """Fills the gradients.

    Args:
        rows: of query, key, value, output and the output's gradient.
        gradients: rows of the gradients of query, key and value.
        plan_rows: queries that share one plan.
        tile: its widths.
        dtable: gets the gradient of the table; None = not wanted.
    """
    from alibi_attn.attention.backends.fused.kernels.table_gradients import table_key_kernel, table_query_kernel

    device, (query, key, value, output, grads), (dq, dk, dv) = spec.slopes.device, rows, gradients
    lse, grad_lse, delta, call, visited, visitors = between
    table, heads = _table(spec), spec.batch * spec.num_heads
    (queries, keys), inputs = tile.rows, (query, key, value)
    programs, of_kernel = heads * -(-spec.query_len // queries), _constants(spec, plan_rows, queries, keys)
    arguments = *inputs, output, grads, dq, grad_lse, lse, delta, table, call, visited
    launch(device, table_query_kernel, (programs, 1, 1), of_kernel, *arguments)
    queries, keys = tile.keys
    programs = spec.batch * spec.num_kv_heads * -(-spec.key_len // keys)
    of_kernel = _constants(spec, plan_rows, queries, keys)
    launch(
        device, table_key_kernel, (programs, 1, 1), of_kernel, *inputs, grads, dk, dv, lse, delta, table, call, visitors
    )
    if dtable is not None:
        _launch_diagonals(spec, (*inputs, grads), (lse, delta, table, call), tile.diagonal, dtable)


def _launch_diagonals(
    spec: Spec, rows: tuple[Argument, ...], shared: tuple[Argument, ...], side: int, dtable: Tensor
) -> None:
    from alibi_attn.attention.backends.fused.kernels.table_diagonals import diagonal_kernel, total_kernel

    device, heads = dtable.device, spec.batch * spec.num_heads
    programs = heads * (-(-spec.query_len // side) - (-spec.key_len // side) - 1)
    sums = Space(scratch(programs * 2 * side, device)).at(0, torch.float32)
    of_kernel = constants(D=spec.head_dim, N=side, CAUSAL=spec.causal, PRECISION=precision(), num_stages=2)
    launch(device, diagonal_kernel, (programs, 1, 1), of_kernel, *rows, sums, *shared)
    programs = spec.num_heads * -(-dtable.shape[1] // COLUMNS)
    launch(device, total_kernel, (programs, 1, 1), constants(N=side, WIDTH=COLUMNS), sums, pointer(dtable), *shared[2:])


def _table(spec: Spec) -> Argument:
    assert spec.table is not None
    return grouped(Table, pointer(spec.table), number(spec.table.shape[1]), number(spec.table_first))


def _constants(spec: Spec, rows: int, queries: int, keys: int) -> Constants:
    return constants(
        D=spec.head_dim, BM=queries, BN=keys, ROWS=rows, CAUSAL=spec.causal, PRECISION=precision(), num_stages=2
    )
