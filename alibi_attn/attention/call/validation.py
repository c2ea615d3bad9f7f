"""Validates every argument of a PyTorch call once, and fills in the defaults.

`checks.py` checks shapes, dtypes and Python numbers; this module checks devices and values, and makes the spec."""

import functools
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from alibi_attn.attention.call.bias import Slopes
from alibi_attn.attention.call.checks import BIAS_RULE, SINKS_RULE, Checked, check_call, check_position, dtype_name
from alibi_attn.attention.call.hints import check_known
from alibi_attn.attention.call.options import DEFAULTS, UNCHANGED, SpecOptions, named_arrays
from alibi_attn.attention.call.part_options import free_values, part_fields
from alibi_attn.attention.call.query_positions import windows_of_heads
from alibi_attn.attention.call.spec import MAX_POSITION, AttentionSpec
from alibi_attn.attention.call.transforms import constant_when_compiled, is_traced, may_read
from alibi_attn.slopes import alibi_slopes

SegmentIds = Tensor | tuple[Tensor, Tensor]


def make_spec(
    query: Tensor, key: Tensor, value: Tensor, slopes: Slopes | None = None, **options: Unpack[SpecOptions[Tensor]]
) -> AttentionSpec[Tensor]:
    """The validated spec of a call; options and defaults are those of `alibi_attention`."""
    given: Any = {**DEFAULTS, **options}
    if len(given) != len(DEFAULTS):
        check_known("alibi_attention", options)
    is_plain = all(x is DEFAULTS[name] for name, x in options.items())
    _check_inputs(query, key, value)
    left = right = head_windows = query_segments = key_segments = None
    window, offset, key_bias = given["window"], given["query_offset"], given["key_bias"]
    if not is_plain:
        for name, tensor in named_arrays(given, "tensor"):
            check_tensor(name, tensor, query.device)
        if isinstance(offset, Tensor):
            _check_device("query_offset", offset, query.device)
        if given["right_slopes"] is not None:
            right = _given_slopes("right_slopes", given["right_slopes"], query)
        window, head_windows = windows_of_heads(window, query.shape[1] if query.ndim == 4 else 0, free_values)
    if slopes is not None:
        left = _given_slopes("slopes", slopes, query)
    published = _default_slopes(query) if slopes is None and query.ndim == 4 and query.shape[1] > 0 else None
    unchanged = {name: given[name] for name in UNCHANGED}
    checked = given if window is given["window"] else given | {"window": window}
    sizes = check_call(query, key, value, checked, slopes=left, right_slopes=right)
    offset = sizes.key_len - sizes.query_len if offset is None else _offset(offset)
    if given["segment_ids"] is not None:
        query_segments, key_segments = _segments(given["segment_ids"], offset, sizes)
    if slopes is not None or not is_plain:
        _check_values(left, right, offset, key_bias, given["sink_logits"])
    if key_bias is not None:
        key_bias = key_bias.expand(sizes.batch, sizes.num_heads, sizes.key_len)
    return AttentionSpec(
        slopes=published if left is None else left,
        right_slopes=right,
        window=None if window is None else min(window, MAX_POSITION),
        head_windows=head_windows,
        query_offset=offset,
        query_segments=query_segments,
        key_segments=key_segments,
        key_bias=key_bias,
        sink_logits=given["sink_logits"],
        **sizes._asdict(),
        **({} if is_plain else part_fields(given, sizes)),
        **unchanged,
    )


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor but is {type(tensor).__name__}; convert arrays with torch.as_tensor, or use "
                "alibi_attn.jax for JAX arrays"
            )
    device = query.device
    if key.device != device or value.device != device:
        _check_device("key", key, device)
        _check_device("value", value, device)


def _check_values(
    left: Tensor | None, right: Tensor | None, offset: int | Tensor, key_bias: Tensor | None, sink_logits: Tensor | None
) -> None:
    """Checks the values of tensors, where reading them is free."""
    if left is not None and may_read(left) and not bool(left.detach().isfinite().all()):
        raise ValueError(f"slopes must be finite but is {left.tolist()}")
    if right is not None and may_read(right) and not bool((right.detach() > -torch.inf).all()):
        rule = "finite, or inf for a head that never attends to the right"
        raise ValueError(f"right_slopes must be {rule} but is {right.tolist()}")
    if isinstance(offset, Tensor) and may_read(offset) and offset.numel():
        for extreme in torch.aminmax(offset):
            check_position("query_offset", int(extreme))
    for tensor, rule in ((key_bias, BIAS_RULE), (sink_logits, SINKS_RULE)):
        if tensor is not None and may_read(tensor) and not bool((tensor.detach() < torch.inf).all()):
            raise ValueError(rule)


