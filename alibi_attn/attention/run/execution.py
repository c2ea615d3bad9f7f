"""Runs a validated call: picks the backend, runs parts, allows one derivative, handles empty inputs."""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from alibi_attn.attention.backends.protocol import Visits
from alibi_attn.attention.call import transforms
from alibi_attn.attention.call.dropout import drawn_seed
from alibi_attn.attention.call.reads import DROPOUT, MASKS, PARTS, SPACE
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import largest_distances
from alibi_attn.attention.operators.derivatives import differentiable_once, once
from alibi_attn.attention.operators.finite_numbers import lse_dtype
from alibi_attn.attention.run import dispatch, merging, space

# The fields that `visits` reads, also those that do not change what is read.
VISITS = MASKS | PARTS | SPACE | DROPOUT | {"key_bias", "sink_logits"}


def attend(
    spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    """The output of a validated call, or (output, lse)."""
    if spec.dropout_p > 0 and spec.dropout_seed is None:
        spec = dataclasses.replace(spec, dropout_seed=drawn_seed(query.device))
    name, off = dispatch.choose(backend, spec, query, key, value)
    is_empty = spec.query_len == 0 or spec.key_len == 0 or transforms.surely(spec.batch == 0)
    lse: Tensor | None
    if "sink_logits" in off and spec.sink_logits is not None:
        output, lse = attend(without_sinks(spec), query, key, value, backend)
        output = scaled_by_sinks(output, lse, spec.sink_logits)
    elif off and not is_empty:
        parts = merging.parts(spec, query, key, value)
        results = [attend(part.spec, part.query, part.key, part.value, backend) for part in parts]
        with transforms.without_autocast(query.device.type):
            output, lse = merging.joined(spec, parts, [(result[0], result[1]) for result in results])
    else:
        if is_empty or name not in dispatch.WITH_OPERATOR:
            # Second derivatives and forward mode would be wrong on some backends; operators refuse them too.
            spec, query, key, value = differentiable_once(spec, query, key, value)
        if is_empty:
            output, lse = _nothing(spec, query, key, value)
        else:
            run = dispatch.RUNS[name]
            if spec.coordinates is not None:
                skips = name not in dispatch.WITHOUT_SKIPPING
                run = functools.partial(space.attend, run, skips=skips, in_chunks=backend == "auto")
            with transforms.without_autocast(query.device.type):
                output, lse = run(spec, query, key, value)
    if not spec.return_lse:
        return output
    assert lse is not None, f"{name} did not return the requested lse"
    return output, lse


def _nothing(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(output, lse) without queries or without keys: zeros, and lse −inf."""
    everywhere = torch.ones((), dtype=torch.bool, device=query.device)
    given = key, value, spec.slopes, spec.right_slopes, spec.key_bias, spec.query_bias, spec.table
    inputs = [x for x in given if x is not None]
    # The output depends on all inputs, so that each gets a gradient of zeros.
    zero = torch.stack([x.masked_fill(everywhere, 0.0).sum().to(query.dtype) for x in inputs]).sum()
    output = query.masked_fill(everywhere, 0.0) + zero
    return output, output.sum(-1).to(lse_dtype(spec, query.dtype)) - math.inf


def without_sinks(spec: AttentionSpec[Tensor]) -> AttentionSpec[Tensor]:
    """The call that a backend computes; sinks are applied to its output and lse."""
    return spec if spec.sink_logits is None else dataclasses.replace(spec, sink_logits=None, return_lse=True)


def scaled_by_sinks(output: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """The output over the given keys and one sink per head, output·σ(lse − sink), [B, H, T, D] in output's dtype.

    Apply it once, after merging the results over all keys: lse excludes the sink.
    """
    blind = lse == -math.inf  # the output of such a query is 0, and its incoming gradient has no effect
    (sink_logits,) = once(sink_logits)
    share = torch.sigmoid(lse.masked_fill(blind, 0.0) - sink_logits.to(lse.dtype)[:, None]).masked_fill(blind, 0.0)
    return (output * share[..., None]).to(output.dtype)


def visits(
    spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor | None, backend: str
) -> Visits | None:
    """What the backend that runs reads, added up over parts; None = everything."""
    given = key if value is None else value
    spec = without_sinks(spec)
    name, off = dispatch.choose(backend, spec, query, key, given)
    if 0 in (spec.batch, spec.query_len, spec.key_len):
        return None
    if not off and spec.coordinates is not None and name not in dispatch.WITHOUT_SKIPPING:
        spec, query, key, given, _ = space.sorted_in_space(spec, query, key, given)
        value = None if value is None else given
    if not off:
        return dispatch.BACKENDS[name].visits(spec, query, key, value)
    if value is None:  # values of equal norms are what the certificate then assumes
        given = torch.ones((), dtype=key.dtype, device=key.device).expand_as(key)
    if spec.dropout_p > 0:
        spec = dataclasses.replace(spec, dropout_seed=drawn_seed(query.device))
    reach, scores = torch.zeros(2, spec.batch, spec.num_heads, dtype=torch.int64, device=query.device)
    for part in merging.parts(spec, query, key, given):
        found = visits(part.spec, part.query, part.key, part.value, backend)
        heads = slice(None) if part.heads is None else list(part.heads)
        if found is None:
            pairs = part.spec.query_len * part.spec.key_len
            found = Visits(largest_distances(part.spec, query.device), torch.full_like(reach[:, heads], pairs))
        if part.places is not None:  # counted in the part, where queries and keys have other indices
            found = Visits(largest_distances(spec, query.device), found.scores)
        far = found.reach.to(reach.device) + (found.reach > 0).to(reach.device) * part.is_reversed
        reach[:, heads] = torch.maximum(reach[:, heads], far)
        scores[:, heads] += found.scores.to(reach.device)
    return Visits(reach, scores)
