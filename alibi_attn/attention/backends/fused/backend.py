"""CUDA: our Triton kernels, which visit only the key tiles inside the certified reach; forward, backward and decoding.

`plan.py` computes which tiles every block of queries visits, and `full_tiles.py` in which of them nothing is hidden.
The kernels (`kernels/`) loop over them; their arguments are defined in `kernels/arguments.py` and prepared in `call.py`;
`launch.py` launches them. Backward visits exactly the tiles that forward visited: forward saves its plan. On a CPU it runs in
Triton's interpreter only, for tests: set TRITON_INTERPRET=1 before triton is imported.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import table
from alibi_attn.attention.backends.fused.call import call_of, in_place
from alibi_attn.attention.backends.fused.configs import (
    DECODE_QUERIES,
    MAX_HEAD_DIM,
    PLAN_ROWS,
    WHOLE_KEYS,
    Kernel,
    Shape,
    may_describe,
    may_fix,
    tile_shape,
)
from alibi_attn.attention.backends.fused.devices import is_hopper, is_large, missing
from alibi_attn.attention.backends.fused.kernels.arguments import Visited, Visitors
from alibi_attn.attention.backends.fused.launch import (
    NONE,
    Argument,
    described,
    grouped,
    in_rows,
    is_describable,
    launch,
    number,
    of_shape,
    pointer,
    rows_of,
    scratch,
    tiling,
)
from alibi_attn.attention.backends.fused.plan import How, empty_plan, find_visitors, make_plan, measured_tiles, plan_in
from alibi_attn.attention.backends.fused.recording import replayed_call
from alibi_attn.attention.backends.fused.space import Layout, Plan, allotted
from alibi_attn.attention.backends.fused.split_keys import forward_in_parts, is_split, reads_whole
from alibi_attn.attention.backends.protocol import TooSmall, Visits
from alibi_attn.attention.call.reads import GATES, MASKS, NUMBERED_DROPOUT
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import in_memory, transforms, why_not_compiled
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.certificate.tiles import Tiles, reach_and_scores
from alibi_attn.attention.operators.operator import operator, requires_gradient
from alibi_attn.attention.operators.schema import Arguments, BackwardInputs, Gradients, Kernels

Spec = AttentionSpec[Tensor]

name = "fused"
READS = MASKS | GATES | NUMBERED_DROPOUT | {"table"}


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Needs Triton and a CUDA device of compute capability 8.0 or more, fp16, bf16 or fp32, and D ≤ 256."""
    if spec.table is not None and transforms():
        return "it does not differentiate or map a table of distances in torch.func"
    return why_not_rows(query)


def why_not_rows(query: Tensor) -> str | None:
    """Why the kernels do not support queries of this dtype, head size and device; None = they do."""
    if query.dtype == torch.float64:
        return "it computes in float16, bfloat16 and float32 but query is float64"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"its tiles hold heads of at most {MAX_HEAD_DIM} but D is {query.shape[3]}"
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        if query.dtype == torch.bfloat16:
            return "Triton's interpreter multiplies bfloat16 wrongly; it does float16 and float32"
        return why_not_compiled() or missing(None)
    if query.device.type != "cuda":
        return f"it runs on CUDA devices but query is on {query.device}"
    return why_not_compiled() or missing(query.device.index)


def too_small(spec: Spec) -> TooSmall | None:
    """None: short inputs have not been measured on a GPU."""
    return None


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> Visits:
    """What a call reads. Where forward measures what backward visits, this computes the attention.

    If no tensor requires a gradient, it describes the call without gradients, which reads up to WHOLE_KEYS keys whole, and
    measures nothing.
    """
    gradients = requires_gradient(spec, query, key, value)
    whole = spec.key_len <= WHOLE_KEYS and not gradients
    found = plan(spec, query, key, value, whole=whole, gradients=gradients)
    numbers = reach_and_scores(spec, Tiles(found.bands, found.outlier_tiles, found.beside, found.weight, found.rows))
    if not gradients or not measures(spec, query):
        return Visits(*numbers)
    q, k, v = in_rows(query, key, key if value is None else value)
    forward(spec, q, k, v, found)
    return Visits(*numbers, *reach_and_scores(spec, measured_tiles(spec, found)))


