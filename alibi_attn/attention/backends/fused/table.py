"""Launches the kernels that only calls with a table have; `backend.py` plans the tiles that they visit."""

from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.devices import is_large, processors
from alibi_attn.attention.backends.fused.kernels.arguments import Rows
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
    from alibi_attn.attention.backends.fused.kernels.forward import table_forward_kernel

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
    grid, of_kernel = (b * h * -(-t // queries), parts, 1), tiling(spec.head_dim, spec.causal, (queries, keys), rows)
    arguments = *map(rows_of, inputs), *written, call, visited, of_kernel
    launch(device, table_forward_kernel, grid, _CONSTANTS, *arguments)
    if parts > 1:
        merge(call, query, parts, outputs, lses, given)


def add_up(
    spec: Spec,
    rows: tuple[Argument, ...],
    of_queries: tuple[Argument, Argument],
    call: Argument,
    plan_rows: int,
    side: int,
    dtable: Tensor,
) -> None:
    """Fills the gradient of the table.

    Args:
        rows: of query, key, value and the output's gradient.
        of_queries: lse and δ of every query, as backward has them.
        plan_rows: queries that share one plan.
        side: queries and keys of a tile.
    """
    from alibi_attn.attention.backends.fused.kernels.table_diagonals import diagonal_kernel, total_kernel

    device, heads = spec.slopes.device, spec.batch * spec.num_heads
    programs = heads * (-(-spec.query_len // side) - (-spec.key_len // side) - 1)
    (sums,) = allotted(device, (programs * 2 * side, torch.float32))
    of_kernel = tiling(spec.head_dim, spec.causal, (side, side), plan_rows)
    launch(device, diagonal_kernel, (programs, 1, 1), _CONSTANTS, *rows, sums, *of_queries, call, of_kernel)
    programs, named = spec.num_heads * -(-dtable.shape[1] // COLUMNS), constants(N=side, WIDTH=COLUMNS)
    launch(device, total_kernel, (programs, 1, 1), named, sums, pointer(dtable), call)


_CONSTANTS = constants(num_stages=2)
