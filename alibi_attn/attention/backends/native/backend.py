"""CPU: our C++ kernels, compiled for the processor or its instruction level; each block of queries reads only its certified band.

The kernels determine the reach of each block while they run (`certificate.hpp`) and divide the work (`tasks.hpp`);
`visited.py` decodes which keys they read. This module builds the argument structure of a call and wraps the kernels as
an operator. Processors with bf16 products multiply bf16 directly (`products_bf16.hpp`); elsewhere bf16, and fp16
everywhere, is computed in fp32.
"""

import ctypes
import functools

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.visited import Visited, numbers_of_visited
from alibi_attn.attention.backends.protocol import FEW_QUERIES, TooSmall, Visits
from alibi_attn.attention.call.bias import columns_of
from alibi_attn.attention.call.checks import EPS
from alibi_attn.attention.call.cuts import with_segments
from alibi_attn.attention.call.reads import GATES, MASKS, NUMBERED_DROPOUT, SPACE
from alibi_attn.attention.call.spec import AttentionSpec, dropout_numbers
from alibi_attn.attention.call.transforms import constant_when_compiled, in_memory, surely, transforms
from alibi_attn.attention.call.visibility import first_positions, with_plain_offset
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.operators.finite_numbers import on_finite_numbers, without_bad_numbers
from alibi_attn.attention.operators.operator import operator
from alibi_attn.attention.operators.schema import Arguments, BackwardInputs, Gradients, Saved

Spec = AttentionSpec[Tensor]
Arrays = dict[str, Tensor | None]  # by the names of `build.Call`

name = "native"
READS = MASKS | SPACE | GATES | NUMBERED_DROPOUT | {"table"}

FEWEST_SCORES = 2**17  # of all heads together; with fewer, `dense` is faster (see docs/backends.md)
WIDTH = 16  # numbers in the widest vector; head sizes are zero-padded to a multiple of it
NO_WINDOW = 0
_NAMES = {getattr(torch, dtype): dtype for dtype in EPS}


