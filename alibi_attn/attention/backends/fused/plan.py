"""The certificate and the plan of a call on a GPU, computed by two kernels; nothing is read on the host.

About three hundred small torch operations would keep the host busy for longer than short attention runs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.call import call_of
from alibi_attn.attention.backends.fused.configs import PLAN_ROWS, width_for
from alibi_attn.attention.backends.fused.full_tiles import Hidden, find_full_tiles, heads_of_masks
from alibi_attn.attention.backends.fused.kernels import arguments
from alibi_attn.attention.backends.fused.launch import (
    NONE,
    Argument,
    constants,
    grouped,
    in_rows,
    launch,
    number,
    one_or_more,
    pointer,
    real,
    rows_of,
    scratch,
)
from alibi_attn.attention.backends.fused.space import Plan, allotted, layout_of
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.bounds import Bounds
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES, TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.certificate.tiles import Tiles

Spec = AttentionSpec[Tensor]

_CHOICES = len(OUTLIER_CHOICES)


class How(NamedTuple):
    """How to plan.

    Args:
        rows: queries that visit the same tiles.
        shared: all query heads of a key head visit the same tiles, those of the widest; for at most TILE queries.
        known_norms: norms of keys and values; only the nearest of the keys that they cover are read.
        certified: False = visit all keys that the masks allow.
        gradients: False = the key rule of `certificate/constants.py` does not apply: without gradients, the limit of a query is
            enough, and up to an eighth fewer keys are visited.
    """

    rows: int
    shared: bool = False
    known_norms: Norms | None = None
    certified: bool = True
    gradients: bool = True


def planned(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, how: How) -> tuple[Plan, Bounds]:
    """(the plan, the certificate that it comes from); arguments as for `make_plan`."""
    shape = 2, spec.batch, spec.num_heads, -(-spec.query_len // TILE)
    reach = torch.empty(shape, dtype=torch.int32, device=query.device)
    plan = make_plan(spec, call_of(spec, query.device), query, key, value, how, reach=reach)
    return plan, Bounds(reach[0], reach[1], plan.outlier_tiles)


def empty_plan(spec: Spec, rows: int, device: torch.device) -> Tensor:
    """Memory for the plan of every `rows` queries, [B, row] int32."""
    layout = layout_of(spec.num_heads, -(-spec.query_len // rows), spec.key_len, heads_of_masks(spec))
    return torch.empty((spec.batch, layout.row), dtype=torch.int32, device=device)


def make_plan(
    spec: Spec, call: Argument, query: Tensor, key: Tensor, value: Tensor | None, how: How, *, into: Tensor | None = None,
    reach: Tensor | None = None,
) -> Plan:  # fmt: skip
    """The tiles that every `how.rows` queries visit.

    Args:
        call: its `Call`.
        value: None = the values are assumed to have equal norms.
        into: the plan's tensor, of `empty_plan`; None = scratch memory.
        reach: [2, B, H, ⌈T / TILE⌉] int32; gets the reach of every TILE queries.
    """
    from alibi_attn.attention.backends.fused.kernels.plan import plan_kernel

    device, heads, rows = query.device, heads_of_masks(spec), how.rows
    layout = layout_of(spec.num_heads, -(-spec.query_len // rows), spec.key_len, heads)
    plan = Plan(scratch((spec.batch, layout.row), device) if into is None else into, layout, spec.num_heads, rows)
    if spec.query_len == 0:
        return plan
    hidden = find_full_tiles(spec, call, plan) if heads > 0 else Hidden()
    is_certified = how.certified and spec.table is None and spec.tolerance > 0 and spec.key_len > 0
    count = spec.batch * spec.num_heads
    arrived, order = allotted(device, (count + 1, torch.int32), (count, torch.int32))
    if is_certified and not how.shared:
        plan.order = order
    at = plan.space.at
    of_plan = grouped(
        arguments.Plan, at(layout.bands), at(layout.outliers), at(layout.beside), at(layout.weight), number(layout.row),
        pointer(reach), plan.order, arrived,
    )  # fmt: skip
    if is_certified:
        plan.norms, plan.allowance, plan.online = _certify(spec, call, query, key, value, how, hidden, of_plan, arrived)
        return plan
    programs = spec.batch * (spec.num_kv_heads if how.shared else spec.num_heads)
    of_kernel = constants(
        ROWS=rows, WIDTH=width_for(-(-spec.query_len // rows)), CAUSAL=spec.causal, SHARED=how.shared, num_warps=1
    )
    launch(device, plan_kernel, (programs, 1, 1), of_kernel, hidden.allowed_keys, of_plan, call)
    return plan


def plan_in(tensor: Tensor, spec: Spec, rows: int) -> Plan:
    """The plan that `make_plan` wrote to a tensor."""
    layout = layout_of(spec.num_heads, -(-spec.query_len // rows), spec.key_len, heads_of_masks(spec))
    return Plan(tensor, layout, spec.num_heads, rows)


def measured_tiles(spec: Spec, tiles: Plan) -> Tiles:
    """The tiles that every TILE queries visit in backward, from a plan that forward has completed."""
    parts, blocks = tiles.rows // TILE, -(-spec.query_len // TILE)
    beside = tiles.beside.repeat_interleave(parts, 2)[:, :, :blocks]
    return Tiles(tiles.measured[:, :, :blocks], tiles.outlier_tiles, beside, tiles.weight, TILE)


def find_visitors(
    spec: Spec, tiles: Plan, bands: Argument, unit: int, order: Argument, candidates: Argument, key_order: Argument
) -> None:
    """Fills `candidates` of Visitors, and the orders of heads and of key heads; `bands` has a block for `unit` queries."""
    from alibi_attn.attention.backends.fused.kernels.plan import visitors_kernel

    at, layout, key_tiles = tiles.space.at, tiles.layout, -(-spec.key_len // TILE)
    blocks = -(-spec.query_len // tiles.rows) * (tiles.rows // unit)
    plan = grouped(
        arguments.Plan, bands, at(layout.outliers), NONE, at(layout.weight), number(layout.row), NONE, order, NONE
    )
    launch(
        tiles.space.tensor.device, visitors_kernel, (spec.batch * spec.num_heads * -(-key_tiles // 16), 1, 1),
        constants(WIDTH=16, BLOCKS=64), plan, candidates, key_order, number(spec.batch), number(spec.num_heads),
        one_or_more(spec.group), number(blocks), number(key_tiles),
    )  # fmt: skip


def _certify(
    spec: Spec, call: Argument, query: Tensor, key: Tensor, value: Tensor | None, how: How, hidden: Hidden, plan: Argument,
    arrived: Argument,
) -> tuple[Argument, Argument, Argument]:  # fmt: skip
    """Fills the plan; with known norms only the norms near the queries are measured. Returns `norms`, `allowance`, `online`."""
    from alibi_attn.attention.backends.fused.kernels.certificate import norms_kernel, survey_kernel
    from alibi_attn.attention.backends.fused.kernels.reach import reach_kernel

    device, real_numbers, whole = query.device, torch.float32, torch.int32
    sides, of_keys, of_heads = (1 if spec.causal else 2), spec.batch * spec.num_kv_heads, spec.batch * spec.num_heads
    tiles, blocks = -(-spec.key_len // TILE), -(-spec.query_len // TILE)
    of_tiles, each_value, reach, outliers, allowance, costs, online, *survey = allotted(
        device, (3 * of_keys * tiles, real_numbers), (of_keys * tiles * TILE, real_numbers),
        (sides * _CHOICES * of_heads * blocks, whole), (of_heads * OUTLIER_TILES, whole), (of_heads * blocks, real_numbers),
        (of_heads * _CHOICES, torch.int64), (of_heads * blocks, whole), (sides * _CHOICES * of_keys * tiles, real_numbers),
        (of_keys * tiles, whole), (of_keys * OUTLIER_TILES, whole), (2 * of_keys, real_numbers),
    )  # fmt: skip
    query, key, *values = in_rows(query, key, *([] if value is None else [value]))
    keys, known, known_keys, known_values = rows_of(key), 0, NONE, NONE
    if how.known_norms is not None and how.known_norms.keys.shape[-1] > 0:
        known, known_keys = how.known_norms.keys.shape[-1], pointer(how.known_norms.keys.contiguous())
        known_values = NONE if value is None else pointer(how.known_norms.values.contiguous())
    norms = grouped(arguments.Norms, of_tiles, each_value, known_keys, known_values, number(known), hidden.sums)
    # The nearest values are measured one by one, even if their tile's norm is known. Some tile is always measured: its program
    # also clears counters.
    begin = 0
    if isinstance(spec.query_offset, int) and spec.key_mask is None:
        begin = min(known, max(0, min(spec.query_offset, (tiles - 2) * TILE) - TILE) // TILE, tiles - 1)
    # If a tensor has the position, but all norms are known, the kernel finds the tiles near the queries.
    is_near = isinstance(spec.query_offset, Tensor) and spec.key_mask is None and known == tiles
    measured = min(tiles, blocks + 3) if is_near else tiles - begin
    of_kernel = constants(D=spec.head_dim, VALUES=value is not None, NEAR=is_near)
    inputs = keys, rows_of(values[0]) if values else keys, call, norms, arrived, costs, number(begin), number(measured)
    launch(device, norms_kernel, (of_keys * measured, 1, 1), of_kernel, *inputs)
    width, surveyed = width_for(tiles, most=1024), NONE
    if not how.shared:
        surveyed, span = grouped(arguments.Survey, *survey), min(width, 64)
        grid, of_kernel = (
            (of_keys * -(-tiles // span), 1, 1),
            constants(WIDTH=width, SPAN=span, BOTH_SIDES=not spec.causal),
        )
        launch(device, survey_kernel, grid, of_kernel, norms, surveyed, number(of_keys), number(tiles))
    is_biased = spec.key_bias is not None
    hides = is_biased or spec.key_mask is not None
    of_kernel = constants(
        D=spec.head_dim,
        ROWS=how.rows,
        BIAS_ROWS=PLAN_ROWS,
        WIDTH=width if how.shared or is_biased else 16,  # otherwise unused
        PLAN_WIDTH=width_for(-(-spec.query_len // how.rows)),
        CAUSAL=spec.causal,
        HIDDEN=hides,
        SHARED=how.shared,
        KEY_RULE=how.gradients,
    )
    launch(
        device, reach_kernel, (of_heads * blocks, 1, 1), of_kernel, rows_of(query), keys, call, norms, surveyed,
        hidden.first_seen if hides else NONE, hidden.allowed_keys,
        grouped(arguments.Certificate, reach, outliers, allowance, costs, online), plan,
        real(-math.log(spec.tolerance if spec.causal else spec.tolerance / 2)),
    )  # fmt: skip
    return of_tiles, allowance, online
