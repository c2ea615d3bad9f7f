"""Windows per head, sinks, prefixes and positions in fp64: what each query sees, and the biases, as dense masks."""

import math

import torch


def seen_and_bias(q, k, slopes, *, causal=True, window=None, sinks=0, prefix_len=None, positions=None, query_positions=None,
                  query_offset=None, key_mask=None, segment_ids=None, key_bias=None, right_slopes=None, registers=0):  # fmt: skip
    """([B, H, T, S] bool, [B, H, T, S] fp64): what each query sees, and what is added to its scores."""
    assert registers == 0
    (batch, heads, t, _), s = q.shape, k.shape[2]
    first = s - t if query_offset is None else query_offset
    index, j = torch.arange(t)[:, None] + first, torch.arange(s)
    distance, is_right = (index - j).double().expand(batch, t, s), index < j
    if positions is not None:
        own = positions[:, s - t :] if query_positions is None else query_positions
        distance = own.double()[:, :, None] - positions.double()[:, None]
        if query_positions is not None and not causal:
            is_right = (distance < 0)[:, None]
    m = slopes.double().reshape(-1, heads, 1, 1)
    right = m if right_slopes is None else torch.as_tensor(right_slopes, dtype=torch.float64).reshape(-1, heads, 1, 1)
    bias = -torch.where(is_right, right, m) * distance.abs()[:, None]
    if key_bias is not None:
        bias = bias + key_bias.double().expand(batch, heads, s)[:, :, None]
    seen = torch.ones(batch, heads, t, s, dtype=torch.bool)
    if causal:
        before = (
            torch.zeros(batch, 1, s, dtype=torch.bool) if prefix_len is None else (j < prefix_len[:, None])[:, None]
        )
        seen &= ((index >= j) | before)[:, None]
    if window is not None:
        windows = torch.as_tensor(window).reshape(-1, 1, 1)
        seen &= ((index - j).abs() < windows) | (j < sinks)
    if key_mask is not None:
        seen &= key_mask[:, None, None]
    if segment_ids is not None:
        seen &= (segment_ids[:, s - t :, None] == segment_ids[:, None])[:, None]
    return seen, bias


def truth(q, k, v, slopes, **options):
    """(output, lse) in fp64, differentiable."""
    seen, bias = seen_and_bias(q, k, slopes, **options)
    seen &= bias > -math.inf
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.mT / math.sqrt(q.shape[3]) + bias).masked_fill(~seen, -math.inf)
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return weights @ v, scores.logsumexp(-1)
