"""Calls in which far keys could lose their gradient, and what each key lost: the weight in queries that left it out, in fp64."""

import math

import torch
from torch import Tensor

LENGTH, SLOPE, TOLERANCE = 2048, 1 / 2, 1e-3


def growing_queries(share: float, *, block: int = 64, norm: float = 1.0) -> list[Tensor]:
    """query, key, value [1, 1, S, 8] fp64, for scale=1: the first query of every block gives key 0 this share of its softmax.

    Queries grow along key 0 from block to block, as the bias falls; the other keys, of the given norm, are orthogonal to them.
    """
    query, key = torch.zeros(2, 1, 1, LENGTH, 8, dtype=torch.float64)
    query[..., 0] = SLOPE * (torch.arange(LENGTH) // block * block) + math.log(share / -math.expm1(-SLOPE))
    key[:, :, 0, 0] = 1.0
    key[:, :, 1:, 1] = norm
    generator = torch.Generator().manual_seed(0)
    value = torch.nn.functional.normalize(
        torch.randn(1, 1, LENGTH, 8, dtype=torch.float64, generator=generator), dim=-1
    )
    return [query, key, value]


def gates(tile: int = 64) -> Tensor:
    """[1, 1, S]: gates in place of the slope. Of the first tile only key 0 is visible, because certificates sum over tiles."""
    bias = SLOPE * torch.arange(LENGTH, dtype=torch.float64)
    bias[1:tile] = -math.inf
    return bias[None, None]


def largest_loss(tolerance: float, queries: int) -> float:
    """What the key rule lets a key lose in all, in units of one query's weight."""
    return tolerance * (1 + math.log(max(queries, 64) / 64))


def lost_weight(kept: Tensor, score: Tensor) -> Tensor:
    """[B, H, S]: Σ_i p_ij over the queries i that do not read key j; `kept` bool and `score` [B, H, T, S]."""
    return (score.softmax(-1).nan_to_num(nan=0.0) * ~kept).sum(2)


def assert_keys_keep_their_weight(kept: Tensor, score: Tensor, distance: Tensor, tolerance: float) -> None:
    """Every pair that is left out obeys the key rule, and so no key loses much; `distance` i − j, broadcastable to the others."""
    share = score.softmax(-1).nan_to_num(nan=0.0)
    allowed = tolerance / (2 * (distance.abs() + 64))
    worst = float((share / allowed * ~kept).max())
    assert worst <= 1 + 1e-9, f"a key is left out at {worst:.3g} times what the rule allows"
    assert float(lost_weight(kept, score).max()) <= largest_loss(tolerance, score.shape[2])
