"""CPU: our own kernels in C++, compiled for the processor or its level; each block of queries reads only its certified band.

The kernels decide how far a block must look while they look (`certificate.hpp`) and divide the work (`tasks.hpp`);
`visited.py` is what they visited. This module lays out a call and makes an operator of it. bf16 is multiplied as it is where the
processor can (`products_bf16.hpp`); elsewhere, and fp16 always, half precision is computed in fp32.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.visited import Visited, numbers_of_visited
from alibi_attn.attention.backends.protocol import FEW_QUERIES, TooSmall
from alibi_attn.attention.bias import columns_of
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.operator import is_eager, on_finite_numbers, operator
from alibi_attn.attention.schema import Arguments, BackwardInputs, Gradients, Saved
from alibi_attn.attention.spec import AttentionSpec, dropout_numbers, dtype_name
from alibi_attn.attention.transforms import constant_when_compiled, in_memory, surely, why_not_compiled
from alibi_attn.attention.visibility import first_positions, with_plain_offset, without_bad_numbers

Spec = AttentionSpec[Tensor]
Arrays = dict[str, Tensor | None]  # by the names of `build.Call`

name = "native"

FEWEST_SCORES = 2**17  # of all heads together: with fewer a call costs more than it saves (see docs/backends.md)
WIDTH = 16  # numbers of the widest vector; head sizes are padded with zeros to a multiple of it
NO_WINDOW, WIDEST_WINDOW = 0, 2**40

_is_built = constant_when_compiled(build.why_not)


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Needs a CPU, and the kernels of a wheel or a C++ compiler."""
    if query.device.type != "cpu":
        return f"it runs on the CPU but query is on {query.device}"
    if spec.table is not None and not is_eager(spec, query, key, value):
        return (
            "a table of distances does not pass through its operator, which torch.func and whatever traces a call meet"
        )
    return why_not_compiled() or _is_built()


