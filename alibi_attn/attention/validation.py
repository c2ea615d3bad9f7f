"""Validates every argument of a PyTorch call once, and fills in the defaults."""

import functools
from typing import TypedDict, Unpack, cast

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.argument_names import with_defaults
from alibi_attn.attention.bias import Slopes
from alibi_attn.attention.spec import (
    FARTHEST,
    SINKS_RULE,
    AttentionSpec,
    check_key_bias,
    check_key_mask,
    check_numbers,
    check_position,
    check_query_offset,
    check_segments,
    check_shapes,
    check_sink_logits,
    check_slopes,
    dtype_name,
)
from alibi_attn.attention.transforms import constant_when_compiled, is_traced, may_read, transforms
from alibi_attn.slopes import alibi_slopes

SegmentIds = Tensor | tuple[Tensor, Tensor]


class SharedOptions(TypedDict, total=False):
    """The keywords shared by all functions, except return_lse and backend."""

    window: int | None
    scale: float | None
    dropout_p: float


class MaskOptions(SharedOptions, total=False):
    """The keywords shared by the functions of a batch."""

    key_mask: Tensor | None
    segment_ids: SegmentIds | None


class BiasOptions(TypedDict, total=False):
    """The keywords of functions whose keys may have biases."""

    key_bias: Tensor | None
    sink_logits: Tensor | None
    tolerance: float | None


class VarlenOptions(SharedOptions, BiasOptions, total=False):
    """The keywords of `alibi_attention_varlen`."""

    causal: bool
    right_slopes: Slopes | None


class AttentionOptions(VarlenOptions, MaskOptions, total=False):
    """The keywords of `alibi_attention`, which explains them."""

    query_offset: int | Tensor | None


class SpecOptions(AttentionOptions, total=False):
    """The keywords of `make_spec`, and of functions that describe a call without computing it."""

    return_lse: bool


class ForgettingOptions(MaskOptions, BiasOptions, total=False):
    """The keywords of `forgetting_attention`."""

    query_offset: int | None


class ToeplitzOptions(MaskOptions, total=False):
    """The keywords of `toeplitz_attention`."""

    causal: bool
    query_offset: int | None


def make_spec(
    query: Tensor, key: Tensor, value: Tensor, slopes: Slopes | None = None, **options: Unpack[SpecOptions]
) -> AttentionSpec[Tensor]:
    """The validated spec of a call; options and defaults are those of `alibi_attention`."""
    given = cast(SpecOptions, with_defaults(options))
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor but is {type(tensor).__name__}; convert arrays with torch.as_tensor, or use "
                "alibi_attn.jax for JAX arrays"
            )
        _check_device(name, tensor, query.device)
    b, h, k, t, s, d = check_shapes(query, key, value)
    causal, window, right_slopes = given["causal"], given["window"], given["right_slopes"]
    key_mask, key_bias, sink_logits = given["key_mask"], given["key_bias"], given["sink_logits"]
    scale, tolerance = check_numbers(
        causal=causal, has_right_slopes=right_slopes is not None, window=window, scale=given["scale"],
        dropout_p=given["dropout_p"], tolerance=given["tolerance"], head_dim=d, dtype=dtype_name(query.dtype),
    )  # fmt: skip
    if key_mask is not None:
        check_tensor("key_mask", key_mask, query.device)
        check_key_mask(key_mask, batch=b, key_len=s)
    offset = _offset(given["query_offset"], batch=b, query_len=t, key_len=s, device=query.device)
    query_segments, key_segments = _segments(
        given["segment_ids"], offset, batch=b, query_len=t, key_len=s, device=query.device
    )
    return AttentionSpec(
        batch=b, num_heads=h, num_kv_heads=k, query_len=t, key_len=s, head_dim=d,
        slopes=_slopes("slopes", slopes, query, batch=b, num_heads=h),
        right_slopes=None if right_slopes is None else _slopes("right_slopes", right_slopes, query, batch=b, num_heads=h),
        causal=causal, window=None if window is None else min(window, FARTHEST), scale=scale, query_offset=offset,
        key_mask=key_mask, query_segments=query_segments, key_segments=key_segments,
        key_bias=None if key_bias is None else _key_bias(key_bias, query.device, b, h, s),
        sink_logits=None if sink_logits is None else _sink_logits(sink_logits, query.device, h),
        dropout_p=given["dropout_p"], tolerance=tolerance, return_lse=given["return_lse"],
    )  # fmt: skip


