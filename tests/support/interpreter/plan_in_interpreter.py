"""What the small kernels before attention write: norms around tiles, orders of heads, full tiles; in the interpreter."""

# mypy: ignore-errors

import numpy as np
import torch
import triton
import triton.language as tl
from attention_cases import Case
from torch import Tensor

from alibi_attn.attention.backends.fused.call import call_of
from alibi_attn.attention.backends.fused.full_tiles import find_full_tiles
from alibi_attn.attention.backends.fused.kernels.arguments import Norms, Plan, Survey
from alibi_attn.attention.backends.fused.kernels.certificate import survey_kernel
from alibi_attn.attention.backends.fused.kernels.plan import octave, order_heads, visitors_kernel
from alibi_attn.attention.backends.fused.plan import empty_plan, plan_in
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES, TILE


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


def full_tiles_of(case: Case) -> tuple[np.ndarray, list, dict[int, tuple[list, list]]]:
    """Returns (hidden pairs [B, T, S], keys allowed to each TILE queries, full tiles and full blocks by rows)."""
    from attention_checks import arguments

    (query, key, value, slopes), options = arguments(case, torch.float32)
    spec = make_spec(query, key, value, slopes, **options)
    hidden = torch.zeros(spec.batch, spec.query_len, spec.key_len, dtype=torch.bool)
    if spec.key_mask is not None:
        hidden |= ~spec.key_mask[:, None]
    if spec.query_segments is not None:
        hidden |= spec.query_segments[:, :, None] != spec.key_segments[:, None]
    found = {rows: _full_tiles(spec, rows) for rows in (64, 128)}
    return hidden.numpy(), found[64][2], {rows: of_rows[:2] for rows, of_rows in found.items()}


def full_tiles_of_long_documents() -> tuple[list, list, list]:
    """Returns the full tiles for blocks of 128 queries, those for tiles, and the keys that 64 queries may see."""
    x = torch.zeros(1, 1, 2560, 8)
    of = torch.tensor([9, 0, 1, 1, 2]).repeat_interleave(512)[None]
    spec = make_spec(x, x, x, segment_ids=of, key_mask=(torch.arange(2560) >= 512)[None])
    return tuple(x[0] for x in _full_tiles(spec, 128))


def _full_tiles(spec: AttentionSpec[Tensor], rows: int) -> tuple[list, list, list]:
    """(the full tiles for blocks of `rows` queries, those for tiles, and the keys that 64 queries may see)."""
    plan = plan_in(empty_plan(spec, rows, torch.device("cpu")), spec, rows)
    allowed = find_full_tiles(spec, call_of(spec, torch.device("cpu")), plan).allowed_keys.value
    blocks, tiles, at = -(-spec.query_len // rows), -(-spec.key_len // TILE), plan.layout
    of_blocks, of_tiles = (
        plan.space.tensor[:, start : start + 2 * count].unflatten(1, (count, 2)).tolist()
        for start, count in ((at.full_blocks, blocks), (at.full_tiles, tiles))
    )
    count = -(-spec.query_len // TILE)
    return of_blocks, of_tiles, allowed[: spec.batch * count * 2].view(spec.batch, count, 2).tolist()


@triton.jit
def _kernel(plan, B, H):
    for bh in range(B * H):
        tl.store(plan.arrived + bh, octave(tl.load(plan.arrived + bh)))
    order_heads(plan, B, H)
