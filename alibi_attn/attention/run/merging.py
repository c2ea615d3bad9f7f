"""Calls whose keys split into disjoint sets, each an ordinary call that every backend computes; the results merge by their lse.

    prefix_len, positions     the keys to the left of each query (and itself), and those to the right
    windows per head          the heads that share a window
    sinks                     the first n keys, without the window, and all others, within it

Keys to the right become keys to the left by reversing both sequences. There the queries are moved by one, so that none sees its
own key again; all distances are then one too small, and lse is too large by m. Explicit positions are biases of queries and keys,
−m·(p_i − p_j) = −m·p_i + m·p_j, with slopes of 0. Queries that are not at the positions of keys are first sorted in among them.

A merged result drops the mean of the shares that its parts drop, weighted by their mass: at most the tolerance of each part.
`execution.py` runs the parts. Shapes as in `spec.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.call.bias import widest
from alibi_attn.attention.call.dropout import numbered
from alibi_attn.attention.call.spec import AttentionSpec, heads_by_window, index_of, key_heads
from alibi_attn.attention.call.transforms import may_read, surely
from alibi_attn.attention.operators.finite_numbers import lse_dtype
from alibi_attn.attention.run.splitting import first_split, register_queries

Spec = AttentionSpec[Tensor]
Result = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """Some keys of a call, or some of its heads. Later parts may have fewer queries, the first ones.

    Args:
        heads: the query heads of the call; None = all.
        is_reversed: the sequences run backward, and distances are one too small.
        places: [B, T], where the queries of the call are among those of the part; None = they are the same.
        queries: the part has all keys and the queries after those of the part before it.
    """

    spec: Spec
    query: Tensor
    key: Tensor
    value: Tensor
    heads: tuple[int, ...] | None = None
    is_reversed: bool = False
    places: Tensor | None = None
    queries: bool = False


def parts(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> list[Part]:
    """The parts of a call; those of several heads or sides may have parts again. A dropout seed must have been drawn."""
    spec = dataclasses.replace(spec, return_lse=True)
    split = first_split(spec)
    if split == "registers":
        return _registers_and_others(spec, query, key, value)
    if split == "heads":
        windows = heads_by_window(spec.head_windows or (), runs=spec.dropout_p > 0)
        return [_of_heads(spec, query, key, value, heads, window) for heads, window in windows]
    if spec.key_bias is not None:  # lse has its dtype, and merging compares lse, which are as large as the biases
        spec = dataclasses.replace(spec, key_bias=spec.key_bias.to(widest(spec.key_bias)))
    if split == "sinks":
        return _sinks_and_others(spec, query, key, value)
    if split == "one axis":
        return [_on_one_axis(spec, query, key, value)]
    if split == "sides":
        return _two_sides(spec, query, key, value)
    return [Part(_with_positions(spec), query, key, value)]


def joined(spec: Spec, of: Sequence[Part], results: Sequence[Result]) -> Result:
    """(output in query's dtype, lse) of the call whose parts gave these results."""
    if of[0].heads is not None:
        places = {head: (part, at) for part, one in enumerate(of) for at, head in enumerate(one.heads or ())}
        order = [places[head] for head in range(spec.num_heads)]
        output, lse = (torch.stack([results[part][n][:, at] for part, at in order], 1) for n in (0, 1))
        return output, lse
    if of[0].places is not None:
        at = of[0].places[:, None].expand(-1, spec.num_heads, -1)
        output, lse = results[0]
        return output.gather(2, at[..., None].expand(*at.shape, output.shape[-1])), lse.gather(2, at)
    if of[0].queries:
        output, lse = (torch.cat(x, 2) for x in zip(*results, strict=True))
        return output, lse
    forward = [_in_order(part, result) for part, result in zip(of, results, strict=True)]
    output, lse = forward[0]
    for more, more_lse in forward[1:]:
        count = more_lse.shape[2]
        both = merged(output[:, :, :count], lse[:, :, :count], more, more_lse)
        if count < spec.query_len:
            both = torch.cat([both[0], output[:, :, count:]], 2), torch.cat([both[1], lse[:, :, count:]], 2)
        output, lse = both
    return output.to(of[0].query.dtype), lse.to(lse_dtype(spec, of[0].query.dtype))


def merged(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> Result:
    """The (output, lse) over the union of two disjoint sets of keys; differentiable, even if a query sees no keys."""
    top = torch.maximum(lse, more_lse).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (lse - top).exp(), (more_lse - top).exp()
    total = weights[0] + weights[1]
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    shares = [(weight / total)[..., None] for weight in weights]
    return shares[0] * output + shares[1] * more, (top + total.log()).masked_fill(nothing, -torch.inf)


def _of_heads(spec: Spec, query: Tensor, key: Tensor, value: Tensor, heads: tuple[int, ...], window: int) -> Part:
    of_heads, owners = list(heads), key_heads(heads, spec.group)
    seed = spec.dropout_seed
    if seed is not None:
        seed = torch.cat([seed[:, :2], seed[:, 2:3] + heads[0], seed[:, 3:]], 1)
    part = spec.of_heads(heads, lambda x, axis: _taken(x, of_heads, axis), dropout_seed=seed, window=window)
    query, key, value = _taken(query, of_heads, 1), _taken(key, owners, 1), _taken(value, owners, 1)
    if spec.sinks == 0:
        part, key, value = _keys(part, key, value, _first_near(part), part.key_len)
    return Part(part, query, key, value, heads=heads)


def _registers_and_others(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> list[Part]:
    """The queries that are registers and all others; then the keys that are registers, which have no bias, and all others."""
    count = register_queries(spec)
    if count > 0:
        first, rest = spec.on_queries(0, count), spec.on_queries(count, spec.query_len)
        return [
            Part(first.without_bias(_flat), query[:, :, :count], key, value, queries=True),
            Part(rest, query[:, :, count:], key, value, queries=True),
        ]
    registers = min(spec.registers, spec.key_len)
    of_registers = _keys(spec.without_bias(_flat), key, value, 0, registers)
    others = _keys(dataclasses.replace(spec, registers=0), key, value, registers, spec.key_len)
    return [Part(part, query, keys, values) for part, keys, values in (others, of_registers)]


def _flat(slopes: Tensor) -> Tensor:
    return slopes.detach().masked_fill(~slopes.isinf(), 0.0)


def _sinks_and_others(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> list[Part]:
    if torch.compiler.is_exporting():  # keys are hidden instead: a slice would be a guard on the length
        first = torch.arange(spec.key_len, device=key.device) < spec.sinks
        masks = [x.expand(spec.batch, -1) if spec.key_mask is None else x & spec.key_mask for x in (~first, first)]
        sides = zip(masks, (spec.window, None), strict=True)
        specs = [dataclasses.replace(spec, sinks=0, key_mask=mask, window=window) for mask, window in sides]
        return [Part(part, query, key, value) for part in specs]
    sinks = min(spec.sinks, spec.key_len)
    spec = dataclasses.replace(spec, sinks=0)
    of_sinks = _keys(dataclasses.replace(spec, window=None), key, value, 0, sinks)
    others = _keys(spec, key, value, max(sinks, _first_near(spec)), spec.key_len)
    return [Part(part, query, keys, values) for part, keys, values in (others, of_sinks)]


def _first_near(spec: Spec) -> int:
    """The first key that the window may show to query 0, if that is known without reading a tensor."""
    if spec.window is None or not isinstance(spec.query_offset, int):
        return 0
    return min(max(spec.query_offset - spec.window + 1, 0), spec.key_len)


def _keys(spec: Spec, key: Tensor, value: Tensor, start: int, stop: int) -> tuple[Spec, Tensor, Tensor]:
    """The call over keys [start, stop) only."""
    if start == 0 and stop == spec.key_len:
        return spec, key, value
    seed = spec.dropout_seed
    if seed is not None and spec.key_numbers is None:
        seed = torch.cat([seed[:, :3], seed[:, 3:] + start], 1)
    return spec.on_keys(start, stop, dropout_seed=seed), key[:, :, start:stop], value[:, :, start:stop]


def _on_one_axis(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> Part:
    """Queries and keys sorted by position into one sequence of S + T; places without a key are hidden."""
    positions, own = spec.positions, spec.query_positions
    assert positions is not None
    assert own is not None
    wide, device = widest(positions), key.device
    positions, own = positions.to(wide).contiguous(), own.to(wide).contiguous()
    of_keys = torch.arange(spec.key_len, device=device) + torch.searchsorted(own, positions)
    of_queries = torch.arange(spec.query_len, device=device) + torch.searchsorted(positions, own, right=True)
    length = spec.key_len + spec.query_len

    def placed(x: Tensor, at: Tensor) -> Tensor:
        """[B, …, N] along the last axis, zeros elsewhere."""
        at = at.reshape(spec.batch, *[1] * (x.ndim - 2), -1).expand(x.shape)
        return x.new_zeros(*x.shape[:-1], length).scatter(-1, at, x)

    def rows(x: Tensor, at: Tensor) -> Tensor:
        return placed(x.mT, at).mT

    spec = numbered(spec, device)
    mask = torch.ones_like(positions, dtype=torch.bool) if spec.key_mask is None else spec.key_mask
    together = placed(positions, of_keys) + placed(own, of_queries)
    part = spec.on_one_axis(together, mask, lambda x, _: placed(x, of_keys), lambda x, _: placed(x, of_queries))
    return Part(part, rows(query, of_queries), rows(key, of_keys), rows(value, of_keys), places=of_queries)


def _two_sides(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> list[Part]:
    """The keys up to each query, and those after it."""
    left = Part(
        dataclasses.replace(spec, causal=True, right_slopes=None, prefix_len=None, right_window=None), query, key, value
    )
    if spec.right_window is not None:
        spec = dataclasses.replace(spec, window=spec.right_window, right_window=None)
    after = 0 if isinstance(spec.query_offset, Tensor) else spec.query_offset + 1  # the first key after query 0
    stop = spec.key_len
    if spec.prefix_len is not None and may_read(spec.prefix_len) and not isinstance(spec.query_offset, Tensor):
        # Neither keys after the longest prefix nor their queries are needed.
        stop = min(max(int(spec.prefix_len.max()), 0), spec.key_len)
        count = min(max(stop - after, 0), spec.query_len)
        query, spec = query[:, :, :count], spec.on_queries(0, count)
    if spec.window == 1 or surely(stop == 0) or surely(after >= stop):
        return [left]
    part, key, value = _keys(spec, key, value, after if surely(after > 0) else 0, stop)
    return [left, _reversed(part, query, key, value)]


def _reversed(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> Part:
    """The keys after each query."""
    mask = spec.key_mask
    if spec.prefix_len is not None:
        inside = torch.arange(spec.key_len, device=key.device) < spec.prefix_len[:, None]
        mask = inside if mask is None else inside & mask
    part = numbered(spec, key.device).reversed(lambda x, axis: x.flip(axis), mask)
    return Part(part, query.flip(2), key.flip(2), value.flip(2), is_reversed=True)


def _in_order(part: Part, result: Result) -> Result:
    """The result of a part, for the queries in their order and with the true distances."""
    if not part.is_reversed:
        return result
    output, lse = result[0].flip(2), result[1].flip(2)
    return output, lse if part.spec.positions is not None else lse - part.spec.slopes[..., None]


def _with_positions(spec: Spec) -> Spec:
    """The causal call with its positions as biases."""
    positions, query_positions = spec.positions, spec.query_positions
    assert positions is not None
    assert query_positions is not None
    wide = widest(positions)
    last = positions[:, -1:].to(wide)  # differences keep more digits than products with large numbers
    never = spec.slopes.isinf()  # right slopes: such a head sees no key to the right
    m = spec.slopes.to(wide).masked_fill(never, 0.0).reshape(-1, spec.num_heads, 1)
    of_keys = m * (positions.to(wide) - last)[:, None]
    of_keys = of_keys.masked_fill(never.reshape(-1, spec.num_heads, 1), -torch.inf)
    of_queries = -m * (query_positions.to(wide) - last)[:, None]
    heads = spec.batch, spec.num_heads
    return dataclasses.replace(
        spec,
        slopes=torch.zeros_like(spec.slopes).detach(),
        key_bias=(of_keys if spec.key_bias is None else of_keys + spec.key_bias).expand(*heads, -1),
        query_bias=of_queries.expand(*heads, -1),
        positions=None,
        query_positions=None,
    )


def _taken(x: Tensor, heads: list[int], axis: int) -> Tensor:
    """Some heads of a tensor; without an index tensor, whose copy to a GPU would synchronize."""
    chosen = index_of(heads)
    if isinstance(chosen, slice):
        return x.narrow(axis, chosen.start, chosen.stop - chosen.start)
    return torch.stack([x.select(axis, head) for head in heads], axis)
