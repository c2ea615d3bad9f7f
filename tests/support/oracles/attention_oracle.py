"""The truth: docs/maths.md's definition as a loop over sequences, heads, queries and keys, in float64.

It shares no code with the package: visibility is decided key by key in plain Python.
"""

import dataclasses
import functools
import math

import numpy as np
import torch
from attention_cases import Case


@dataclasses.dataclass(frozen=True)
class Answer:
    """Float64: output [B, H, T, D], lse [B, H, T], and gradients of Σ output·grad_output + Σ (finite) lse·grad_lse."""

    output: torch.Tensor
    lse: torch.Tensor
    gradients: dict[str, torch.Tensor]


def positions(case: Case, drawn: dict) -> np.ndarray:
    """[B, T] position of every query."""
    first = drawn["query_offset"] if drawn["query_offset"] is not None else np.full(case.batch, case.first_position)
    return first[:, None] + np.arange(case.query_len)


def visible_keys(case: Case, drawn: dict, b: int, h: int, t: int) -> list[int]:
    """The keys that query t of head h in sequence b may attend to."""
    i = int(positions(case, drawn)[b, t])
    mask = None if drawn["key_mask"] is None else drawn["key_mask"][b].tolist()
    segments = None if drawn["key_segments"] is None else drawn["key_segments"][b].tolist()
    query_segments = drawn["query_segments"]
    own = None
    if segments is not None:
        own = query_segments[b, t] if query_segments is not None else segments[i]
    bias = None if drawn["key_bias"] is None else of_key(drawn["key_bias"], b, h, slice(None)).tolist()
    never_right = drawn["right_slopes"] is not None and math.isinf(of_head(drawn["right_slopes"], b, h))
    keys = []
    for j in range(case.key_len):
        if case.causal and j > i:
            continue
        if case.window is not None and abs(i - j) >= case.window:
            continue
        if mask is not None and not mask[j]:
            continue
        if segments is not None and own != segments[j]:
            continue
        if bias is not None and bias[j] == -math.inf:
            continue
        if j > i and never_right:
            continue
        keys.append(j)
    return keys


def of_head(slopes, b: int, h: int):
    return slopes[h] if slopes.ndim == 1 else slopes[b, h]


def of_key(key_bias, b: int, h: int, j):
    return key_bias[j] if key_bias.ndim == 1 else key_bias[h, j] if key_bias.ndim == 2 else key_bias[b, h, j]


@functools.cache
def truth(case: Case) -> Answer:
    drawn = case.draw()
    names = ("query", "key", "value", "slopes")
    names += (("right_slopes",) if case.right else ()) + (("key_bias",) if case.key_bias else ())
    leaf = {name: torch.tensor(drawn[name], dtype=torch.float64, requires_grad=True) for name in names}
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.head_dim)
    group = case.heads // (case.kv_heads or case.heads)
    at = positions(case, drawn)
    output = torch.zeros(case.batch, case.heads, case.query_len, case.head_dim, dtype=torch.float64)
    lse = torch.full((case.batch, case.heads, case.query_len), -math.inf, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    grad_output, grad_lse = torch.tensor(drawn["grad_output"]), torch.tensor(drawn["grad_lse"])
    for b in range(case.batch):
        for h in range(case.heads):
            rows_out, rows_lse, rows = [], [], []
            query, key, value = leaf["query"][b, h], leaf["key"][b, h // group], leaf["value"][b, h // group]
            biases = of_key(leaf["key_bias"], b, h, slice(None)) if case.key_bias else None
            for t in range(case.query_len):
                keys = visible_keys(case, drawn, b, h, t)
                if not keys:
                    continue
                keys = torch.tensor(keys)
                distance, to_right = (int(at[b, t]) - keys).abs().double(), keys > int(at[b, t])
                slope = of_head(leaf["slopes"], b, h)
                if case.right and bool(to_right.any()):
                    slope = torch.where(to_right, of_head(leaf["right_slopes"], b, h), slope)
                bias, most = -slope * distance, 0.0
                if biases is not None:  # relative to the largest, or large biases would cost digits in float64 too
                    own = biases[keys]
                    most = own.detach().max()
                    bias = bias + (own - most)
                scores = scale * (key[keys] @ query[t]) + bias
                rows_lse.append(torch.logsumexp(scores, 0) + most)
                rows_out.append(torch.softmax(scores, 0) @ value[keys])
                rows.append(t)
            if rows:
                out_h, lse_h = torch.stack(rows_out), torch.stack(rows_lse)
                total = total + (out_h * grad_output[b, h, rows]).sum() + (lse_h * grad_lse[b, h, rows]).sum()
                output[b, h, rows], lse[b, h, rows] = out_h.detach(), lse_h.detach()
    gradients = {name: torch.zeros_like(tensor) for name, tensor in leaf.items()}
    if total.requires_grad:
        found = torch.autograd.grad(total, list(leaf.values()), allow_unused=True)
        gradients.update({n: g for n, g in zip(leaf, found, strict=True) if g is not None})
    return Answer(output, lse, gradients)
