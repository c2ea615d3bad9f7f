"""What a cache may forget with a proof: keys out of reach, and keys that forget gates have left.

Slopes determine a static reach before any text exists; gates forget by content (`docs/certificate.md`, step 12). The bound U on
scores comes from QK-normalization or from the caller; see `ALiBiAttention.reach_cache`.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.call.bias import widest
from alibi_attn.attention.call.spec import query_heads
from alibi_attn.attention.certificate.biased import sums_behind
from alibi_attn.nn.cache.storage import Growing

TOGETHER = 64  # tokens between two computations of the keys that gates allow to forget


@dataclasses.dataclass(frozen=True)
class Certified:
    """Keys that no later query needs are forgotten, as a bound on all scores proves: `within_reach` or `by_gates`.

    Args:
        slopes: [H] fp32, as attention computes with them; empty = unknown.
        score_bound: U, the largest |q·k|/√D.
        tolerance: ε, the largest share of a later query's softmax mass that is forgotten.
        key_heads: the key heads of each group that keeps the same tokens.
        num_heads: H.
        limits: of each group, the distance from which on keys are forgotten; None = gates tell.
        sinks: the number of first keys that are never forgotten.
    """

    slopes: tuple[float, ...]
    score_bound: float
    tolerance: float
    key_heads: tuple[tuple[int, ...], ...]
    num_heads: int
    limits: tuple[int, ...] | None = None
    sinks: int = 0

    @functools.cached_property
    def num_kv_heads(self) -> int:
        return sum(map(len, self.key_heads))

    @functools.cached_property
    def heads(self) -> list[list[int]]:
        """The query heads of each group."""
        return [query_heads(members, self.num_heads // self.num_kv_heads) for members in self.key_heads]


def within_reach(
    reach: Sequence[int] | Tensor,
    *,
    score_bound: float,
    tolerance: float,
    num_kv_heads: int | None = None,
    slopes: Sequence[float] = (),
    sinks: int = 0,
) -> Certified:
    """Keys at a distance of their head's reach or more are forgotten, except for the first `sinks`.

    A head of slope m whose scores never exceed U needs no such key (`alibi_attn/reach.py`). Key heads whose reach rounds up to
    the same power of two keep the same tokens, so that decoding makes one call per group.

    Args:
        reach: [H], one per query head; it counts the query itself. A key head keeps the widest of its query heads.
        num_kv_heads: K; default H.

    Raises:
        ValueError: a reach is below 1, or num_kv_heads does not divide the number of heads.
    """
    per_head = [operator.index(r) for r in (reach.tolist() if isinstance(reach, Tensor) else reach)]
    heads = _checked_heads(len(per_head), num_kv_heads, "reach")
    if not per_head or min(per_head) < 1:
        raise ValueError(f"reach is {per_head} but must be at least 1 per head: it counts the query itself")
    widest_of = [max(row) for row in np.reshape(per_head, (heads, -1)).tolist()]
    size = [(reach - 1).bit_length() for reach in widest_of]
    groups = tuple(tuple(h for h in range(heads) if size[h] == one) for one in sorted(set(size)))
    limits = tuple(max(widest_of[h] for h in members) for members in groups)
    return Certified(_as_fp32(slopes), score_bound, tolerance, groups, len(per_head), limits, sinks)


def by_gates(slopes: Sequence[float] | Tensor, *, score_bound: float, tolerance: float, num_kv_heads: int) -> Certified:
    """The oldest keys of a key head are forgotten once its forget gates prove that no later query needs them.

    At time t a dropped key at l weighs, for any later query of head h, at most e^(2U + c_t − c_l − m·(t − l)) times the query's
    own key, where c is the sum of ln f. This bound only decreases with time. The oldest keys are dropped as long as all keys
    ever dropped together weigh at most ε, for every query head that reads them and in every sequence of the batch.

    Args:
        slopes: [H], none of them negative.
        num_kv_heads: K, which divides H.

    Raises:
        ValueError: a slope is negative, so that far keys gain weight; or num_kv_heads does not divide the number of heads.
    """
    own = _as_fp32(slopes)
    if min(own) < 0:
        raise ValueError(
            f"slopes are {list(own)} but must not be negative, or keys would gain weight over time; use KVCache()"
        )
    heads = _checked_heads(len(own), num_kv_heads, "slopes")
    return Certified(own, score_bound, tolerance, tuple((k,) for k in range(heads)), len(own))


@torch.no_grad()
def drop_by_gates(retention: Certified, groups: Sequence[Growing], gone: list[Tensor | None], since: int) -> None:
    """Drops the oldest keys that may be dropped, and updates the weight of those dropped before.

    Args:
        gone: [B, group] ln of the weight of the dropped keys of each key head; changed.
        since: the number of tokens since the last time.
    """
    room = math.log(retention.tolerance) - 2 * retention.score_bound if retention.tolerance > 0 else -math.inf
    for k, (group, heads) in enumerate(zip(groups, retention.heads, strict=True)):
        group.changed = False  # what is dropped now follows from the tensors as they are
        gates = group.filled()[2][..., 0]
        gates = gates if widest(gates) == torch.float64 else gates.cpu()
        slopes = torch.tensor([retention.slopes[h] for h in heads], dtype=torch.float64, device=gates.device)
        # ln of the product of the gates after each key, and m·(t − l): [B, group, S'].
        steps = gates.double() - slopes[:, None]
        after = sums_behind(steps)
        before = gone[k]
        if before is None:
            before = torch.full_like(after[..., 0], -math.inf)
        before = before + steps[..., steps.shape[-1] - since :].sum(-1)
        total = torch.logaddexp(after.logcumsumexp(-1), before[..., None])
        # Sums over 10⁶ keys in fp64 are off by 10⁻⁹ at most.
        count = int((total <= room - 1e-6).all(0).all(0).cumprod(-1).sum())
        count = min(count, group.length - 1)  # the newest token is always kept
        gone[k] = total[..., count - 1] if count else before
        if count:
            group.drop(count)


def _as_fp32(slopes: Sequence[float] | Tensor) -> tuple[float, ...]:
    return tuple(torch.as_tensor(slopes, dtype=torch.float32).tolist())


def _checked_heads(num_heads: int, num_kv_heads: int | None, of: str) -> int:
    heads = num_heads if num_kv_heads is None else operator.index(num_kv_heads)
    if heads < 1 or num_heads % heads:
        raise ValueError(f"num_kv_heads is {heads} but must divide the {num_heads} heads of {of}")
    return heads
