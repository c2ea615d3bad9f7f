"""The specification: softmax(scale·q·kᵀ − m·|i − j|)·v as written, on any device and in any dtype; slow and clear.

Memory and time grow with T·S. Every other backend is compared with this one, and this one with a loop over i and j.
Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
"""

import torch
from torch import Tensor

from alibi_attn.attention.backends.protocol import Pairs, Result, Spec, TooSmall
from alibi_attn.attention.call.bias import widest
from alibi_attn.attention.call.dropout import dropped
from alibi_attn.attention.call.reads import FLASH_ATTN, GATES, MASKS, NUMBERED_DROPOUT, PARTS, SPACE
from alibi_attn.attention.call.visibility import per_query_head

name = "reference"
READS = MASKS | PARTS | SPACE | FLASH_ATTN | GATES | NUMBERED_DROPOUT | {"table"}


def formula(spec: Spec, query: Tensor, key: Tensor, value: Tensor, pairs: Pairs) -> Result:
    """(output, lse): scores in fp32 (fp64 for fp64), sums in fp64 if the device has it."""
    scores = scores_of(spec, query, key, pairs)
    # In fp32 a sum that has reached 1 would drop weights below 3e-8, of which a million may follow.
    wide = scores.to(widest(scores))
    weights = dropped(spec, wide.softmax(-1).masked_fill(~pairs.seen, 0.0))
    output = weights @ per_query_head(spec, value.to(wide.dtype))
    return output, wide.logsumexp(-1).to(scores.dtype) if spec.return_lse else None


def scores_of(spec: Spec, query: Tensor, key: Tensor, pairs: Pairs) -> Tensor:
    """[B, H, T, S] in fp32 or fp64: scale·q·kᵀ + bias."""
    work = torch.promote_types(query.dtype, torch.float32)
    scores = spec.scale * (query.to(work) @ per_query_head(spec, key.to(work)).mT)
    return scores.masked_fill(~pairs.seen, 0.0) + pairs.bias


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """It runs every call."""
    return None


def too_small(spec: Spec) -> TooSmall | None:
    """Unused: "auto" never picks it."""
    return None


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """It computes every score and skips nothing."""
