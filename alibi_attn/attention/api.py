"""`alibi_attention`: the one function. It checks at the door, describes the call as an `AttentionSpec`, and hands over."""

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from alibi_attn.attention import dispatch
from alibi_attn.attention.bias import Slopes
from alibi_attn.attention.spec import (
    AttentionSpec,
    check_key_mask,
    check_numbers,
    check_query_offset,
    check_segments,
    check_shapes,
    check_slopes,
    dtype_name,
)
from alibi_attn.slopes import alibi_slopes

SegmentIds = Tensor | tuple[Tensor, Tensor]


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
    dropout_p: float = 0.0,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with linear biases, softmax(scale·q·kᵀ − m·|i − j|)·v, [B, H, T, D] in query's dtype.

    Exact to rounding. Differentiable once in query, key, value and slopes, and through lse.

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
        dropout_p: share of the attention weights that are dropped, in [0, 1).
        tolerance: the largest share of a query's softmax mass that may be skipped, in [0, 1); default eps / 32 of the dtype, far
            below its rounding; 0 skips only what is forbidden.
        return_lse: also return the natural log-sum-exp of the scores, [B, H, T] fp32 (fp64 for fp64), −inf where nothing is
            seen. Results over disjoint sets of keys merge exactly with it.
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
        query_offset=query_offset, key_mask=key_mask, segment_ids=segment_ids, dropout_p=dropout_p,
        tolerance=tolerance, return_lse=return_lse,
    )  # fmt: skip
    query, key, value, spec = _once(query, key, value, spec)
    module = dispatch.choose(backend, spec, query, key, value)
    with _without_autocast(query.device.type):
        output, lse = module.run(spec, query, key, value)
    return (output, lse) if return_lse else output


