"""Attention in the plane and in space, defined in fp64 with `torch.cdist`, and places of tokens that are hard for it."""

import torch
from torch import Tensor

KINDS = ("random", "grid", "one point", "line", "far", "duplicates", "clusters")


def points(kind: str, batch: int, length: int, axes: int, side: float = 50.0) -> Tensor:
    """[B, N, C] fp64, in a box of this side, of one of the `KINDS`."""
    p = torch.rand(batch, length, axes, dtype=torch.float64) * side
    if kind == "grid":
        return p.round()
    if kind == "one point":
        return torch.zeros_like(p)
    if kind == "line":
        return p[..., :1].expand(-1, -1, axes).clone()
    if kind == "far":
        return p + 1e7
    if kind == "clusters":  # far from one another
        return p + 1e3 * side * torch.randint(0, 3, (batch, length, 1))
    return p if kind == "random" else p[:, : 1 + length // 3].repeat(1, 4, 1)[:, :length]


def weights_of(q, k, slopes, of_query, of_key, registers=0, key_mask=None, segments=None, key_bias=None):
    """(weights, lse, distances [B, T, S]) in fp64; `segments` are a pair, of the queries and of the keys."""
    distance = torch.cdist(of_query, of_key, compute_mode="donot_use_mm_for_euclid_dist")
    if registers:
        at_query = torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]
        distance[:, at_query < registers] = 0.0
        distance[:, :, :registers] = 0.0
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5 - slopes.reshape(-1, q.shape[1], 1, 1) * distance[:, None]
    scores = scores if key_bias is None else scores + key_bias[:, :, None]
    seen = torch.ones_like(scores, dtype=torch.bool)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    if segments is not None:
        seen = seen & (segments[0][:, None, :, None] == segments[1][:, None, None])
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0)
    lse = scores.logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)
    return scores.softmax(-1).masked_fill(blind, 0.0), lse, distance


def definition(q, k, v, slopes, of_query, of_key, **given):
    """(output, lse) in fp64; `given` as for `weights_of`."""
    weights, lse, _ = weights_of(q, k, slopes, of_query, of_key, **given)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse
