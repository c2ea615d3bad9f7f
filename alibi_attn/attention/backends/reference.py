"""The specification: softmax(scale·q·kᵀ − m·|i − j|)·v as written, on any device and in any dtype; slow and clear.

Memory and time grow with T·S. Every other backend is compared with this one, and this one with a loop over i and j.
Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
"""

import torch
from torch import Tensor

from alibi_attn.attention.backends.protocol import TooSmall
from alibi_attn.attention.call.bias import score_bias, unshifted_lse, widest
from alibi_attn.attention.call.dropout import dropped
from alibi_attn.attention.call.reads import DROPOUT, FLASH_ATTN, GATES, MASKS, PARTS, SPACE
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import distances, per_query_head, visible
from alibi_attn.attention.operators.finite_numbers import without_bad_keys

name = "reference"
READS = MASKS | PARTS | SPACE | FLASH_ATTN | GATES | DROPOUT | {"table"}


def why_not(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """It runs every call."""
    return None


def too_small(spec: AttentionSpec[Tensor]) -> TooSmall | None:
    """Unused: "auto" never picks it."""
    return None


def visits(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """It computes every score and skips nothing."""


def run(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """(output, lse): scores in fp32 (fp64 for fp64), sums in fp64 if the device has it, rounded once."""
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, query.device)
    seen = visible(spec, distance)
    sees_any = seen.any(-1).expand(spec.batch, spec.num_heads, spec.query_len)
    key, value, poison, _ = without_bad_keys(spec, seen, key, value)
    scores, origin = scores_of(spec, query, key, distance, seen)
    # In fp32 a sum that has reached 1 would drop weights below 3e-8, of which a million may follow.
    wide = scores.to(widest(scores))
    weights = dropped(spec, wide.softmax(-1).masked_fill(~seen, 0.0))
    v = per_query_head(spec, value.to(wide.dtype))
    output = (weights @ v).masked_fill(~sees_any[..., None], 0.0)
    lse = None
    if spec.return_lse:
        lse = unshifted_lse(spec, wide.logsumexp(-1).to(scores.dtype), origin).masked_fill(~sees_any, float("-inf"))
    if poison is not None:
        output = output + poison[..., None]
        lse = None if lse is None else lse + poison
    return output.to(query.dtype), lse


def scores_of(
    spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, distance: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(scores [B, H, T, S], origin of `score_bias`) in fp32 or fp64; −inf where not `seen`, and 0 in rows that see no key.

    Such a row would be all −inf: it passes zeros to softmax, and its result is discarded.
    """
    work = torch.promote_types(query.dtype, torch.float32)
    sees_any = seen.any(-1, keepdim=True)
    q = query.to(work).masked_fill(~sees_any, 0.0)
    k = per_query_head(spec, key.to(work))
    # Hidden keys are never used, forward or backward: the largest numbers would give inf − inf and 0·inf.
    bias, origin = score_bias(spec, distance, seen)
    scores = (spec.scale * (q @ k.mT)).masked_fill(~seen, 0.0) + bias
    return scores.masked_fill(~sees_any, 0.0), origin
