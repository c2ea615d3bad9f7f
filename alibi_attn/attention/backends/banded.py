"""CPU: each block of queries reads only its certified band, forward and backward, in memory linear in the length.

Underneath is torch's own fused CPU attention, called on strided views in which the blocks of one head are the batch (it works on
batch × heads in parallel, so one call a head would keep one core busy). `bounds.py` says how far a block must look,
`bands.py` makes pieces of it, and this module runs the pieces: forward merges them by their log-sum-exps, backward runs the
same pieces with the final log-sum-exp.

A bias along the keys only, m·(j − r), is exact ALiBi to the left of the queries: the part that depends on i cancels in softmax
and is put back into lse.
"""

import dataclasses
import math

import torch
from torch import Tensor

from alibi_attn.attention import bands
from alibi_attn.attention.bands import Piece
from alibi_attn.attention.bounds import PIN_CHOICES, TILE, Bounds, bounds, first_positions, worth_pinning
from alibi_attn.attention.masks import HeadMasks, Masks, key_view, query_view
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import are_finite, rows_that_see

Spec = AttentionSpec[Tensor]

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Needs a CPU, and has no dropout."""
    if query.device.type != "cpu":
        return f"it runs on the CPU but query is on {query.device}"
    if spec.dropout_p > 0:
        return f"it has no dropout but dropout_p is {spec.dropout_p}"
    return None


def run(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """(output, lse), as one operator that autograd and torch.compile take as it is."""
    output, lse, *_ = _forward_op(
        query, key, value, spec.slopes, spec.right_slopes, first_positions(spec, query.device), spec.key_mask,
        spec.query_segments, spec.key_segments, spec.causal, spec.window, spec.scale, spec.tolerance, spec.return_lse,
    )  # fmt: skip
    return output, lse if spec.return_lse else None


def plan(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Bounds, list[list[list[Piece]]]]:
    """What will be visited, before it is: the bounds, and the pieces of every sequence and head."""
    found = bounds(spec, query, key, value, pin_choices=_pin_choices(spec, key))
    return found, bands.plan(spec, found, threads=torch.get_num_threads())


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is read, and the scores that are computed."""
    operator = (spec.slopes, spec.right_slopes, first_positions(spec, query.device), spec.key_mask)
    spec = _spec(
        query,
        key,
        *operator,
        spec.query_segments,
        spec.key_segments,
        spec.causal,
        spec.window,
        spec.scale,
        spec.tolerance,
    )
    q, k, v, _ = _clean(spec, query, key, key if value is None else value)
    _, plans = plan(spec, q, k, None if value is None else v)
    first = first_positions(spec, query.device).expand(spec.batch).tolist()
    reach = [[bands.farthest(spec, pieces, first[b]) for pieces in heads] for b, heads in enumerate(plans)]
    scores = [[sum(piece.scores for piece in pieces) for pieces in heads] for heads in plans]
    return torch.tensor(reach), torch.tensor(scores)


