"""Emulates a GPU's arithmetic in Triton's interpreter, with the largest errors that its documentation permits.

The interpreter computes with numpy, and bf16 incorrectly: it multiplies the bit patterns. Here

* bf16 is rounded to nearest even;
* matrix products behave as in tensor cores: exact products, a few at a time aligned to the largest and truncated, as is
  their sum
  (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA tensor cores"; newer ones keep a few more bits);
* fp32 is truncated to tf32 before, and with "tf32x3" multiplied in three parts as in Triton;
* exponentials, roots and quotients are PTX's approximations, logarithms CUDA's, with their largest documented errors.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from alibi_attn.attention.backends.fused import backend as fused

WORST = 2.0**-22  # relative: ex2.approx 2⁻²², div.full 2 ulp, sqrt.approx 2⁻²³, log2f 1 ulp
_NORMAL = 2.0**-126
_DEPTH = {
    np.dtype(np.uint16): 16,
    np.dtype(np.float16): 16,
    np.dtype(np.float32): 8,
}  # products that are added in one step


@contextlib.contextmanager
def of_a_device(functions: Literal["exact", "random", "against us"]) -> Iterator[None]:
    """Makes Triton's interpreter compute as a device does; for the process that interprets.

    Args:
        functions: how approximate functions err. "against us": each by its largest error, in the direction that makes a
            certified reach shorter; exponentials and logarithms are too large, roots and quotients too small.
    """
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    rng = np.random.default_rng(0)

    def off(function: Callable[..., np.ndarray], sign: int) -> Callable[..., Any]:
        def approximate(self: Any, *operands: Any) -> Any:
            given = [_flushed(x.data) for x in operands]
            exact = function(*given)
            lean = {"exact": 0.0, "against us": sign, "random": rng.uniform(-1, 1, exact.shape)}[functions]
            result = _flushed((exact + WORST * lean * np.abs(exact)).astype(exact.dtype))
            return type(operands[0])(np.where(np.isfinite(exact), result, exact), operands[0].dtype.scalar)

        return approximate

    changed = {
        "create_exp2": off(np.exp2, 1),
        "create_log2": off(np.log2, 1),
        "create_sqrt": off(np.sqrt, -1),
        "create_fdiv": off(np.divide, -1),
        "create_dot": _dot,
        "cast_impl": _cast,
        "create_fp_to_fp": _cast,
    }
    refuses = fused.why_not

    def why_not(*call: Any) -> str | None:
        reason = refuses(*call)
        return None if reason and "multiplies bfloat16 wrongly" in reason else reason

    with (
        mock.patch.multiple(Builder, **changed),
        mock.patch.object(fused, "why_not", why_not),
        np.errstate(all="ignore"),
    ):
        yield


def matrix_product(a: np.ndarray, b: np.ndarray, c: np.ndarray, depth: int) -> np.ndarray:
    """c + a·b in fp32 for a [M, K], b [K, N], whose products are exact in fp64; `depth` of them are added at a time."""
    total = c.astype(np.float64)
    for start in range(0, a.shape[1], depth):
        terms = a[:, start : start + depth, None].astype(np.float64) * b[None, start : start + depth]
        terms = np.concatenate([terms, total[:, None]], 1)
        total = _cut(_cut(terms, np.abs(terms).max(1, keepdims=True)).sum(1))
    return total.astype(np.float32)


def _cut(x: np.ndarray, largest: np.ndarray | None = None) -> np.ndarray:
    """Truncates the bits below the 24 bits of the largest."""
    unit = np.exp2(np.frexp(x if largest is None else largest)[1] - 24.0)
    return np.trunc(x / unit) * unit


def _dot(self: Any, a: Any, b: Any, c: Any, precision: Any, _most: Any) -> Any:
    depth = _DEPTH[a.data.dtype]
    if a.data.dtype != np.float32:
        return type(c)(matrix_product(_wide(a), _wide(b), c.data, depth), c.dtype.scalar)
    if precision.name == "TF32":
        return type(c)(matrix_product(_tf32(a.data), _tf32(b.data), c.data, depth), c.dtype.scalar)
    assert precision.name == "TF32x3", f"{precision} is not the arithmetic of tensor cores"
    big_a, big_b = _rounded_tf32(a.data), _rounded_tf32(b.data)
    small_a, small_b = _rounded_tf32(a.data - big_a), _rounded_tf32(b.data - big_b)
    total = matrix_product(small_a, big_b, np.zeros_like(c.data), depth)
    total = np.nan_to_num(matrix_product(big_a, small_b, total, depth), posinf=np.inf, neginf=-np.inf)
    return type(c)(matrix_product(big_a, big_b, total, depth) + c.data, c.dtype.scalar)


def _cast(self: Any, source: Any, to: Any, _rounding: Any = None) -> Any:
    from triton import language as tl
    from triton.runtime.interpreter import _get_np_dtype

    data = _wide(source)
    if to.scalar == tl.bfloat16:
        narrow = torch.from_numpy(np.asarray(data, dtype=np.float32)).to(torch.bfloat16)
        return type(source)(narrow.view(torch.int16).numpy().view(np.uint16), to.scalar)
    return type(source)(data.astype(_get_np_dtype(to)), to.scalar)


def _wide(operand: Any) -> np.ndarray:
    """The numbers of a tensor; the interpreter stores bf16 as bit patterns."""
    from triton import language as tl

    if operand.dtype.scalar == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand.data


def _tf32(x: np.ndarray) -> np.ndarray:
    """fp32 as tensor cores read it: the lowest 13 bits are ignored."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _rounded_tf32(x: np.ndarray) -> np.ndarray:
    """Rounds to nearest, as Triton does to make the three parts."""
    return _tf32((np.ascontiguousarray(x).view(np.uint32) + np.uint32(0x1000)).view(np.float32))


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _NORMAL, np.copysign(0, x), x).astype(x.dtype)


