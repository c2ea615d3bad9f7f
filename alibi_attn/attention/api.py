"""`alibi_attention`: the one function. It checks its arguments, describes the call as an `AttentionSpec`, and calls a backend."""

import contextlib
import dataclasses
import math
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from alibi_attn.attention import dispatch, explanation, transforms
from alibi_attn.attention.bias import Slopes
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.validation import AttentionOptions, SegmentIds, make_spec
from alibi_attn.attention.visibility import largest_distance, lse_dtype


@overload
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = ...,
    *,
    causal: bool = ...,
    right_slopes: Slopes | None = ...,
    window: int | None = ...,
    scale: float | None = ...,
    query_offset: int | Tensor | None = ...,
    key_mask: Tensor | None = ...,
    segment_ids: SegmentIds | None = ...,
    key_bias: Tensor | None = ...,
    dropout_p: float = ...,
    tolerance: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = ...,
    *,
    causal: bool = ...,
    right_slopes: Slopes | None = ...,
    window: int | None = ...,
    scale: float | None = ...,
    query_offset: int | Tensor | None = ...,
    key_mask: Tensor | None = ...,
    segment_ids: SegmentIds | None = ...,
    key_bias: Tensor | None = ...,
    dropout_p: float = ...,
    tolerance: float | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = ...,
    *,
    causal: bool = ...,
    right_slopes: Slopes | None = ...,
    window: int | None = ...,
    scale: float | None = ...,
    query_offset: int | Tensor | None = ...,
    key_mask: Tensor | None = ...,
    segment_ids: SegmentIds | None = ...,
    key_bias: Tensor | None = ...,
    dropout_p: float = ...,
    tolerance: float | None = ...,
    return_lse: bool = ...,
    backend: str = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    window: int | None = None,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    segment_ids: SegmentIds | None = None,
    key_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with linear biases, softmax(scale·q·kᵀ − m·|i − j| + b_j)·v, [B, H, T, D] in query's dtype.

    Exact to rounding. Differentiable once in query, key, value, slopes and key_bias, and through lse.

    Args:
        query: [B, H, T, D]; float16, bfloat16, float32 or float64.
        key, value: [B, K, S, D], K divides H (grouped-query attention).
        slopes: m, one a head [H] or [B, H]; sequence, array, tensor or Parameter, used in fp32 (fp64 for fp64 input); 0 = no
            position, negative = far keys are preferred. Default `alibi_slopes(H)`, the published ones.
        causal: keys to the right are not seen. False is symmetric, −m·|i − j| on both sides.
        right_slopes: own slopes for keys to the right (causal=False only); inf = this head never looks right.
        window: how many keys a query may see, itself included (to either side when not causal).
        scale: factor of q·k, 1/√D by default. The bias is not scaled.
        query_offset: position of query 0; S − T by default: the queries are the last T of the S positions. An int, or an
            integer tensor, 0-d or [B], that is never read on the host. It may lie before or after all the keys.
        key_mask: [B, S] bool, True = may be seen.
        segment_ids: [B, S] integers, attention within a segment only; or a pair ([B, T], [B, S]) for queries and keys.
        key_bias: b, fp32 or fp64, [B, H, S] or what broadcasts to it, added to the score of each key; −inf = may not be seen.
            However large the numbers are, a score is off by a rounding of their difference to the b of a key near the query.
        dropout_p: share of the attention weights that are dropped, in [0, 1).
        tolerance: the largest share of a query's softmax mass that may be skipped, in [0, 1); default eps / 32 of the dtype, far
            below its rounding; 0 skips only what is forbidden.
        return_lse: also return the natural log-sum-exp of the scores, [B, H, T] fp32 (fp64 where query or key_bias is), −inf
            where nothing is seen. Results over disjoint sets of keys merge exactly with it.
        backend: "auto", or the name of one: it runs or raises.

    Returns:
        The output, or (output, lse). A query that may see nothing gives zeros. A key that may not be seen is never used.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or numbers, or a named backend that cannot run this call.

    >>> q = k = v = torch.randn(1, 8, 128, 64)
    >>> alibi_attention(q, k, v).shape
    torch.Size([1, 8, 128, 64])

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    query, key, value = _autocast(query, key, value)
    spec = make_spec(
        query, key, value, slopes, causal=causal, right_slopes=right_slopes, window=window, scale=scale,
        query_offset=query_offset, key_mask=key_mask, segment_ids=segment_ids, key_bias=key_bias, dropout_p=dropout_p,
        tolerance=tolerance, return_lse=return_lse,
    )  # fmt: skip
    return _attend(spec, query, key, value, backend)