def plan(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, known_norms: Norms | None = None,
    call: Argument | None = None, into: Tensor | None = None, whole: bool = False, gradients: bool = True,
) -> Plan:  # fmt: skip
    """The tiles that every block of queries will visit.

    Args:
        known_norms: norms of keys and values. Without them, up to DECODE_QUERIES queries visit all keys that the masks
            allow, because computing the norms costs as much.
        call: its `Call`, if it was prepared before.
        into: the plan's tensor, if it was allocated before.
        whole: visit all keys that the masks allow.
        gradients: whether backward may follow, see `How`.
    """
    certified = not whole and (spec.query_len > DECODE_QUERIES or known_norms is not None)
    how = How(plan_rows(spec.query_len), spec.query_len <= TILE, known_norms, certified, gradients)
    return make_plan(spec, call_of(spec, query.device) if call is None else call, query, key, value, how, into=into)


def plan_rows(query_len: int) -> int:
    """Queries that share one plan."""
    return TILE if query_len <= TILE else PLAN_ROWS


def forward(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, tiles: Plan | None, *, call: Argument | None = None,
    given_lse: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
    measured: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, lse) over the tiles of a plan.

    Without a plan, up to DECODE_QUERIES queries visit all keys that they may see; there are no masks and biases of keys.
    With a key bias lse is [B, 3, H, T]: in units
    of log2, followed by the pair that each is relative to. Queries that are all beyond the keys are moved next to them, and lse
    is that of the moved ones; `given_lse` [B, H, T] gets the natural lse at the given positions. `into` gets the result.
    `measured`: which tiles matter is written to the plan, if `measures` says so.
    """
    from alibi_attn.attention.backends.fused.kernels.forward import forward_kernel

    output, lse = (torch.empty_like(query), _empty_lse(spec, query)) if into is None else into
    call = call_of(spec, query.device) if call is None else call
    if tiles is None or (spec.table is None and is_split(spec, query)):
        visited = _EVERYTHING if tiles is None else _visited(tiles, with_masks=False)
        forward_in_parts(spec, call, (query, key, value), visited, (output, lse, given_lse))
        return output, lse
    if spec.table is not None:
        table.forward(spec, call, (query, key, value), _visited(tiles), tiles.rows, (output, lse, given_lse))
        return output, lse
    shape = tile_shape("forward", query.dtype, spec.head_dim, large=is_large(query.device), rows=tiles.rows)
    is_plain = spec.causal and not tiles.masked
    launch(
        query.device, forward_kernel, (spec.batch * spec.num_heads * -(-spec.query_len // shape.queries), 1, 1),
        of_shape(shape), rows_of(query), rows_of(key), rows_of(value),
        rows_of(output), pointer(lse), pointer(given_lse), call, _visited(tiles),
        tiles.norms if is_plain else NONE, tiles.order,
        *((tiles.space.at(tiles.layout.measured), tiles.allowance) if measured and measures(spec, query) else (NONE, NONE)),
        tiles.online if is_plain and spec.dropout_p == 0 and may_fix(query.dtype, spec.head_dim) else NONE,
        tiling(spec.head_dim, spec.causal, shape[:2], tiles.rows),
    )  # fmt: skip
    return output, lse


def measures(spec: Spec, query: Tensor) -> bool:
    """Whether forward measures which tiles matter, and backward visits only these."""
    certified = spec.table is None and spec.tolerance > 0 and spec.key_len > 0 and spec.query_len > DECODE_QUERIES
    shape = tile_shape("forward", query.dtype, spec.head_dim, large=is_large(query.device))
    return certified and not is_split(spec, query) and shape.queries >= TILE


_EVERYTHING = grouped(Visited, NONE, NONE, NONE, number(0))


def _visited(tiles: Plan, *, with_masks: bool = True, bands: Argument = NONE) -> Argument:
    at, layout = tiles.space.at, tiles.layout
    full = at(layout.full_blocks) if with_masks and tiles.masked else NONE
    return grouped(Visited, at(layout.bands) if bands is NONE else bands, at(layout.beside), full, number(layout.row))


def decode(spec: Spec, query: Tensor, key: Tensor, value: Tensor, known_norms: Norms) -> tuple[Tensor, Tensor]:
    """(output, lse) of causal queries without key mask and segments; keys beyond the reach are not read.

    Args:
        known_norms: norms of the keys and values, of all but the last few.
    """
    query, key, value = in_rows(query, key, value)
    output, given_lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

    def launched(spec: Spec, *tensors: Tensor) -> None:
        query, key, value, keys, values, output, given_lse = tensors
        call = call_of(spec, query.device)
        tiles = None
        if not reads_whole(spec, key):
            tiles = plan(spec, query, key, value, Norms(keys, values), call, gradients=False)
        into = output, scratch(given_lse.numel(), query.device, torch.float32)
        forward(spec, query, key, value, tiles, call=call, given_lse=given_lse, into=into)

    norms = known_norms.keys.contiguous(), known_norms.values.contiguous()
    tensors = query, key, value, *norms, output, given_lse
    replayed_call("decode", in_place(spec), tensors, launched, made=2, caches=(1, 2))
    return output, given_lse


def backward(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor | None, tiles: Plan, *, slopes_wanted: bool, biases_wanted: bool = False,
) -> Gradients:  # fmt: skip
    """The exact gradient over the plan's tiles; lse as `forward` returns it."""
    (grad_output,) = in_rows(grad_output)
    device, like = query.device, torch.float32
    heads, s, t = (2, spec.batch, spec.num_heads), spec.key_len, spec.query_len
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    dslopes = torch.empty((*heads, t), dtype=like, device=device) if slopes_wanted else None
    of_table = (
        None if spec.table is None or not biases_wanted else torch.empty(spec.table.shape, dtype=like, device=device)
    )
    biases_wanted = biases_wanted and spec.table is None
    of_keys = torch.empty((*heads, s), dtype=like, device=device) if biases_wanted else None
    of_queries = torch.empty((*heads, t), dtype=like, device=device) if biases_wanted else None
    grad_lse = None if grad_lse is None else in_memory(grad_lse).contiguous()
    replayed_call(
        ("backward", tiles.rows), in_place(spec),
        (query, key, value, output, lse, grad_output, grad_lse, tiles.space.tensor, dq, dk, dv, dslopes, of_keys, of_queries,
        of_table),
        _launch_backward, made=7,
    )  # fmt: skip
    of_keys, of_queries = (None if x is None else x.sum(0, dtype=torch.float64) for x in (of_keys, of_queries))
    of_slopes = dq if dslopes is None else dslopes.sum(-1, dtype=torch.float64)  # not read if not wanted
    return Gradients(dq, dk, dv, of_slopes, of_keys, of_queries, of_table)


