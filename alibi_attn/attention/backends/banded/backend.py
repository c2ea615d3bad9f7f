"""CPU: each block of queries reads only its certified band, forward and backward, in memory linear in the length.

It calls torch's fused CPU attention on strided views in which the blocks of one head are the batch. (Torch parallelizes over
batch × heads, so one call per head would use one core only.) `bounds.py` computes how far a block must attend, `pieces.py`
divides that into pieces, and this module runs them: forward merges pieces by their log-sum-exps, backward uses the final
log-sum-exp, and leaves out what forward found to weigh nothing (`visited.py`). A call without gradients measures nothing, and
reads fewer keys: only gradients need the key rule (`certificate/key_rule.py`), which costs more than 3 % of forward.

A bias along the keys only, m·(j − r), is exact ALiBi to the left of the queries: the part that depends on i cancels in softmax
and is added to lse afterwards.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from alibi_attn.attention.backends.banded import pieces as banded_pieces
from alibi_attn.attention.backends.banded.masks import HeadMasks, Masks, key_view, query_view
from alibi_attn.attention.backends.banded.pieces import Piece
from alibi_attn.attention.backends.banded.plain import plain_backward, plain_forward
from alibi_attn.attention.backends.banded.visited import narrow, reach_and_scores, tile_tolerances
from alibi_attn.attention.backends.protocol import FEW_QUERIES, TooSmall, Visits
from alibi_attn.attention.call.reads import MASKS
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import surely
from alibi_attn.attention.call.visibility import with_plain_offset
from alibi_attn.attention.certificate.bounds import Bounds, bounds, worth_leaving_out
from alibi_attn.attention.certificate.constants import OUTLIER_TILES, TILE
from alibi_attn.attention.certificate.norms import HUGE, has_huge_scores
from alibi_attn.attention.operators.finite_numbers import are_moderate, on_finite_numbers, without_bad_numbers
from alibi_attn.attention.operators.operator import operator, requires_gradient
from alibi_attn.attention.operators.schema import Arguments, BackwardInputs, Gradients, Saved

Spec = AttentionSpec[Tensor]
Plans = list[list[list[Piece]]]  # [B][H]

name = "banded"
READS = MASKS

# With fewer keys and fewer scores per head, the certificate costs more than it saves (see docs/backends.md).
SHORT_KEYS, SHORT_SCORES = 4096, 768 * 768
FEW_SCORES = 2**16  # up to this many scores, dense is faster than the certificate, which reads all keys

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Needs a CPU."""
    return None if query.device.type == "cpu" else f"it runs on the CPU but query is on {query.device}"


def too_small(spec: Spec) -> TooSmall | None:
    """A few queries, and short input."""
    if surely(spec.query_len <= FEW_QUERIES):
        return TooSmall(f"T ≤ {FEW_QUERIES}: dense scores all keys faster than the certificate reads them")
    scores = spec.query_len * spec.key_len
    if surely(spec.key_len < SHORT_KEYS) and surely(scores < SHORT_SCORES):
        return TooSmall(f"short input: S < {SHORT_KEYS} and T·S = {{}} < {SHORT_SCORES}", scores)
    return TooSmall(f"few queries: T·S = {{}} ≤ {FEW_SCORES}", scores) if surely(scores <= FEW_SCORES) else None


def plan(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None, *, for_gradients: bool = True
) -> tuple[Bounds, Plans]:
    """The bounds, and the pieces of every sequence and head."""
    certified = bounds(spec, query, key, value, outliers=_outliers(spec, key), for_gradients=for_gradients)
    most_keys = banded_pieces.PART if query.dtype == torch.float32 else banded_pieces.MAX_KEYS
    threads = torch.get_num_threads()
    pieces = banded_pieces.plan(spec, certified, threads=threads, measured=for_gradients, most_keys=most_keys)
    return certified, pieces


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> Visits:
    """What a call reads. If forward measures keys, this computes the attention.

    If no tensor requires a gradient, the numbers of forward are those of the call without gradients.
    """
    forward, backward = visited(spec, query, key, value)
    of_backward = () if forward is backward else reach_and_scores(spec, backward)
    if not requires_gradient(spec, query, key, value):
        spec, q, k, v = _finite_rows(spec, query, key, value)
        forward = plan(spec, q, k, v, for_gradients=False)[1]
    return Visits(*reach_and_scores(spec, forward), *of_backward)


