"""Attention from its formula as a loop over queries and keys in fp64, for every method of the lab."""

import math

import torch
from torch import Tensor


def by_loops(q, k, v, score, *, sees=lambda b, i, j: True, value=lambda h, d, v: v) -> Tensor:
    """Σ_j softmax_j(score(h, i − j, q_i, k_j, j))·value(h, i − j, v_j) over each j ≤ i where `sees(b, i, j)`."""
    q, k, v = (x.double() for x in (q, k, v))
    out, first = v.new_empty(*q.shape[:3], v.shape[3]), k.shape[2] - q.shape[2]
    for b, h, row in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        i = first + row
        seen = [j for j in range(i + 1) if sees(b, i, j)]
        weights = [math.exp(score(h, i - j, q[b, h, row], k[b, h, j], j)) for j in seen]
        terms = [w * value(h, i - j, v[b, h, j]) for w, j in zip(weights, seen, strict=True)]
        out[b, h, row] = torch.stack(terms).sum(0) / sum(weights)
    return out
