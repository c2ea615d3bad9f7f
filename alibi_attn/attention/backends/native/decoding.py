"""The kernels of a decoding step: a few queries at the end of a long text, and linear maps of a few rows.

They call `decoding.cpp` and `linear.cpp` directly, without torch's operators: no gradients, CPU only; fp32, bf16 and fp16
(computed in fp32).
"""

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.backend import NO_WINDOW
from alibi_attn.attention.backends.native.build import Rows
from alibi_attn.attention.call.spec import MAX_POSITION
from alibi_attn.attention.call.transforms import in_memory, may_read
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MAX_ROWS = 4  # of a linear map; with more rows a matrix product reuses the weights


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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    norms: Norms | None,
    visible: Sequence[tuple[int, int]] | None,
    window: int | None,
    scale: float,
    tolerance: float,
) -> Tensor | None:
    """Causal attention of the last T positions, [B, H, T, D]; None if a number is not finite: the caller then uses another path.

    Args:
        query, key, value: supported by `takes`; D is a multiple of WIDTH.
        slopes: [H] or [B, H].
        norms: the largest norms per tile of keys and values; None = unknown, and every visible key is read.
        visible: the keys `[start, stop)` that each sequence may see; None = all.
    """
    batch, heads, query_len, head_dim = query.shape
    kv_heads, key_len = key.shape[1:3]
    runs = [(0, key_len)] * batch if visible is None else visible
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    of_heads = in_memory(slopes.detach()).to(torch.float32).expand(batch, heads).contiguous()
    fine = ctypes.c_int64(0)
    call = _DecodingCall(
        B=batch,
        H=heads,
        K=kv_heads,
        T=query_len,
        S=key_len,
        D=head_dim,
        query=_rows(query),
        key=_rows(key),
        value=_rows(value),
        output=_rows(output),
        slopes=of_heads.data_ptr(),
        start=(ctypes.c_int64 * batch)(*(start for start, _ in runs)),
        stop=(ctypes.c_int64 * batch)(*(stop for _, stop in runs)),
        window=NO_WINDOW if window is None else min(window, MAX_POSITION),
        scale=scale,
        tolerance=tolerance,
        threads=torch.get_num_threads(),
        fine=ctypes.pointer(fine),
    )
    if norms is not None and norms.keys.shape[2]:
        keys, values = norms.keys, norms.values
        if keys.stride() != values.stride() or keys.stride(2) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        call.N, call.norms_of_sequence, call.norms_of_head = keys.shape[2], keys.stride(0), keys.stride(1)
        call.key_norms, call.value_norms = keys.data_ptr(), values.data_ptr()
    _run("decode", query.dtype, call)
    return output if fine.value else None


def tile_norms(rows: Tensor) -> Tensor:
    """[B, K, ⌊S / TILE⌋] fp64: upper bounds of the norms in every whole tile of keys or values, [B, K, S, D]."""
    batch, heads, length, head_dim = rows.shape
    norms = torch.empty(batch, heads, length // TILE, dtype=torch.float64, device=rows.device)
    call = _NormsCall(*norms.shape, head_dim, _rows(rows), norms.data_ptr(), torch.get_num_threads())
    _run("norms", rows.dtype, call)
    return norms


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., outputs]: rows·weightᵀ + bias, summed in fp32; at most MAX_ROWS rows [..., inputs], all contiguous."""
    outputs, inputs = weight.shape
    result = rows.new_empty((*rows.shape[:-1], outputs))
    call = _LinearCall(
        rows.numel() // inputs,
        inputs,
        outputs,
        torch.get_num_threads(),
        rows.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        result.data_ptr(),
    )
    _run("linear", rows.dtype, call)
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
        *(("rows", Rows), ("norms", ctypes.c_void_p), ("threads", ctypes.c_int64)),
    ]


class _LinearCall(ctypes.Structure):
    """`LinearCall` of `linear.cpp`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
    ]


def _rows(x: Tensor) -> Rows:
    return Rows(x.data_ptr(), *x.stride()[:3])


def _run(function: str, dtype: torch.dtype, call: ctypes.Structure) -> None:
    getattr(_library(), f"alibi_{function}_{DTYPES[dtype]}")(ctypes.byref(call))


@functools.cache
def library_with(sizes_of: str, *calls: type[ctypes.Structure]) -> ctypes.CDLL | None:
    """The kernels, whose structures are equal to these; None if they cannot be built (see `build.why_not`).

    Cached because a decoding step uses it twenty times.

    Args:
        sizes_of: their function that writes the sizes of `calls`.
    """
    if build.why_not("decoding"):
        return None
    library = build.library(part="decoding")
    expected = tuple(map(ctypes.sizeof, calls))
    sizes = (ctypes.c_int64 * len(expected))()
    getattr(library, sizes_of)(sizes)
    assert tuple(sizes) == expected, (
        f"the kernels' calls have {tuple(sizes)} bytes, but the Python structures {expected}"
    )
    return library


def _library() -> ctypes.CDLL | None:
    return library_with("alibi_decoding_bytes", _DecodingCall, _NormsCall, _LinearCall)
