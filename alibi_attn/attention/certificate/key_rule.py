"""The key rule: the share of a query's softmax that it may leave out at one key, by the distance of the key.

A limit per query says nothing about keys: thousands of queries may all leave out the same one, which then loses its gradient.
So wherever a gradient is needed, a query leaves out a key at distance d only if the key's share is at most

    tolerance / (2·(d + KEY_RULE_TOKENS)) .

Over all queries, no key then loses more than tolerance·(1 + ln(T / 64)) of one query's weight, for each query head of its key
head. The rule reads one distance and no count of keys, so results do not depend on padding, the batch, parts, halos or ranks.
"""

import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.certificate.constants import KEY_RULE_TOKENS

Distance = TypeVar("Distance", Tensor, np.ndarray)


def largest_share(distance: Distance, tolerance: float) -> Distance:
    """The share that a query may leave out at a key at this distance; of several keys, the farthest counts."""
    return tolerance / (2.0 * (distance + KEY_RULE_TOKENS))


def reach_by_key_rule(nats: Tensor, m: Tensor, tolerance: float) -> Tensor:
    """fp64: from this distance on every key obeys the rule, if one at distance d weighs at most e^(nats − m·d), with m > 0.

    With x = d + KEY_RULE_TOKENS the rule is f(x) = ln(2x) − m·x + c ≤ 0. f is concave and falls from x = 1/m on, so a step of
    Newton's method from any x > 1/m lands at or beyond the last root. (Substituting x = (c + ln(2x)) / m stops short of it.)
    """
    c = nats - math.log(tolerance) + m * KEY_RULE_TOKENS
    always = c + torch.log(2.0 / m) <= 1.0  # even where f is largest, at x = 1/m
    least = 2.0 / m
    x = torch.maximum((c + torch.log(2.0 * torch.maximum(c / m, least))) / m, least)
    for _ in range(3):
        x = x + (torch.log(2.0 * x) - m * x + c) / (m - 1.0 / x)
    return torch.where(always, 0.0, x - KEY_RULE_TOKENS)


def obeys_key_rule(nats: Tensor, distance: Tensor, tolerance: float) -> Tensor:
    """bool: whether keys of the weight e^nats at this distance obey the rule; False for NaN."""
    return nats + torch.log(2.0 * (distance + KEY_RULE_TOKENS)) <= math.log(tolerance)
