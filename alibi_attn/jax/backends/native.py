"""JAX on the CPU: the same C++ kernels as in PyTorch, as two targets of XLA's foreign function interface.

`native.cpp` is the binding. The first call compiles it against jaxlib's headers and keeps it next to the kernels. Arrays have
XLA's layout, [B, T, H, D]; the binding copies the rows of each head next to each other (`packed.hpp`) and handles NaN and inf
(`clean.hpp`). bf16 is multiplied directly if the processor can; other bf16, and all fp16, is widened first. `vmap` adds its axis
to the batch. Read `attention/backends/native` next.
"""

import ctypes
import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_attn.attention.backends.native import build, compiling
from alibi_attn.attention.backends.native.compiling import BuildError
from alibi_attn.attention.backends.native.visited import numbers_of_visited
from alibi_attn.attention.call.checks import dtype_name
from alibi_attn.attention.call.reads import MASKS, NUMBERED_DROPOUT
from alibi_attn.attention.call.spec import dropout_numbers
from alibi_attn.jax.call.operands import Arrays, Rest
from alibi_attn.jax.call.plan import Array, Plan

FOLDER = Path(__file__).parent
SOURCES, HEADERS = ("native.cpp",), ("packed.hpp", "clean.hpp")
READS = MASKS | NUMBERED_DROPOUT | {"key_bias", "query_bias"}
TARGETS = ("alibi_xla_forward", "alibi_xla_backward")


