"""Which whole tiles a key mask, segments and a key bias hide, computed by two kernels; nothing is read on the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS, width_for
from alibi_attn.attention.backends.fused.kernels.arguments import Labels
from alibi_attn.attention.backends.fused.launch import NONE, Argument, constants, grouped, launch, number, rows_of
from alibi_attn.attention.backends.fused.space import Plan, allotted
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import in_memory
from alibi_attn.attention.certificate.constants import TILE

Spec = AttentionSpec[Tensor]

_WIDTH = 16


class Hidden(NamedTuple):
    """What the masks of a call hide. R = B rows, or B·H with a key bias, which hides other keys from each head.

    Args:
        allowed_keys: [R, ⌈T / TILE⌉, 2] int32: the masks let TILE queries see no key outside this interval.
        first_seen: [R] int32: the first visible key.
        sums: `sums` of the kernels' Norms; None without a key bias.
    """

    allowed_keys: Argument = NONE
    first_seen: Argument = NONE
    sums: Argument = NONE


def find_full_tiles(spec: Spec, call: Argument, plan: Plan) -> Hidden:
    """Fills the masks' part of a plan: where in the tiles nothing is hidden; `call` is its `Call`."""
    from alibi_attn.attention.backends.fused.kernels.masks import labels_kernel, spread_kernel

    whole, wide, device, is_biased = torch.int32, torch.int64, spec.slopes.device, spec.key_bias is not None
    r, b, tiles, blocks = (
        spec.batch * heads_of_masks(spec),
        spec.batch,
        -(-spec.key_len // TILE),
        -(-spec.query_len // TILE),
    )
    sides = 1 if spec.causal else 2
    least, most, uniform, edges, *of_queries, allowed, first_seen, sums = allotted(
        device, (r * tiles, wide), (r * tiles, wide), (r * tiles, whole), (2 * r * tiles, whole), (b * blocks, wide),
        (b * blocks, wide), (b * blocks, whole), (2 * r * blocks, whole), (r, whole),
        (sides * r * tiles if is_biased else 0, torch.float32),
    )  # fmt: skip
    found = Hidden(allowed, first_seen, sums if is_biased else NONE)
    keys, queries = grouped(Labels, least, most, uniform, edges), grouped(Labels, *of_queries, NONE)
    if (programs := r * tiles + b * blocks) > 0:
        bias = NONE if spec.key_bias is None else rows_of(in_memory(spec.key_bias))
        of_kernel = constants(CAUSAL=spec.causal, num_warps=4 if is_biased else 1)
        launch(device, labels_kernel, (programs, 1, 1), of_kernel, call, keys, queries, bias, found.sums)
    most_tiles, layout = max(tiles, blocks), plan.layout
    if (programs := r * -(-most_tiles // _WIDTH)) > 0:
        of_kernel = constants(
            PARTS=plan.rows // TILE, BIAS_ROWS=PLAN_ROWS, WIDTH=_WIDTH, OF_WIDTH=width_for(most_tiles, most=64)
        )
        full = map(plan.space.at, (layout.full_blocks, layout.full_tiles))
        outputs = allowed, first_seen, *full, number(layout.row)
        launch(device, spread_kernel, (programs, 1, 1), of_kernel, call, keys, queries, *outputs)
    return found


def heads_of_masks(spec: Spec) -> int:
    """How many heads have masks of their own; 0 = nothing hides keys."""
    if spec.key_bias is not None:
        return spec.num_heads
    return 1 if spec.hides_keys else 0
