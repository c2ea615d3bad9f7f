"""The certificate and the plan of a call on a GPU, from a handful of kernels; nothing is read on the host.

Some three hundred small torch operations, however fast each, keep the host busy for longer than short attention takes.
"""

import math

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.full_tiles import FullTiles
from alibi_attn.attention.backends.fused.launch import (
    in_rows,
    mask_arguments,
    on,
    row_constants,
    strides,
    width_for,
    window_of,
)
from alibi_attn.attention.certificate.bounds import Bounds
from alibi_attn.attention.certificate.constants import KEPT, OUTLIER_CHOICES, OUTLIER_TILES, TILE, VALUE_RATIO
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.certificate.tiles import Tiles
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import first_positions

Spec = AttentionSpec[Tensor]

_WARPS = 4
_PINS, _CHOICES = OUTLIER_TILES, len(OUTLIER_CHOICES)


def planned(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, *, rows: int, shared: bool = False,
    known_norms: Norms | None = None, full_tiles: FullTiles | None = None, certified: bool = True,
) -> tuple[Tiles, Bounds]:  # fmt: skip
    """(the tiles that every `rows` queries visit, the certificate they come from).

    Args:
        value: None = the values are taken to be of like length.
        shared: all query heads of a key head visit the same tiles, those of the widest; for at most TILE queries.
        known_norms: what is known of keys and values; of those that it knows only the nearest are read.
        full_tiles: what the masks say; made here where it is not given and some key may be hidden.
        certified: False = all that the masks allow is visited.
    """
    from alibi_attn.attention.backends.fused.kernels.plan import plan_kernel, shared_plan_kernel

    certified = certified and spec.tolerance > 0 and spec.key_len > 0
    b, h, device = spec.batch, spec.num_heads, query.device
    blocks, n = -(-spec.query_len // TILE), -(-spec.query_len // rows)
    plan = torch.empty((b, h, n, 4), dtype=torch.int32, device=device)
    besides = torch.empty((b, h, n, _PINS), dtype=torch.int32, device=device)
    pins = torch.empty((b, h, _PINS), dtype=torch.int32, device=device)
    weight = torch.empty((b, h), dtype=torch.int32, device=device)
    found = torch.empty((2, b, h, blocks), dtype=torch.int32, device=device)
    first = first_positions(spec, device).contiguous()
    if spec.hides_keys and full_tiles is None:
        full_tiles = FullTiles.of(spec, first)
    reach, chosen, norms = found, pins, None
    if certified:
        reach, chosen, norms = _reach(spec, query, key, value, known_norms, full_tiles, first)
    arguments = {
        "REACH": reach, "CHOSEN": chosen, "FIRST": first, "PLAN": plan, "BESIDES": besides, "PINNED": pins,
        "ALLOWED": plan if full_tiles is None else full_tiles.allowed(),
        "WEIGHT": weight, "FOUND": found, "first_b": 0 if first.numel() == 1 else 1, "window": window_of(spec), "H": h,
        "G": spec.group, "T": spec.query_len, "S": spec.key_len, "TILE": TILE, "CAUSAL": spec.causal,
        "HAS_WINDOW": spec.window is not None, "HAS_ALLOWED": spec.hides_keys, "UNLIMITED": not certified,
    }  # fmt: skip
    if spec.query_len > 0:
        with on(query):
            if shared:
                shared_plan_kernel[(b * spec.num_kv_heads,)](**arguments, num_warps=1)
            else:
                plan_kernel[(b * h,)](**arguments, N=n, ROWS=rows, WIDTH=width_for(n))
    return Tiles(plan, pins, besides, weight, rows, norms), Bounds(found[0], found[1], pins)


def asked_blocks(tiles: Tiles, *, count: int) -> Tensor:
    """[B, H, count, 3] int32, for every tile of keys: first and last block of queries to be asked, and 1 where it is pinned.

    Some blocks in between may not visit the tile; their plan says so.
    """
    from alibi_attn.attention.backends.fused.kernels.plan import asked_kernel

    b, h, n, _ = tiles.plan.shape
    asked = torch.empty((b, h, count, 3), dtype=torch.int32, device=tiles.plan.device)
    if asked.numel() > 0:
        with on(asked):
            asked_kernel[(b * h * -(-count // 64),)](tiles.plan, tiles.pins, asked, n, count, WIDTH=64, BLOCKS=64)
    return asked


def _reach(
    spec: Spec,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    known_norms: Norms | None,
    full_tiles: FullTiles | None,
    first: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(reach [sides, choices, B, H, blocks] int32, tiles with the largest norms [B, K, pins] int32, norms of the tiles).

    With `known_norms` the norms are those of the tiles near the queries only.
    """
    from alibi_attn.attention.backends.fused.kernels.certificate import lengths_kernel, outliers_kernel, reach_kernel

    b, h, kv, device = spec.batch, spec.num_heads, spec.num_kv_heads, query.device
    unknown = value is None
    query, key, value = in_rows(query, key, key if value is None else value)
    tiles, sides = -(-spec.key_len // TILE), 1 if spec.causal else 2
    norms = torch.empty((3, b, kv, tiles), dtype=torch.float32, device=device)
    kappa = torch.empty((sides, _CHOICES, b, kv, tiles), dtype=torch.float32, device=device)
    values = torch.empty((2, b, kv), dtype=torch.float32, device=device)
    chosen = torch.empty((b, kv, _PINS), dtype=torch.int32, device=device)
    reach = torch.empty((sides, _CHOICES, b, h, -(-spec.query_len // TILE)), dtype=torch.int32, device=device)
    slopes = spec.slopes.detach().contiguous()
    right = slopes if spec.right_slopes is None else spec.right_slopes.detach().contiguous()
    before = torch.empty((b, kv, tiles), dtype=torch.int32, device=device) if spec.key_mask is not None else chosen
    known = 0 if known_norms is None else known_norms.keys.shape[-1]
    # The nearest values are measured one by one, also where their tile's norm is known.
    at_the_end = isinstance(spec.query_offset, int) and spec.key_mask is None
    begin = min(known, max(0, min(spec.query_offset, spec.key_len - TILE) - TILE) // TILE) if at_the_end else 0
    each = torch.empty((b, kv, spec.key_len), dtype=torch.float32, device=device)
    told = (norms, norms) if known_norms is None else (known_norms.keys.contiguous(), known_norms.values.contiguous())
    seen = first if full_tiles is None else full_tiles.keys.edges[0].amin(-1)
    tolerance = spec.tolerance if spec.causal else spec.tolerance / 2
    of_keys = (*key.stride()[:3], *value.stride()[:3])
    masks = mask_arguments(spec, first)
    with on(query):
        if begin < tiles:
            lengths_kernel[(b * kv * (tiles - begin),)](
                key, value, masks["MASK"], norms, each, *of_keys, begin, tiles - begin, kv, spec.key_len, tiles,
                HAS_MASK=masks["HAS_MASK"], **row_constants(spec), num_warps=_WARPS,
            )  # fmt: skip
        outliers_kernel[(b * kv,)](
            norms, *told, chosen, kappa, values, before, b * kv, tiles, known, WIDTH=width_for(tiles), BOTH_SIDES=not spec.causal,
            HAS_KNOWN=known > 0, HAS_MASK=masks["HAS_MASK"],
        )  # fmt: skip
        if unknown:
            values.zero_()
        reach_kernel[(b * h * reach.shape[-1],)](
            query, key, each, **masks, SLOPES=slopes, RIGHT=right, FIRST=first, FIRST_SEEN=seen, BEFORE=before, KAPPA=kappa,
            VALUES=values, REACH=reach, **strides("q", "bht", query), **strides("k", "bhs", key),
            slopes_b=h if slopes.ndim == 2 else 0, right_b=h if right.ndim == 2 else 0, first_b=0 if first.numel() == 1 else 1,
            scale=spec.scale, nats_of_tolerance=-math.log(tolerance), ratio=VALUE_RATIO, window=window_of(spec),
            B=b, H=h, G=spec.group, T=spec.query_len, S=spec.key_len, N=tiles, KEPT=KEPT, **row_constants(spec),
            CAUSAL=spec.causal, HAS_RIGHT=spec.right_slopes is not None, HAS_WINDOW=spec.window is not None, num_warps=_WARPS,
        )  # fmt: skip
    return reach, chosen, norms
