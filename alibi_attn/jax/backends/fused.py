"""CUDA: the Triton kernels of PyTorch's backend `fused`, for calls without masks and biases of keys.

`attention/backends/fused/` explains the kernels. Here are their launches for JAX arrays: norms, survey and reach, which plan the
tiles that each block of queries visits, and forward; for gradients visitors, queries and keys.
"""

import math
from typing import NamedTuple, cast

import jax.numpy as jnp

from alibi_attn.attention.backends.fused.configs import (
    MAX_HEAD_DIM,
    PLAN_ROWS,
    Kernel,
    Shape,
    may_fix,
    tile_shape,
    width_for,
)
from alibi_attn.attention.backends.fused.kernels import arguments as of_kernels
from alibi_attn.attention.backends.fused.kernels.arguments import Call, Rows
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES, TILE
from alibi_attn.jax.backends import launching
from alibi_attn.jax.backends.launching import Changed, Fixed, empty
from alibi_attn.jax.call.operands import Arrays
from alibi_attn.jax.call.plan import Array, Numbers

READS = frozenset({"causal", "right_slopes", "window", "return_lse"})

_CHOICES = len(OUTLIER_CHOICES)
_PRECISION = "tf32x3"  # of products in fp32


class Saved(NamedTuple):
    """The arrays that forward saves for backward: its lse, and in int32 its plan, with the bands that backward visits."""

    lse: Array  # [B, H, T]
    bands: Array  # [B, row]
    outliers: Array
    beside: Array
    weight: Array


