"""Key biases in a form for GPU kernels: in fp32, without losing a digit of their differences.

In a tile whose biases are close to one another, b = base of the tile + rest. A query's scores are relative to the base of a tile
that weighs much for it, and it changes to another base that weighs much more, so a score is off by the rounding of b_j − b_ref,
however large both are. In all other tiles each bias is a pair of numbers, and scores are relative to about the query's largest.
Everything is in units of log2, as scores are.
"""

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS
from alibi_attn.attention.backends.fused.kernels.arguments import KeyBias
from alibi_attn.attention.backends.fused.launch import Argument, constants, grouped, launch, number, rows_of
from alibi_attn.attention.backends.fused.space import allotted
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import TILE

Spec = AttentionSpec[Tensor]


def parts_of(spec: Spec, device: torch.device) -> Argument:
    """Memory for a `KeyBias`; `FullTiles` fills it."""
    b, h, s, tiles = spec.batch, spec.num_heads, spec.key_len, -(-spec.key_len // TILE)
    sizes = b * h * s, 2 * b * h * s, b * h * tiles, b * h * -(-spec.query_len // PLAN_ROWS)
    return grouped(KeyBias, *allotted(device, *((size, torch.float32) for size in sizes)))


def split(spec: Spec, key_bias: Tensor) -> Argument:
    """The `KeyBias` of key_bias [B, H, S], without its references."""
    from alibi_attn.attention.backends.fused.kernels.key_bias import split_kernel

    parts, programs = parts_of(spec, key_bias.device), spec.batch * spec.num_heads * -(-spec.key_len // TILE)
    if programs > 0:
        numbers = number(spec.num_heads), number(spec.key_len)
        launch(key_bias.device, split_kernel, (programs, 1, 1), constants(), rows_of(key_bias), parts, *numbers)
    return parts