def is_as_documented(part: str) -> None:
    """Raises if this arithmetic is more or less accurate than documented."""
    from triton import language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    rng, builder = np.random.default_rng(1), InterpreterBuilder()
    x = rng.standard_normal((32, 96)).astype(np.float32)
    y = rng.uniform(0.5, 2, (96, 16)).astype(np.float32)
    exact, size = x.astype(float) @ y, np.abs(x).astype(float) @ y
    if part == "bfloat16":
        x.flat[:4] = np.inf, np.nan, 1.00390625, -1.01171875  # the last two are ties
        with of_a_device("exact"):
            narrow = builder.cast_impl(TensorHandle(x, tl.float32), tl.bfloat16)
            wide = builder.cast_impl(narrow, tl.float32).data
        np.testing.assert_array_equal(wide, torch.from_numpy(x).bfloat16().float().numpy())
    elif part == "products":
        with of_a_device("exact"):
            zero = TensorHandle(np.zeros((32, 16), np.float32), tl.float32)
            for name, dtype, least, most in (
                ("TF32", tl.float32, 2.0**-14, 2.0**-9),
                ("TF32x3", tl.float32, 2.0**-26, 2.0**-19),
            ):
                a, b = TensorHandle(x, dtype), TensorHandle(y, dtype)
                off = np.abs(builder.create_dot(a, b, zero, getattr(ir.INPUT_PRECISION, name), 0).data - exact) / size
                assert least < off.max() < most, f"{name} is off by {off.max()}"
        cut = matrix_product(np.abs(x), y, zero.data, 8) - np.abs(x).astype(float) @ y
        assert (cut <= 0).all(), "sums are cut"
        assert -(9 * 12 * 2.0**-23) < (cut / size).min() < -(2.0**-23), (
            "at more than one place, and not by more than a unit each"
        )
    else:
        z = y.astype(float)
        for name, function, sign in (("exp2", np.exp2, 1), ("log2", np.log2, 1), ("sqrt", np.sqrt, -1)):
            with of_a_device("against us"):
                found = getattr(builder, f"create_{name}")(TensorHandle(y, tl.float32)).data
            off = sign * (found - function(z)) / np.abs(function(z))
            assert 0 < off.min() <= off.max() < 2 * WORST, f"{name} is off by {off.min()} to {off.max()}"
