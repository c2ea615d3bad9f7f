"""λ: a lower bound on every query's log-sum-exp, from a few keys that it certainly sees.

Near keys are scored one by one: a query's own group of `NEAR` and the group before. Farther back, which matters to
flat heads, a *stretch* of n keys is represented by its mean: Jensen's inequality gives Σ exp(s_j) ≥ n·exp(mean s_j), and the mean
score is one product with the mean key. The two sets are disjoint, so their masses add up.
"""

import dataclasses
import math

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec

Spec = AttentionSpec[Tensor]

NEAR = 16  # queries that share one small tile of 2·NEAR near keys
STRETCHES = (32, 128, 512)  # keys before the near ones; a head of slope m gains most from about 2/m
FLAT = 1 / 12  # a steeper head gains nothing from keys that far back


def lower_bound(
    spec: Spec, query: Tensor, key: Tensor, first: Tensor, *, stretches: bool, text_len: int | None = None
) -> Tensor:
    """λ [B, H, T] fp64, correct up to the rounding of fp32 products.

    It is −inf if the query sees no near key, and for heads so flat that a text of `text_len` keys (default: S) ends
    before their reach.
    """
    if query.device.type != "cpu" or spec.query_len <= NEAR:
        return _mass(spec, query, key, first, stretches)
    text_len = spec.key_len if text_len is None else text_len
    offset = _inner_offset(spec)
    if offset is None or not _unmasked(spec):
        return _one_key_head_at_a_time(spec, query, key, first, stretches, text_len)
    # Whole groups of queries with a group of keys before them need no copies; the few others are computed together.
    lead = NEAR if offset < NEAR else 0
    end = lead + (spec.query_len - lead) // NEAR * NEAR
    mass = torch.empty(query.shape[:3], dtype=torch.float64, device=query.device)
    for start, stop in ((0, lead), (lead, end), (end, spec.query_len)):
        if start < stop:
            part = dataclasses.replace(spec, query_len=stop - start, query_offset=offset + start)
            few = start != lead
            of_part = part, query[:, :, start:stop], key, first + start, stretches
            mass[:, :, start:stop] = _mass(*of_part) if few else _one_key_head_at_a_time(*of_part, text_len)
    return mass


def biased_lower_bound(spec: Spec, query: Tensor, key: Tensor, first: Tensor) -> Tensor:
    """λ [B, H, T] with key biases: fp64 sums, correct up to the rounding of the products, however large a bias is."""
    rows = _grouped_rows(spec, query)
    return _near_mass(spec, rows, key, first).flatten(2)[..., : spec.query_len]


def _unmasked(spec: Spec) -> bool:
    return spec.key_mask is None and spec.key_segments is None


def _one_key_head_at_a_time(
    spec: Spec, query: Tensor, key: Tensor, first: Tensor, stretches: bool, text_len: int
) -> Tensor:
    """`_mass`, one key head at a time: on a CPU large temporaries cost more than all the arithmetic."""
    mass = torch.full(query.shape[:3], -math.inf, dtype=torch.float64, device=query.device)
    first = first.expand(spec.batch)
    for b in range(spec.batch):

        def of_sequence(x: Tensor, axis: int, b: int = b) -> Tensor:
            return x[b : b + 1] if x.ndim == -axis else x  # slopes may lack the batch

        rows = spec.along("B", of_sequence)
        offset = first[b : b + 1] if isinstance(spec.query_offset, Tensor) else spec.query_offset
        for k in range(spec.num_kv_heads):
            heads = slice(k * spec.group, (k + 1) * spec.group)
            slopes = {name: rows[name][..., heads] for name in ("slopes", "right_slopes") if name in rows}
            sizes = {"batch": 1, "num_heads": spec.group, "num_kv_heads": 1, "query_offset": offset}
            one = dataclasses.replace(spec, **(rows | slopes | sizes))
            steepest = max(float(m.max()) for m in (one.slopes, one.right_slopes) if m is not None)
            if steepest * text_len <= -math.log(spec.tolerance):
                continue  # the text ends before the reach, whatever λ is
            q, k_head = query[b : b + 1, heads], key[b : b + 1, k : k + 1]
            flat = stretches and float(one.slopes.min()) < FLAT
            mass[b, heads] = _mass(one, q, k_head, first[b : b + 1], flat)[0]
    return mass