def _slopes(name: str, slopes: Slopes | None, query: Tensor, *, batch: int, num_heads: int) -> Tensor:
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    if slopes is None:
        return _default_slopes(num_heads, work, query)
    if isinstance(slopes, Tensor):
        _check_device(name, slopes, query.device)
        if slopes.is_complex() or slopes.dtype == torch.bool:
            raise TypeError(f"{name} is {dtype_name(slopes.dtype)} but must hold real numbers")
        tensor = slopes.to(work)
    else:
        tensor = slopes_beside(slopes, work, query)
    check_slopes(name, tensor.shape, batch=batch, num_heads=num_heads, query_len=query.shape[2])
    if may_read(tensor):
        values = tensor.detach()
        allowed = values.isfinite() | values.isposinf() if name == "right_slopes" else values.isfinite()
        if not bool(allowed.all()):
            rule = "finite, or inf for a head that never attends to the right" if name == "right_slopes" else "finite"
            raise ValueError(f"{name} must be {rule} but is {tensor.tolist()}")
    return tensor


def _default_slopes(num_heads: int, dtype: torch.dtype, query: Tensor) -> Tensor:
    # With dynamic shapes H is a symbol; the length of a list is definite, so this makes H a number.
    published = _published(len([None] * num_heads))
    if torch.compiler.is_compiling():
        # The compiler fuses this into one launch; a constant would be copied from the host.
        return torch.stack([torch.full((), slope, dtype=dtype, device=query.device) for slope in published])
    return slopes_beside(published, dtype, query)


@constant_when_compiled
def _published(num_heads: int) -> tuple[float, ...]:
    return _published_once(num_heads)


@functools.lru_cache(maxsize=256)
def _published_once(num_heads: int) -> tuple[float, ...]:
    return tuple(alibi_slopes(num_heads).tolist())


def slopes_beside(slopes: Slopes, dtype: torch.dtype, query: Tensor) -> Tensor:
    """The numbers as a tensor on query's device, created once: copying them to the GPU in every call would synchronize."""
    # Not cached with subclasses of Tensor, which may have no data and cannot be mixed with real tensors, nor inside torch.func
    # or a fake mode, whose tensors must not leave it.
    traced = is_traced() or transforms()
    if type(query) in (Tensor, torch.nn.Parameter) and not traced and _are_numbers(slopes):
        try:
            array = np.asarray(slopes, dtype=np.float64)
        except OverflowError:
            raise ValueError("slopes must be finite but contain an integer too large for float64") from None
        constant = _constant(array.tobytes(), array.shape, dtype, query.device)
        if type(constant) is Tensor:
            return constant
    try:
        return torch.as_tensor(slopes, dtype=dtype, device=query.device)
    except (TypeError, ValueError) as error:
        raise TypeError(f"slopes must be real numbers, [H] or [B, H], but cannot be read as such ({error})") from None


def _are_numbers(slopes: Slopes) -> bool:
    if isinstance(slopes, list | tuple):
        return all(isinstance(slope, int | float) for slope in slopes)
    if isinstance(slopes, np.ndarray) and slopes.dtype.kind not in "iuf":
        raise TypeError(f"slopes is an array of {slopes.dtype} but must hold real numbers")
    return isinstance(slopes, np.ndarray)


