"""What one rank computes: its queries over its own rows, the halo around them, and outlier tiles farther off.

Halo and shard are one stretch of positions, so they are one call of `alibi_attention` with a query offset. Heads with halos of
about one width go together, as a batch where they differ: then every head has a mask of its own, which hides what it did not ask
for. Outlier tiles are calls of their own, merged by their log-sum-exps. Dropout is told which sequences, heads and rows of the
whole these are.
"""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.execution import attend
from alibi_attn.attention.heads import index_of, query_heads
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.validation import make_spec
from alibi_attn.distributed.exchange import Pieces
from alibi_attn.distributed.halos import Halo, Span

Spec = AttentionSpec[Tensor]

BEFORE, BEHIND, FAR = 0, 1, 2  # of `Halo.spans`: the halo before the shard, that behind it, and the first outlier


@dataclasses.dataclass(frozen=True)
class Mine:
    """What a rank has: its shard's rows, and what came of other ranks.

    Args:
        spec: of the shard alone; its masks, segments and biases are the shard's.
        halo, rank: what was asked for, by which rank.
        query: [B, H, L, D].
        key, value: [B, K, L, D], with the pieces that came, [B, 1, rows, D] for every key head and span.
        bias: [B, H, L] and pieces [B, H / K, rows], or None.
        marks: [B, 1, L, 2] int64, whether a key may be seen and its segment; the pieces are those of `halo.widest()`.
        backend: of `alibi_attention`.
    """

    spec: Spec
    halo: Halo
    rank: int
    query: Tensor
    key: tuple[Tensor, Pieces]
    value: tuple[Tensor, Pieces]
    bias: tuple[Tensor, Pieces] | None
    marks: tuple[Tensor, Pieces] | None
    backend: str


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Consecutive rows of some key heads, which the heads' queries attend to in one call.

    Args:
        heads: the key heads, n of them.
        offset: the position of the first query, counted from the first row.
        key, value: [B, n, W, D].
        bias: [B, n·H / K, W], or None.
        marks: [B, W, 2], or None.
        asked: [n, W] bool, False for rows that a head has not asked for; None where all have.
    """

    heads: list[int]
    offset: int
    key: Tensor
    value: Tensor
    bias: Tensor | None
    marks: Tensor | None
    asked: Tensor | None


def attended(mine: Mine) -> tuple[Tensor, Tensor | None]:
    """(output [B, H, L, D], lse [B, H, L] or None): what `alibi_attention` over all ranks' rows gives this rank's queries."""
    far = _far_spans(mine)
    wants_lse = mine.spec.return_lse or bool(far)
    found, order = [], []
    for heads in _buckets(mine):
        found.append(_call(mine, _near(mine, heads), wants_lse))
        order += query_heads(heads, mine.spec.group)
    output = _in_order([output for output, _ in found], order)
    lse = _in_order([lse for _, lse in found if lse is not None], order) if wants_lse else None
    if lse is None or not far:
        return output, lse
    output = output.to(lse.dtype)
    for span, heads in far.items():
        index = torch.tensor(query_heads(heads, mine.spec.group), device=output.device)
        more, more_lse = _call(mine, _outlier(mine, span, heads), True)
        assert more_lse is not None
        both, both_lse = merged(output[:, index], lse[:, index], more.to(output.dtype), more_lse)
        output, lse = output.index_copy(1, index, both), lse.index_copy(1, index, both_lse)
    return output.to(mine.query.dtype), lse


def merged(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(output, lse) of two disjoint sets of keys together; differentiable, also where a query sees nothing of either."""
    top = torch.maximum(lse, more_lse).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (lse - top).exp(), (more_lse - top).exp()
    total = weights[0] + weights[1]
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    shares = [(weight / total)[..., None] for weight in weights]
    return shares[0] * output + shares[1] * more, (top + total.log()).masked_fill(nothing, -torch.inf)


def _buckets(mine: Mine) -> list[list[int]]:
    """Key heads whose halos are about as wide, to the next power of two from a tile on."""
    found: dict[tuple[int, ...], list[int]] = {}
    for head in range(mine.halo.num_kv_heads):
        widths = mine.halo.left[mine.rank][head], mine.halo.right[mine.rank][head]
        found.setdefault(tuple((max(n, TILE) - 1).bit_length() for n in widths), []).append(head)
    return list(found.values())


def _far_spans(mine: Mine) -> dict[Span, list[int]]:
    """The spans of outlier tiles, and the key heads that asked for each."""
    found: dict[Span, list[int]] = {}
    for head, spans in enumerate(mine.halo.outliers[mine.rank]):
        for span in spans:
            found.setdefault(span, []).append(head)
    return found


def _near(mine: Mine, heads: list[int]) -> Stretch:
    """The shard with the halo around it, as wide as the widest of the heads'."""
    left, right = ([side[mine.rank][head] for head in heads] for side in (mine.halo.left, mine.halo.right))
    widths = max(left), max(right)
    key, value = (_around(own, pieces, heads, heads, widths) for own, pieces in (mine.key, mine.value))
    bias = None if mine.bias is None else _around(*mine.bias, query_heads(heads, mine.spec.group), heads, widths)
    marks, asked = None, None
    if mine.marks is not None:
        own, ((before, behind, *_),) = mine.marks
        before = before[:, :, before.shape[2] - widths[0] :]
        marks = torch.cat([before, own, behind[:, :, : widths[1]]], 2)[:, 0]
    if len(set(left)) > 1 or len(set(right)) > 1:
        at = torch.arange(-widths[0], key.shape[2] - widths[0], device=key.device)
        low, high = (torch.tensor(side, device=key.device)[:, None] for side in (left, right))
        asked = (at >= -low) & (at < mine.spec.key_len + high)
    return Stretch(heads, widths[0], key, value, bias, marks, asked)


