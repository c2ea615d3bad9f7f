"""Checks that a halo is wide enough: sums the softmax mass outside it in fp64, over all pairs of rows."""

import math

import torch

from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.distributed import Halo
from alibi_attn.distributed.simulation import planned_requests


def scores(query, key, slopes, *, spec):
    """[B, H, S, S] fp64, −inf at hidden keys."""
    q, k = query.double(), key.double().repeat_interleave(spec.group, 1)
    apart = distances(spec.query_len, spec.key_len, 0, None)
    m = torch.as_tensor(slopes, dtype=torch.float64).reshape(-1, spec.num_heads, 1, 1)
    right = m if spec.right_slopes is None else spec.right_slopes.double().reshape(-1, spec.num_heads, 1, 1)
    off = torch.where(apart[:, None] >= 0, m, right).nan_to_num(posinf=0.0) * apart[:, None].abs()
    found = spec.scale * (q @ k.mT) - off
    if spec.key_bias is not None:
        found = found + spec.key_bias.double()[:, :, None]
    return found.masked_fill(~visible(spec, apart), -math.inf)


def largest_share_left_out(found: Halo, score, group):
    """The largest softmax mass of any query on rows that are neither local to its rank nor sent to it."""
    share = score.softmax(-1).nan_to_num(nan=0.0)
    worst = 0.0
    for rank, (start, length) in enumerate(zip(found.offsets, found.lengths, strict=True)):
        for head in range(found.num_kv_heads):
            there = torch.zeros(score.shape[-1], dtype=torch.bool)
            there[start : start + length] = True
            for low, high in found.spans(rank, head):
                there[low:high] = True
            rows = share[:, head * group : (head + 1) * group, start : start + length]
            worst = max(worst, float(rows[..., ~there].sum(-1).amax()) if rows.numel() else 0.0)
    return worst


def largest_share_beyond_reach(requests, lengths, score, spec):
    """The largest softmax mass of any query on rows of one side that no call over that side's rows may need."""
    share, worst, start = score.softmax(-1).nan_to_num(nan=0.0), 0.0, 0
    row = torch.arange(score.shape[-1])
    for request, length in zip(requests, lengths, strict=True):
        for side, (edge, there) in enumerate(((start - 1, row < start), (start + length, row >= start + length))):
            for head, numbers in enumerate(request):
                reach = numbers[2 + side]
                of_query = row[start : start + length, None]
                beyond = (of_query - edge).abs() >= reach  # the query skips the side
                if spec.key_bias is None:
                    beyond = beyond | ((of_query - row).abs() >= reach)
                rows = share[:, head * spec.group : (head + 1) * spec.group, start : start + length]
                skipped = (rows * (beyond & there)).sum(-1)
                worst = max(worst, float(skipped.amax()) if skipped.numel() else 0.0)
        start += length
    return worst


def assert_reaches_are_certified(query, key, value, slopes, lengths, *, tolerance=2.0**-28, **options):
    spec = make_spec(query, key, value, slopes, tolerance=tolerance, **options)
    requests, lengths = planned_requests(spec, query, key, value, lengths)
    beyond = largest_share_beyond_reach(requests, lengths, scores(query, key, slopes, spec=spec), spec)
    assert beyond <= tolerance * (1 + 1e-9), f"{beyond:.3g} of a query's softmax mass is beyond its reach"
    return requests


def assert_certified(found, query, key, value, slopes, *, tolerance=2.0**-28, **options):
    spec = make_spec(query, key, value, slopes, tolerance=tolerance, **options)
    left_out = largest_share_left_out(found, scores(query, key, slopes, spec=spec), spec.group)
    assert left_out <= tolerance * (1 + 1e-9), f"{left_out:.3g} of a query's softmax mass is left out"