def make_spec(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None,
    *,
    causal: bool,
    right_slopes: Slopes | None,
    window: int | None,
    scale: float | None,
    query_offset: int | Tensor | None,
    key_mask: Tensor | None,
    segment_ids: SegmentIds | None,
    dropout_p: float,
    tolerance: float | None,
    return_lse: bool,
) -> AttentionSpec[Tensor]:
    """The door: everything is checked here, once, and completed with its defaults."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor but is {type(tensor).__name__}")
        _check_device(name, tensor, query.device)
    b, h, k, t, s, d = check_shapes(query, key, value)
    scale, tolerance = check_numbers(
        causal=causal, has_right_slopes=right_slopes is not None, window=window, scale=scale, dropout_p=dropout_p,
        tolerance=tolerance, head_dim=d, dtype=dtype_name(query.dtype),
    )  # fmt: skip
    if key_mask is not None:
        _check_tensor("key_mask", key_mask, query.device)
        check_key_mask(key_mask, batch=b, key_len=s)
    offset = _offset(query_offset, batch=b, query_len=t, key_len=s, device=query.device)
    query_segments, key_segments = _segments(segment_ids, offset, batch=b, query_len=t, key_len=s, device=query.device)
    return AttentionSpec(
        batch=b, num_heads=h, num_kv_heads=k, query_len=t, key_len=s, head_dim=d,
        slopes=_slopes("slopes", _default_slopes(h) if slopes is None else slopes, query, batch=b, num_heads=h),
        right_slopes=None if right_slopes is None else _slopes("right_slopes", right_slopes, query, batch=b, num_heads=h),
        causal=causal, window=window, scale=scale, query_offset=offset, key_mask=key_mask,
        query_segments=query_segments, key_segments=key_segments,
        dropout_p=dropout_p, tolerance=tolerance, return_lse=return_lse,
    )  # fmt: skip


def _slopes(name: str, slopes: Slopes, query: Tensor, *, batch: int, num_heads: int) -> Tensor:
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    if isinstance(slopes, Tensor):
        _check_device(name, slopes, query.device)
        if slopes.is_complex() or slopes.dtype == torch.bool:
            raise TypeError(f"{name} is {dtype_name(slopes.dtype)} but must hold real numbers")
        tensor = slopes.to(work)
    else:
        tensor = torch.as_tensor(slopes, dtype=work, device=query.device)
    check_slopes(name, tensor.shape, batch=batch, num_heads=num_heads)
    if tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        allowed = tensor.isfinite() | tensor.isposinf() if name == "right_slopes" else tensor.isfinite()
        if not bool(allowed.all()):
            rule = "finite, or inf for a head that never looks right" if name == "right_slopes" else "finite"
            raise ValueError(f"{name} must be {rule} but is {tensor.tolist()}")
    return tensor


def _default_slopes(num_heads: int) -> tuple[float, ...]:
    # Under dynamic shapes H is a symbol; a list has a definite length, and so H becomes a number.
    return _published(len([None] * num_heads))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _published(num_heads: int) -> tuple[float, ...]:
    return tuple(alibi_slopes(num_heads).tolist())


def _offset(
    query_offset: int | Tensor | None, *, batch: int, query_len: int, key_len: int, device: torch.device
) -> int | Tensor:
    if query_offset is None:
        return key_len - query_len
    if isinstance(query_offset, Tensor):
        _check_device("query_offset", query_offset, device)
        check_query_offset(query_offset, batch=batch)
        return query_offset.to(torch.int64)
    if isinstance(query_offset, bool) or not isinstance(query_offset, int | torch.SymInt):
        raise TypeError(f"query_offset must be an int or an integer tensor but is {query_offset!r}")
    return query_offset


def _segments(
    segment_ids: SegmentIds | None,
    offset: int | Tensor,
    *,
    batch: int,
    query_len: int,
    key_len: int,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """(query's [B, T], key's [B, S]); a query takes the segment of its position, which must then be a key's."""
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2:
            raise ValueError(
                f"segment_ids has {len(segment_ids)} parts but is one tensor [B, S] or a pair ([B, T], [B, S])"
            )
        of_query, of_key = segment_ids
        _check_tensor("segment_ids[0]", of_query, device)
        _check_tensor("segment_ids[1]", of_key, device)
        check_segments("segment_ids[0]", of_query, batch=batch, length=query_len, axis="T")
        check_segments("segment_ids[1]", of_key, batch=batch, length=key_len, axis="S")
        return of_query.to(torch.int64), of_key.to(torch.int64)
    _check_tensor("segment_ids", segment_ids, device)
    check_segments("segment_ids", segment_ids, batch=batch, length=key_len, axis="S")
    of_key = segment_ids.to(torch.int64)
    if not isinstance(offset, Tensor):
        if offset < 0 or offset + query_len > key_len:
            raise ValueError(
                f"the queries stand at positions {offset} to {offset + query_len - 1} but segment_ids covers the keys' 0 to "
                f"{key_len - 1}; pass a pair ([B, T], [B, S]) of segment ids for queries and keys"
            )
        return of_key[:, offset : offset + query_len], of_key
    position = offset.reshape(-1, 1) + torch.arange(query_len, device=device)
    outside = (position < 0) | (position >= key_len)
    if device.type == "cpu" and not torch.compiler.is_compiling() and bool(outside.any()):
        raise ValueError(
            f"query_offset places queries outside the keys' positions 0 to {key_len - 1}, which segment_ids covers; "
            "pass a pair ([B, T], [B, S]) of segment ids for queries and keys"
        )
    # Where values cannot be read a query outside gets a number that no key has, and sees nothing.
    of_query = of_key.gather(1, position.clamp(0, max(key_len - 1, 0)).expand(batch, query_len))
    return torch.where(outside, of_key.amax(1, keepdim=True) + 1, of_query), of_key


def _check_tensor(name: str, tensor: Tensor, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor but is {type(tensor).__name__}")
    _check_device(name, tensor, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but query on {device}; pass {name}.to(query.device)")


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


def _once(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec[Tensor]
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec[Tensor]]:
    """Mark the inputs so that second derivatives raise on every backend alike, instead of being wrong on some."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return query, key, value, spec
    right = spec.right_slopes
    spec = dataclasses.replace(spec, slopes=_mark(spec.slopes), right_slopes=None if right is None else _mark(right))
    return _mark(query), _mark(key), _mark(value), spec


def _mark(tensor: Tensor) -> Tensor:
    marked: Tensor = _Once.apply(tensor)  # type: ignore[no-untyped-call]
    return marked


class _Once(torch.autograd.Function):
    """The identity, differentiable once."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return gradient
        (tensor,) = ctx.saved_tensors
        guarded: Tensor = _NoSecondDerivative.apply(gradient, tensor)  # type: ignore[no-untyped-call]
        return guarded


class _NoSecondDerivative(torch.autograd.Function):
    """A gradient that stays connected to its input, so that whoever differentiates it again is told."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, tensor: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError(
            "alibi_attention is differentiable once, and second derivatives were asked for; "
            "write out softmax(scale·q·kᵀ + alibi_bias(...))·v for those"
        )