class _Sizes(NamedTuple):
    """B, H, K, T, S, D, and how many TILEs of queries and of keys, and blocks of a plan, there are."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int

    @property
    def parts(self) -> int:
        return -(-self.queries // TILE)

    @property
    def tiles(self) -> int:
        return -(-self.keys // TILE)

    @property
    def blocks(self) -> int:
        return -(-self.queries // PLAN_ROWS)

    @property
    def row(self) -> int:
        """Numbers per sequence that are enough for every part of a plan."""
        return self.heads * self.blocks * 4 * max(PLAN_ROWS // TILE, OUTLIER_TILES)

    @classmethod
    def of(cls, arrays: Arrays) -> "_Sizes":
        (b, t, h, d), (_, s, k, _) = arrays.query.shape, arrays.key.shape
        return cls(b, h, k, t, s, d)


def why_not(spec: AttentionSpec[Array], query: Array, platforms: set[str]) -> str | None:
    """Why the kernels do not support a call here; None = they do."""
    if platforms != {"gpu"}:
        return f"it runs on CUDA devices but query is on {' and '.join(sorted(platforms))}"
    if (lacking := launching.missing()) is not None:
        return lacking
    if query.dtype.itemsize > 4:
        return f"it computes in float16, bfloat16 and float32 but query is {query.dtype}"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"its tiles hold heads of at most {MAX_HEAD_DIM} but D is {spec.head_dim}"
    if spec.query_len <= TILE or spec.tolerance == 0:
        return f"in JAX it is for more than {TILE} queries and a tolerance above 0"
    if not 0 <= cast(int, spec.query_offset) <= spec.key_len - spec.query_len:
        return "in JAX its queries are at positions of keys"
    return None


def numbers(spec: AttentionSpec[Array]) -> Numbers:
    """Of a call that the kernels support."""
    assert isinstance(spec.query_offset, int)
    both = spec.right_slopes is not None
    return Numbers(
        float(spec.scale), float(spec.tolerance), spec.window, spec.query_offset, both, launching.capability()
    )


def forward(causal: bool, given: Numbers, arrays: Arrays) -> tuple[Array, Array, Saved]:
    """(output [B, T, H, D] in query's dtype, lse [B, H, T], arrays for backward)."""
    from alibi_attn.attention.backends.fused.kernels.forward import forward_kernel

    size = _Sizes.of(arrays)
    norms, order, allowance, online, bands, outliers, beside, weight = _planned(causal, given, arrays)
    shape, of_queries = _shape("forward", arrays, given), (size.batch, size.heads, size.queries)
    measured = empty(bands.shape, jnp.int32) if _measures(shape) else None
    output, lse, given_lse, *measured_bands = launching.launch(
        forward_kernel,
        size.batch * size.heads * -(-size.queries // shape.queries),
        (
            *(_rows(x) for x in arrays[:3]),
            _rows(empty(arrays.query.shape, arrays.query.dtype)),
            empty(of_queries),
            empty(of_queries),
            _call(causal, given, arrays),
            of_kernels.Visited(bands, beside, None, size.row),
            norms if causal else None,
            order,
            measured,
            None if measured is None else allowance,
            online if causal and may_fix(arrays.query.dtype, size.head_dim) else None,
            _tiling(size, shape, causal),
        ),
        **_options(shape),
    )
    return output, given_lse, Saved(lse, measured_bands[0] if measured_bands else bands, outliers, beside, weight)


def _planned(causal: bool, given: Numbers, arrays: Arrays) -> tuple[Array, ...]:
    """(norms, order of heads, allowance, online, bands, outliers, beside, weight)."""
    from alibi_attn.attention.backends.fused.kernels.certificate import norms_kernel, survey_kernel
    from alibi_attn.attention.backends.fused.kernels.reach import reach_kernel

    size, sides, whole = _Sizes.of(arrays), 1 if causal else 2, jnp.int32
    b, h, k, tiles, parts = size.batch, size.heads, size.kv_heads, size.tiles, size.parts
    call, queries, keys = _call(causal, given, arrays), _rows(arrays.query), _rows(arrays.key)
    norms, each, arrived, costs = launching.launch(
        norms_kernel,
        b * k * tiles,
        (
            keys,
            _rows(arrays.value),
            call,
            of_kernels.Norms(empty((3, b, k, tiles)), empty((b, k, tiles * TILE)), None, None, 0),
            empty((b * h + 1,), whole),
            Changed(jnp.zeros((b, h, _CHOICES, 2), jnp.int32), "*i64"),  # JAX may not have int64
            0,
            tiles,
        ),
        D=size.head_dim,
        VALUES=True,
        NEAR=False,
    )
    known, width = of_kernels.Norms(norms, each, None, None, 0), width_for(tiles, most=1024)
    survey = of_kernels.Survey(
        empty((sides, _CHOICES, b, k, tiles)),
        empty((b, k, tiles), whole),
        empty((b, k, OUTLIER_TILES), whole),
        empty((2, b, k)),
    )
    span = min(width, 64)
    surveyed = launching.launch(
        survey_kernel,
        b * k * -(-tiles // span),
        (known, survey, b * k, tiles),
        WIDTH=width,
        SPAN=span,
        BOTH_SIDES=not causal,
    )
    certificate = of_kernels.Certificate(
        empty((sides, _CHOICES, b, h, parts), whole),
        empty((b, h, OUTLIER_TILES), whole),
        empty((b, h, parts)),
        Changed(costs, "*i64"),
        empty((b, h, parts), whole),
    )
    bands, outliers, beside, weight = (empty((b, size.row), whole) for _ in range(4))
    order = empty((b * h,), whole)
    _, _, allowance, _, online, *planned, of_heads, _ = launching.launch(
        reach_kernel,
        b * h * parts,
        (
            queries,
            keys,
            call,
            known,
            of_kernels.Survey(*surveyed),
            None,
            None,
            certificate,
            of_kernels.Plan(bands, outliers, beside, weight, size.row, None, order, Changed(arrived)),
            -math.log(given.tolerance if causal else given.tolerance / 2),
        ),
        D=size.head_dim,
        ROWS=PLAN_ROWS,
        BIAS_ROWS=PLAN_ROWS,
        WIDTH=16,  # unused without biases of keys
        PLAN_WIDTH=width_for(size.blocks),
        CAUSAL=causal,
        HIDDEN=False,
        SHARED=False,
        KEY_RULE=True,
    )
    return norms, of_heads, allowance, online, *planned


def backward(
    causal: bool,
    given: Numbers,
    arrays: Arrays,
    saved: Saved,
    output: Array,
    grad_output: Array,
    grad_lse: Array | None,
    *,
    slopes_wanted: bool,
) -> Arrays:
    """Gradients in the shapes and dtypes of their inputs.

    Args:
        output: [B, T, H, D] from forward; grad_output [B, T, H, D] and grad_lse [B, H, T] are the gradients of the loss;
            None = 0.
    """
    from alibi_attn.attention.backends.fused.kernels.backward import query_kernel
    from alibi_attn.attention.backends.fused.kernels.backward_keys import key_kernel

    size, call = _Sizes.of(arrays), _call(causal, given, arrays)
    b, h, k = size.batch, size.heads, size.kv_heads
    query, key, value = arrays[:3]
    unit = TILE if _measures(_shape("forward", arrays, given)) else PLAN_ROWS
    candidates, order, key_order = _visitors(size, saved, unit)
    padded, like = (b * h * size.blocks * PLAN_ROWS,), query.dtype
    # As in PyTorch: fp32 would lose digits.
    shifted = empty(padded) if causal and like != jnp.float32 else None
    slopes = empty((2, b, h, size.queries)) if slopes_wanted else None
    shape = _shape("query", arrays, given)
    inputs = [_rows(x) for x in (query, key, value)]
    grad_output = grad_output.astype(like)
    dq, delta, *more = launching.launch(
        query_kernel,
        b * h * -(-size.queries // shape.queries),
        (
            *inputs,
            _rows(output),
            _rows(grad_output),
            _rows(empty(query.shape, like)),
            saved.lse,
            None if grad_lse is None else grad_lse.astype(jnp.float32),
            empty(padded),
            shifted,
            slopes,
            None,
            call,
            of_kernels.Visited(saved.bands, saved.beside, None, size.row),
            order,
            _tiling(size, shape, causal, unit),
        ),
        **_options(shape),
    )
    shape = _shape("key", arrays, given)
    dk, dv = launching.launch(
        key_kernel,
        b * k * -(-size.keys // shape.keys),
        (
            *inputs,
            _rows(grad_output),
            _rows(empty(key.shape, like)),
            _rows(empty(key.shape, like)),
            saved.lse,
            None if shifted is None else more[0],
            delta,
            None,
            call,
            of_kernels.Visitors(saved.bands, candidates, None, size.row),
            key_order,
            _tiling(size, shape, causal, unit),
        ),
        **_options(shape),
    )
    of_slopes = more[-1].sum(-1) if slopes_wanted else jnp.zeros((2, b, h), arrays.left.dtype)
    return Arrays(dq, dk, dv, of_slopes[0], of_slopes[1], None, None)


def _visitors(size: _Sizes, saved: Saved, unit: int) -> tuple[Array, Array, Array]:
    """(the blocks that may visit each tile, the order of heads, that of key heads); `bands` has a block per `unit` queries."""
    from alibi_attn.attention.backends.fused.kernels.plan import visitors_kernel

    b, h, k, tiles = size.batch, size.heads, size.kv_heads, size.tiles
    ordered, grouped = empty((b * h,), jnp.int32), empty((b * k,), jnp.int32) if k < h else None
    plan = of_kernels.Plan(saved.bands, saved.outliers, None, saved.weight, size.row, None, ordered, None)
    order, candidates, *of_keys = launching.launch(
        visitors_kernel,
        b * h * -(-tiles // 16),
        (
            plan,
            empty((b, h, tiles, 3), jnp.int32),
            grouped,
            b,
            h,
            _group(size),
            size.blocks * (PLAN_ROWS // unit),
            tiles,
        ),
        WIDTH=16,
        BLOCKS=64,
    )
    return candidates, order, of_keys[0] if of_keys else order


def _call(causal: bool, given: Numbers, arrays: Arrays) -> Call:
    size, heads = _Sizes.of(arrays), arrays.left.shape[1]
    return Call(
        of_kernels.Slopes(arrays.left, heads),
        of_kernels.Slopes(arrays.right, heads) if given.both and not causal else None,
        of_kernels.QueryOffset(None, 0, given.first),
        of_kernels.Masks(None, None, None),
        given.scale,
        given.window,
        None,
        None,
        size.batch,
        size.heads,
        _group(size),
        size.queries,
        size.keys,
    )


def _group(size: _Sizes) -> int | Fixed:
    group = size.heads // size.kv_heads
    return Fixed(1) if group == 1 else group  # the code is shorter


def _rows(x: Array | Changed) -> Rows:
    """The `Rows` of an array [B, T, H, D]."""
    _, t, h, d = (x.array if isinstance(x, Changed) else x).shape
    return Rows(x, t * h * d, d, h * d)


def _shape(kernel: Kernel, arrays: Arrays, given: Numbers) -> Shape:
    return tile_shape(kernel, arrays.query.dtype, arrays.query.shape[3], large=given.large)


def _measures(forward: Shape) -> bool:
    """Whether forward, with tiles of this shape, measures which tiles matter, and backward visits only these."""
    return forward.queries >= TILE


def _tiling(size: _Sizes, shape: Shape, causal: bool, unit: int = PLAN_ROWS) -> of_kernels.Tiling:
    known = of_kernels.Tiling.of(size.head_dim, *shape[:2], PLAN_ROWS, unit, causal, _PRECISION, False)
    return of_kernels.Tiling(*map(Fixed, known))


def _options(shape: Shape) -> dict[str, int]:
    return {"num_warps": shape.warps, "num_stages": shape.stages}
