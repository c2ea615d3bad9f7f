"""What the small kernels before attention write: norms around tiles, and orders of heads; runs in the interpreter's process."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.arguments import Norms, Plan, Survey
from alibi_attn.attention.backends.fused.kernels.certificate import survey_kernel
from alibi_attn.attention.backends.fused.kernels.plan import octave, order_heads, visitors_kernel
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES


def survey_of(norms: torch.Tensor, *, span: int) -> tuple[torch.Tensor, ...]:
    """The Survey of norms [3, heads, tiles], for both sides, by programs of `span` tiles; longest [2, CHOICES, heads, tiles]."""
    _, heads, tiles = norms.shape
    found = Survey(
        torch.empty(2, len(OUTLIER_CHOICES), heads, tiles),
        torch.empty(heads, tiles, dtype=torch.int32),
        torch.empty(heads, OUTLIER_TILES, dtype=torch.int32),
        torch.empty(2, heads),
    )
    given, grid = Norms(norms, None, None, None, 0), (heads * -(-tiles // span),)
    survey_kernel[grid](given, found, heads, tiles, WIDTH=16, SPAN=span, BOTH_SIDES=True)
    return tuple(found)


def orders_of(weights: list[list[int]], group: int) -> tuple[list[int], list[int], list[int]]:
    """(forward's order of the heads, backward's, backward's of the key heads) for weights [B, H]."""
    weight = torch.tensor(weights, dtype=torch.int32)
    b, h = weight.shape
    forward, backward, of_keys = (torch.full((n,), -1, dtype=torch.int32) for n in (b * h, b * h, b * h // group))
    bands, outliers = torch.zeros(b, 4 * h, dtype=torch.int32), torch.full((4 * b * h,), -1, dtype=torch.int32)
    # Every part of a sequence is 4·H numbers after the one of the sequence before.
    wide = torch.zeros(b, 4 * h, dtype=torch.int32)
    wide[:, :h] = weight
    candidates = torch.empty(b, h, 1, 3, dtype=torch.int32)
    for order in (forward, backward):
        plan = Plan(bands, outliers, None, wide, 4 * h, None, order, weight.flatten())
        if order is forward:
            _kernel[(1,)](plan, b, h)
        else:
            visitors_kernel[(b * h,)](plan, candidates, of_keys, b, h, group, 1, 1, WIDTH=16, BLOCKS=64)
    return forward.tolist(), backward.tolist(), of_keys.tolist()


@triton.jit
def _kernel(plan, B, H):
    for bh in range(B * H):
        tl.store(plan.arrived + bh, octave(tl.load(plan.arrived + bh)))
    order_heads(plan, B, H)
