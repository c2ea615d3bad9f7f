"""The certificate and the plan of a call on a GPU, computed by two kernels; nothing is read on the host.

About three hundred small torch operations would keep the host busy for longer than short attention runs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.call import call_of
from alibi_attn.attention.backends.fused.configs import PLAN_ROWS, width_for
from alibi_attn.attention.backends.fused.full_tiles import FullTiles, heads_of_masks
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
from alibi_attn.attention.backends.fused.space import Plan, Space, layout_of, starts
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.bounds import Bounds
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES, TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.certificate.tiles import Tiles

Spec = AttentionSpec[Tensor]

_CHOICES = len(OUTLIER_CHOICES)


class _Scratch(NamedTuple):
    """The first word of each part of a plan's scratch memory, in fp32 or int32; see `arguments.py`."""

    norms: int
    each_value: int
    sums: int
    reach: int
    outliers: int
    arrived: int
    order: int
    plan_reach: int
    allowance: int
    longest: int
    latest: int
    key_outliers: int
    of_values: int
    costs: int
    online: int
    end: int

    @classmethod
    def of(cls, spec: Spec) -> "_Scratch":
        b, h, k, sides = spec.batch, spec.num_heads, spec.num_kv_heads, 1 if spec.causal else 2
        tiles, blocks = -(-spec.key_len // TILE), -(-spec.query_len // TILE)
        return cls(
            *starts(
                3 * b * k * tiles,
                b * k * tiles * TILE,
                0 if spec.key_bias is None else sides * b * h * tiles,
                sides * _CHOICES * b * h * blocks,
                b * h * OUTLIER_TILES,
                b * h + 1,
                b * h,
                2 * b * h * blocks,
                b * h * blocks,
                sides * _CHOICES * b * k * tiles,
                b * k * tiles,
                b * k * OUTLIER_TILES,
                2 * b * k,
                2 * b * h * _CHOICES,
                b * h * blocks,
            )
        )


def planned(
    spec: Spec,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    rows: int,
    shared: bool = False,
    known_norms: Norms | None = None,
    certified: bool = True,
    gradients: bool = True,
) -> tuple[Plan, Bounds]:
    """(the plan, the certificate that it comes from); arguments as for `make_plan`."""
    plan = make_plan(
        spec,
        call_of(spec, query.device),
        query,
        key,
        value,
        rows=rows,
        shared=shared,
        known_norms=known_norms,
        certified=certified,
        gradients=gradients,
        with_reach=True,
    )
    assert plan.scratch is not None
    at, blocks = _Scratch.of(spec).plan_reach, -(-spec.query_len // TILE)
    count = spec.batch * spec.num_heads * blocks
    reach = plan.scratch[at : at + 2 * count].view(2, spec.batch, spec.num_heads, blocks)
    return plan, Bounds(reach[0], reach[1], plan.outlier_tiles)


def empty_plan(spec: Spec, rows: int, device: torch.device) -> Tensor:
    """Memory for the plan of every `rows` queries, [B, row] int32."""
    layout = layout_of(spec.num_heads, -(-spec.query_len // rows), spec.key_len, heads_of_masks(spec))
    return torch.empty((spec.batch, layout.row), dtype=torch.int32, device=device)


def make_plan(
    spec: Spec,
    call: Argument,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    rows: int,
    shared: bool = False,
    known_norms: Norms | None = None,
    certified: bool = True,
    gradients: bool = True,
    with_reach: bool = False,
    into: Tensor | None = None,
) -> Plan:
    """The tiles that every `rows` queries visit.

    Args:
        call: its `Call`.
        value: None = the values are assumed to have equal norms.
        shared: all query heads of a key head visit the same tiles, those of the widest; for at most TILE queries.
        known_norms: norms of keys and values; only the nearest of the keys that they cover are read.
        certified: False = visit all keys that the masks allow.
        gradients: False = the key rule of `certificate/constants.py` does not apply: without gradients, the limit of a query is
            enough, and up to an eighth fewer keys are visited.
        with_reach: also write the reach of every TILE queries into the scratch memory.
        into: the plan's tensor, of `empty_plan`; None = scratch memory.
    """
    device, at, heads = query.device, _Scratch.of(spec), heads_of_masks(spec)
    memory = scratch(at.end, device)
    space = Space(memory)
    layout = layout_of(spec.num_heads, -(-spec.query_len // rows), spec.key_len, heads)
    tensor = scratch((spec.batch, layout.row), device) if into is None else into
    plan = Plan(tensor, layout, spec.num_heads, rows, scratch=memory)
    if spec.query_len == 0:
        return plan
    full_tiles = None
    if heads > 0:
        sums = NONE if spec.key_bias is None else space.at(at.sums, torch.float32)
        full_tiles = FullTiles(spec, call, device, sums)
        full_tiles.spread(plan)
    allowed = NONE if full_tiles is None else full_tiles.allowed_keys
    is_certified = certified and spec.table is None and spec.tolerance > 0 and spec.key_len > 0
    if is_certified and not shared:
        plan.order = space.at(at.order)
    of_plan = grouped(
        arguments.Plan,
        plan.space.at(layout.bands),
        plan.space.at(layout.outliers),
        plan.space.at(layout.beside),
        plan.space.at(layout.weight),
        number(layout.row),
        space.at(at.plan_reach) if with_reach else NONE,
        plan.order,
        space.at(at.arrived),
    )
    if is_certified:
        plan.norms = space.at(at.norms, torch.float32)
        plan.allowance, plan.online = space.at(at.allowance, torch.float32), space.at(at.online)
        _certify(
            spec, call, query, key, value, known_norms, full_tiles, of_plan, space,
            shared=shared, rows=rows, gradients=gradients,
        )  # fmt: skip
        return plan
    from alibi_attn.attention.backends.fused.kernels.plan import plan_kernel

    programs = spec.batch * (spec.num_kv_heads if shared else spec.num_heads)
    of_kernel = constants(
        ROWS=rows, WIDTH=width_for(-(-spec.query_len // rows)), CAUSAL=spec.causal, SHARED=shared, num_warps=1
    )
    launch(device, plan_kernel, (programs, 1, 1), of_kernel, allowed, of_plan, call)
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
        arguments.Plan,
        bands,
        at(layout.outliers),
        NONE,
        at(layout.weight),
        number(layout.row),
        NONE,
        order,
        NONE,
    )
    launch(
        tiles.space.tensor.device, visitors_kernel, (spec.batch * spec.num_heads * -(-key_tiles // 16), 1, 1),
        constants(WIDTH=16, BLOCKS=64), plan, candidates, key_order, number(spec.batch), number(spec.num_heads),
        one_or_more(spec.group), number(blocks), number(key_tiles),
    )  # fmt: skip


def _certify(
    spec: Spec,
    call: Argument,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    known_norms: Norms | None,
    full_tiles: FullTiles | None,
    plan: Argument,
    space: Space,
    *,
    shared: bool,
    rows: int,
    gradients: bool,
) -> None:
    """Fills the plan; with `known_norms` only the norms near the queries are measured."""
    from alibi_attn.attention.backends.fused.kernels.certificate import norms_kernel, survey_kernel
    from alibi_attn.attention.backends.fused.kernels.reach import reach_kernel

    b, kv, at = spec.batch, spec.num_kv_heads, _Scratch.of(spec)
    query, key, *values = in_rows(query, key, *([] if value is None else [value]))
    tiles, blocks = -(-spec.key_len // TILE), -(-spec.query_len // TILE)
    known = 0 if known_norms is None else known_norms.keys.shape[-1]
    known_keys = known_values = NONE
    if known_norms is not None and known > 0:
        known_keys = pointer(known_norms.keys.contiguous())
        known_values = NONE if value is None else pointer(known_norms.values.contiguous())
    norms = grouped(
        arguments.Norms,
        space.at(at.norms, torch.float32),
        space.at(at.each_value, torch.float32),
        known_keys,
        known_values,
        number(known),
        NONE if spec.key_bias is None else space.at(at.sums, torch.float32),
    )
    certificate = grouped(
        arguments.Certificate,
        space.at(at.reach),
        space.at(at.outliers),
        space.at(at.allowance, torch.float32),
        space.at(at.costs, torch.int64),
        space.at(at.online),
    )
    # The nearest values are measured one by one, even if their tile's norm is known. Some tile is always measured: its program
    # also clears counters.
    begin = 0
    if isinstance(spec.query_offset, int) and spec.key_mask is None:
        begin = min(known, max(0, min(spec.query_offset, (tiles - 2) * TILE) - TILE) // TILE, tiles - 1)
    # If a tensor has the position, but all norms are known, the kernel finds the tiles near the queries.
    is_near = isinstance(spec.query_offset, Tensor) and spec.key_mask is None and known == tiles
    measured = min(tiles, blocks + 3) if is_near else tiles - begin
    hidden = spec.key_mask is not None or spec.key_bias is not None
    first_seen = full_tiles.first_seen if full_tiles is not None and hidden else NONE
    allowed = NONE if full_tiles is None else full_tiles.allowed_keys
    tolerance = spec.tolerance if spec.causal else spec.tolerance / 2
    width = width_for(tiles, most=1024)
    of_norms = constants(D=spec.head_dim, VALUES=value is not None, NEAR=is_near)
    of_reach = constants(
        D=spec.head_dim,
        ROWS=rows,
        BIAS_ROWS=PLAN_ROWS,
        WIDTH=width if shared or spec.key_bias is not None else 16,  # otherwise unused
        PLAN_WIDTH=width_for(-(-spec.query_len // rows)),
        CAUSAL=spec.causal,
        HIDDEN=hidden,
        SHARED=shared,
        KEY_RULE=gradients,
    )
    keys, surveyed = rows_of(key), NONE
    launch(
        query.device,
        norms_kernel,
        (b * kv * measured, 1, 1),
        of_norms,
        keys,
        rows_of(values[0]) if values else keys,
        call,
        norms,
        space.at(at.arrived),
        space.at(at.costs, torch.int64),
        number(begin),
        number(measured),
    )
    if not shared:
        surveyed = grouped(
            arguments.Survey,
            space.at(at.longest, torch.float32),
            space.at(at.latest),
            space.at(at.key_outliers),
            space.at(at.of_values, torch.float32),
        )
        span = min(width, 64)
        of_survey, grid = (
            constants(WIDTH=width, SPAN=span, BOTH_SIDES=not spec.causal),
            (b * kv * -(-tiles // span), 1, 1),
        )
        launch(query.device, survey_kernel, grid, of_survey, norms, surveyed, number(b * kv), number(tiles))
    launch(
        query.device,
        reach_kernel,
        (b * spec.num_heads * blocks, 1, 1),
        of_reach,
        rows_of(query),
        keys,
        call,
        norms,
        surveyed,
        first_seen,
        allowed,
        certificate,
        plan,
        real(-math.log(tolerance)),
    )
