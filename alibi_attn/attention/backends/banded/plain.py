"""A head with numbers that torch's fused operator cannot handle, such as huge scores: plain products of a few whole rows."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from alibi_attn.attention.backends.banded.masks import HeadMasks
from alibi_attn.attention.backends.banded.pieces import Piece

PLAIN_SCORES = 2**22  # materialized at a time


def plain_forward(head: HeadMasks, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor) -> None:
    """One head with numbers that torch's operator cannot handle: it adds −inf to hidden scores, which may be inf, and rounds
    slopes times distances, which may overflow.
    """
    q, k, v = (x.to(output.dtype) for x in (q, k, v))
    largest = torch.finfo(lse.dtype).max
    for some, score, _, origin in _scores(head, q, k):
        output[some] = _weights(score, origin) @ v
        whole = score.logsumexp(-1).double() + origin
        lse[some] = whole.clamp(-largest, largest).to(lse.dtype).masked_fill(origin == -math.inf, -math.inf)


def plain_backward(
    head: HeadMasks, tensors: list[Tensor], grad_lse: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor
) -> Tensor:
    """Adds the gradients of one head to dq, dk and dv, and returns those of the slopes as `_slope_gradient` does.

    Weights are recomputed by softmax, because the rounding of a huge lse alone would make exp(score − lse) wrong.
    """
    grad, q, k, v = (x.to(dq.dtype) for x in tensors[:4])
    bad = tensors[4].isnan().any(-1, keepdim=True)  # queries that saw NaN, which was taken out of q, k and v
    total = dq.new_zeros(2, dtype=torch.float64)
    for some, score, distance, origin in _scores(head, q, k):
        weight = _weights(score, origin)
        moment = (grad[some] @ v.T).masked_fill_(weight == 0, 0.0)
        moment = weight * (moment - (weight * moment).sum(-1, keepdim=True))
        if grad_lse is not None:
            moment = moment + weight * grad_lse[some, None]
        moment = moment.masked_fill(bad[some] & (score > -math.inf), math.nan)
        scaled = moment * head.spec.scale  # before the products, which may overflow although the gradient does not
        dq[some] += scaled @ k
        dk += scaled.T @ q[some]
        dv += weight.T @ grad[some]
        total[0] -= (moment.double() * distance.clamp(min=0)).sum()
        total[1] += (moment.double() * distance.clamp(max=0)).sum()
    return total


def _weights(score: Tensor, origin: Tensor) -> Tensor:
    """Softmax, and zeros for queries that see no key; NaN if products overflow."""
    return score.softmax(-1).masked_fill(origin[:, None] == -math.inf, 0.0)


def _scores(head: HeadMasks, q: Tensor, k: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(queries, their scores with all keys, i − j, origin), a few whole rows at a time.

    Scores are relative to the bias of the query's best visible key, its origin: fp64, −inf if it sees no key.
    """
    right_slope = 0.0 if math.isinf(head.right_slope) else head.right_slope
    rows = max(1, PLAIN_SCORES // len(k))
    for start in range(0, len(q), rows):
        some = slice(start, start + rows)
        piece = Piece(start, 1, len(q[some]), 0, 0, len(k), 0)
        distance = head.distance(piece, 0)[0]
        slope = q.new_full(distance.shape, -head.slope, dtype=torch.float64).masked_fill_(distance < 0, right_slope)
        bias = distance * slope
        bias = bias.masked_fill_(head.hidden(piece, distance[None], 0)[0], -math.inf)
        origin = bias.amax(-1)
        relative = (bias - origin.masked_fill(origin == -math.inf, 0.0)[:, None]).to(head.dtype)
        products = (q[some].to(head.dtype) @ k.to(head.dtype).T) * head.spec.scale
        yield some, (products + relative).masked_fill_(bias == -math.inf, -math.inf), distance, origin
