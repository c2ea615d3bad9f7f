"""Runs a validated call: applies autocast, picks the backend, allows one derivative, handles empty inputs."""

import dataclasses
import math

import torch
from torch import Tensor

from alibi_attn.attention import dispatch, transforms
from alibi_attn.attention.derivatives import differentiable_once
from alibi_attn.attention.dropout import drawn_seed
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import nothing


def attend(
    spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    """The output of a validated call, or (output, lse)."""
    if spec.sink_logits is not None:
        return _attend_with_sinks(spec, spec.sink_logits, query, key, value, backend)
    name = dispatch.choose(backend, spec, query, key, value)
    is_empty = spec.query_len == 0 or spec.key_len == 0 or transforms.surely(spec.batch == 0)
    if is_empty or name not in dispatch.WITH_OPERATOR:
        # On some backends second derivatives and forward mode would be wrong; operators refuse them, for all others this does.
        spec, query, key, value = differentiable_once(spec, query, key, value)
    lse: Tensor | None
    if is_empty:
        output, lse = nothing(spec, query, key, value)
    else:
        if spec.dropout_p > 0 and spec.dropout_seed is None:
            spec = dataclasses.replace(spec, dropout_seed=drawn_seed(query.device))
        with transforms.without_autocast(query.device.type):
            output, lse = dispatch.BACKENDS[name].run(spec, query, key, value)
    if not spec.return_lse:
        return output
    assert lse is not None, f"{name} did not return the requested lse"
    return output, lse


def without_sinks(spec: AttentionSpec[Tensor]) -> AttentionSpec[Tensor]:
    """The call that a backend computes; sinks are applied to its output and lse."""
    return spec if spec.sink_logits is None else dataclasses.replace(spec, sink_logits=None, return_lse=True)


def scaled_by_sinks(output: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """The output over the given keys and one sink per head, output·σ(lse − sink), [B, H, T, D] in output's dtype.

    Apply it once, after merging the results over all keys: lse excludes the sink.
    """
    blind = lse == -math.inf  # the output of such a query is 0, and its incoming gradient has no effect
    share = torch.sigmoid(lse.masked_fill(blind, 0.0) - sink_logits.to(lse.dtype)[:, None]).masked_fill(blind, 0.0)
    return (output * share[..., None]).to(output.dtype)


def _attend_with_sinks(
    spec: AttentionSpec[Tensor], sink_logits: Tensor, query: Tensor, key: Tensor, value: Tensor, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    output, lse = attend(without_sinks(spec), query, key, value, backend)
    output = scaled_by_sinks(output, lse, sink_logits)
    return (output, lse) if spec.return_lse else output


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as torch.autocast does for scaled_dot_product_attention: fp16, bf16 and fp32 become the autocast dtype."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not transforms.autocasts(device):
        return tensors
    low = torch.get_autocast_dtype(device)
    return tuple(x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