def _given_slopes(name: str, slopes: Slopes, query: Tensor) -> Tensor:
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    if not isinstance(slopes, Tensor):
        return slopes_beside(slopes, work, query)
    _check_device(name, slopes, query.device)
    if slopes.is_complex() or slopes.dtype == torch.bool:
        raise TypeError(f"{name} is {dtype_name(slopes.dtype)} but must hold real numbers")
    return slopes.to(work)


def _default_slopes(query: Tensor) -> Tensor:
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    if _may_keep_constants(query):
        constant = _published_constant(query.shape[1], work, query.device)
        if type(constant) is Tensor:
            return constant
    # With dynamic shapes H is a symbol; the length of a list is definite, so this makes H a number.
    published = _published(len([None] * query.shape[1]))
    if torch.compiler.is_compiling():
        # The compiler fuses this into one launch; a constant would be copied from the host.
        return torch.stack([torch.full((), slope, dtype=work, device=query.device) for slope in published])
    return torch.as_tensor(published, dtype=work, device=query.device)


@constant_when_compiled
def _published(num_heads: int) -> tuple[float, ...]:
    return _published_once(num_heads)


@functools.lru_cache(maxsize=256)
def _published_once(num_heads: int) -> tuple[float, ...]:
    return tuple(alibi_slopes(num_heads).tolist())


@functools.lru_cache(maxsize=256)
def _published_constant(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.tensor(_published_once(num_heads), dtype=dtype, device=device)


def _may_keep_constants(query: Tensor) -> bool:
    """Whether a constant may be kept and used in calls like this one.

    Not with subclasses of Tensor, which may have no data and cannot be mixed with real tensors, nor where a graph is made, nor
    inside torch.func, whose tensors must not leave it. In a fake mode the constant is no plain Tensor.
    """
    if type(query) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return False
    return not torch._C._are_functorch_transforms_active()


def slopes_beside(slopes: Slopes, dtype: torch.dtype, query: Tensor) -> Tensor:
    """The numbers as a tensor on query's device, created once: copying them to the GPU in every call would synchronize."""
    if _may_keep_constants(query) and _are_numbers(slopes):
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


def _offset(query_offset: int | Tensor) -> int | Tensor:
    if isinstance(query_offset, Tensor):
        return query_offset.to(torch.int64)
    if isinstance(query_offset, bool) or not isinstance(query_offset, int | torch.SymInt):
        raise TypeError(f"query_offset must be an int or an integer tensor but is {query_offset!r}")
    if not is_traced():
        check_position("query_offset", query_offset)
    return query_offset


def _segments(segment_ids: SegmentIds, offset: int | Tensor, sizes: Checked) -> tuple[Tensor, Tensor]:
    """(query's [B, T], key's [B, S]). Given one tensor, a query has the segment of its position, which must be that of a key."""
    if isinstance(segment_ids, tuple | list):
        return segment_ids[0].to(torch.int64), segment_ids[1].to(torch.int64)
    of_key, query_len, key_len = segment_ids.to(torch.int64), sizes.query_len, sizes.key_len
    if not isinstance(offset, Tensor):
        if offset < 0 or offset + query_len > key_len:
            raise ValueError(
                f"the queries are at positions {offset} to {offset + query_len - 1} but segment_ids covers only the keys' "
                f"positions 0 to {key_len - 1}; pass a pair ([B, T], [B, S]) of segment ids for queries and keys"
            )
        return of_key[:, offset : offset + query_len], of_key
    position = offset.reshape(-1, 1) + torch.arange(query_len, device=of_key.device)
    outside = (position < 0) | (position >= key_len)
    if may_read(outside) and bool(outside.any()):
        raise ValueError(
            f"query_offset places queries outside the keys' positions 0 to {key_len - 1}, which segment_ids covers; "
            "pass a pair ([B, T], [B, S]) of segment ids for queries and keys"
        )
    if key_len == 0:  # gather would fail
        return of_key.new_zeros(sizes.batch, query_len), of_key
    # If values cannot be read, a query outside gets a segment that no key has, and sees no key.
    of_query = of_key.gather(1, position.clamp(0, key_len - 1).expand(sizes.batch, query_len))
    return torch.where(outside, of_key.amax(1, keepdim=True) + 1, of_query), of_key


def check_tensor(name: str, tensor: Tensor, device: torch.device) -> None:
    """Checks that it is a tensor on query's device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor but is {type(tensor).__name__}")
    _check_device(name, tensor, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but query on {device}; pass {name}.to(query.device)")
