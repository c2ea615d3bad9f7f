"""The certificate and the plan of a call on a GPU, computed by a few kernels; nothing is read on the host.

About three hundred small torch operations would keep the host busy for longer than short attention runs.
"""

import math

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS
from alibi_attn.attention.backends.fused.full_tiles import FullTiles
from alibi_attn.attention.backends.fused.kernels import arguments
from alibi_attn.attention.backends.fused.kernels.arguments import Call, Certificate, Plan
from alibi_attn.attention.backends.fused.launch import call_of, in_rows, on, rows_of, width_for
from alibi_attn.attention.certificate.bounds import Bounds
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES, TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.certificate.tiles import Tiles
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import shown_keys

Spec = AttentionSpec[Tensor]

_WARPS = 4
_CHOICES = len(OUTLIER_CHOICES)


def planned(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, *, rows: int, shared: bool = False,
    known_norms: Norms | None = None, full_tiles: FullTiles | None = None, certified: bool = True,
) -> tuple[Tiles, Bounds]:  # fmt: skip
    """(the tiles that every `rows` queries visit, the certificate they come from).

    Args:
        value: None = the values are assumed to have equal norms.
        shared: all query heads of a key head visit the same tiles, those of the widest; for at most TILE queries.
        known_norms: norms of keys and values; only the nearest of the keys that they cover are read.
        full_tiles: the masks in whole tiles; computed here if missing and some key may be hidden.
        certified: False = visit all keys that the masks allow.
    """
    from alibi_attn.attention.backends.fused.kernels.plan import plan_kernel, shared_plan_kernel

    b, h, device = spec.batch, spec.num_heads, query.device
    blocks, n = -(-spec.query_len // TILE), -(-spec.query_len // rows)
    bands = torch.empty((b, h, n, 4), dtype=torch.int32, device=device)
    beside = torch.empty((b, h, n, OUTLIER_TILES), dtype=torch.int32, device=device)
    outliers = torch.empty((b, h, OUTLIER_TILES), dtype=torch.int32, device=device)
    weight = torch.empty((b, h), dtype=torch.int32, device=device)
    reach = torch.empty((2, b, h, blocks), dtype=torch.int32, device=device)
    call = call_of(spec, device, key_bias=None if full_tiles is None else full_tiles.call.key_bias)
    if full_tiles is None and (spec.hides_keys or spec.key_bias is not None):
        full_tiles = FullTiles.of(spec, call, device)
    certificate, norms = None, None
    allowed = None if full_tiles is None else full_tiles.allowed()
    if certified and spec.tolerance > 0 and spec.key_len > 0:
        certificate, norms = _certificate(spec, query, key, value, known_norms, full_tiles, allowed, call)
    plan = Plan(bands, outliers, beside, weight, reach)
    arguments_of_plan = (certificate, allowed, plan, call)
    if spec.query_len > 0:
        with on(query):
            if shared:
                shared_plan_kernel[(b * spec.num_kv_heads,)](*arguments_of_plan, CAUSAL=spec.causal, num_warps=1)
            else:
                plan_kernel[(b * h,)](*arguments_of_plan, ROWS=rows, WIDTH=width_for(n), CAUSAL=spec.causal)
    return Tiles(bands, outliers, beside, weight, rows, norms), Bounds(reach[0], reach[1], outliers)


def visiting_blocks(tiles: Tiles, *, count: int) -> Tensor:
    """[B, H, count, 3] int32, for every tile of keys: the half-open range of blocks of queries that may visit it, and 1 if it is
    an outlier tile.

    Some blocks in the range may not visit the tile; their bands show it.
    """
    from alibi_attn.attention.backends.fused.kernels.plan import visitors_kernel

    b, h, n, _ = tiles.bands.shape
    candidates = torch.empty((b, h, count, 3), dtype=torch.int32, device=tiles.bands.device)
    if candidates.numel() > 0:
        with on(candidates):
            visitors_kernel[(b * h * -(-count // 64),)](
                tiles.bands, tiles.outlier_tiles, candidates, n, count, WIDTH=64, BLOCKS=64
            )
    return candidates


def _certificate(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, known_norms: Norms | None, full_tiles: FullTiles | None,
    allowed: Tensor | None, call: Call,
) -> tuple[Certificate, Tensor]:  # fmt: skip
    """(reach and outlier tiles, norms of the tiles [3, B, K, tiles]); with `known_norms` those near the queries only."""
    from alibi_attn.attention.backends.fused.kernels.certificate import (
        norms_kernel,
        outliers_kernel,
        reach_kernel,
        tile_sums_kernel,
    )

    b, kv, device = spec.batch, spec.num_kv_heads, query.device
    unknown = value is None
    query, key, value = in_rows(query, key, key if value is None else value)
    tiles, blocks, sides = -(-spec.key_len // TILE), -(-spec.query_len // TILE), 1 if spec.causal else 2
    of_tiles = torch.empty((3, b, kv, tiles), dtype=torch.float32, device=device)
    extremes = torch.empty((2, b, kv), dtype=torch.float32, device=device)
    hidden = spec.key_mask is not None or spec.key_bias is not None
    norms = arguments.Norms(
        tiles=of_tiles,
        each_value=torch.empty((b, kv, spec.key_len), dtype=torch.float32, device=device),
        prefix=torch.empty((sides, _CHOICES, b, kv, tiles), dtype=torch.float32, device=device),
        extremes=extremes,
        latest=None if not hidden else torch.empty((b, kv, tiles), dtype=torch.int32, device=device),
        sums=None if spec.key_bias is None else extremes.new_empty((sides, b, spec.num_heads, tiles)),
    )
    masks = call.masks
    if (shown := shown_keys(spec)) is not None and spec.key_bias is not None:
        # A key that no head of its group may see is not measured.
        masks = masks._replace(keys=shown.unflatten(1, (kv, spec.group)).any(2).view(torch.int8))
    outliers = torch.empty((b, kv, OUTLIER_TILES), dtype=torch.int32, device=device)
    reach = torch.empty((sides, _CHOICES, b, spec.num_heads, blocks), dtype=torch.int32, device=device)
    known = 0 if known_norms is None else known_norms.keys.shape[-1]
    known_of_tiles: tuple[Tensor | None, Tensor | None] = (None, None)
    if known_norms is not None and known > 0:
        known_of_tiles = known_norms.keys.contiguous(), known_norms.values.contiguous()
    # The nearest values are measured one by one, even if their tile's norm is known.
    at_the_end = isinstance(spec.query_offset, int) and spec.key_mask is None
    begin = min(known, max(0, min(spec.query_offset, spec.key_len - TILE) - TILE) // TILE) if at_the_end else 0
    first_seen = None if full_tiles is None or not hidden else full_tiles.edges[0].amin(-1)
    tolerance = spec.tolerance if spec.causal else spec.tolerance / 2
    with on(query):
        if begin < tiles:
            norms_kernel[(b * kv * (tiles - begin),)](
                rows_of(key), rows_of(value), masks, norms, begin, tiles - begin, kv, spec.key_len, D=spec.head_dim,
                OF_HEADS=spec.key_bias is not None, num_warps=_WARPS,
            )  # fmt: skip
        outliers_kernel[(b * kv,)](
            norms, *known_of_tiles, outliers, b * kv, tiles, known, WIDTH=width_for(tiles), BOTH_SIDES=not spec.causal
        )
        if unknown:
            extremes.zero_()
        if spec.key_bias is not None:
            tile_sums_kernel[(b * spec.num_heads * tiles,)](call, norms, CAUSAL=spec.causal, num_warps=1)
        reach_kernel[(b * spec.num_heads * blocks,)](
            rows_of(query), rows_of(key), call, norms, first_seen, allowed if spec.key_bias is not None else None, reach, b,
            -math.log(tolerance), D=spec.head_dim, ROWS=PLAN_ROWS, WIDTH=width_for(tiles), CAUSAL=spec.causal,
            num_warps=_WARPS,
        )  # fmt: skip
    return Certificate(reach, outliers), of_tiles