def visited(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Plans, Plans]:
    """The pieces of every sequence and head, of forward and of backward, in a call with gradients."""
    spec, q, k, v = _finite_rows(spec, query, key, value)
    _, plans = plan(spec, q, k, v)
    if not any(piece.is_section for heads in plans for pieces in heads for piece in pieces):
        return plans, plans
    saved = _forward(spec, q, k, k if v is None else v, has_values=v is not None)[2]
    return plans, banded_pieces.plan(spec, _bounds(spec, saved), threads=torch.get_num_threads())


def _finite_rows(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor | None
) -> tuple[Spec, Tensor, Tensor, Tensor | None]:
    """The call as `_forward` gets it."""
    spec = with_plain_offset(spec)
    q, k, v, *_ = without_bad_numbers(spec, query, key, key if value is None else value)
    return spec, q, k, None if value is None else v


def _forward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, *, has_values: bool = True, for_gradients: bool = True
) -> tuple[Tensor, Tensor, Saved]:
    spec, q, _ = _with_positive_scale(spec, q)
    certified, plans = plan(spec, q, k, v if has_values else None, for_gradients=for_gradients)
    kept, tolerances = dataclasses.replace(certified, left=certified.left.clone(), right=certified.right.clone()), None
    work = torch.promote_types(q.dtype, torch.float32)
    output = q.new_zeros(q.shape, dtype=work)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=work)
    largest = q.new_full(q.shape[2:3], torch.finfo(work).min, dtype=work)  # of one head's pieces
    moderate = are_moderate(q, k, v)
    for h in range(spec.num_heads):
        masks: Masks = {}
        for b in range(spec.batch):
            head, pieces = HeadMasks(spec, b, h, masks), plans[b][h]
            tensors = q[b, h], k[b, h // spec.group], v[b, h // spec.group]
            if head.is_extreme or (not moderate and not are_moderate(*tensors)):
                plain_forward(head, *tensors, output[b, h], lse[b, h])
                continue
            rows = output[b, h], lse[b, h], largest.clone()
            shares = [_forward_piece(head, piece, tensors, rows) for piece in pieces]
            lse[b, h] += rows[2]
            if any(piece.is_section for piece in pieces):
                tolerances = tile_tolerances(spec, v if has_values else None) if tolerances is None else tolerances
                narrow(spec, kept, b, h, pieces=pieces, shares=shares, tolerances=tolerances[b, h])
    visited = torch.cat([kept.left, kept.right, kept.outlier_tiles], -1).flatten(1)
    return output, lse, Saved(visited, output.new_empty(spec.batch, 0))


def _backward(spec: Spec, saved: Saved, inputs: BackwardInputs) -> Gradients:
    q, k, v, out, lse, grad, grad_lse = inputs[:7]
    spec, q, sign = _with_positive_scale(spec, q)
    plans = banded_pieces.plan(spec, _bounds(spec, saved), threads=torch.get_num_threads())
    dq, dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in inputs[:3])
    dslope = q.new_zeros(2, spec.batch, spec.num_heads, dtype=torch.float64)
    for h in range(spec.num_heads):
        masks: Masks = {}
        for b in range(spec.batch):
            head, pieces = HeadMasks(spec, b, h, masks), plans[b][h]
            shared = b, h // spec.group
            tensors = [grad[b, h], q[b, h], k[shared], v[shared], out[b, h]]
            to = dq[b, h], dk[shared], dv[shared]
            # Of an output with NaN, torch's products in bf16 by AMX also spoil the gradient of the query before.
            moderate = are_moderate(q[b, h], k[shared], v[shared], grad[b, h], out[b, h])
            if (
                head.is_extreme
                or not moderate
                or has_huge_scores(spec.scale, q[b, h], k[shared])
                or _is_huge(lse[b, h])
            ):
                dslope[:, b, h] = plain_backward(head, tensors, None if grad_lse is None else grad_lse[b, h], *to)
                continue
            if inputs.slopes_wanted:
                of_lse = None if grad_lse is None else grad_lse[b, h]
                dslope[:, b, h] = _slope_gradient(head, pieces, tensors, lse[b, h], of_lse)
            if grad_lse is not None:
                tensors = _with_lse_column(tensors, grad_lse[b, h])
            for piece in pieces:
                _backward_piece(head, piece, tensors, lse[b, h], *to)
    # A scale of 0 was replaced by 1: the gradient is 0, even where that overflows.
    return Gradients(dq * sign if sign else torch.zeros_like(dq), dk, dv, dslope)


