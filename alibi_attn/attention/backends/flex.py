"""torch's FlexAttention with a certified BlockMask for every head: for devices without our kernels, and for comparison.

Biases are a `score_mod`; the BlockMask lists, for every head and block of 128 queries, the blocks of 128 keys in the certified
reach. FlexAttention's format has (T / 128)·(S / 128) entries per head, whatever the reach is.
Source: Dong et al. 2024, FlexAttention (arXiv:2412.05496).
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alibi_attn.attention.backends.protocol import TooSmall, Visits
from alibi_attn.attention.call.bias import bias_that_matters, unshifted_lse
from alibi_attn.attention.call.cuts import with_steps
from alibi_attn.attention.call.reads import GATES, MASKS, SPACE
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions, largest_distances
from alibi_attn.attention.certificate.biased import biased_bounds
from alibi_attn.attention.certificate.bounds import bounds
from alibi_attn.attention.certificate.boxes import blocks_in_space
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.tiles import Tiles, key_tiles, reach_and_scores
from alibi_attn.attention.operators.operator import requires_gradient

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Spec = AttentionSpec[Tensor]

name = "flex"
READS = MASKS | SPACE | GATES

_FINE, _HIDDEN, _BAD = 0, 1, 2
_MOST_SHAPES = 1024  # more shapes raise an error
BLOCK = 2 * TILE  # queries and keys per block: FlexAttention's default


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Needs a CPU (forward only) or CUDA, fp16, bf16 or fp32; no deterministic gradient of biases."""
    device = query.device.type
    if device not in ("cpu", "cuda"):
        return f"it runs on CPU and CUDA but query is on {query.device}"
    if query.dtype == torch.float64:
        return "it computes in float16, bfloat16 and float32 but query is float64"
    if spec.head_dim < 16 and device == "cuda":
        return f"FlexAttention needs heads of at least 16 but D is {spec.head_dim}"
    if spec.coordinates is not None and spec.key_bias is not None:
        return "it computes positions in the plane or in space without key_bias"
    if device == "cpu" and spec.return_lse:
        return "FlexAttention has no lse on the CPU"
    if not torch.is_grad_enabled():
        return None
    for name, x in (("slopes", spec.slopes), ("slopes", spec.right_slopes), ("key_bias", spec.key_bias)):
        if x is not None and x.requires_grad:
            return f"FlexAttention adds up gradients of {name} in no fixed order"
    if spec.query_bias is not None and spec.query_bias.requires_grad:
        return "FlexAttention has no gradient of a bias that only lse has"
    if device == "cpu" and any(x.requires_grad for x in (query, key, value)):
        return "FlexAttention has no backward on the CPU; call it under torch.no_grad()"
    return None


