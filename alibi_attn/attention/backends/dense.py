"""torch's scaled_dot_product_attention with the bias as its mask: for short sequences, on any device.

Memory and time grow with T·S, as in hand-written ALiBi; for short input nothing is faster.
"""

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn.attention.backends.protocol import FEW_QUERIES, TooSmall
from alibi_attn.attention.call.bias import score_bias, unshifted_lse
from alibi_attn.attention.call.dropout import dropped
from alibi_attn.attention.call.reads import DROPOUT, FLASH_ATTN, GATES, MASKS, PARTS, SPACE
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import is_traced, may_read, transforms
from alibi_attn.attention.call.visibility import distances, may_see_nothing, per_query_head, visible
from alibi_attn.attention.certificate.norms import has_huge_scores
from alibi_attn.attention.operators.finite_numbers import MODERATE_SCALE, are_moderate, without_bad_keys

name = "dense"
READS = MASKS | PARTS | SPACE | FLASH_ATTN | GATES | DROPOUT | {"table"}

FEW_KEYS = 8192  # keys of one head that are converted to fp32 at a time, and that torch's fused function may add up
PART = 256  # keys whose weighted values are added in fp32 at once


def why_not(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Runs everywhere."""
    return None


def too_small(spec: AttentionSpec[Tensor]) -> TooSmall | None:
    """None: this backend is for small calls."""
    return None


def visits(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """It computes every score and skips nothing."""


def run(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """(output, lse). With lse, dropout or vmap the scores are materialized, because torch's function does not support these."""
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, query.device)
    seen = visible(spec, distance)
    bias, origin = score_bias(spec, distance, seen)
    if _is_decoding(spec, query, key, value, bias):
        result = _written_out(spec, query, key, value, bias, origin)
        if result is not None:
            return result
    key, value, poison, moderate = without_bad_keys(spec, seen, key, value)
    moderate = moderate and not _may_overflow(spec, query)
    q, k, v, blind = query, key, value, None
    if may_see_nothing(spec):
        # The softmax of a row that sees no key would be empty: let the row see everything, and discard the result.
        blind = ~seen.any(-1, keepdim=True)
        bias, q = bias.masked_fill(blind, 0.0), query.masked_fill(blind, 0.0)
    dtype = query.dtype
    if query.device.type != "cpu" and dtype in (torch.float16, torch.bfloat16):
        # On other devices a mask must have query's dtype, and a distance does not fit into 8 or 11 bits.
        q, k, v = q.float(), k.float(), v.float()

    lse = None
    if spec.return_lse or spec.dropout_p > 0 or _is_written_out(spec, q, k, moderate=moderate):
        work = torch.promote_types(q.dtype, torch.float32)
        k, v = per_query_head(spec, k), per_query_head(spec, v)
        scores = spec.scale * (q.to(work) @ k.to(work).mT)
        scores = (scores if moderate else scores.masked_fill(~seen, 0.0)) + bias
        weights = scores.softmax(-1)
        of_keys = dropped(spec, weights if moderate else weights.masked_fill(~seen, 0.0))
        output = _weighted(of_keys, v.to(work)) / weights.sum(-1, keepdim=True)
        lse = scores.logsumexp(-1) if spec.return_lse else None
    else:
        # The query heads of one key head become rows, so keys are not copied. Symbolic lengths cannot be folded.
        side = 1 if torch.compiler.is_exporting() else spec.group
        rows = bias.expand(spec.batch, spec.num_heads, -1, -1).unflatten(1, (-1, side)).flatten(2, 3)
        output = functional.scaled_dot_product_attention(
            q.unflatten(1, (-1, side)).flatten(2, 3),
            k if side == spec.group else per_query_head(spec, k),
            v if side == spec.group else per_query_head(spec, v),
            attn_mask=rows,
            scale=spec.scale,
        )
        output = output.unflatten(2, (side, -1)).flatten(1, 2)
    if lse is not None:
        lse = unshifted_lse(spec, lse, origin)
    if blind is not None:
        output = output.masked_fill(blind, 0.0)
        lse = None if lse is None else lse.masked_fill(blind.squeeze(-1), float("-inf"))
    if poison is not None:
        output = output + poison[..., None].to(output.dtype)
        lse = None if lse is None else lse + poison
    return output.to(dtype), lse


def _is_written_out(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, *, moderate: bool) -> bool:
    """Whether torch's fused function would be wrong."""
    many_keys = not is_traced() and spec.key_len > FEW_KEYS and query.device.type == "cpu"
    return many_keys or "Vmap" in transforms() or not moderate or _has_huge_scores(spec, query, key)


def _weighted(weights: Tensor, value: Tensor) -> Tensor:
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


def _may_overflow(spec: AttentionSpec[Tensor], query: Tensor) -> bool:
    """Whether scores of moderate keys, hidden ones too, may overflow; checked only if reading values is free."""
    return may_read(query) and (abs(spec.scale) > MODERATE_SCALE or not are_moderate(query))


def _has_huge_scores(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor) -> bool:
    """Whether scores need a gradient that torch's fused function cannot compute; checked only if reading values is free."""
    free = torch.is_grad_enabled() and may_read(query) and may_read(key)
    return free and (query.requires_grad or key.requires_grad) and has_huge_scores(spec.scale, query, key)


def _is_decoding(spec: AttentionSpec[Tensor], *tensors: Tensor) -> bool:
    """Few queries on a CPU that do not require gradients: reading the keys is all the work."""
    if torch.is_grad_enabled() or is_traced():
        return False  # before the lengths are read, which would add a guard
    return spec.query_len <= FEW_QUERIES and spec.key_len > 0 and spec.dropout_p == 0 and may_read(*tensors)


def _written_out(
    spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor, bias: Tensor, origin: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """(output, lse) by two products; None if a number is not finite, which the general path handles.

    Scores are finite only if all keys are, and outputs only if all values are and every query sees a key. So nothing has to be
    checked before, and this is up to twice as fast as the fused operator. Half precision is converted to fp32 in small parts.
    """
    work = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(work).unflatten(1, (-1, spec.group))
    bias = bias.expand(spec.batch, spec.num_heads, -1, -1).unflatten(1, (-1, spec.group))
    wide = query.dtype == work
    step, keys = (spec.num_kv_heads, spec.key_len) if wide else (1, FEW_KEYS)
    parts = [slice(start, start + keys) for start in range(0, spec.key_len, keys)]
    outputs, lses = [], []
    for start in range(0, spec.num_kv_heads, step):
        heads = slice(start, start + step)
        products = [rows[:, heads].flatten(2, 3) @ key[:, heads, part].to(work).mT for part in parts]
        scores = (products[0] if len(parts) == 1 else torch.cat(products, -1)).mul_(spec.scale)
        if not bool(scores.sum().isfinite()):
            return None
        scores.unflatten(2, (spec.group, -1)).add_(bias[:, heads])
        weights = scores.softmax(-1)
        of_parts = [_weighted(weights[..., part], value[:, heads, part].to(work)) for part in parts]
        outputs.append(torch.stack(of_parts).sum(0) / weights.sum(-1, keepdim=True))
        if spec.return_lse:
            lses.append(scores.logsumexp(-1))
    output = torch.cat(outputs, 1).unflatten(2, (spec.group, -1)).flatten(1, 2)
    if not bool(output.sum().isfinite()):
        return None
    if not spec.return_lse:
        return output.to(query.dtype), None
    lse = torch.cat(lses, 1).unflatten(2, (spec.group, -1)).flatten(1, 2)
    return output.to(query.dtype), unshifted_lse(spec, lse, origin)
