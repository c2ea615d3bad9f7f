"""CUDA: our Triton kernels, which visit only the key tiles inside the certified reach; forward, backward and decoding.

`plan.py` computes which tiles every block of queries visits, and `full_tiles.py` in which of them nothing is hidden.
The kernels (`kernels/`) loop over them; their arguments are defined in `kernels/arguments.py` and filled in
`launch.py`. Backward visits exactly the tiles that forward visited: forward saves its plan. On a CPU it runs in
Triton's interpreter only, for tests: set TRITON_INTERPRET=1 before triton is imported.
"""

import importlib.util
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import MAX_HEAD_DIM, PLAN_ROWS, Shape, is_large, tile_shape
from alibi_attn.attention.backends.fused.full_tiles import FullTiles
from alibi_attn.attention.backends.fused.kernels.arguments import Visited, Visitors
from alibi_attn.attention.backends.fused.key_bias import unshifted
from alibi_attn.attention.backends.fused.launch import bias_of_move, call_of, in_rows, on, precision, rows_of
from alibi_attn.attention.backends.fused.plan import planned, visiting_blocks
from alibi_attn.attention.backends.protocol import TooSmall
from alibi_attn.attention.certificate.constants import OUTLIER_TILES, TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.certificate.tiles import Tiles, reach_and_scores
from alibi_attn.attention.cuts import with_steps
from alibi_attn.attention.operator import operator
from alibi_attn.attention.schema import Arguments, BackwardInputs, Gradients, Kernels
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.transforms import constant_when_compiled, why_not_compiled
from alibi_attn.attention.visibility import contained_by_cuts, rounded_lse

Spec = AttentionSpec[Tensor]

name = "fused"

DECODE_QUERIES = 8  # up to this many queries are decoding
_INTERPRETER_PROCESSORS = 2


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Needs Triton and a CUDA device of compute capability 8.0 or more, fp16, bf16 or fp32, and D ≤ 256."""
    if spec.table is not None:
        return "it has no table of distances"
    if query.dtype == torch.float64:
        return "it computes in float16, bfloat16 and float32 but query is float64"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"its tiles hold heads of at most {MAX_HEAD_DIM} but D is {spec.head_dim}"
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        if query.dtype == torch.bfloat16:
            return "Triton's interpreter multiplies bfloat16 wrongly; it does float16 and float32"
        return why_not_compiled() or _missing(None)
    if query.device.type != "cuda":
        return f"it runs on CUDA devices but query is on {query.device}"
    return why_not_compiled() or _missing(query.device.index)


def too_small(spec: Spec) -> TooSmall | None:
    """None: short inputs have not been measured on a GPU."""
    return None


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is read, and the scores that are computed."""
    return reach_and_scores(spec, plan(spec, query, key, value))


def plan(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, known_norms: Norms | None = None,
    full_tiles: FullTiles | None = None,
) -> Tiles:  # fmt: skip
    """The tiles that every block of queries will visit.

    Args:
        known_norms: norms of keys and values. Without them, up to DECODE_QUERIES queries visit all keys that the masks
            allow, because computing the norms costs as much.
    """
    return planned(
        spec, query, key, value, rows=plan_rows(spec.query_len), shared=spec.query_len <= TILE, known_norms=known_norms,
        full_tiles=full_tiles, certified=spec.query_len > DECODE_QUERIES or known_norms is not None,
    )[0]  # fmt: skip


def plan_rows(query_len: int) -> int:
    """Queries that share one plan."""
    return TILE if query_len <= TILE else PLAN_ROWS


def is_split(spec: Spec, query: Tensor) -> bool:
    """Whether the heads of a group are packed together and the keys are split among programs: for few queries, or few heads.

    The visited tiles do not depend on it, because other sequences in the batch must not change them.
    """
    few = spec.batch * spec.num_heads < _processors(query.device)
    return spec.query_len <= DECODE_QUERIES or (spec.query_len <= TILE and few)