class Saved(NamedTuple):
    """The arrays that forward saves for backward."""

    rows: Array  # [B, 2, H, T] m_i and ln l_i
    visited: Array  # [B, …] int32, see `Visited` of `call.hpp`


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients are requested, in addition to those of query, key and value."""

    slopes: bool
    biases: bool


def why_not(platforms: set[str], dtype: jnp.dtype) -> str | None:
    """Why the kernels cannot run on these platforms for inputs of a dtype; on a CPU, compiles them if needed."""
    if platforms != {"cpu"}:
        return f"it runs on the CPU but query is on {', '.join(sorted(platforms))}"
    return _bound(build.part_of(dtype_name(dtype)))


@functools.cache
def _bound(part: str) -> str | None:
    """Binds a part of the kernels to the targets, once per process; returns the reason if that fails."""
    try:
        kernels, threads, binding = build.library(part=part), build.library(part="threads"), _registered()
    except BuildError as error:
        return str(error)
    work = "float64" if part == "float64" else "float32"
    of_threads = _addresses(threads, "alibi_run_team", "alibi_most_threads")
    of_part = _addresses(kernels, f"alibi_forward_{work}", f"alibi_backward_{work}")
    size = binding.alibi_xla_bind(_PARTS.index(part), of_threads, of_part)
    if size != ctypes.sizeof(build.Call):
        return f"the binding to XLA was built for calls of {size} bytes, not {ctypes.sizeof(build.Call)}"
    return None


_PARTS = ("float32", "float64", "bfloat16")  # in the order of `native.cpp`


@functools.cache
def _registered() -> ctypes.CDLL:
    """The binding, whose targets are registered with XLA once per process."""
    of_jax = Path(jax.ffi.include_dir())
    flags = (*build.FLAGS_HERE, f"-I{build.FOLDER}", "-isystem", str(of_jax))
    headers = [FOLDER / name for name in HEADERS] + [build.FOLDER / name for name in build.HEADERS]
    headers += sorted((of_jax / "xla" / "ffi" / "api").glob("*.h"))
    binding = compiling.cached("for-jax", [FOLDER / name for name in SOURCES], headers, flags, _load)
    for target in TARGETS:
        capsule = jax.ffi.pycapsule(getattr(binding, target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return binding


def _addresses(library: ctypes.CDLL, *functions: str) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(functions))(
        *(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in functions)
    )


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        for target in TARGETS:
            getattr(loaded, target)
        bind = loaded.alibi_xla_bind
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled binding cannot be loaded: {error}") from None
    bind.argtypes, bind.restype = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int64
    return loaded


def forward(plan: Plan, arrays: Arrays, rest: Rest) -> tuple[Array, Array, Array | None, Saved]:
    """(output [B, T, H, D] in query's dtype, lse [B, H, T] with the biases of queries, its low part, arrays for backward)."""
    work = arrays.left.dtype
    batch, query_len, heads, _ = arrays.query.shape
    visited = numbers_of_visited(num_heads=heads, num_kv_heads=arrays.key.shape[2], query_len=query_len)
    lse_dtype = work if arrays.key_bias is None else jnp.promote_types(work, arrays.key_bias.dtype)
    results = (
        (arrays.query.shape, _stored(arrays)),
        ((batch, heads, query_len), lse_dtype),
        ((batch, 2, heads, query_len), work),
        ((batch, visited), jnp.int32),
        ((batch, heads, query_len) if plan.lse_in_two else (0,), lse_dtype),
    )
    output, lse, rows, keys, low = _call("alibi_xla_forward", plan, _operands(arrays, rest), results)
    return output.astype(arrays.query.dtype), lse, low if plan.lse_in_two else None, Saved(rows, keys)


def backward(
    plan: Plan, wanted: Wanted, arrays: Arrays, rest: Rest, saved: Saved, output: Array, grad: Array, grad_lse: Array
) -> Arrays:
    """Gradients in the shapes and dtypes of their inputs; zeros for gradients that are not requested.

    Args:
        output: [B, T, H, D] from forward; grad [B, T, H, D] and grad_lse [B, H, T] are the gradients of the loss.
    """
    work, stored = arrays.left.dtype, _stored(arrays)
    operands = *_operands(arrays, rest), output.astype(stored), grad.astype(stored), grad_lse.astype(work), *saved
    slopes = arrays.left.shape if wanted.slopes else (0,)
    shapes = *(x.shape for x in arrays[:3]), slopes, slopes
    biases = [(0,) if x is None or not wanted.biases else x.shape for x in (arrays.key_bias, arrays.query_bias)]
    bias_dtype = work if arrays.key_bias is None else arrays.key_bias.dtype
    results = *((shape, work) for shape in shapes), *((shape, bias_dtype) for shape in biases)
    grads = _call("alibi_xla_backward", plan, operands, results)
    rest_grads = [
        None if x is None else dx if dx.size else jnp.zeros_like(x) for x, dx in zip(arrays[3:], grads[3:], strict=True)
    ]
    return Arrays(*(dx.astype(arrays.query.dtype) for dx in grads[:3]), *rest_grads)


def _stored(arrays: Arrays) -> jnp.dtype:
    """The dtype in which the kernels read queries, keys and values."""
    dtype: jnp.dtype = arrays.query.dtype
    return dtype if dtype == jnp.bfloat16 and build.multiplies_bf16() else arrays.left.dtype


def _call(
    target: str, plan: Plan, operands: tuple[Array, ...], results: tuple[tuple[tuple[int, ...], jnp.dtype], ...]
) -> list[Array]:
    if reason := _bound(build.part_of(dtype_name(operands[0].dtype))):
        raise BuildError(reason)
    # Created from an operand, so that inside `shard_map` they vary over the same mesh axes.
    like = jax.eval_shape(lambda x: [jnp.zeros_like(x, dtype, shape=shape) for shape, dtype in results], operands[0])
    threshold, factor = dropout_numbers(plan.dropout_p)
    call = jax.ffi.ffi_call(target, like, vmap_method="broadcast_all")
    found: list[Array] = call(  # type: ignore[no-untyped-call]
        *operands,
        causal=int(plan.causal),
        for_backward=int(plan.for_backward),
        dropout_threshold=threshold,
        dropout_factor=factor,
        dropout_head=plan.dropout_origin.head,
        dropout_key=plan.dropout_origin.key,
    )
    return found


def _operands(arrays: Arrays, rest: Rest) -> tuple[Array, ...]:
    """In the order of `native.cpp`; a missing argument is an array without elements."""
    seed = rest.dropout_seed
    if seed is not None:
        seed += jnp.zeros_like(arrays.left, seed.dtype, shape=())
    optional = (
        rest.key_mask,
        rest.query_segments,
        rest.key_segments,
        arrays.key_bias,
        rest.key_bias_low,
        arrays.query_bias,
        rest.query_bias_low,
        seed,
        rest.query_start,
        rest.query_numbers,
        rest.key_numbers,
    )
    return (
        *(x.astype(_stored(arrays)) for x in arrays[:3]),
        arrays.left,
        arrays.right,
        rest.offset,
        *(jnp.zeros_like(arrays.left, shape=(0,)) if x is None else x for x in optional),
        rest.numbers,
    )