def _around(own: Tensor, pieces: Pieces, heads: list[int], key_heads: list[int], widths: tuple[int, int]) -> Tensor:
    """[B, heads, W, …]: the shard's rows between those that came, with zeros where a head asked for fewer."""
    before = [_widened(pieces[head][BEFORE], widths[0], in_front=True) for head in key_heads]
    behind = [_widened(pieces[head][BEHIND], widths[1], in_front=False) for head in key_heads]
    whole = len(heads) == own.shape[1]
    parts = [torch.cat(before, 1), own if whole else own[:, index_of(heads)], torch.cat(behind, 1)]
    parts = [part for part in parts if part.shape[2]] or parts[1:2]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _widened(rows: Tensor, width: int, *, in_front: bool) -> Tensor:
    lacking = width - rows.shape[2]
    if not lacking:
        return rows
    zeros = rows.new_zeros(*rows.shape[:2], lacking, *rows.shape[3:])
    return torch.cat([zeros, rows] if in_front else [rows, zeros], 2)


def _outlier(mine: Mine, span: Span, heads: list[int]) -> Stretch:
    """Rows farther off, for the heads that asked for them."""
    places = [FAR + mine.halo.outliers[mine.rank][head].index(span) for head in heads]

    def came(pieces: Pieces) -> Tensor:
        return torch.cat([pieces[head][at] for head, at in zip(heads, places, strict=True)], 1)

    marks = None
    if mine.marks is not None:
        at = FAR + mine.halo.widest().outliers[mine.rank][0].index(span)
        marks = mine.marks[1][0][at][:, 0]
    offset = mine.halo.offsets[mine.rank] - span[0]
    bias = None if mine.bias is None else came(mine.bias[1])
    return Stretch(heads, offset, came(mine.key[1]), came(mine.value[1]), bias, marks, None)


def _call(mine: Mine, stretch: Stretch, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """One call: (output [B, n·H / K, L, D], lse)."""
    spec, heads = mine.spec, query_heads(stretch.heads, mine.spec.group)

    def ours(x: Tensor | None, axis: int) -> Tensor | None:
        """Of all query heads, those of the stretch."""
        if x is None or len(heads) == spec.num_heads:
            return x
        return x[:, index_of(heads)] if axis == 1 else x[..., index_of(heads)]

    seen = segments = None
    if stretch.marks is not None:
        seen = stretch.marks[..., 0].bool() if spec.key_mask is not None else None
        segments = stretch.marks[..., 1] if spec.key_segments is not None else None
    # A mask belongs to a sequence: heads with masks of their own become sequences of a batch. So do heads that are not neighbors,
    # where dropout counts them.
    scattered = spec.dropout_p > 0 and not isinstance(index_of(heads), slice)
    count = len(stretch.heads) if stretch.asked is not None or scattered else 1
    if stretch.asked is not None:
        seen = stretch.asked.expand(spec.batch, -1, -1) if seen is None else stretch.asked & seen[:, None]
        seen = seen.flatten(0, 1)
    elif seen is not None:
        seen = seen.repeat_interleave(count, 0)

    def apart(x: Tensor | None) -> Tensor | None:
        """[B, n·m, …] -> [B·n, m, …]"""
        return x if x is None or count == 1 else x.unflatten(1, (count, -1)).flatten(0, 1)

    def apart_slopes(x: Tensor | None) -> Tensor | None:
        return x if x is None or count == 1 else apart(x.expand(spec.batch, -1))

    def repeated(x: Tensor | None) -> Tensor | None:
        return x if x is None else x.repeat_interleave(count, 0)

    query, key, value = apart(ours(mine.query, 1)), apart(stretch.key), apart(stretch.value)
    of_query, of_key = repeated(spec.query_segments), repeated(segments)
    assert query is not None
    assert key is not None
    assert value is not None
    part = make_spec(
        query, key, value, apart_slopes(ours(spec.slopes, -1)), causal=spec.causal, window=spec.window, scale=spec.scale,
        right_slopes=apart_slopes(ours(spec.right_slopes, -1)), query_offset=stretch.offset, key_mask=seen,
        segment_ids=None if of_query is None or of_key is None else (of_query, of_key), key_bias=apart(stretch.bias),
        dropout_p=spec.dropout_p, tolerance=spec.tolerance, return_lse=wants_lse,
    )  # fmt: skip
    seed = _dropout_seed(mine, stretch, count)
    part = dataclasses.replace(part, query_bias=apart(ours(spec.query_bias, 1)), dropout_seed=seed)
    found = attend(part, query, key, value, mine.backend)
    output, lse = found if isinstance(found, tuple) else (found, None)
    if count == 1:
        return output, lse
    together = output.unflatten(0, (-1, count)).flatten(1, 2)
    return together, None if lse is None else lse.unflatten(0, (-1, count)).flatten(1, 2)


def _dropout_seed(mine: Mine, stretch: Stretch, count: int) -> Tensor | None:
    """With the numbers that a stretch's sequences, heads and rows have in the whole; a row a sequence where heads are apart."""
    spec = mine.spec
    if spec.dropout_seed is None:
        return None
    seed, row = int(spec.dropout_seed[0, 0]), mine.halo.offsets[mine.rank] - stretch.offset
    heads = [head * spec.group for head in stretch.heads]
    firsts = [(0, heads[0])] if count == 1 else [(b, head) for b in range(spec.batch) for head in heads]
    return spec.dropout_seed.new_tensor([[seed, b, head, row] for b, head in firsts])


def _in_order(parts: list[Tensor], order: list[int]) -> Tensor:
    """[B, H, …] from the heads of all parts, which came in that order."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if order == sorted(order):
        return whole
    return whole[:, torch.tensor(order, device=whole.device).argsort()]
