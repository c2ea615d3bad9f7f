"""Few queries on a CPU by `dense`, without a look at the numbers first: reading the keys is all the work."""

import torch
from torch import Tensor

from alibi_attn.attention.backends.dense import FEW_KEYS, weighted
from alibi_attn.attention.backends.protocol import FEW_QUERIES, Result, Spec
from alibi_attn.attention.call.reads import FLASH_ATTN, GATES, MASKS, PARTS, SPACE
from alibi_attn.attention.call.transforms import is_traced, may_read

READS = MASKS | PARTS | SPACE | FLASH_ATTN | GATES | {"table"}


def are_few(spec: Spec, *tensors: Tensor) -> bool:
    """Few queries on a CPU that do not require gradients, without dropout."""
    if torch.is_grad_enabled() or is_traced():
        return False  # before the lengths are read, which would add a guard
    return spec.query_len <= FEW_QUERIES and spec.key_len > 0 and spec.dropout_p == 0 and may_read(*tensors)


def attend(spec: Spec, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Result | None:
    """(output, lse with this bias) by two products; None if a number is not finite, which `guards.py` handles.

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
        of_parts = [weighted(weights[..., part], value[:, heads, part].to(work)) for part in parts]
        outputs.append(torch.stack(of_parts).sum(0) / weights.sum(-1, keepdim=True))
        if spec.return_lse:
            lses.append(scores.logsumexp(-1))
    output = _of_heads(spec, outputs)
    if not bool(output.sum().isfinite()):
        return None
    return output, _of_heads(spec, lses) if spec.return_lse else None


def _of_heads(spec: Spec, of_key_heads: list[Tensor]) -> Tensor:
    """Parts [B, some K, group·T, …] as [B, H, T, …]."""
    return torch.cat(of_key_heads, 1).unflatten(2, (spec.group, -1)).flatten(1, 2)
