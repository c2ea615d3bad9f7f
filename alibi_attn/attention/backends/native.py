"""CPU: our own kernels in C++, compiled for the processor they run on; each block of queries reads only its certified band.

The kernels in `native/` decide how far a block must look while they look (`certificate.hpp`); `ranges.py` is what they found.
This module divides the work into tasks, calls them, and makes an operator of it. Half precision is computed in fp32.

A task is a run of blocks of queries. Backward adds up the gradients of keys without atomics: each task owns the keys where its
queries stand, and keeps what it finds for others apart (see `native/backward.cpp`), in memory linear in the length.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn.attention.bounds import TILE
from alibi_attn.attention.native import library
from alibi_attn.attention.operators import Plan, clean, described, operator
from alibi_attn.attention.ranges import OUTLIERS, Ranges
from alibi_attn.attention.spec import AttentionSpec, dtype_name
from alibi_attn.attention.transforms import why_not_compiled

Spec = AttentionSpec[Tensor]

WIDTH = 16  # numbers of the widest vector; head sizes are padded with zeros to a multiple of it
TASKS = 8  # a core, so that none is idle at the end
BLOCKS = 8  # of queries in a forward task, at most
USUAL_NATS = 30  # a head of slope m usually looks at about 30 / m keys
# Keys whose gradients backward may keep apart: so many times as there are, or so many numbers, for many cores and a short text.
HALOS, FEW_NUMBERS = 2, 2**24

_is_built = torch.compiler.assume_constant_result(library.why_not)


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Needs a CPU and a C++ compiler, and has no dropout."""
    if query.device.type != "cpu":
        return f"it runs on the CPU but query is on {query.device}"
    if spec.dropout_p > 0:
        return f"it has no dropout but dropout_p is {spec.dropout_p}"
    return why_not_compiled() or _is_built()


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is met, and the scores of those blocks and keys.

    The kernels know how far to look when they have looked, so this computes the attention.
    """
    return met(spec, query, key, value).reach_and_scores(spec)


def met(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> Ranges:
    """Which keys each block of queries meets; computes the attention to find out."""
    spec = described(spec, query, key)
    q, k, v, _ = clean(spec, query, key, key if value is None else value)
    return _attended(spec, q, k, v, has_values=value is not None)[2]


def _forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Plan]:
    output, lse, ranges = _attended(spec, q, k, v)
    return output, lse, ranges.tensors()


def _attended(spec: Spec, q: Tensor, k: Tensor, v: Tensor, *, has_values: bool = True) -> tuple[Tensor, Tensor, Ranges]:
    """(output, lse, what was met); without values they are taken to be of like length."""
    ranges = Ranges.open(spec)
    rows = {name: _wide(x) for name, x in (("query", q), ("key", k), ("value", v))}
    result = torch.empty_like(rows["query"], memory_format=torch.contiguous_format)
    lse = result.new_empty(q.shape[:3])
    tasks = _forward_tasks(spec, ranges)
    _call("forward", spec, ranges, rows=rows, tasks=tasks, result=result, lse=lse, has_values=has_values)
    return _narrow(result, spec), lse, ranges


def _backward(
    spec: Spec, plan: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor,
    lse: Tensor, slopes_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ranges = Ranges.again(spec, *plan)
    names = ("query", "key", "value", "output", "grad")
    rows = {name: _wide(x) for name, x in zip(names, (*inputs, out, grad), strict=True)}
    dq, dk, dv = (torch.empty_like(rows[name], memory_format=torch.contiguous_format) for name in names[:3])
    tasks, order, starts, kept = _backward_tasks(spec, ranges)
    slope_grads = torch.zeros(len(tasks), spec.group, 2, dtype=torch.float64) if slopes_wanted else None
    _call(
        "backward", spec, ranges, rows=rows, tasks=tasks, result=dq, lse=lse, key_grad=dk, value_grad=dv,
        order=order, starts=starts, partial=dq.new_empty(2 * kept, dq.shape[-1]), slope_grads=slope_grads,
        grad_lse=grad_lse,
    )  # fmt: skip
    dslope = torch.zeros(2, spec.batch, spec.num_heads, dtype=torch.float64)
    if slope_grads is not None:
        of_tasks = slope_grads[torch.from_numpy(order)]  # in the order of their queries
        heads = torch.from_numpy((tasks[:, 0] * spec.num_kv_heads + tasks[:, 1])[order])
        total = torch.zeros(spec.batch * spec.num_kv_heads, spec.group, 2, dtype=torch.float64)
        dslope = total.index_add_(0, heads, of_tasks).reshape(spec.batch, spec.num_heads, 2).permute(2, 0, 1)
        if spec.right_slopes is None:
            dslope = torch.stack([dslope.sum(0), torch.zeros_like(dslope[0])])
    return _narrow(dq, spec), _narrow(dk, spec), _narrow(dv, spec), dslope


def _empty_plan(query: Tensor, key: Tensor) -> Plan:
    blocks = (query.shape[2] + TILE - 1) // TILE
    shapes = (*query.shape[:2], blocks, 4), (*query.shape[:2], blocks), (*key.shape[:2], OUTLIERS)
    keys, pins, outliers = (query.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return keys, pins, outliers


run = operator("native", _forward, _backward, _empty_plan)


def _forward_tasks(spec: Spec, ranges: Ranges) -> np.ndarray:
    """[count, 4] int64: a sequence, a head, and its blocks of queries from one to another; the heaviest first, by guess."""
    b, h, n = ranges.pins.shape
    size = max(1, min(BLOCKS, b * h * n // (TASKS * torch.get_num_threads())))
    starts = np.arange(0, n, size)
    slopes = spec.slopes.detach().double().expand(b, h).numpy()
    guess = np.where(slopes > 0, USUAL_NATS / np.maximum(slopes, 1e-30), np.inf)[..., None]
    allowed = ranges.keys[..., 3] - ranges.keys[..., 2]
    cost = np.add.reduceat(np.minimum(allowed, guess), starts, axis=-1)
    at = np.stack(np.unravel_index(np.argsort(-cost, axis=None, kind="stable"), cost.shape), -1)
    return np.concatenate([at[:, :2], at[:, 2:] * size, np.minimum((at[:, 2:] + 1) * size, n)], -1).astype(np.int64)


def _backward_tasks(spec: Spec, ranges: Ranges) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(tasks, order, starts) as `native/backward.cpp` wants them, and how many keys' gradients are kept apart."""
    b, _, n, _ = ranges.keys.shape
    heads, group = b * spec.num_kv_heads, spec.group
    cost = ranges.met.reshape(heads, group, n).sum(1)
    low, high = (ranges.keys[..., side].reshape(heads, group, n) for side in (0, 1))
    some = low < high
    low, high = np.where(some, low, spec.key_len).min(1), np.where(some, high, 0).max(1)
    widest = np.maximum(high - low, 1).max(-1)
    wanted = np.ceil(TASKS * torch.get_num_threads() * cost.sum(-1) / max(1, cost.sum()))
    most = max(HALOS * spec.key_len, FEW_NUMBERS // (heads * spec.head_dim))
    parts = np.minimum(np.maximum(wanted, 1), 1 + most // widest).astype(np.int64)
    # Cuts of equal cost, as blocks of all heads in a row.
    total = np.concatenate([[0], cost.sum(-1).cumsum()])
    part = np.concatenate([np.arange(count) for count in parts])
    head = np.repeat(np.arange(heads), parts)
    aim = total[head] + cost.sum(-1)[head] * part / parts[head]
    start = np.searchsorted(cost.cumsum() - cost.ravel(), aim).clip(head * n, head * n + n - 1)
    start = np.unique(np.concatenate([start, np.arange(heads) * n]))
    head, block = start // n, start % n
    end = np.minimum(np.append(start[1:], heads * n), (head + 1) * n) - head * n
    first = ranges.first[head // spec.num_kv_heads]
    own = np.where(block == 0, 0, (first + block * TILE).clip(0, spec.key_len))
    own_end = np.where(end == n, spec.key_len, (first + end * TILE).clip(0, spec.key_len))
    halo = np.minimum(np.minimum.reduceat(low.ravel(), start), own)
    halo_end = np.maximum(np.maximum.reduceat(high.ravel(), start), own_end)
    kept = own - halo + halo_end - own_end + _outliers(ranges) * TILE
    at = kept.cumsum() - kept
    tasks = np.stack(
        [head // spec.num_kv_heads, head % spec.num_kv_heads, block, end, own, own_end, halo, halo_end, at], -1
    )
    heaviest = np.argsort(-np.add.reduceat(cost.ravel(), start), kind="stable")
    return tasks[heaviest], np.argsort(heaviest), np.searchsorted(head, np.arange(heads + 1)), int(kept.sum())


def _outliers(ranges: Ranges) -> int:
    """How many outlying tiles backward must look at: all or none."""
    return OUTLIERS if ranges.pins.any() else 0


def _wide(x: Tensor) -> Tensor:
    """[..., D] in fp32 or better with D a multiple of WIDTH; the same tensor where it is that already."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return functional.pad(x, (0, -x.shape[-1] % WIDTH)) if x.shape[-1] % WIDTH else x


def _narrow(x: Tensor, spec: Spec) -> Tensor:
    return x[..., : spec.head_dim].contiguous()


class _Rows(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), *((axis, ctypes.c_int64) for axis in ("sequence", "head", "row"))]


_INPUTS = (
    "slopes", "right_slopes", "first", "key_mask", "query_segments", "key_segments", "ranges", "pins", "outliers"
)  # fmt: skip
_RESULTS = (
    "lse",
    "result",
    "grad_lse",
    "key_grad",
    "value_grad",
    "partial",
    "order",
    "starts",
    "slope_grads",
    "met",
    "norms",
    "stats",
)


class _Call(ctypes.Structure):
    """`Call` of `native/block.hpp`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "BHKTSDP"),
        *((name, _Rows) for name in ("query", "key", "value", "output", "grad")),
        *((name, ctypes.c_void_p) for name in _INPUTS),
        ("window", ctypes.c_int64), ("causal", ctypes.c_int64), ("has_values", ctypes.c_int64),
        ("scale", ctypes.c_double), ("tolerance", ctypes.c_double),
        ("tasks", ctypes.c_void_p), ("count", ctypes.c_int64), ("threads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _RESULTS),
    ]  # fmt: skip


def _call(
    function: str, spec: Spec, ranges: Ranges, *, rows: dict[str, Tensor], has_values: bool = True, **arrays: Any
) -> None:
    """Fill a `Call` and run it; `arrays` are tensors, numpy arrays or None by the names of `Call`."""
    right = spec.slopes if spec.right_slopes is None else spec.right_slopes
    work = rows["query"].dtype
    slopes, right = (x.detach().to(work).expand(spec.batch, spec.num_heads).contiguous() for x in (spec.slopes, right))
    query_segments, key_segments = _small_numbers(spec)
    arrays |= {
        "slopes": slopes, "right_slopes": right, "first": ranges.first.astype(np.int64), "key_mask": spec.key_mask,
        "query_segments": query_segments, "key_segments": key_segments, "ranges": ranges.keys, "pins": ranges.pins,
        "outliers": ranges.outliers,
    }  # fmt: skip
    arrays = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in arrays.items()}
    call = _Call(
        B=spec.batch, H=spec.num_heads, K=spec.num_kv_heads, T=spec.query_len, S=spec.key_len,
        D=rows["query"].shape[-1], P=OUTLIERS if function == "forward" else _outliers(ranges), window=spec.window or 0,
        causal=spec.causal, has_values=has_values, scale=spec.scale, tolerance=spec.tolerance,
        count=len(arrays["tasks"]), threads=torch.get_num_threads(),
        **{name: _Rows(x.data_ptr(), *x.stride()[:3]) for name, x in rows.items()},
        **{name: x.data_ptr() if isinstance(x, Tensor) else x.ctypes.data for name, x in arrays.items() if x is not None},
    )  # fmt: skip
    getattr(library.library(), f"alibi_{function}_{dtype_name(work)}")(ctypes.byref(call))


def _small_numbers(spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """The segments as int32: only whether they are equal counts."""
    if spec.query_segments is None or spec.key_segments is None:
        return None, None
    both = torch.cat([spec.query_segments, spec.key_segments], -1).long()
    if bool((both.abs() >= 2**31).any()):
        both = both.unique(return_inverse=True)[1]
    query, key = both.to(torch.int32).split([spec.query_len, spec.key_len], -1)
    return query.contiguous(), key.contiguous()
