"""A few queries at the end of a long text, and linear maps of a few rows, in C++: `decoding.cpp` and `linear.cpp`.

What a decoding step needs, and no operator of torch: without gradients, on the CPU, fp32, bf16 or fp16 (computed in
fp32).
"""

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.backend import NO_WINDOW, WIDEST_WINDOW
from alibi_attn.attention.backends.native.build import Rows
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.transforms import in_memory, may_read

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MAX_ROWS = 4  # of a linear map; with more a matrix product has something to reuse


def takes(*tensors: Tensor) -> bool:
    """Whether these functions support the inputs: a single supported dtype, on a CPU, a last stride of 1, not being traced.

    The first call may compile the kernels.
    """
    dtype = tensors[0].dtype
    return (
        dtype in DTYPES
        and all(x.dtype == dtype and x.stride(-1) == 1 and in_memory(x) is x for x in tensors)
        and may_read(*tensors)
        and _library() is not None
    )


def decode(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, norms: Norms | None, visible: Sequence[tuple[int, int]] | None,
    window: int | None, scale: float, tolerance: float,
) -> Tensor | None:  # fmt: skip
    """Causal attention of the last T positions, [B, H, T, D]; None where some number is not finite, for somebody else to answer.

    Args:
        query, key, value: which `takes` takes, D a multiple of WIDTH.
        slopes: [H] or [B, H].
        norms: what is known of keys and values; None = nothing, and all that may be seen is read.
        visible: the keys that each row may see, as `[start, stop)`; None = all.
    """
    library = _library()
    assert library is not None
    batch, heads, query_len, head_dim = query.shape
    kv_heads, key_len = key.shape[1:3]
    runs = [(0, key_len)] * batch if visible is None else visible
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    of_heads = in_memory(slopes.detach()).to(torch.float32).expand(batch, heads).contiguous()
    fine = ctypes.c_int64(0)
    call = _DecodingCall(
        B=batch, H=heads, K=kv_heads, T=query_len, S=key_len, D=head_dim,
        query=_rows(query), key=_rows(key), value=_rows(value), output=_rows(output), slopes=of_heads.data_ptr(),
        start=(ctypes.c_int64 * batch)(*(start for start, _ in runs)),
        stop=(ctypes.c_int64 * batch)(*(stop for _, stop in runs)),
        window=NO_WINDOW if window is None else min(window, WIDEST_WINDOW), scale=scale, tolerance=tolerance,
        threads=torch.get_num_threads(), fine=ctypes.pointer(fine),
    )  # fmt: skip
    if norms is not None and norms.keys.shape[2]:
        keys, values = norms.keys, norms.values
        if keys.stride() != values.stride() or keys.stride(2) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        call.N, call.norms_of_sequence, call.norms_of_head = keys.shape[2], keys.stride(0), keys.stride(1)
        call.key_norms, call.value_norms = keys.data_ptr(), values.data_ptr()
    getattr(library, f"alibi_decode_{DTYPES[query.dtype]}")(ctypes.byref(call))
    return output if fine.value else None


def tile_norms(rows: Tensor) -> Tensor:
    """[B, K, ⌊S / TILE⌋] fp64: an upper bound of the norms in every whole tile of keys or values, [B, K, S, D]."""
    library = _library()
    assert library is not None
    batch, heads, length, head_dim = rows.shape
    norms = torch.empty(batch, heads, length // TILE, dtype=torch.float64)
    call = _NormsCall(
        B=batch,
        K=heads,
        N=length // TILE,
        D=head_dim,
        rows=_rows(rows),
        norms=norms.data_ptr(),
        threads=torch.get_num_threads(),
    )
    getattr(library, f"alibi_norms_{DTYPES[rows.dtype]}")(ctypes.byref(call))
    return norms


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., outputs], rows·weightᵀ + bias, with sums in fp32; at most MAX_ROWS rows [..., inputs], all contiguous."""
    library = _library()
    assert library is not None
    outputs, inputs = weight.shape
    result = rows.new_empty((*rows.shape[:-1], outputs))
    call = _LinearCall(
        rows.numel() // inputs, inputs, outputs, torch.get_num_threads(), rows.data_ptr(), weight.data_ptr(),
        None if bias is None else bias.data_ptr(), result.data_ptr(),
    )  # fmt: skip
    getattr(library, f"alibi_linear_{DTYPES[rows.dtype]}")(ctypes.byref(call))
    return result


class _DecodingCall(ctypes.Structure):
    """`DecodingCall` of `decoding.hpp`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "BHKTSD"),
        *((name, Rows) for name in ("query", "key", "value", "output")),
        ("slopes", ctypes.c_void_p),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("start", "stop")),
        *((name, ctypes.c_int64) for name in ("N", "norms_of_head", "norms_of_sequence")),
        *((name, ctypes.c_void_p) for name in ("key_norms", "value_norms")),
        ("window", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("scale", "tolerance")),
        ("threads", ctypes.c_int64),
        ("fine", ctypes.POINTER(ctypes.c_int64)),
    ]


class _NormsCall(ctypes.Structure):
    """`NormsCall` of `decoding.hpp`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "BKND"),
        ("rows", Rows),
        ("norms", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


class _LinearCall(ctypes.Structure):
    """`LinearCall` of `linear.cpp`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
    ]


def _rows(x: Tensor) -> Rows:
    return Rows(x.data_ptr(), *x.stride()[:3])


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernels, whose calls are those above; None where they cannot be built, for which `build.why_not` has the reason.

    Asked once a process: a step of decoding comes here twenty times.
    """
    try:
        library = build.library()
    except build.BuildError:
        return None
    of_calls = (ctypes.sizeof(_DecodingCall), ctypes.sizeof(_NormsCall), ctypes.sizeof(_LinearCall))
    found = (ctypes.c_int64 * len(of_calls))()
    library.alibi_decoding_bytes(found)
    assert tuple(found) == of_calls, f"the kernels' calls have {tuple(found)} bytes, and those here {of_calls}"
    return library