@constant_when_compiled
def _why_not_built(dtype: str) -> str | None:
    return build.why_not(build.part_of(dtype))


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Requires a CPU, and the kernels of a wheel or a C++ compiler."""
    if query.device.type != "cpu":
        return f"it runs on the CPU but query is on {query.device}"
    if spec.table is not None and transforms():
        return "it does not differentiate or map a table of distances in torch.func"
    if spec.coordinates is not None and spec.key_bias is not None:
        return "it computes positions in the plane or in space without key_bias"
    return _why_not_built(_NAMES[query.dtype])


def too_small(spec: Spec) -> TooSmall | None:
    """A few queries, or short input; never with dropout, because materializing its mask costs more than a call."""
    if spec.dropout_p > 0:
        return None
    certain = surely if torch.compiler.is_exporting() else bool
    if certain(spec.query_len <= FEW_QUERIES):
        return TooSmall(
            f"T ≤ {FEW_QUERIES}: dense scores all keys in less time than the certificate needs to read them"
        )
    scores = spec.batch * spec.num_heads * spec.query_len * spec.key_len
    if certain(scores < FEWEST_SCORES):
        return TooSmall(f"short input: B·H·T·S = {{}} < {FEWEST_SCORES}", scores)
    return None


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> Visits:
    """What a call reads if a backward pass follows; otherwise it reads no more.

    The kernels determine the reach while they run, so this computes the attention.
    """
    found = visited(spec, query, key, value)
    numbers = list(found.reach_and_scores(spec))
    if spec.coordinates is None:  # else backward decides anew
        numbers += found.for_backward.reach_and_scores(spec)
    return Visits(*(torch.from_numpy(x) for x in numbers))


def visited(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, *, for_backward: bool = True) -> Visited:
    """Which keys each block of queries visits, by default where a backward pass follows; this computes the attention."""
    spec = with_plain_offset(spec)
    q, k, v, *_ = without_bad_numbers(spec, query, key, key if value is None else value)
    saved = _forward(spec, q, k, v, has_values=value is not None, for_backward=for_backward)[2]
    return Visited.of(spec, first_positions(spec, q.device).numpy(), saved.visited.numpy())


def _forward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, *, has_values: bool = True, for_backward: bool = True
) -> tuple[Tensor, Tensor, Saved]:
    """(output, lse, tensors for backward); without values, the certificate assumes that all have the same norm.

    With `for_backward` it also reads the keys that matter to gradients only, which changes no output.
    """
    rows = {name: _wide(x) for name, x in (("query", q), ("key", k), ("value", v))}
    output = torch.empty_like(rows["query"], memory_format=torch.contiguous_format)
    saved, lse = _new_saved(q, spec.num_kv_heads), output.new_empty(q.shape[:3], dtype=torch.float64)
    arrays: Arrays = {"lse": lse, "rows": saved.rows, "visited": saved.visited}
    _call("forward", spec, rows | {"output": output}, arrays, has_values=has_values, for_backward=for_backward)
    return output if output.shape[-1] == spec.head_dim else _narrow(output, spec), lse, saved


def _backward(spec: Spec, saved: Saved, inputs: BackwardInputs) -> Gradients:
    names = ("query", "key", "value", "output")
    rows = {name: _wide(getattr(inputs, name)) for name in names} | {"grad": _wide(inputs.grad_output)}
    work, heads = _work(rows), (spec.batch, spec.num_heads)
    gradients = {
        f"{x}_grad": torch.empty_like(rows[x], dtype=work, memory_format=torch.contiguous_format) for x in names[:3]
    }
    dslope = torch.zeros(2, *heads, dtype=torch.float64, device=inputs.query.device)
    dkey_bias = dquery_bias = by_distance = dtable = None
    if spec.key_bias is not None and inputs.biases_wanted:
        dkey_bias, dquery_bias = (dslope.new_empty((*heads, length)) for length in (spec.key_len, spec.query_len))
    if spec.table is not None and inputs.biases_wanted:
        by_distance = dslope.new_zeros((spec.num_heads, _distances(spec)[1]))
    arrays: Arrays = {
        "visited": saved.visited,
        "rows": saved.rows,
        "slope_grads": dslope if inputs.slopes_wanted else None,
        "grad_lse": None if inputs.grad_lse is None else inputs.grad_lse.to(work),
        "key_bias_grad": dkey_bias,
        "query_bias_grad": dquery_bias,
        "table_grads": by_distance,
    }
    _call("backward", spec, rows | gradients, arrays)
    if spec.table is not None and by_distance is not None:
        columns = columns_of(spec, spec.table, *_distances(spec))
        dtable = by_distance.new_zeros(spec.table.shape).index_add_(1, columns, by_distance)
    dq, dk, dv = (_narrow(x, spec) for x in gradients.values())
    return Gradients(dq, dk, dv, dslope, dkey_bias, dquery_bias, dtable)


def _forward_between_cuts(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, *, for_backward: bool = True
) -> tuple[Tensor, Tensor, Saved]:
    """`_forward` with cuts as segments; whether or not heads become sequences, all results have the same shapes."""
    if spec.query_start is None:
        return _forward(spec, q, k, v, for_backward=for_backward)
    between, *rows = with_segments(spec, q, k, v)
    output, lse, saved = _forward(between, *rows, for_backward=for_backward)
    visited = saved.visited.reshape(spec.batch, _numbers_between_cuts(spec, between))
    most = numbers_of_visited(num_heads=spec.num_heads, num_kv_heads=spec.num_heads, query_len=spec.query_len)
    visited = functional.pad(visited, (0, most - visited.shape[1]))
    of_rows = saved.rows.transpose(1, 2).reshape(*q.shape[:2], 2, spec.query_len).transpose(1, 2)
    return output.reshape(q.shape), lse.reshape(q.shape[:3]), Saved(visited, of_rows.contiguous())


def _backward_between_cuts(spec: Spec, saved: Saved, inputs: BackwardInputs) -> Gradients:
    if spec.query_start is None:
        return _backward(spec, saved, inputs)
    between, q, k, v = with_segments(spec, inputs.query, inputs.key, inputs.value)
    parts = spec.num_heads // between.num_heads  # H if heads became sequences, else 1
    copies = parts * between.num_kv_heads // spec.num_kv_heads
    numbers = _numbers_between_cuts(spec, between)

    def split(x: Tensor) -> Tensor:
        """[B, H, …] with the batch and the heads of `between`."""
        return x.reshape(between.batch, between.num_heads, *x.shape[2:])

    def joined(x: Tensor) -> Tensor:
        """The inverse."""
        return x.reshape(spec.batch, spec.num_heads, *x.shape[2:])

    def added(x: Tensor) -> Tensor:
        """[B, K, …]: the sum over the copies of each key head."""
        x = x.reshape(spec.batch, spec.num_kv_heads, copies, *x.shape[2:])
        return x.sum(2) if copies > 1 else x.squeeze(2)

    visited = saved.visited[:, :numbers].reshape(between.batch, numbers // parts)
    of_rows = split(saved.rows.transpose(1, 2)).transpose(1, 2)
    found = _backward(
        between,
        Saved(visited, of_rows),
        inputs._replace(
            query=q,
            key=k,
            value=v,
            output=split(inputs.output),
            lse=split(inputs.lse),
            grad_output=split(inputs.grad_output),
            grad_lse=None if inputs.grad_lse is None else split(inputs.grad_lse),
        ),
    )
    of_biases = [None if x is None else joined(x) for x in (found.key_bias, found.query_bias)]
    slopes = found.slopes.reshape(2, spec.batch, spec.num_heads)
    return Gradients(joined(found.query), added(found.key), added(found.value), slopes, *of_biases)


def _numbers_between_cuts(spec: Spec, between: Spec) -> int:
    """The numbers in `visited` per sequence of `spec`, whose heads may be sequences of `between`."""
    numbers = numbers_of_visited(
        num_heads=between.num_heads, num_kv_heads=between.num_kv_heads, query_len=spec.query_len
    )
    return numbers * (spec.num_heads // between.num_heads)


def _new_saved(query: Tensor, num_kv_heads: int) -> Saved:
    """Uninitialized: which keys each block visits, and m_i and ln l_i of every row, [B, 2, H, T]."""
    batch, heads, query_len = query.shape[:3]
    work = torch.promote_types(query.dtype, torch.float32)
    numbers = numbers_of_visited(num_heads=heads, num_kv_heads=num_kv_heads, query_len=query_len)
    visited = query.new_empty((batch, numbers), dtype=torch.int32)
    return Saved(visited, query.new_empty((batch, 2, heads, query_len), dtype=work))


def _empty_saved(arguments: Arguments) -> Saved:
    shared = arguments.query_start is None  # otherwise each head may become a sequence with its own key head
    return _new_saved(arguments.query, arguments.key.shape[1] if shared else arguments.query.shape[1])


_infer = functools.partial(_forward_between_cuts, for_backward=False)
run = operator(
    on_finite_numbers("native", _forward_between_cuts, _backward_between_cuts, _empty_saved, infer=_infer), READS
)


def _wide(x: Tensor) -> Tensor:
    """[..., D] in a dtype that the kernels read, with D a multiple of WIDTH; the same tensor if it already is."""
    if x.is_neg() or x._is_zerotensor():
        x = in_memory(x)
    if x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not build.multiplies_bf16()):
        x = x.float()
    return functional.pad(x, (0, -x.shape[-1] % WIDTH)) if x.shape[-1] % WIDTH else x


def _work(rows: dict[str, Tensor]) -> torch.dtype:
    """The dtype of sums: fp32 for bf16."""
    return torch.promote_types(rows["query"].dtype, torch.float32)


def _narrow(x: Tensor, spec: Spec) -> Tensor:
    return x if x.shape[-1] == spec.head_dim else x[..., : spec.head_dim].contiguous()


def _call(function: str, spec: Spec, rows: dict[str, Tensor], arrays: Arrays, **flags: bool) -> None:
    """Fills a `build.Call` and runs it; the keys of `rows` and `arrays` are its fields."""
    if spec.batch == 0:
        return  # the kernels divide by the number of sequences
    call, _alive = call_of(spec, rows, arrays, **flags)
    name = f"alibi_{function}_{_NAMES[_work(rows)]}"
    library = build.library(part=build.part_of(_NAMES[rows["query"].dtype]))
    getattr(library, name)(ctypes.byref(call))


def call_of(
    spec: Spec, rows: dict[str, Tensor], arrays: Arrays, *, has_values: bool = True, for_backward: bool = True
) -> tuple[build.Call, list[Tensor]]:
    """(the call, the tensors that must outlive it)."""
    work, heads = _work(rows), (spec.batch, spec.num_heads)
    slopes = spec.slopes.detach().to(work).expand(heads).contiguous()
    right = slopes if spec.right_slopes is None else spec.right_slopes.detach().to(work).expand(heads)
    query_segments, key_segments = _small_numbers(spec)
    if isinstance(spec.query_offset, Tensor):
        first = spec.query_offset.long().reshape(-1).expand(spec.batch)
    else:
        first = torch.full((spec.batch,), spec.query_offset, device=slopes.device)
    table_first, distances, table = 0, 0, None
    if spec.table is not None:
        table_first, distances = _distances(spec)
        table = spec.table.detach().index_select(1, columns_of(spec, spec.table, table_first, distances))
    points = _points(spec.coordinates)
    given = arrays | {
        "slopes": slopes,
        "right_slopes": right,
        "first": first,
        **{name: getattr(spec, name) for name in ("key_mask", "dropout_seed", "query_numbers", "key_numbers")},
        "query_segments": query_segments,
        "key_segments": key_segments,
        "key_bias": None if spec.key_bias is None else spec.key_bias.detach().double(),
        "table": table,
        "query_points": points if spec.query_coordinates is spec.coordinates else _points(spec.query_coordinates),
        "key_points": points,
    }
    alive = {name: x.contiguous() for name, x in given.items() if x is not None}
    alive |= {name: in_memory(x).contiguous() for name, x in alive.items() if x.is_neg() or x._is_zerotensor()}
    threshold, factor = dropout_numbers(spec.dropout_p) if spec.dropout_p > 0 else (0, 1.0)
    call = build.Call(
        B=spec.batch,
        H=spec.num_heads,
        K=spec.num_kv_heads,
        T=spec.query_len,
        S=spec.key_len,
        D=rows["query"].shape[-1],
        window=NO_WINDOW if spec.window is None else spec.window,
        causal=spec.causal,
        has_values=has_values,
        scale=spec.scale,
        tolerance=spec.tolerance,
        threads=torch.get_num_threads(),
        dropout_runs=0 if spec.dropout_seed is None else len(spec.dropout_seed),
        dropout_threshold=threshold,
        dropout_factor=factor,
        for_backward=for_backward,
        bf16=rows["query"].dtype == torch.bfloat16,
        distances=distances,
        table_first=table_first,
        **{name: build.Rows(x.data_ptr(), *x.stride()[:3]) for name, x in rows.items()},
        **{name: x.data_ptr() for name, x in alive.items()},
    )
    return call, [*rows.values(), *alive.values()]


def _points(coordinates: Tensor | None) -> Tensor | None:
    """[B, N, 3] fp64: coordinates in the plane have a third one of 0."""
    if coordinates is None:
        return None
    return functional.pad(coordinates.detach().double(), (0, 3 - coordinates.shape[-1]))


def _distances(spec: Spec) -> tuple[int, int]:
    """(the first distance, the number of distances) that whole vectors of queries cover: a few more than a table."""
    first = int(spec.query_offset)
    blocks, low = -(-spec.query_len // TILE), first - spec.key_len + 1
    if spec.causal:
        low = max(low, 1 - TILE)
    return low, max(1, first + blocks * TILE + WIDTH - low)


def _small_numbers(spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """The segments as int32; they are only compared for equality."""
    if spec.query_segments is None or spec.key_segments is None:
        return None, None
    both = torch.cat([spec.query_segments, spec.key_segments], -1).long()
    small = both.to(torch.int32)
    if bool((small != both).any()):
        small = both.unique(return_inverse=True)[1].to(torch.int32)
    query, key = small.split([spec.query_len, spec.key_len], -1)
    return query, key