def run(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """(output, lse); outside torch.compile it compiles FlexAttention, so the first call is slow."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    for_gradients = torch.is_grad_enabled() and requires_gradient(spec, query, key, value)
    with torch.no_grad():
        flags = _key_flags(spec, key, value)
        rows = query.detach(), key.detach(), value.detach()
        mask = block_mask(spec, *rows, flags=flags, for_gradients=for_gradients)
    origin = None if spec.key_bias is None else bias_that_matters(spec, spec.key_bias)
    unfit, biased = (flags != _FINE)[..., None], _biased(spec, flags, origin)
    attention: Any = flex_attention if torch.compiler.is_compiling() else _compiled
    # FlexAttention has no kernel for views with a negative bit.
    query, key, value = query.resolve_neg(), key.masked_fill(unfit, 0.0), value.masked_fill(unfit, 0.0)
    options = {"score_mod": biased, "block_mask": mask, "scale": spec.scale, "enable_gqa": spec.group > 1}
    if not spec.return_lse:
        return attention(query, key, value, **options), None
    output, aux = attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    return output, unshifted_lse(spec, aux.lse, origin)


def too_small(spec: Spec) -> TooSmall | None:
    """None: short inputs have not been measured on the devices that this backend is for."""
    return None


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> Visits:
    """What a call reads."""
    if spec.coordinates is not None:
        needed = blocks_in_space(spec, query, key, value, BLOCK)
        rows, columns = (
            (length - torch.arange(0, length, BLOCK, device=needed.device)).clamp(max=BLOCK)
            for length in (spec.query_len, spec.key_len)
        )
        return Visits(largest_distances(spec, query.device), (needed * rows[:, None] * columns).sum((-1, -2)))
    found = plan(spec, query, key, value, for_gradients=requires_gradient(spec, query, key, value))
    return Visits(*reach_and_scores(spec, Tiles.of(*_rounded(found, BLOCK), BLOCK)))


def plan(
    spec: Spec,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    rows: int = BLOCK,
    for_gradients: bool = True,
) -> Tiles:
    """The certified tiles of every block of queries."""
    if spec.key_bias is None:
        certified = bounds(spec, query, key, value, for_gradients=for_gradients)
    else:
        certified = biased_bounds(with_steps(spec), query, key, value, for_gradients=for_gradients)
    return key_tiles(spec, certified, rows=rows)


def block_mask(
    spec: Spec,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    flags: Tensor | None = None,
    block_size: tuple[int, int] = (BLOCK, BLOCK),
    for_gradients: bool = True,
) -> "BlockMask":
    """The blocks of keys that matter to each block of queries, and a `mask_mod` of the keys that a query may see.

    Args:
        flags: flags of the keys, see `_key_flags`; None = the flags of the key mask.
        block_size: queries and keys per block, multiples of TILE.
        for_gradients: every key keeps its gradient (`certificate/key_rule.py`).
    """
    from torch.nn.attention.flex_attention import BlockMask

    with torch.no_grad():
        flags = _key_flags(spec) if flags is None else flags
        if spec.coordinates is not None:
            count, indices = _first_true(blocks_in_space(spec, query, key, value, BLOCK))
        else:
            found = plan(spec, query, key, value, rows=block_size[0], for_gradients=for_gradients)
            count, indices = key_blocks(spec, found, block_size[1])
    return BlockMask.from_kv_blocks(
        count,
        indices,
        BLOCK_SIZE=block_size,
        mask_mod=_visible(spec, flags),
        seq_lengths=(spec.query_len, spec.key_len),
    )


def key_blocks(spec: Spec, tiles: Tiles, keys: int) -> tuple[Tensor, Tensor]:
    """(count [B, H, N], indices [B, H, N, blocks of `keys` keys]) int32: the visited ones come first."""
    rounded, beside = _rounded(tiles, keys)
    first, last, low, high = (x[..., None] for x in rounded.unbind(-1))
    width = keys // TILE
    at = torch.arange(-(-spec.key_len // keys), device=first.device, dtype=torch.int32) * width
    inside = (at >= first) & (at < last)
    for tile in beside.unbind(-1):
        inside = inside | ((at == tile[..., None, None]) & (at >= low) & (at < high))
    return _first_true(inside)


def _first_true(inside: Tensor) -> tuple[Tensor, Tensor]:
    """(the number of true entries, the indices of all, the true ones first), int32."""
    order = torch.argsort((~inside).to(torch.int8), dim=-1, stable=True)
    return inside.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _key_flags(spec: Spec, *rows: Tensor) -> Tensor:
    """[B, K, S] int8: _HIDDEN by the key mask; _BAD: visible, with NaN or inf in one of the rows (keys, values); else _FINE."""
    shape = spec.batch, spec.num_kv_heads, spec.key_len
    flags = torch.zeros(shape, dtype=torch.int8, device=spec.slopes.device)
    for x in rows:
        flags = flags.masked_fill(~x.isfinite().all(-1), _BAD)
    return flags if spec.key_mask is None else flags.masked_fill(~spec.key_mask[:, None], _HIDDEN)


def _rounded(tiles: Tiles, keys: int) -> tuple[Tensor, Tensor]:
    """(bands, outlier tiles), rounded outward to blocks of `keys` keys."""
    width = keys // TILE
    first, last, low, high = tiles.bands.unbind(-1)
    parts = [x // width * width for x in (first, last + width - 1, low, high + width - 1)]
    beside = [
        torch.where(tiles.outlier_tiles >= 0, tiles.outlier_tiles // width * width + at, -1) for at in range(width)
    ]
    return torch.stack(parts, -1), torch.cat(beside, -1)


def _visible(spec: Spec, flags: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask_mod: whether query i may see key j."""
    first = first_positions(spec, flags.device).expand(spec.batch).contiguous()
    right = None if spec.right_slopes is None else spec.right_slopes.detach().expand(spec.batch, -1).contiguous()
    group, causal, window = spec.group, spec.causal, spec.window
    of_query, of_key = spec.query_segments, spec.key_segments
    start = None if spec.query_start is None else spec.query_start.contiguous()
    shown = None if spec.key_bias is None else (spec.key_bias.detach() > -torch.inf).contiguous()

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + first[b] - j
        visible = flags[b, h // group, j] != _HIDDEN
        if causal:
            visible = visible & (distance >= 0)
        elif right is not None:
            visible = visible & ((distance >= 0) | (right[b, h] < torch.inf))
        if window is not None:
            visible = visible & (distance < window) & (distance > -window)
        if of_query is not None and of_key is not None:
            visible = visible & (of_query[b, i] == of_key[b, j])
        if shown is not None:
            visible = visible & shown[b, h, j]
        if start is not None:
            visible = visible & (j >= start[b, h, i])
        return visible

    return seen


def _biased(
    spec: Spec, flags: Tensor, origin: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's score_mod: −m·|i − j| + b_j, also to the right, or −m·‖p_i − p_j‖; NaN for a bad key that is seen.

    Key biases are relative to `origin` [B, H, T], the bias of the best key that the query sees.
    """
    first = first_positions(spec, flags.device).expand(spec.batch).contiguous()
    slopes = spec.slopes.resolve_neg().expand(spec.batch, -1).contiguous()
    right = slopes if spec.right_slopes is None else spec.right_slopes.expand(spec.batch, -1).contiguous()
    right = right.masked_fill(right.isinf(), 0.0)
    group, causal, relative, apart = spec.group, spec.causal, _relative_key_bias(spec, origin), _apart(spec)

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + first[b] - j
        slope = slopes[b, h] if causal else torch.where(distance < 0, right[b, h], slopes[b, h])
        shifted = score - slope * (distance.abs().to(torch.float32) if apart is None else apart(b, i, j))
        if relative is not None:
            shifted = shifted + relative(b, h, i, j)
        return torch.where(flags[b, h // group, j] == _BAD, torch.nan, shifted)

    return biased


def _apart(spec: Spec) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """‖p_i − p_j‖ in fp32; coordinates in fp64 are sums of two numbers, so that each difference is rounded once."""
    if spec.coordinates is None or spec.query_coordinates is None:
        return None
    parts = 2 if torch.float64 in (spec.coordinates.dtype, spec.query_coordinates.dtype) else 1
    axes = [[_in_two(x)[:parts] for x in p.unbind(-1)] for p in (spec.query_coordinates, spec.coordinates)]

    def apart(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        squares = []
        for pair in zip(*axes, strict=True):
            gaps = [of_query[b, i] - of_key[b, j] for of_query, of_key in zip(*pair, strict=True)]
            squares.append(functools.reduce(torch.add, gaps).square())
        return functools.reduce(torch.add, squares).sqrt()

    return apart


def _relative_key_bias(spec: Spec, origin: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """b_j − r_i in fp32, off by one rounding of the difference: both are sums of two numbers, subtracted part by part."""
    if spec.key_bias is None or origin is None:
        return None
    of_key, of_query = (
        _in_two(x.detach()) for x in (spec.key_bias.masked_fill(spec.key_bias == -torch.inf, 0.0), origin)
    )

    def relative(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        high, low = (x[b, h, j] - y[b, h, i] for x, y in zip(of_key, of_query, strict=True))
        return high + low

    return relative


def _in_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as the sum of two fp32 numbers, the second less than a rounding of the first."""
    high = x.to(torch.float32).contiguous()
    return high, (x - high).to(torch.float32).contiguous()


def _compiled(*args: Any, **options: Any) -> Any:
    """FlexAttention, compiled for these shapes. Past torch's limit of eight shapes it would materialize all T·S scores."""
    with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES, accumulated_recompile_limit=_MOST_SHAPES):
        return _compiler()(*args, **options)


@functools.cache
def _compiler() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