def _mass(spec: Spec, query: Tensor, key: Tensor, first: Tensor, stretches: bool) -> Tensor:
    """[B, H, T] fp64"""
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows, short = _grouped_rows(spec, query), -spec.query_len % NEAR
    offset = _inner_offset(spec)
    one_key_head = spec.batch == spec.num_kv_heads == 1
    if one_key_head and not short and offset is not None and offset >= NEAR and _unmasked(spec):
        mass = _near_mass_of_views(spec, query[0].to(work), key[0, 0].to(work), offset)
    else:
        mass = _near_mass(spec, rows, key, first).flatten(2)[..., : spec.query_len]
    if stretches and offset is not None and _unmasked(spec) and spec.window is None:
        more = _stretch_mass(spec, rows, key, offset)
        mass = torch.logaddexp(mass, more.flatten(2)[..., : spec.query_len])
    return mass.double()


def _grouped_rows(spec: Spec, query: Tensor) -> Tensor:
    """[B, K, H / K, G, NEAR, D] in fp32 or better, zeros beyond the last."""
    groups, short = -(-spec.query_len // NEAR), -spec.query_len % NEAR
    rows = torch.nn.functional.pad(query, (0, 0, 0, short)) if short else query
    rows = rows.to(torch.promote_types(query.dtype, torch.float32))
    return rows.reshape(spec.batch, spec.num_kv_heads, spec.group, groups, NEAR, spec.head_dim)


def _near_mass_of_views(spec: Spec, query: Tensor, key: Tensor, offset: int) -> Tensor:
    """The same as `_near_mass`, [1, H, T], without a copy: query [H, T, D] and one key head [S, D], nothing masked.

    T is whole groups, and at least NEAR keys lie before the first query.
    """
    groups, begin = spec.query_len // NEAR, offset - NEAR
    rows = query.unflatten(1, (groups, NEAR)).transpose(0, 1).flatten(1, 2)
    s, d = key.stride()
    near = key.as_strided((groups, 2 * NEAR, key.shape[1]), (NEAR * s, s, d), key.storage_offset() + begin * s)
    i, j = (torch.arange(n, device=key.device) for n in (NEAR, 2 * NEAR))
    distance = NEAR + i[:, None] - j
    bias = -_penalty(spec, distance[None, None, None], rows.dtype)[:, :, 0].flatten(1, 2)
    scores = torch.baddbmm(bias, rows, near.mT, alpha=spec.scale)
    return scores.logsumexp(-1).unflatten(1, (-1, NEAR)).transpose(0, 1).flatten(1, 2)[None]


def _penalty(spec: Spec, distance: Tensor, dtype: torch.dtype) -> Tensor:
    """[B|1, H, ...]: the nats that the bias subtracts at `distance` [B|1, ...], inf for hidden keys."""
    slopes = spec.slopes.detach().reshape(-1, spec.num_heads, 1, 1, 1)
    if spec.right_slopes is not None:
        right = spec.right_slopes.detach().reshape(-1, spec.num_heads, 1, 1, 1)
        slopes = torch.where(distance < 0, right, slopes).masked_fill(distance == 0, 0.0)
    penalty = slopes * distance.abs().to(dtype)
    if spec.causal:
        penalty = penalty.masked_fill(distance < 0, math.inf)
    if spec.window is not None:
        penalty = penalty.masked_fill(distance.abs() >= spec.window, math.inf)
    return penalty


def _inner_offset(spec: Spec) -> int | None:
    """The position of query 0 if every query is known to have a key at its position; else None."""
    offset = spec.query_offset
    if isinstance(offset, Tensor) or offset < 0 or offset + spec.query_len > spec.key_len:
        return None
    return offset


def _near_mass(spec: Spec, rows: Tensor, key: Tensor, first: Tensor) -> Tensor:
    """[B, H, G, NEAR]: the log-sum-exp over the near keys that a query sees; −inf if it sees none of them."""
    near, at = _near_keys(spec, key, first)
    groups, width = at.shape[1:]
    scores = (rows @ near[:, :, None].to(rows.dtype).mT).mul_(spec.scale)
    scores = scores.reshape(spec.batch, spec.num_heads, groups, NEAR, width)

    i = (first[:, None] + torch.arange(groups * NEAR, device=first.device)).reshape(-1, groups, NEAR, 1)
    hidden = ((at < 0) | (at >= spec.key_len))[:, :, None]
    # If all queries are among the keys, every group has the same distances as the first.
    pairs = slice(None) if _inner_offset(spec) is None else slice(0, 1)
    distance = i[:, pairs] - at[:, pairs, None, :]
    penalty = _penalty(spec, distance[:, None], rows.dtype if spec.key_bias is None else torch.float64)
    if spec.key_mask is not None:
        hidden = hidden | ~_per_sequence(spec.key_mask, at)
    if spec.query_segments is not None and spec.key_segments is not None:
        short = groups * NEAR - spec.query_len
        own = torch.nn.functional.pad(spec.query_segments, (0, short)).reshape(-1, groups, NEAR, 1)
        hidden = hidden | (own != _per_sequence(spec.key_segments, at))
    if spec.key_bias is not None:
        index = at.clamp(0, spec.key_len - 1).flatten(1).expand(spec.batch, -1)[:, None].expand(-1, spec.num_heads, -1)
        own = spec.key_bias.detach().double().gather(2, index).unflatten(2, (groups, 1, width))  # [B, H, G, 1, W]
        hidden, scores = hidden[:, None] | (own == -math.inf), scores + own.masked_fill(own == -math.inf, 0.0)
        return scores.sub_(penalty).masked_fill_(hidden, -math.inf).logsumexp(-1)
    return scores.sub_(penalty).masked_fill_(hidden[:, None], -math.inf).logsumexp(-1)


def _near_keys(spec: Spec, key: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The 2·NEAR keys around every small group of queries, [B, K, G, W, D], and their positions [B|1, G, W], some outside."""
    groups = -(-spec.query_len // NEAR)
    offset = _inner_offset(spec)
    if offset is not None:
        # The keys of every group and of the group before it, as overlapping views of one padded copy, without gather.
        padded = torch.nn.functional.pad(key, (0, 0, NEAR - offset, offset + groups * NEAR - spec.key_len))
        b, k, s, d = padded.stride()
        shape = (key.shape[0], key.shape[1], groups, 2 * NEAR, key.shape[3])
        near = padded.as_strided(shape, (b, k, NEAR * s, s, d))
        start = torch.arange(groups, device=key.device) * NEAR + (offset - NEAR)
        return near, start[None, :, None] + torch.arange(2 * NEAR, device=key.device)
    width = min(2 * NEAR, spec.key_len)
    start = first[:, None] + torch.arange(groups, device=key.device) * NEAR - NEAR
    at = start.clamp(0, spec.key_len - width)[..., None] + torch.arange(width, device=key.device)
    index = at.reshape(-1, 1, groups * width, 1).expand(spec.batch, spec.num_kv_heads, -1, spec.head_dim)
    return key.gather(2, index).unflatten(2, (groups, width)), at


def _per_sequence(row: Tensor, at: Tensor) -> Tensor:
    """[B, G, 1, W]: the values at [B|1, G, W] of a mask or of segment ids [B, S]."""
    index = at.clamp(0, row.shape[1] - 1).flatten(1).expand(row.shape[0], -1)
    return row.gather(1, index).reshape(row.shape[0], at.shape[1], 1, at.shape[2])


def _stretch_mass(spec: Spec, rows: Tensor, key: Tensor, offset: int) -> Tensor:
    """[B, H, G, NEAR]: ln n + the mean score of the n keys before the near ones, for the best stretch."""
    groups = rows.shape[3]
    most = max(STRETCHES) // NEAR
    # Groups of NEAR keys that end where the first query's near keys begin, at most `most` of them.
    end = offset - NEAR
    stop = end + (groups - 1) * NEAR
    if stop <= 0:  # no key is that far back
        return rows.new_full((spec.batch, spec.num_heads, groups, NEAR), -math.inf)
    ahead = max(0, min(-(-end // NEAR), most))
    begin = end - ahead * NEAR
    parts = key[:, :, max(begin, 0) : stop]
    if begin < 0:
        parts = torch.nn.functional.pad(parts, (0, 0, -begin, 0))
    sums = parts.to(rows.dtype).unflatten(2, (-1, NEAR)).sum(3).double()
    total = torch.nn.functional.pad(sums.cumsum(2), (0, 0, 1, 0))
    device = key.device
    last = torch.arange(ahead, ahead + groups, device=device)  # row of `total` at the end of each group's stretch
    position = end + torch.arange(groups, device=device) * NEAR
    i = (offset + torch.arange(groups * NEAR, device=device)).reshape(groups, NEAR).to(rows.dtype)
    means, counts, centres = [], [], []
    for stretch in STRETCHES:
        count = position.clamp(0, stretch)
        start = (last - stretch // NEAR).clamp(min=0)
        means.append((total[:, :, ahead : ahead + groups] - total[:, :, start]) / count.clamp(min=1)[:, None])
        counts.append(count)
        centres.append(position - (count + 1) / 2)
    mean = torch.stack(means, -1).to(rows.dtype)  # [B, K, G, D, stretches]
    scores = (rows @ mean[:, :, None]).mul_(spec.scale)
    scores = scores.reshape(spec.batch, spec.num_heads, groups, NEAR, len(STRETCHES))
    slopes = spec.slopes.detach().reshape(-1, spec.num_heads, 1, 1, 1).to(rows.dtype)
    scores = scores - slopes * (i[..., None] - torch.stack(centres, -1)[:, None].to(rows.dtype))
    scores = scores + torch.stack(counts, -1)[:, None].to(rows.dtype).log()  # ln 0 = −inf: no stretch
    return scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(-1)