def _launch_backward(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor | None, saved_plan: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dslopes: Tensor | None,
    of_keys: Tensor | None, of_queries: Tensor | None, of_table: Tensor | None,
) -> None:  # fmt: skip
    """The kernels that find visitors, fill the gradients of queries, of keys, and of a table."""
    from alibi_attn.attention.backends.fused.kernels.backward import query_kernel
    from alibi_attn.attention.backends.fused.kernels.backward_keys import key_kernel

    device, large, tiles = query.device, is_large(query.device), plan_in(saved_plan, spec, plan_rows(spec.query_len))
    b, h, k, s, t = spec.batch, spec.num_heads, spec.num_kv_heads, spec.key_len, spec.query_len
    call, key_tiles = call_of(spec, device), -(-s // TILE)
    rows = b * h * -(-t // tiles.rows) * tiles.rows
    is_shifted = spec.causal and query.dtype != torch.float32 and spec.table is None  # fp32 would lose digits
    delta, shifted, candidates, order, key_order = allotted(
        device, (rows, torch.float32), (rows if is_shifted else 0, torch.float32), (3 * b * h * key_tiles, torch.int32),
        (b * h, torch.int32), (b * k, torch.int32),
    )  # fmt: skip
    shifted = shifted if is_shifted else NONE
    key_order = order if spec.group == 1 else key_order
    queries, keys, values, grads = rows_of(query), rows_of(key), rows_of(value), rows_of(grad_output)
    lses, layout, of_plan = pointer(lse), tiles.layout, tiles.space.at
    full = of_plan(layout.full_tiles) if tiles.masked else NONE
    is_measured = measures(spec, query)
    bands, unit = of_plan(layout.measured if is_measured else layout.bands), TILE if is_measured else tiles.rows
    visitors = grouped(Visitors, bands, candidates, full, number(layout.row))
    find_visitors(spec, tiles, bands, unit, order, candidates, key_order if spec.group > 1 else NONE)
    may = spec.table is None and may_describe(query.dtype, spec.head_dim, large=large)
    width = 1 << (spec.head_dim - 1).bit_length()
    known = may and is_hopper(device) and spec.key_bias is None and all(map(is_describable, (key, value)))
    shape = _shape("query", spec, query, tiles.rows, described=known)
    fetched = (described(x, shape.keys, width) for x in (key, value)) if known else (keys, values)
    launch(
        device, query_kernel, (b * h * -(-t // shape.queries), 1, 1),
        of_shape(shape), queries, *fetched, rows_of(output), grads, rows_of(dq), lses, pointer(grad_lse), delta, shifted,
        pointer(dslopes), pointer(of_queries), call,
        _visited(tiles, bands=bands), order, tiling(spec.head_dim, spec.causal, shape[:2], tiles.rows, unit, described=known),
    )  # fmt: skip
    known = may and all(map(is_describable, (query, grad_output)))
    shape = _shape("key", spec, query, tiles.rows, described=known)
    if known:
        queries, grads = (described(x, shape.queries, width) for x in (query, grad_output))
    launch(
        device, key_kernel, (b * k * -(-s // shape.keys), 1, 1),
        of_shape(shape), queries, keys, values, grads, rows_of(dk), rows_of(dv), lses, shifted, delta, pointer(of_keys), call,
        visitors, key_order, tiling(spec.head_dim, spec.causal, shape[:2], tiles.rows, unit, described=known),
    )  # fmt: skip
    if of_table is not None:
        inputs = queries, keys, values, grads
        table.add_up(spec, inputs, (lses, delta), call, tiles.rows, table.widths(query).diagonal, of_table)


def _shape(kernel: Kernel, spec: Spec, query: Tensor, rows: int, *, described: bool) -> Shape:
    """The tile of a kernel of backward; `rows` queries share one plan."""
    if spec.table is not None:
        found = table.widths(query)
        return Shape(*(found.rows if kernel == "query" else found.keys), warps=4, stages=2)
    return tile_shape(kernel, query.dtype, spec.head_dim, large=is_large(query.device), described=described, rows=rows)


class _Saved(NamedTuple):
    """Saved by forward for backward: its plan, and the lse of the kernels, which keeps the digits that a large bias costs."""

    plan: Tensor
    relative_lse: Tensor


def _attend(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, _Saved, bool]:
    query, key, value = in_rows(query, key, value)
    output, lse, given_lse = torch.empty_like(query), _empty_lse(spec, query), _empty_given_lse(spec, query)
    plan = empty_plan(spec, plan_rows(spec.query_len), query.device)
    tensors = query, key, value, output, lse, given_lse, plan
    replayed_call("forward", in_place(spec), tensors, _launch_forward, made=4, caches=(1, 2))
    return output, given_lse, _Saved(plan, lse), False


def _launch_forward(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, given_lse: Tensor, into: Tensor
) -> None:
    call = call_of(spec, query.device, planned=False)
    tiles = plan(spec, query, key, value, call=call, into=into)
    forward(spec, query, key, value, tiles, call=call, given_lse=given_lse, into=(output, lse))


def _infer(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(output, lse) of a call without gradients, which saves nothing."""
    query, key, value = in_rows(query, key, value)
    output, given_lse = torch.empty_like(query), _empty_given_lse(spec, query)
    tensors = query, key, value, output, given_lse
    replayed_call("inference", in_place(spec), tensors, _launch_inference, made=2, caches=(1, 2))
    return output, given_lse


def _launch_inference(spec: Spec, query: Tensor, key: Tensor, value: Tensor, output: Tensor, given_lse: Tensor) -> None:
    hides = spec.table is not None or any(
        x is not None for x in (spec.key_mask, spec.query_segments, spec.key_segments, spec.key_bias)
    )
    call = call_of(spec, query.device, planned=not hides)
    tiles = None
    if hides or spec.query_len > DECODE_QUERIES:
        tiles = plan(spec, query, key, value, call=call, whole=spec.key_len <= WHOLE_KEYS, gradients=False)
    lse = scratch((1 if spec.key_bias is None else 3) * given_lse.numel(), query.device, torch.float32)
    forward(spec, query, key, value, tiles, call=call, given_lse=given_lse, into=(output, lse), measured=False)


def _empty_given_lse(spec: Spec, query: Tensor) -> Tensor:
    wide = spec.key_bias is not None and spec.key_bias.dtype == torch.float64
    return torch.empty(query.shape[:3], dtype=torch.float64 if wide else torch.float32, device=query.device)


def _empty_lse(spec: Spec, query: Tensor) -> Tensor:
    heads = query.shape[:3] if spec.key_bias is None else (query.shape[0], 3, *query.shape[1:3])
    return torch.empty(heads, dtype=torch.float32, device=query.device)


def _differentiate(spec: Spec, saved: tuple[Tensor, ...], inputs: BackwardInputs) -> Gradients:
    plan, relative_lse = saved
    lse, grad_lse, grad_output = relative_lse.contiguous(), inputs.grad_lse, inputs.grad_output
    if grad_lse is not None:
        grad_lse = grad_lse.float()
    query, key, value = in_rows(inputs.query, inputs.key, inputs.value)
    if inputs.may_see_nothing:
        # 0·NaN is NaN: a query that sees no key must not affect the keys' gradients.
        nothing = ((lse if spec.key_bias is None else lse[:, 0]) == -torch.inf)[..., None]
        query, grad_output = query.masked_fill(nothing, 0.0), grad_output.masked_fill(nothing, 0.0)
    tiles = plan_in(plan.contiguous(), spec, plan_rows(spec.query_len))
    return backward(
        spec, query, key, value, inputs.output, lse, grad_output, grad_lse, tiles, slopes_wanted=inputs.slopes_wanted,
        biases_wanted=inputs.biases_wanted,
    )  # fmt: skip


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(next(in_rows(x)))


def _empty_saved(arguments: Arguments) -> _Saved:
    query, is_biased = arguments.query, arguments.key_bias is not None
    b, h, t, _ = query.shape
    masked = arguments.key_mask is not None or arguments.key_segments is not None
    blocks = (t + PLAN_ROWS - 1) // PLAN_ROWS  # also one block if `plan_rows` is smaller
    layout = Layout.of(h, blocks, arguments.key.shape[2], h if is_biased else int(masked))
    return _Saved(
        query.new_empty((b, layout.row), dtype=torch.int32),
        query.new_empty((b, 3, h, t) if is_biased else (b, h, t), dtype=torch.float32),
    )


run = operator(Kernels("fused", _attend, _differentiate, _empty_like, _empty_saved, _Saved._fields, _infer), READS)
