"""Launches the kernels of calls with a table (`kernels/table.py`); `backend.py` plans the tiles that they visit."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.devices import is_large, processors
from alibi_attn.attention.backends.fused.kernels.arguments import Rows, Table
from alibi_attn.attention.backends.fused.launch import (
    NONE,
    Argument,
    constants,
    grouped,
    launch,
    number,
    pointer,
    rows_of,
    tiling,
)
from alibi_attn.attention.backends.fused.space import allotted
from alibi_attn.attention.backends.fused.split_keys import Inputs, Into, memory_of_parts, merge
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import TILE

Spec = AttentionSpec[Tensor]

FEWEST_QUERIES = 16  # of a tile: matrix units multiply no fewer rows
COLUMNS = 256  # of a table's gradient per program


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


def forward(spec: Spec, call: Argument, inputs: Inputs, visited: Argument, rows: int, into: Into) -> None:
    """Fills output and the natural lse, twice; `rows` queries share one plan. Few programs split the keys of few queries."""
    from alibi_attn.attention.backends.fused.kernels.table import table_forward_kernel

    query, (output, lse, given_lse) = inputs[0], into
    (b, h, t, d), device, (queries, keys) = query.shape, query.device, widths(query).rows
    queries = FEWEST_QUERIES if t <= FEWEST_QUERIES else queries
    most = 2 * processors(device) if t <= TILE else 0
    parts = max(1, min(most // (b * h), -(-spec.key_len // (4 * TILE)), 64))
    given = rows_of(output), pointer(lse), pointer(given_lse)
    written, outputs, lses = given, NONE, NONE
    if parts > 1:
        outputs, lses = memory_of_parts(parts, query, lse)
        written = grouped(Rows, outputs, number(h * t * d), number(t * d), number(d)), lses, NONE
    grid, of_kernel = (b * h * -(-t // queries), parts, 1), _tiling(spec, (queries, keys), rows)
    arguments = *map(rows_of, inputs), *written, _table(spec), call, visited, of_kernel
    launch(device, table_forward_kernel, grid, _CONSTANTS, *arguments)
    if parts > 1:
        merge(call, query, parts, outputs, lses, given)


def backward(
    spec: Spec,
    inputs: tuple[Argument, ...],
    gradients: tuple[Argument, ...],
    of_queries: tuple[Argument, Argument, Argument],
    call: Argument,
    tiles: tuple[Argument, Argument],
    plan_rows: int,
    tile: Widths,
    dtable: Tensor | None,
) -> None:
    """Fills the gradients.

    Args:
        inputs: rows of query, key, value, output and the output's gradient.
        gradients: rows of the gradients of query, key and value.
        of_queries: [B, H, T] fp32: lse, its gradient (may be None), and memory for the δ of every query.
        tiles: `Visited` and `Visitors`.
        plan_rows: queries that share one plan.
        tile: its widths.
        dtable: gets the gradient of the table; None = not wanted.
    """
    from alibi_attn.attention.backends.fused.kernels.table_diagonals import diagonal_kernel, total_kernel
    from alibi_attn.attention.backends.fused.kernels.table_gradients import table_key_kernel, table_query_kernel

    device, table, heads = spec.slopes.device, _table(spec), spec.batch * spec.num_heads
    (query, key, value, output, grads), (dq, dk, dv), (lse, grad_lse, delta) = inputs, gradients, of_queries
    visited, visitors = tiles

    def run(kernel: Any, programs: int, shape: tuple[int, int], *arguments: Argument) -> None:
        launch(device, kernel, (programs, 1, 1), _CONSTANTS, *arguments, _tiling(spec, shape, plan_rows))

    of_query, of_key = (dq, grad_lse, lse, delta, table, call, visited), (dk, dv, lse, delta, table, call, visitors)
    programs = heads * -(-spec.query_len // tile.rows[0])
    run(table_query_kernel, programs, tile.rows, query, key, value, output, grads, *of_query)
    programs = spec.batch * spec.num_kv_heads * -(-spec.key_len // tile.keys[1])
    run(table_key_kernel, programs, tile.keys, query, key, value, grads, *of_key)
    if dtable is None:
        return
    side = tile.diagonal
    programs = heads * (-(-spec.query_len // side) - (-spec.key_len // side) - 1)
    (sums,) = allotted(device, (programs * 2 * side, torch.float32))
    run(diagonal_kernel, programs, (side, side), query, key, value, grads, sums, lse, delta, table, call)
    programs, of_kernel = spec.num_heads * -(-dtable.shape[1] // COLUMNS), constants(N=side, WIDTH=COLUMNS)
    launch(device, total_kernel, (programs, 1, 1), of_kernel, sums, pointer(dtable), table, call)


_CONSTANTS = constants(num_stages=2)


def _table(spec: Spec) -> Argument:
    assert spec.table is not None
    return grouped(Table, pointer(spec.table), number(spec.table.shape[1]), number(spec.table_first))


def _tiling(spec: Spec, shape: tuple[int, int], rows: int) -> Argument:
    return tiling(spec.head_dim, spec.causal, shape, rows)