def too_small(spec: Spec) -> TooSmall | None:
    """A few queries, and short input; with dropout neither, as a mask that is written out takes longer than a call."""
    if spec.dropout_p > 0:
        return None
    if surely(spec.query_len <= FEW_QUERIES):
        return TooSmall(f"T ≤ {FEW_QUERIES}: dense has scored all keys before the certificate has read them")
    scores = spec.batch * spec.num_heads * spec.query_len * spec.key_len
    return (
        TooSmall(f"short input: B·H·T·S = {{}} < {FEWEST_SCORES}", scores) if surely(scores < FEWEST_SCORES) else None
    )


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is visited, and the scores of those blocks and keys.

    The kernels know how far to look when they have looked, so this computes the attention.
    """
    reach, scores = visited(spec, query, key, value).reach_and_scores(spec)
    return torch.from_numpy(reach), torch.from_numpy(scores)


def visited(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> Visited:
    """Which keys each block of queries visits; computes the attention to find out."""
    spec = with_plain_offset(spec)
    q, k, v, *_ = without_bad_numbers(spec, query, key, key if value is None else value)
    found = _attended(spec, q, k, v, has_values=value is not None)[2]
    return Visited.of(spec, first_positions(spec, q.device).numpy(), found.visited.numpy())


def _forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    return _attended(spec, q, k, v)


def _attended(spec: Spec, q: Tensor, k: Tensor, v: Tensor, *, has_values: bool = True) -> tuple[Tensor, Tensor, Saved]:
    """(output, lse, what backward wants to know); without values they count as of like length."""
    rows = {name: _wide(x) for name, x in (("query", q), ("key", k), ("value", v))}
    output = torch.empty_like(rows["query"], memory_format=torch.contiguous_format)
    saved, lse = _new_saved(q, spec.num_kv_heads), output.new_empty(q.shape[:3], dtype=torch.float64)
    arrays: Arrays = {"lse": lse, "rows": saved.rows, "visited": saved.visited}
    _call("forward", spec, rows | {"output": output}, arrays, has_values=has_values)
    return _narrow(output, spec), lse, saved


def _backward(spec: Spec, saved: Saved, inputs: BackwardInputs) -> Gradients:
    names = ("query", "key", "value", "output")
    rows = {name: _wide(getattr(inputs, name)) for name in names} | {"grad": _wide(inputs.grad_output)}
    work = _work(rows)
    gradients = {
        f"{x}_grad": torch.empty_like(rows[x], dtype=work, memory_format=torch.contiguous_format) for x in names[:3]
    }
    arrays: Arrays = {"visited": saved.visited, "rows": saved.rows, "slope_grads": None}
    arrays["grad_lse"] = None if inputs.grad_lse is None else inputs.grad_lse.to(work)
    dslope = torch.zeros(2, spec.batch, spec.num_heads, dtype=torch.float64)
    if inputs.slopes_wanted:
        arrays["slope_grads"] = dslope
    biases: tuple[Tensor | None, ...] = None, None
    if spec.key_bias is not None and inputs.biases_wanted:
        heads = spec.batch, spec.num_heads
        biases = tuple(dslope.new_empty((*heads, length)) for length in (spec.key_len, spec.query_len))
    arrays |= dict(zip(("key_bias_grad", "query_bias_grad"), biases, strict=True))
    by_distance = None
    if spec.table is not None and inputs.biases_wanted:
        by_distance = dslope.new_zeros((spec.num_heads, _distances(spec)[1]))
    arrays["table_grads"] = by_distance
    _call("backward", spec, rows | gradients, arrays)
    dq, dk, dv = (_narrow(x, spec) for x in gradients.values())
    found = Gradients(dq, dk, dv, dslope, *biases)
    if spec.table is None or by_distance is None:
        return found
    of_table = by_distance.new_zeros(spec.table.shape)
    return found._replace(table=of_table.index_add_(1, columns_of(spec, spec.table, *_distances(spec)), by_distance))


def _new_saved(query: Tensor, num_kv_heads: int) -> Saved:
    """Which keys each block visits, and the maximum and the logarithm of the sum of every row, [B, 2, H, T]."""
    batch, heads, query_len = query.shape[:3]
    work = torch.promote_types(query.dtype, torch.float32)
    numbers = numbers_of_visited(num_heads=heads, num_kv_heads=num_kv_heads, query_len=query_len)
    visited = query.new_empty((batch, numbers), dtype=torch.int32)
    return Saved(visited, query.new_empty((batch, 2, heads, query_len), dtype=work))


def _empty_saved(arguments: Arguments) -> Saved:
    return _new_saved(arguments.query, arguments.key.shape[1])


run = operator(on_finite_numbers("native", _forward, _backward, _empty_saved))


def _wide(x: Tensor) -> Tensor:
    """[..., D] in what the kernels read, with D a multiple of WIDTH; the same tensor where it is that already."""
    x = in_memory(x)
    if x.dtype != torch.bfloat16 or not build.multiplies_bf16():
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    return functional.pad(x, (0, -x.shape[-1] % WIDTH)) if x.shape[-1] % WIDTH else x


def _work(rows: dict[str, Tensor]) -> torch.dtype:
    """What sums are made in: fp32 of bf16."""
    return torch.promote_types(rows["query"].dtype, torch.float32)


def _narrow(x: Tensor, spec: Spec) -> Tensor:
    return x if x.shape[-1] == spec.head_dim else x[..., : spec.head_dim].contiguous()


def _call(function: str, spec: Spec, rows: dict[str, Tensor], arrays: Arrays, *, has_values: bool = True) -> None:
    """Fill a `build.Call` and run it; `rows` and `arrays` go by the names of its fields."""
    if spec.batch == 0:
        return  # the kernels divide their work by the number of sequences
    call, _alive = call_of(spec, rows, arrays, has_values=has_values)
    getattr(build.library(), f"alibi_{function}_{dtype_name(_work(rows))}")(ctypes.byref(call))


def call_of(
    spec: Spec, rows: dict[str, Tensor], arrays: Arrays, *, has_values: bool = True
) -> tuple[build.Call, list[Tensor]]:
    """(the call, tensors that must live as long as it)."""
    work, heads = _work(rows), (spec.batch, spec.num_heads)
    slopes = spec.slopes.detach().to(work).expand(heads).contiguous()
    right = slopes if spec.right_slopes is None else spec.right_slopes.detach().to(work).expand(heads)
    query_segments, key_segments = _small_numbers(spec)
    first = first_positions(spec, slopes.device).to(torch.int64).expand(spec.batch)
    table_first, distances, table = 0, 0, None
    if spec.table is not None:
        table_first, distances = _distances(spec)
        table = spec.table.detach().index_select(1, columns_of(spec, spec.table, table_first, distances))
    given = arrays | {
        "slopes": slopes, "right_slopes": right, "first": first, "key_mask": spec.key_mask, "query_segments": query_segments,
        "key_segments": key_segments, "key_bias": None if spec.key_bias is None else spec.key_bias.detach().double(),
        "dropout_seed": spec.dropout_seed, "table": table,
    }  # fmt: skip
    alive = {name: in_memory(x).contiguous() for name, x in given.items() if x is not None}
    threshold, factor = dropout_numbers(spec.dropout_p)
    call = build.Call(
        B=spec.batch, H=spec.num_heads, K=spec.num_kv_heads, T=spec.query_len, S=spec.key_len, D=rows["query"].shape[-1],
        window=NO_WINDOW if spec.window is None else min(spec.window, WIDEST_WINDOW), causal=spec.causal,
        has_values=has_values, scale=spec.scale, tolerance=spec.tolerance, threads=torch.get_num_threads(),
        dropout_runs=0 if spec.dropout_seed is None else len(spec.dropout_seed), dropout_threshold=threshold,
        dropout_factor=factor, bf16=rows["query"].dtype == torch.bfloat16, distances=distances, table_first=table_first,
        **{name: build.Rows(x.data_ptr(), *x.stride()[:3]) for name, x in rows.items()},
        **{name: x.data_ptr() for name, x in alive.items()},
    )  # fmt: skip
    return call, [*rows.values(), *alive.values()]


def _distances(spec: Spec) -> tuple[int, int]:
    """(the first distance, how many there are) that whole vectors of queries have: some more than a table."""
    first = int(spec.query_offset)
    blocks, low = -(-spec.query_len // TILE), first - spec.key_len + 1
    if spec.causal:
        low = max(low, 1 - TILE)
    return low, max(1, first + blocks * TILE + WIDTH - low)


def _small_numbers(spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """The segments as int32: only whether they are equal counts."""
    if spec.query_segments is None or spec.key_segments is None:
        return None, None
    both = torch.cat([spec.query_segments, spec.key_segments], -1).long()
    if bool((both.abs() >= 2**31).any()):
        both = both.unique(return_inverse=True)[1]
    query, key = both.to(torch.int32).split([spec.query_len, spec.key_len], -1)
    return query, key