@torch.library.custom_op("alibi_attn::banded_forward", mutates_args=())
def _forward_op(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, right_slopes: Tensor | None, first: Tensor,
    key_mask: Tensor | None, query_segments: Tensor | None, key_segments: Tensor | None,
    causal: bool, window: int | None, scale: float, tolerance: float, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    spec = _spec(
        query,
        key,
        slopes,
        right_slopes,
        first,
        key_mask,
        query_segments,
        key_segments,
        causal,
        window,
        scale,
        tolerance,
    )
    q, k, v, poison = _clean(spec, query, key, value)
    found, plans = plan(spec, q, k, v)
    work = torch.promote_types(query.dtype, torch.float32)
    output = torch.zeros(query.shape, dtype=work)
    lse = torch.full(query.shape[:3], -math.inf, dtype=work)
    for h in range(spec.num_heads):
        masks: Masks = {}
        for b in range(spec.batch):
            head = HeadMasks(spec, b, h, masks)
            ours = q[b, h], k[b, h // spec.group], v[b, h // spec.group]
            for piece in plans[b][h]:
                _forward_piece(head, piece, *ours, output[b, h], lse[b, h])
    if poison is not None:
        output += poison[..., None]
        lse += poison
    return output.to(query.dtype), lse, found.left, found.right.clone(), found.pins


@torch.library.custom_op("alibi_attn::banded_backward", mutates_args=())
def _backward_op(
    grad_output: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    slopes: Tensor, right_slopes: Tensor | None, first: Tensor, key_mask: Tensor | None, query_segments: Tensor | None,
    key_segments: Tensor | None, left: Tensor, right: Tensor, pins: Tensor,
    causal: bool, window: int | None, scale: float, slopes_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    spec = _spec(
        query, key, slopes, right_slopes, first, key_mask, query_segments, key_segments, causal, window, scale, 0.0
    )
    q, k, v, _ = _clean(spec, query, key, value)
    plans = bands.plan(spec, Bounds(left, right, pins), threads=torch.get_num_threads())
    work = lse.dtype
    out, grad = output.to(q.dtype), grad_output.to(q.dtype)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    # A query that sees nothing has lse −inf; 0 instead makes all its weights exp(−inf) = 0.
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    dq, dk, dv = (torch.zeros(x.shape, dtype=work) for x in (query, key, value))
    dslope = torch.zeros(2, spec.batch, spec.num_heads, dtype=torch.float64)
    for h in range(spec.num_heads):
        masks: Masks = {}
        for b in range(spec.batch):
            head, pieces = HeadMasks(spec, b, h, masks), plans[b][h]
            shared = b, h // spec.group
            ours = [grad[b, h], q[b, h], k[shared], v[shared], out[b, h]]
            if slopes_wanted:
                of_lse = None if grad_lse is None else grad_lse[b, h]
                dslope[:, b, h] = _slope_gradient(head, pieces, ours, lse[b, h], of_lse)
            if grad_lse is not None:
                ours = _with_lse_column(ours, grad_lse[b, h])
            for piece in pieces:
                _backward_piece(head, piece, ours, lse[b, h], dq[b, h], dk[shared], dv[shared])
    dslopes = [
        dslope[side] if s is not None and s.ndim == 2 else dslope[side].sum(0)
        for side, s in enumerate((slopes, right_slopes))
    ]
    return (
        dq.to(query.dtype),
        dk.to(key.dtype),
        dv.to(value.dtype),
        dslopes[0].to(slopes.dtype),
        dslopes[1].to(slopes.dtype),
    )


@_forward_op.register_fake
def _(query, key, value, slopes, right_slopes, first, *_rest):  # type: ignore[no-untyped-def]
    work = torch.promote_types(query.dtype, torch.float32)
    b, h, t, _d = query.shape
    blocks = (t + TILE - 1) // TILE
    long = {"dtype": torch.int64}
    return (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        query.new_empty((b, h, t), dtype=work),
        query.new_empty((b, h, blocks), **long),
        query.new_empty((b, h, blocks), **long),
        query.new_empty((b, h, max(PIN_CHOICES)), **long),
    )


@_backward_op.register_fake
def _(grad_output, grad_lse, query, key, value, output, lse, slopes, right_slopes, *_rest):  # type: ignore[no-untyped-def]
    right = slopes.shape if right_slopes is None or right_slopes.ndim == slopes.ndim else right_slopes.shape
    return (
        *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)),
        slopes.new_empty(slopes.shape),
        slopes.new_empty(right if right_slopes is not None else slopes.shape[-1:]),
    )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, slopes, right_slopes, first, key_mask, query_segments, key_segments, *numbers = inputs
    out, lse, left, right, pins = output
    ctx.save_for_backward(
        query,
        key,
        value,
        out,
        lse,
        slopes,
        right_slopes,
        first,
        key_mask,
        query_segments,
        key_segments,
        left,
        right,
        pins,
    )
    ctx.causal, ctx.window, ctx.scale, _tolerance, ctx.return_lse = numbers
    ctx.mark_non_differentiable(left, right, pins)


def _backward(ctx, grad_output, grad_lse, *_integers):  # type: ignore[no-untyped-def]
    slopes_wanted = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    saved = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(saved[3])
    dq, dk, dv, dslopes, dright = _backward_op(
        grad_output, grad_lse if ctx.return_lse else None, *saved, ctx.causal, ctx.window, ctx.scale, slopes_wanted
    )
    if not slopes_wanted:
        dslopes = dright = None
    return dq, dk, dv, dslopes, dright if saved[6] is not None else None, *[None] * 9


_forward_op.register_autograd(_backward, setup_context=_save)


def _forward_piece(head: HeadMasks, piece: Piece, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor) -> None:
    mask, shift, blind = _mask_and_shift(head, piece)
    views = query_view(q, piece)[:, None], key_view(k, piece)[:, None], key_view(v, piece)[:, None]
    part, mass = _fused(*views, 0.0, piece.kind == "diagonal", attn_mask=mask, scale=head.spec.scale)
    part, mass = part[:, 0], mass[:, 0]
    if shift is not None:
        mass = mass - shift
    if blind:
        nothing = (mask[:, 0].amax(-1) == -math.inf).expand(mass.shape)
        mass = mass.masked_fill(nothing, -math.inf)
        part = part.masked_fill(nothing[..., None], 0.0)
    to_output, to_lse = query_view(output, piece), query_view(lse, piece)
    if not piece.merge:
        to_output.copy_(part)
        to_lse.copy_(mass)
        return
    total = torch.logaddexp(to_lse, mass)
    share = (mass - total.masked_fill(total == -math.inf, 0.0)).exp_()
    to_output.lerp_(part.to(to_output.dtype), share[..., None])
    to_lse.copy_(total)


def _backward_piece(
    head: HeadMasks, piece: Piece, ours: list[Tensor], lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    grad, q, k, v, out = ours
    mask, shift, _ = _mask_and_shift(head, piece)
    mass = query_view(lse, piece)
    if shift is not None:
        mass = mass + shift
    gq, gk, gv = _fused_backward(
        query_view(grad, piece)[:, None], query_view(q, piece)[:, None], key_view(k, piece)[:, None], key_view(v, piece)[:, None],
        query_view(out, piece)[:, None], mass[:, None].contiguous(), 0.0, piece.kind == "diagonal",
        attn_mask=mask, scale=head.spec.scale,
    )  # fmt: skip
    d = dq.shape[-1]
    query_view(dq, piece).add_(gq[:, 0, :, :d])
    _add_overlapping(dk, gk[:, 0, :, :d], piece)
    _add_overlapping(dv, gv[:, 0, :, :d], piece)


def _mask_and_shift(head: HeadMasks, piece: Piece) -> tuple[Tensor, Tensor | None, bool]:
    if piece.kind == "tile":
        mask, blind = head.tile_mask(piece)
        return mask, None, blind
    mask, shift = head.key_bias(piece)
    blocks = torch.arange(piece.count, dtype=shift.dtype)[:, None]
    step = 0.0 if piece.kind == "diagonal" else (piece.stride - piece.step) * head.slope
    return mask, shift + blocks * step, False


def _slope_gradient(
    head: HeadMasks, pieces: list[Piece], ours: list[Tensor], lse: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """[2] fp64: −Σ ds·|i − j| of one head over the keys to the left, and to the right; weights are written out block by block."""
    grad, q, k, v, out = ours
    work = lse.dtype
    inner = (grad.to(work) * out.to(work)).sum(-1)
    if grad_lse is not None:
        inner = inner - grad_lse
    right_slope = 0.0 if math.isinf(head.right_slope) else head.right_slope
    total = torch.zeros(2, dtype=torch.float64)
    for piece in pieces:
        rows = query_view(q, piece), query_view(grad, piece), query_view(lse, piece), query_view(inner, piece)
        ks, vs = key_view(k, piece), key_view(v, piece)
        for block in range(piece.count):
            distance = head.distance(piece, block)[0]
            slope = torch.full(distance.shape, head.slope, dtype=work).masked_fill(distance < 0, right_slope)
            hidden = head.hidden(piece, distance[None], block)[0]
            query, go, mass, rest = (x[block].to(work) for x in rows)
            score = (query @ ks[block].to(work).T) * head.spec.scale - slope * distance.abs()
            weight = (score.masked_fill(hidden, -math.inf) - mass[:, None]).exp()
            moment = weight * (go @ vs[block].to(work).T - rest[:, None]) * distance
            total[0] -= moment.where(distance > 0, 0).sum(dtype=torch.float64)
            total[1] += moment.where(distance < 0, 0).sum(dtype=torch.float64)
    if head.spec.right_slopes is None:
        return torch.stack([total.sum(), torch.zeros((), dtype=torch.float64)])
    return total


def _with_lse_column(ours: list[Tensor], grad_lse: Tensor) -> list[Tensor]:
    """(grad, q, k, v, out) with one more column, by which the fused backward subtracts grad_lse from Σ grad·out."""
    grad, q, k, v, out = ours
    pad = torch.nn.functional.pad
    grad = torch.cat([grad, -grad_lse[:, None].to(grad.dtype)], dim=-1)
    return [grad, pad(q, (0, 1)), pad(k, (0, 1)), pad(v, (0, 1)), pad(out, (0, 1), value=1.0)]


def _add_overlapping(total: Tensor, part: Tensor, piece: Piece) -> None:
    """Add the gradients [count, keys, D] of every block's keys where they belong in [S, D]: bands overlap, slices do not."""
    if piece.step == 0:
        total[piece.key : piece.key + piece.keys] += part.sum(0)
        return
    for start in range(0, piece.keys, piece.step):
        size = min(piece.step, piece.keys - start)
        slices = dataclasses.replace(piece, key=piece.key + start, keys=size)
        key_view(total, slices).add_(part[:, start : start + size])


def _spec(
    query: Tensor, key: Tensor, slopes: Tensor, right_slopes: Tensor | None, first: Tensor, key_mask: Tensor | None,
    query_segments: Tensor | None, key_segments: Tensor | None, causal: bool, window: int | None, scale: float, tolerance: float,
) -> Spec:  # fmt: skip
    """The description, back from what an operator can carry."""
    b, h, t, d = query.shape
    offset = int(first) if first.numel() == 1 else first
    return AttentionSpec(
        batch=b, num_heads=h, num_kv_heads=key.shape[1], query_len=t, key_len=key.shape[2], head_dim=d,
        slopes=slopes, right_slopes=right_slopes, causal=causal, window=window, scale=scale, query_offset=offset,
        key_mask=key_mask, query_segments=query_segments, key_segments=key_segments, tolerance=tolerance,
    )  # fmt: skip


def _clean(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(query, key, value, poison) in a dtype and layout the operator computes rightly; see `visibility.without_bad_keys`."""
    if query.dtype == torch.float16:  # torch's fp16 backward is ten times slower than fp32
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if are_finite(query, key, value):
        return query, key, value, None
    sees_any = rows_that_see(spec, torch.ones(spec.batch, spec.num_heads, spec.key_len, dtype=torch.bool))
    query = query.masked_fill(~sees_any[..., None], 0.0)
    bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    sees_bad = rows_that_see(spec, bad.repeat_interleave(spec.group, 1))
    poison = torch.zeros(sees_bad.shape).masked_fill(sees_bad, math.nan)
    return query, key.masked_fill(bad[..., None], 0.0), value.masked_fill(bad[..., None], 0.0), poison


def _pin_choices(spec: Spec, key: Tensor) -> tuple[int, ...]:
    """Whether tiles may be pinned at all: only where some key is much longer than most."""
    if spec.query_len <= TILE:
        return (0,)
    return worth_pinning(torch.linalg.vector_norm(key.float(), dim=-1), times=3)
