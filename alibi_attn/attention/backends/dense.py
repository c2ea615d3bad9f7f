"""torch's scaled_dot_product_attention with the bias as its mask: for short sequences, on any device.

Memory and time grow with T·S, as in hand-written ALiBi; for short input nothing is faster.
"""

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn.attention.backends.protocol import FEW_QUERIES, Pairs, Result, Spec, TooSmall
from alibi_attn.attention.call.dropout import dropped
from alibi_attn.attention.call.reads import FLASH_ATTN, GATES, MASKS, NUMBERED_DROPOUT, PARTS, SPACE
from alibi_attn.attention.call.transforms import is_traced, may_read, transforms
from alibi_attn.attention.call.visibility import per_query_head
from alibi_attn.attention.certificate.norms import has_huge_scores

name = "dense"
READS = MASKS | PARTS | SPACE | FLASH_ATTN | GATES | NUMBERED_DROPOUT | {"table"}

FEW_KEYS = 8192  # keys of one head that are converted to fp32 at a time, and that torch's fused function may add up
PART = 256  # keys whose weighted values are added in fp32 at once


def formula(spec: Spec, query: Tensor, key: Tensor, value: Tensor, pairs: Pairs) -> Result:
    """(output, lse): by torch's function, or from scores in memory where that has no lse, no dropout, or is wrong."""
    if query.device.type != "cpu" and query.dtype in (torch.float16, torch.bfloat16):
        # On other devices a mask must have query's dtype, and a distance does not fit into 8 or 11 bits.
        query, key, value = query.float(), key.float(), value.float()
    if spec.return_lse or spec.dropout_p > 0 or not pairs.are_finite or not _fits_torch(spec, query, key):
        return _from_scores(spec, query, key, value, pairs)
    # The query heads of one key head become rows, so keys are not copied. Symbolic lengths cannot be folded.
    side = 1 if torch.compiler.is_exporting() else spec.group
    rows = pairs.bias.expand(spec.batch, spec.num_heads, -1, -1).unflatten(1, (-1, side)).flatten(2, 3)
    output = functional.scaled_dot_product_attention(
        query.unflatten(1, (-1, side)).flatten(2, 3),
        key if side == spec.group else per_query_head(spec, key),
        value if side == spec.group else per_query_head(spec, value),
        attn_mask=rows,
        scale=spec.scale,
    )
    return output.unflatten(2, (side, -1)).flatten(1, 2), None


def _from_scores(spec: Spec, query: Tensor, key: Tensor, value: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
    work = torch.promote_types(query.dtype, torch.float32)
    key, value = per_query_head(spec, key), per_query_head(spec, value)
    scores = spec.scale * (query.to(work) @ key.to(work).mT)
    scores = (scores if pairs.are_finite else scores.masked_fill(~pairs.seen, 0.0)) + pairs.bias
    weights = scores.softmax(-1)
    kept = dropped(spec, weights if pairs.are_finite else weights.masked_fill(~pairs.seen, 0.0))
    output = weighted(kept, value.to(work)) / weights.sum(-1, keepdim=True)
    return output, scores.logsumexp(-1) if spec.return_lse else None


def _fits_torch(spec: Spec, query: Tensor, key: Tensor) -> bool:
    """Whether torch's function is right: not for many keys, under vmap, or for gradients of huge scores (read only if free)."""
    many_keys = not is_traced() and spec.key_len > FEW_KEYS and query.device.type == "cpu"
    if many_keys or "Vmap" in transforms():
        return False
    has_gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    return not (has_gradients and may_read(query, key) and has_huge_scores(spec.scale, query, key))


def weighted(weights: Tensor, value: Tensor) -> Tensor:
    """weights @ value, adding at most PART keys at a time: a sum in fp32 that has reached 1/2 drops weights below 3e-8.

    For the same reason torch's softmax does not add up to 1 where one of many weights is large: divide by its sum.
    """
    keys = value.shape[-2]
    if is_traced() or keys <= PART:  # a number of parts would be a guard
        return weights @ value
    if weights.device.type == "cpu" and weights.shape[-2] > FEW_QUERIES:
        parts = zip(weights.split(PART, -1), value.split(PART, -2), strict=True)
        return torch.stack([of_part @ values for of_part, values in parts]).sum(0)
    whole = keys // PART * PART
    of_parts = weights[..., :whole].unflatten(-1, (-1, PART)).movedim(-2, -3)
    summed = (of_parts @ value[..., :whole, :].unflatten(-2, (-1, PART))).sum(-3)
    return summed + weights[..., whole:] @ value[..., whole:, :]


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Runs everywhere."""
    return None


def too_small(spec: Spec) -> TooSmall | None:
    """None: this backend is for small calls."""
    return None


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """It computes every score and skips nothing."""