def head_reach(
    query: Tensor,
    key: Tensor,
    slopes: Slopes | None = None,
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """How far every head really looks, [B, H] int64: no query of the head reads a key with |i − j| ≥ reach.

    Like `window` it counts the query itself. Where nothing is skipped (by `dense`, for example, which "auto" takes for short
    input) it is the largest distance that occurs in this call, plus one. It is what the backend reads: its blocks round the
    certified reach up. Values are taken to be of like length: a skipped value more than four times longer than the nearest kept
    ones widens the reach.

    Arguments and errors are those of `alibi_attention`.

    >>> q = k = torch.randn(1, 8, 1024, 64)
    >>> bool((head_reach(q, k)[0, 0] < 200).all())
    True
    """
    query, key = _autocast(query, key)
    spec = make_spec(query, key, key, slopes, **options)
    name = dispatch.choose(backend, spec, query, key, key)
    with torch.no_grad():
        visited = dispatch.visits(name, spec, query, key, None)
    most = largest_distance(spec, query.device)[:, None].expand(-1, spec.num_heads)
    return most.clone() if visited is None else torch.minimum(visited[0], most)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = None,
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> str:
    """What `alibi_attention` would do with these arguments, in words: who runs it and why, and how far each head looks.

    Arguments and errors are those of `alibi_attention`. It reads tensor values, so it is not for compiled code.

    >>> q = k = v = torch.randn(1, 8, 128, 64)
    >>> print(explain(q, k, v).splitlines()[0])
    B=1 H=8 K=8 T=128 S=128 D=64, float32 on cpu, causal
    """
    query, key, value = _autocast(query, key, value)
    spec = make_spec(query, key, value, slopes, **options)
    name = dispatch.choose(backend, spec, query, key, value)
    return explanation.describe(spec, name, backend, query, key, value)


def _attend(
    spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    """What a checked call returns."""
    query, key, value, spec = _differentiable_once(query, key, value, spec)
    name = dispatch.choose(backend, spec, query, key, value)
    lse: Tensor | None
    if spec.query_len == 0 or spec.key_len == 0:
        output, lse = _nothing(spec, query, key, value)
    else:
        with _without_autocast(query.device.type):
            output, lse = dispatch.BACKENDS[name].run(spec, query, key, value)
    if not spec.return_lse:
        return output
    assert lse is not None, f"{name} left out the lse that was asked for"
    return output, lse


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """torch.autocast's rule for scaled_dot_product_attention: fp16, bf16 and fp32 become the autocast dtype."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    low = torch.get_autocast_dtype(device)
    return tuple(x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _differentiable_once(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec[Tensor]
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec[Tensor]]:
    """The inputs, such that second derivatives and forward mode raise on every backend alike, instead of being wrong on some."""
    names = [name for name in ("slopes", "right_slopes", "key_bias", "query_bias") if getattr(spec, name) is not None]
    before: list[Tensor] = [getattr(spec, name) for name in names]
    query, key, value, *after = transforms.once(query, key, value, *before)
    if any(x is not y for x, y in zip(before, after, strict=True)):
        changed: dict[str, Any] = dict(zip(names, after, strict=True))
        spec = dataclasses.replace(spec, **changed)
    return query, key, value, spec


def _nothing(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """No queries, or no keys to be seen: zeros, and lse −inf."""
    everywhere = torch.ones((), dtype=torch.bool, device=query.device)
    given = key, value, spec.slopes, spec.right_slopes, spec.key_bias, spec.query_bias
    inputs = [x for x in given if x is not None]
    # Everything hangs on all inputs, so that gradients, zeros, pass through.
    zero = torch.stack([x.masked_fill(everywhere, 0.0).sum().to(query.dtype) for x in inputs]).sum()
    output = query.masked_fill(everywhere, 0.0) + zero
    return output, output.sum(-1).to(lse_dtype(spec, query)) - math.inf