def forward(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, *, counts: Tensor | None = None,
    full_tiles: FullTiles | None = None, given_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, lse) over the tiles of a plan; `counts` [B, H, ⌈T / tile⌉] int32 gets the tiles that each tile of queries visits.

    If keys are split, `counts` is [B, K, parts] with the parts of `decode_parts`. With a key bias lse is [B, 3, H, T]: in units
    of log2, followed by the pair that each is relative to. Queries that are all beyond the keys are moved next to them, and lse
    is that of the moved ones; without a key bias `given_lse` [B, H, T] fp32 gets the lse at the given positions.
    """
    from alibi_attn.attention.backends.fused.kernels import decode as decode_kernels
    from alibi_attn.attention.backends.fused.kernels import forward as forward_kernels

    output = torch.empty_like(query)
    heads = query.shape[:3] if spec.key_bias is None else (query.shape[0], 3, *query.shape[1:3])
    lse = torch.empty(heads, dtype=torch.float32, device=query.device)
    split = is_split(spec, query)
    shape = tile_shape("decode" if split else "forward", query.dtype, spec.head_dim, large=is_large(query.device))
    if full_tiles is None:
        full_tiles = _full_tiles(spec, query)
    call = call_of(spec, query.device, None if full_tiles is None else full_tiles.call.key_bias)
    inputs = (rows_of(query), rows_of(key), rows_of(value))
    constants = _constants(spec, shape)
    if split:
        parts = decode_parts(spec, query)
        chunks = -(-spec.group * spec.query_len // shape.queries)
        outputs = torch.empty((parts, *query.shape), dtype=torch.float32, device=query.device)
        lses = torch.empty((parts, *heads), dtype=torch.float32, device=query.device)
        with on(query):
            decode_kernels.decode_kernel[(spec.batch * spec.num_kv_heads, chunks, parts)](
                *inputs, outputs, lses, call, Visited(tiles.bands, tiles.beside, None), counts, **constants
            )
            rows = query.shape[:3].numel()
            decode_kernels.merge_kernel[(rows,)](
                outputs, lses, rows_of(output), lse, given_lse, call, parts, rows, SLOTS=1 << (parts - 1).bit_length(),
                D=spec.head_dim, num_warps=1,
            )  # fmt: skip
        return output, lse
    visited = Visited(tiles.bands, tiles.beside, None if full_tiles is None else full_tiles.of_blocks(tiles.rows))
    with on(query):
        forward_kernels.forward_kernel[(spec.batch * spec.num_heads * -(-spec.query_len // shape.queries),)](
            *inputs, rows_of(output), lse, given_lse, call, visited,
            tiles.norms if spec.causal and full_tiles is None else None, _heaviest_first(tiles.weight), counts,
            ROWS=tiles.rows, **constants,
        )  # fmt: skip
    return output, lse


def decode(spec: Spec, query: Tensor, key: Tensor, value: Tensor, known_norms: Norms) -> tuple[Tensor, Tensor]:
    """(output, lse) of causal queries without key mask and segments; keys beyond the reach are not read.

    Args:
        known_norms: norms of the keys and values, of all but the last few.
    """
    query, key, value = in_rows(query, key, value)
    tiles = plan(spec, query, key, value, known_norms)
    given_lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    output, _ = forward(spec, query, key, value, tiles, given_lse=given_lse)
    return output, given_lse


def decode_parts(spec: Spec, query: Tensor) -> int:
    """The number of parts that the keys are split into: enough programs for the device, of at least four tiles each."""
    programs = 2 * _processors(query.device)
    return max(1, min(programs // (spec.batch * spec.num_kv_heads), -(-spec.key_len // (4 * TILE)), 64))


def backward(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor | None, tiles: Tiles, *, slopes_wanted: bool, biases_wanted: bool = False,
) -> Gradients:  # fmt: skip
    """The exact gradient over the plan's tiles; lse as `forward` returns it."""
    from alibi_attn.attention.backends.fused.kernels import backward as kernels

    (grad_output,) = in_rows(grad_output)
    delta, large = lse.new_empty(query.shape[:3]), is_large(query.device)
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    dslopes = None
    if slopes_wanted:
        dslopes = torch.empty((2, *delta.shape), dtype=torch.float32, device=query.device)
    of_keys, of_queries = None, None
    if biases_wanted:
        of_keys, of_queries = (lse.new_empty((2, *delta.shape[:2], n)) for n in (spec.key_len, spec.query_len))
    full_tiles = _full_tiles(spec, query)
    call = call_of(spec, query.device, None if full_tiles is None else full_tiles.call.key_bias)
    inputs = (rows_of(query), rows_of(key), rows_of(value))
    visited = Visited(tiles.bands, tiles.beside, None if full_tiles is None else full_tiles.of_blocks(tiles.rows))
    candidates = visiting_blocks(tiles, count=-(-spec.key_len // TILE))
    visitors = Visitors(tiles.bands, candidates, None if full_tiles is None else full_tiles.of_tiles(tiles.rows))
    order = key_order = _heaviest_first(tiles.weight)
    if spec.group > 1:
        key_order = _heaviest_first(tiles.weight.unflatten(1, (spec.num_kv_heads, spec.group)).sum(-1))
    with on(query):
        shape = tile_shape("query", query.dtype, spec.head_dim, large=large)
        kernels.query_kernel[(spec.batch * spec.num_heads * -(-spec.query_len // shape.queries),)](
            *inputs, rows_of(output), rows_of(grad_output), rows_of(dq), lse, None if grad_lse is None else grad_lse.contiguous(),
            delta, dslopes, of_queries, call, visited, order, ROWS=tiles.rows, **_constants(spec, shape),
        )  # fmt: skip
        shape = tile_shape("key", query.dtype, spec.head_dim, large=large)
        kernels.key_kernel[(spec.batch * spec.num_kv_heads * -(-spec.key_len // shape.keys),)](
            *inputs, rows_of(grad_output), rows_of(dk), rows_of(dv), lse, delta, of_keys, call, visitors, key_order,
            ROWS=tiles.rows, **_constants(spec, shape),
        )  # fmt: skip
    of_keys, of_queries = (None if x is None else x.sum(0, dtype=torch.float64) for x in (of_keys, of_queries))
    if dslopes is None:
        of_slopes = torch.zeros(2, *delta.shape[:2], dtype=torch.float64, device=query.device)
    else:
        of_slopes = dslopes.sum(-1, dtype=torch.float64)
    return Gradients(dq, dk, dv, of_slopes, of_keys, of_queries)


class _Saved(NamedTuple):
    """Saved by forward for backward: its plan, and the lse of the kernels, which keeps the digits that a large bias costs."""

    bands: Tensor
    outlier_tiles: Tensor
    beside: Tensor
    weight: Tensor
    relative_lse: Tensor


def _attend(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, _Saved, bool]:
    query, key, value = in_rows(query, key, value)
    poison = blind = None
    if spec.query_start is not None:
        key, value, poison, blind = contained_by_cuts(spec, key, value)
        spec = with_steps(spec)
    full_tiles = _full_tiles(spec, query)
    tiles = plan(spec, query, key, value, full_tiles=full_tiles)
    given_lse = query.new_empty(query.shape[:3], dtype=torch.float32) if spec.key_bias is None else None
    output, lse = forward(spec, query, key, value, tiles, full_tiles=full_tiles, given_lse=given_lse)
    if poison is not None and blind is not None:
        output = output.masked_fill(blind[..., None], 0.0) + poison[..., None].to(output.dtype)
        lse[:, 0] = lse[:, 0].masked_fill(blind, -torch.inf) + poison
    saved = _Saved(tiles.bands, tiles.outlier_tiles, tiles.beside, tiles.weight, lse)
    if given_lse is not None:
        return output, given_lse, saved, False
    if spec.query_bias is not None:  # all queries are among the keys
        given_lse = unshifted(lse) + spec.query_bias
    else:
        given_lse = unshifted(lse) + bias_of_move(spec, query.device)
    return output, rounded_lse(spec, query, given_lse), saved, False


def _differentiate(spec: Spec, saved: tuple[Tensor, ...], inputs: BackwardInputs) -> Gradients:
    bands, outlier_tiles, beside, weight, relative_lse = saved
    lse, grad_lse, grad_output = relative_lse.contiguous(), inputs.grad_lse, inputs.grad_output
    if grad_lse is not None:
        grad_lse = grad_lse.float()
    query, key, value = in_rows(inputs.query, inputs.key, inputs.value)
    if spec.query_start is not None:
        key, value, *_ = contained_by_cuts(spec, key, value)
        spec = with_steps(spec)
    if inputs.may_see_nothing:
        # 0·NaN is NaN: a query that sees no key must not affect the keys' gradients.
        nothing = ((lse if spec.key_bias is None else lse[:, 0]) == -torch.inf)[..., None]
        query, grad_output = query.masked_fill(nothing, 0.0), grad_output.masked_fill(nothing, 0.0)
    tiles = Tiles(
        bands.contiguous(), outlier_tiles.contiguous(), beside.contiguous(), weight, plan_rows(spec.query_len)
    )
    return backward(
        spec, query, key, value, inputs.output, lse, grad_output, grad_lse, tiles, slopes_wanted=inputs.slopes_wanted,
        biases_wanted=inputs.biases_wanted,
    )  # fmt: skip


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(next(in_rows(x)))


def _empty_saved(arguments: Arguments) -> _Saved:
    query, is_biased = arguments.query, arguments.key_bias is not None
    b, h, t, _ = query.shape
    blocks = (t + PLAN_ROWS - 1) // PLAN_ROWS  # also one block if `plan_rows` is smaller
    return _Saved(
        query.new_empty((b, h, blocks, 4), dtype=torch.int32),
        query.new_empty((b, h, OUTLIER_TILES), dtype=torch.int32),
        query.new_empty((b, h, blocks, OUTLIER_TILES), dtype=torch.int32),
        query.new_empty((b, h), dtype=torch.int32),
        query.new_empty((b, 3, h, t) if is_biased else (b, h, t), dtype=torch.float32),
    )


run = operator(Kernels("fused", _attend, _differentiate, _empty_like, _empty_saved, saves=_Saved._fields))


def _constants(spec: Spec, shape: Shape) -> dict[str, Any]:
    """The compile-time constants of the attention kernels."""
    return {
        "D": spec.head_dim, "BM": shape.queries, "BN": shape.keys, "CAUSAL": spec.causal, "PRECISION": precision(),
        "num_warps": shape.warps, "num_stages": shape.stages,
    }  # fmt: skip


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _full_tiles(spec: Spec, query: Tensor) -> FullTiles | None:
    if not spec.hides_keys and spec.key_bias is None:
        return None
    return FullTiles.of(spec, call_of(spec, query.device), query.device)


def _heaviest_first(weight: Tensor) -> Tensor:
    """The heads of all sequences, those with the most tiles first, so that none of these starts last."""
    return weight.flatten().argsort(descending=True, stable=True)


@constant_when_compiled
def _missing(device: int | None) -> str | None:
    """The requirement that is missing on this machine, or None."""
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton; pip install triton"
    if device is not None and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"it needs compute capability 8.0 but the device has {capability[0]}.{capability[1]}"
    return None
