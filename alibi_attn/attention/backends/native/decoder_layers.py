"""All layers of a decoder for a few new tokens, in one call of `decoder_layers.cpp`: CPU only, without gradients.

In a model that runs module by module, Python and torch's operators cost as much per layer as reading a million weights. This
module holds the structures of the call; `hf/patching/decoding_step.py` fills them.
"""

import ctypes

import torch

from alibi_attn.attention.backends.native.build import Rows
from alibi_attn.attention.backends.native.decoding import DTYPES, MAX_ROWS, library_with

__all__ = ["MAX_ROWS", "Layer", "LayersCall", "Linear", "Norm", "run", "supports"]


class Linear(ctypes.Structure):
    """`LayerLinear` of `decoder_layers.hpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scales", "sums")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
    ]


class Norm(ctypes.Structure):
    """`LayerNorm` of `decoder_layers.hpp`."""

    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("eps", ctypes.c_double)]


class Layer(ctypes.Structure):
    """`DecoderLayer` of `decoder_layers.hpp`."""

    _fields_ = [
        *((name, Norm) for name in ("attention_norm", "ffn_norm")),
        *((name, Linear) for name in ("qkv", "out", "up", "down")),
        *((name, Rows) for name in ("key", "value")),
        *((name, ctypes.c_int64) for name in ("N", "norms_of_head", "norms_of_sequence")),
        *((name, ctypes.c_void_p) for name in ("key_norms", "value_norms")),
    ]


class LayersCall(ctypes.Structure):
    """`LayersCall` of `decoder_layers.hpp`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "H", "T", "S", "D", "E", "layers")),
        *((name, ctypes.c_void_p) for name in "xy"),
        *((name, Norm) for name in ("first_norm", "last_norm")),
        ("layer", ctypes.POINTER(Layer)),
        ("by_head", ctypes.c_int64),
        ("slopes", ctypes.c_void_p),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("start", "stop")),
        *((name, ctypes.c_double) for name in ("scale", "tolerance")),
        *((name, ctypes.c_int64) for name in ("erf_gelu", "residual_after_norm", "threads")),
        ("fine", ctypes.POINTER(ctypes.c_int64)),
    ]


def supports(dtype: torch.dtype) -> bool:
    """Whether hidden states of this dtype are supported, and the kernels can be built."""
    return dtype in DTYPES and _library() is not None


def run(dtype: torch.dtype, call: LayersCall) -> bool:
    """Runs the layers; False if a number is not finite, and then the outputs are not usable."""
    fine = ctypes.c_int64(0)
    call.fine = ctypes.pointer(fine)
    getattr(_library(), f"alibi_layers_{DTYPES[dtype]}")(ctypes.byref(call))
    return bool(fine.value)


def _library() -> ctypes.CDLL | None:
    return library_with("alibi_layers_bytes", LayersCall, Layer)