def _with_positive_scale(spec: Spec, q: Tensor) -> tuple[Spec, Tensor, int]:
    """(spec, q, sign): the same scores with spec.scale > 0; the original query is sign·q.

    Torch's operator scales after it has put −inf at the keys that a causal query may not see, which gives inf or NaN unless the
    scale is positive.
    """
    if spec.scale > 0:
        return spec, q, 1
    sign = -1 if spec.scale < 0 else 0
    return dataclasses.replace(spec, scale=-spec.scale if sign else 1.0), q * sign, sign


def _bounds(spec: Spec, saved: Saved) -> Bounds:
    """The bounds that forward saved, those of backward."""
    blocks = -(-spec.query_len // TILE)
    parts = saved.visited.unflatten(1, (spec.num_heads, -1)).split([blocks, blocks, OUTLIER_TILES], -1)
    return Bounds(*(part.contiguous() for part in parts))


def _empty_saved(arguments: Arguments) -> Saved:
    query = arguments.query
    blocks = (query.shape[2] + TILE - 1) // TILE
    visited = query.new_empty((query.shape[0], query.shape[1] * (2 * blocks + OUTLIER_TILES)), dtype=torch.int64)
    return Saved(visited, query.new_empty((query.shape[0], 0), dtype=torch.promote_types(query.dtype, torch.float32)))


run = operator(
    on_finite_numbers(
        "banded", _forward, _backward, _empty_saved, infer=functools.partial(_forward, for_gradients=False)
    ),
    READS,
)


def _forward_piece(
    head: HeadMasks, piece: Piece, tensors: tuple[Tensor, Tensor, Tensor], rows: tuple[Tensor, Tensor, Tensor]
) -> Tensor | None:
    """Merges one piece into its head's (output, lse minus the largest lse of its pieces so far, that largest lse).

    The merged numbers are therefore near 0, where exp is accurate, however large the log-sum-exps are. Returns the piece's share
    of the softmax over the keys so far, [count, rows], None if it is the first.
    """
    mask, shift, blind = _mask_and_shift(head, piece)
    q, k, v = tensors
    views = query_view(q, piece)[:, None], key_view(k, piece)[:, None], key_view(v, piece)[:, None]
    part, mass = _fused(*views, 0.0, piece.kind == "diagonal", attn_mask=mask, scale=head.spec.scale)
    part, mass = part[:, 0], mass[:, 0]
    if shift is not None:
        mass = mass - shift
    if blind:
        nothing = (mask[:, 0].amax(-1) == -math.inf).expand(mass.shape)
        mass = mass.masked_fill(nothing, -math.inf)
        part = part.masked_fill(nothing[..., None], 0.0)
    to_output, to_lse, to_largest = (query_view(row, piece) for row in rows)
    largest = torch.maximum(to_largest, mass)
    before, mass = to_lse + (to_largest - largest), mass - largest
    to_largest.copy_(largest)
    if not piece.merge:
        to_output.copy_(part)
        to_lse.copy_(mass)
        return None
    total = torch.logaddexp(before, mass)
    share = (mass - total.masked_fill(total == -math.inf, 0.0)).exp_()
    to_output.lerp_(part.to(to_output.dtype), share[..., None])
    to_lse.copy_(total)
    return share


def _is_huge(lse: Tensor) -> bool:
    """Whether some |lse| is so large, because all keys are far, that exp(score − lse) is off by more than a hundredth."""
    return bool((lse.abs() > HUGE).masked_fill_(lse == -math.inf, False).any())


def _backward_piece(
    head: HeadMasks, piece: Piece, tensors: list[Tensor], lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    grad, q, k, v, out = tensors
    mask, shift, _ = _mask_and_shift(head, piece)
    mass = query_view(lse, piece)
    if shift is not None:
        mass = mass + shift
    grad, q, out = (query_view(x, piece)[:, None] for x in (grad, q, out))
    k, v = (key_view(x, piece)[:, None] for x in (k, v))
    rest = mass[:, None].contiguous(), 0.0, piece.kind == "diagonal"
    gradients = _fused_backward(grad, q, k, v, out, *rest, attn_mask=mask, scale=head.spec.scale)
    gq, gk, gv = (x[:, 0] for x in gradients)
    d = dq.shape[-1]
    query_view(dq, piece).add_(gq[..., :d])
    _add_overlapping(dk, gk[..., :d], piece)
    _add_overlapping(dv, gv[..., :d], piece)


def _mask_and_shift(head: HeadMasks, piece: Piece) -> tuple[Tensor, Tensor | None, bool]:
    if piece.kind == "tile":
        mask, blind = head.tile_mask(piece)
        return mask, None, blind
    mask, shift = head.key_bias(piece)
    blocks = torch.arange(piece.count, dtype=shift.dtype, device=shift.device)[:, None]
    step = 0.0 if piece.kind == "diagonal" else (piece.stride - piece.step) * head.slope
    return mask, shift + blocks * step, False


def _slope_gradient(
    head: HeadMasks, pieces: list[Piece], tensors: list[Tensor], lse: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """[2] fp64: −Σ ds·|i − j| of one head over the keys to the left, and to the right; weights are materialized block by block.

    In exact arithmetic, rows of ds add up to the gradient of lse. In floating point they are off by the rounding of Σ grad·out,
    and the error would grow with the distance. So every row is centered by its computed sum: ds + p·(grad_lse − Σ ds) / Σ p.
    """
    inner = (tensors[0].to(lse.dtype) * tensors[4].to(lse.dtype)).sum(-1)
    due = torch.zeros_like(inner) if grad_lse is None else grad_lse
    inner = inner - due
    # For every query: sums of ds and p, and of ds·|i − j| and p·|i − j| to the left and to the right.
    sums = lse.new_zeros(6, *lse.shape, dtype=torch.float64)
    for piece in pieces:
        rows = [query_view(row, piece) for row in sums]
        for block in range(piece.count):
            weight, moment, distance = _written_out(head, piece, block, tensors, lse, inner)
            left, right = distance.clamp(min=0).double(), (-distance).clamp(min=0).double()
            of_block = (
                moment.sum(-1),
                weight.sum(-1),
                *((x * d).sum(-1) for d in (left, right) for x in (moment, weight)),
            )
            for row, more in zip(rows, of_block, strict=True):
                row[block] += more
    excess = (sums[0] - due) / sums[1].clamp(min=torch.finfo(torch.float64).tiny)
    return torch.stack([(excess * sums[3] - sums[2]).sum(), (excess * sums[5] - sums[4]).sum()])


def _written_out(
    head: HeadMasks, piece: Piece, block: int, tensors: list[Tensor], lse: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(p, ds, i − j) of one block of a piece, [rows, keys], the first two fp64; `inner` is Σ grad·out − grad_lse per query."""
    grad, q, k, v, _ = tensors
    work, right_slope = lse.dtype, 0.0 if math.isinf(head.right_slope) else head.right_slope
    distance = head.distance(piece, block)[0]
    slope = q.new_full(distance.shape, head.slope, dtype=head.dtype).masked_fill(distance < 0, right_slope)
    query, key = query_view(q, piece, block)[0].to(head.dtype), key_view(k, piece, block)[0].to(head.dtype)
    score = (query @ key.T) * head.spec.scale - slope * distance.abs()
    score = score.masked_fill(head.hidden(piece, distance[None], block)[0], -math.inf)
    go, mass, rest = (query_view(x, piece, block)[0].to(work) for x in (grad, lse, inner))
    weight = (score - mass[:, None]).clamp(max=0.0).exp().double()  # above 0 is rounding
    return weight, weight * (go @ key_view(v, piece, block)[0].to(work).T - rest[:, None]).double(), distance


def _with_lse_column(tensors: list[Tensor], grad_lse: Tensor) -> list[Tensor]:
    """(grad, q, k, v, out) with one more column, which makes the fused backward subtract grad_lse from Σ grad·out."""
    grad, q, k, v, out = tensors
    pad = torch.nn.functional.pad
    grad = torch.cat([grad, -grad_lse[:, None].to(grad.dtype)], dim=-1)
    return [grad, pad(q, (0, 1)), pad(k, (0, 1)), pad(v, (0, 1)), pad(out, (0, 1), value=1.0)]


def _add_overlapping(total: Tensor, part: Tensor, piece: Piece) -> None:
    """Adds the gradients [count, keys, D] of every block's keys to [S, D], in slices, because bands overlap."""
    if piece.step == 0:
        total[piece.key : piece.key + piece.keys] += part.sum(0)
        return
    for start in range(0, piece.keys, piece.step):
        size = min(piece.step, piece.keys - start)
        slices = dataclasses.replace(piece, key=piece.key + start, keys=size)
        key_view(total, slices).add_(part[:, start : start + size])


def _outliers(spec: Spec, key: Tensor) -> Tensor:
    """[B, K] bool: the key heads that may have outlier tiles, those with a key much longer than most."""
    if spec.query_len <= TILE:
        return torch.zeros(key.shape[:2], dtype=torch.bool, device=key.device)
    return worth_leaving_out(torch.linalg.vector_norm(key.float(), dim=-1), times=3)