@functools.lru_cache(maxsize=256)
def _constant(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The fp64 numbers as a tensor."""
    with torch.inference_mode(mode=False):
        return torch.tensor(np.frombuffer(data).reshape(shape), dtype=dtype, device=device)


def _offset(
    query_offset: int | Tensor | None, *, batch: int, query_len: int, key_len: int, device: torch.device
) -> int | Tensor:
    if query_offset is None:
        return key_len - query_len
    if isinstance(query_offset, Tensor):
        _check_device("query_offset", query_offset, device)
        check_query_offset(query_offset, batch=batch)
        position = query_offset.to(torch.int64)
        if may_read(position):
            for extreme in torch.aminmax(position) if batch else ():
                check_position("query_offset", int(extreme))
        return position
    if isinstance(query_offset, bool) or not isinstance(query_offset, int | torch.SymInt):
        raise TypeError(f"query_offset must be an int or an integer tensor but is {query_offset!r}")
    if not is_traced():
        check_position("query_offset", query_offset)
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
    """(query's [B, T], key's [B, S]). Given one tensor, a query has the segment of its position, which must be that of a key."""
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2:
            raise ValueError(
                f"segment_ids has {len(segment_ids)} parts but must be one tensor [B, S] or a pair ([B, T], [B, S])"
            )
        of_query, of_key = segment_ids
        check_tensor("segment_ids[0]", of_query, device)
        check_tensor("segment_ids[1]", of_key, device)
        check_segments("segment_ids[0]", of_query, batch=batch, length=query_len, axis="T")
        check_segments("segment_ids[1]", of_key, batch=batch, length=key_len, axis="S")
        return of_query.to(torch.int64), of_key.to(torch.int64)
    check_tensor("segment_ids", segment_ids, device)
    check_segments("segment_ids", segment_ids, batch=batch, length=key_len, axis="S")
    of_key = segment_ids.to(torch.int64)
    if not isinstance(offset, Tensor):
        if offset < 0 or offset + query_len > key_len:
            raise ValueError(
                f"the queries are at positions {offset} to {offset + query_len - 1} but segment_ids covers only the keys' "
                f"positions 0 to {key_len - 1}; pass a pair ([B, T], [B, S]) of segment ids for queries and keys"
            )
        return of_key[:, offset : offset + query_len], of_key
    position = offset.reshape(-1, 1) + torch.arange(query_len, device=device)
    outside = (position < 0) | (position >= key_len)
    if may_read(outside) and bool(outside.any()):
        raise ValueError(
            f"query_offset places queries outside the keys' positions 0 to {key_len - 1}, which segment_ids covers; "
            "pass a pair ([B, T], [B, S]) of segment ids for queries and keys"
        )
    if key_len == 0:  # gather would fail
        return of_key.new_zeros(batch, query_len), of_key
    # If values cannot be read, a query outside gets a segment that no key has, and sees no key.
    of_query = of_key.gather(1, position.clamp(0, key_len - 1).expand(batch, query_len))
    return torch.where(outside, of_key.amax(1, keepdim=True) + 1, of_query), of_key


def _key_bias(key_bias: Tensor, device: torch.device, batch: int, num_heads: int, key_len: int) -> Tensor:
    """[B, H, S], a view."""
    check_tensor("key_bias", key_bias, device)
    check_key_bias(key_bias, batch=batch, num_heads=num_heads, key_len=key_len)
    if may_read(key_bias) and not bool((key_bias.detach() < torch.inf).all()):
        raise ValueError("key_bias has NaN or +inf in it but must be finite, or −inf for a hidden key")
    return key_bias.expand(batch, num_heads, key_len)


def _sink_logits(sink_logits: Tensor, device: torch.device, num_heads: int) -> Tensor:
    check_tensor("sink_logits", sink_logits, device)
    check_sink_logits(sink_logits, num_heads=num_heads)
    if may_read(sink_logits) and not bool((sink_logits.detach() < torch.inf).all()):
        raise ValueError(SINKS_RULE)
    return sink_logits


def check_tensor(name: str, tensor: Tensor, device: torch.device) -> None:
    """Checks that it is a tensor on query's device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor but is {type(tensor).__name__}")
    _check_device(name, tensor, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but query on {device}; pass {name}.to(query.device)")
