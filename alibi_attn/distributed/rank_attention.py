"""Computes one rank's attention: its queries over its own rows, then over the halo around them and distant outlier tiles.

The first call needs no rows of other ranks, which travel meanwhile. The queries near a border then attend to the halo on that
side, and the results are merged by their log-sum-exps. Heads with halos of about the same width share a call. If their widths
differ, they become sequences of a batch: each then has its own mask, which hides the rows that it did not request. Each outlier
tile is a separate call. Dropout gets the indices of these sequences, heads and rows in the full call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec, index_of, query_heads
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.run.execution import attend
from alibi_attn.attention.run.merging import merged
from alibi_attn.distributed.exchange import Pieces
from alibi_attn.distributed.halos import Halo, Span
from alibi_attn.reach import UNLIMITED

Spec = AttentionSpec[Tensor]
Reach = tuple[int, int]  # to the left and to the right, as in `halo_bounds.requested_rows`

BEFORE, AFTER, FAR = 0, 1, 2  # indices into `Halo.spans`: halo before the shard, halo after it, first outlier


@dataclasses.dataclass(frozen=True)
class RankInputs:
    """The rows of a rank's shard.

    Args:
        spec: the call of the shard alone, with its masks, segments and biases.
        halo, rank: the rows that were requested, and this process's rank.
        reaches: of each key head, [K].
        query: [B, H, L, D].
        key, value: [B, K, L, D].
        bias: [B, H, L], or None.
        start: [B, H, L], the position in the whole sequence of each query's last cut; or None.
        marks: (visible, segment) of each key, [B, 1, L, 2] int64; or None.
        backend: as for `alibi_attention`.
    """

    spec: Spec
    halo: Halo
    reaches: list[Reach]
    rank: int
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    start: Tensor | None
    marks: Tensor | None
    backend: str

    @property
    def offset(self) -> int:
        """The position in the whole sequence of the shard's first row."""
        return self.halo.offsets[self.rank]


@dataclasses.dataclass(frozen=True)
class Received:
    """The rows received from other ranks, in pieces: [B, 1, rows, D] per key head and span; of `halo.widest()` for the marks."""

    key: Pieces
    value: Pieces
    bias: Pieces | None
    marks: Pieces | None

    def of(self, heads: Callable[[Pieces], list[Tensor]]) -> dict[str, Any]:
        """key, value and bias of a `KeySpan`; `heads` takes those of its heads from the pieces."""
        parts = {"key": self.key, "value": self.value, "bias": self.bias}
        return {name: None if x is None else torch.cat(heads(x), 1) for name, x in parts.items()}


@dataclasses.dataclass(frozen=True)
class KeySpan:
    """Consecutive rows of some key heads, attended to in one call.

    Args:
        heads: the key heads, n of them.
        first: the position in the whole sequence of the span's first row.
        key, value: [B, n, W, D].
        bias: [B, n·H / K, W], or None.
        marks: [B, W, 2], or None.
        queries: (start, stop), the queries of the shard that attend to them.
        window: as for `alibi_attention`.
        requested: [n, W] bool, False for rows that a head did not request; None if every head requested all of them.
    """

    heads: list[int]
    first: int
    key: Tensor
    value: Tensor
    bias: Tensor | None
    marks: Tensor | None
    queries: tuple[int, int]
    window: int | None
    requested: Tensor | None = None


def attend_rank(inputs: RankInputs, received: Callable[[], Received]) -> tuple[Tensor, Tensor | None]:
    """(output [B, H, L, D], lse [B, H, L] or None) of this rank's queries over the rows of all ranks.

    The keys of the shard come first, and only then `received` is called, which waits for the others.
    """
    near = [(side, _buckets(inputs, side)) for side in (BEFORE, AFTER)]
    far: dict[Span, list[int]] = {}  # the key heads that requested each span of outlier tiles
    for head, requested in enumerate(inputs.halo.outliers[inputs.rank]):
        for span in requested:
            far.setdefault(span, []).append(head)
    needs_more = bool(far) or any(buckets for _, buckets in near)
    own = KeySpan(
        heads=list(range(inputs.spec.num_kv_heads)),
        first=inputs.offset,
        key=inputs.key,
        value=inputs.value,
        bias=inputs.bias,
        marks=None if inputs.marks is None else inputs.marks[:, 0],
        queries=(0, inputs.spec.query_len),
        window=inputs.spec.window,
    )
    output, lse = _call(inputs, own, inputs.spec.return_lse or needs_more)
    rows = received()
    if lse is None or not needs_more:
        return output, lse
    spans = [[_near(inputs, rows, side, heads) for heads in buckets] for side, buckets in near if buckets]
    spans += [[_outlier(inputs, rows, span, heads)] for span, heads in far.items()]
    if len(spans) > 1:
        output = output.to(lse.dtype)  # rounded once
    for of_heads in spans:
        output, lse = _with_more_keys(inputs, of_heads, output, lse)
    return output.to(inputs.query.dtype), lse


def static_reaches(halo: Halo, rank: int) -> list[Reach]:
    """The reaches that a halo without outliers implies if they are the same for all queries of a head."""
    start = halo.offsets[rank]
    rooms = start, sum(halo.lengths) - start - halo.lengths[rank]
    left, right = (
        [rows + 1 if rows < room else UNLIMITED for rows in side[rank]]
        for side, room in zip((halo.left, halo.right), rooms, strict=True)
    )
    return list(zip(left, right, strict=True))


def _buckets(inputs: RankInputs, side: int) -> list[list[int]]:
    """Groups the key heads with a halo on one side by its width, rounded up to a power of two of at least one tile."""
    buckets: dict[int, list[int]] = {}
    for head, width in enumerate(_widths(inputs, side)):
        if width:
            buckets.setdefault((max(width, TILE) - 1).bit_length(), []).append(head)
    return list(buckets.values())


def _widths(inputs: RankInputs, side: int) -> tuple[int, ...]:
    """The rows received on one side, [K]."""
    return (inputs.halo.left, inputs.halo.right)[side][inputs.rank]


def _near(inputs: RankInputs, rows: Received, side: int, heads: list[int]) -> KeySpan:
    """The widest of the heads' halos on one side, for the queries within reach of it; narrower ones are padded with zeros."""
    spec, device = inputs.spec, inputs.query.device
    widths, reach = [_widths(inputs, side)[head] for head in heads], max(inputs.reaches[head][side] for head in heads)
    width, count = max(widths), min(spec.query_len, reach - 1)

    marks = requested = None
    if rows.marks is not None:
        of_side = rows.marks[0][side][:, 0]
        marks = of_side[:, of_side.shape[1] - width :] if side == BEFORE else of_side[:, :width]
    if len(set(widths)) > 1:
        at = torch.arange(width, device=device)
        requested = torch.stack([at >= width - n if side == BEFORE else at < n for n in widths])
    window = spec.window
    if spec.key_bias is None and reach < count + width:  # rows farther away are among those that need not be sent
        window = reach if window is None else min(window, reach)
    return KeySpan(
        heads=heads,
        first=inputs.offset - width if side == BEFORE else inputs.offset + spec.query_len,
        **rows.of(lambda x: [_widened(x[head][side], width, in_front=side == BEFORE) for head in heads]),
        marks=marks,
        queries=(0, count) if side == BEFORE else (spec.query_len - count, spec.query_len),
        window=window,
        requested=requested,
    )


def _widened(rows: Tensor, width: int, *, in_front: bool) -> Tensor:
    missing = width - rows.shape[2]
    padding = (missing, 0) if in_front else (0, missing)
    return torch.nn.functional.pad(rows, (0, 0) * (rows.ndim - 3) + padding) if missing else rows


def _outlier(inputs: RankInputs, rows: Received, span: Span, heads: list[int]) -> KeySpan:
    """A span of outlier tiles, for the heads that requested it."""
    places = [FAR + inputs.halo.outliers[inputs.rank][head].index(span) for head in heads]

    marks = None
    if rows.marks is not None:
        at = FAR + inputs.halo.widest().outliers[inputs.rank][0].index(span)
        marks = rows.marks[0][at][:, 0]
    return KeySpan(
        heads=heads,
        first=span[0],
        **rows.of(lambda x: [x[head][at] for head, at in zip(heads, places, strict=True)]),
        marks=marks,
        queries=(0, inputs.spec.query_len),
        window=inputs.spec.window,
    )


def _with_more_keys(inputs: RankInputs, spans: list[KeySpan], output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(output, lse) over further keys too: the given spans, each for other heads."""
    of_spans = [query_heads(span.heads, inputs.spec.group) for span in spans]
    order = [head for heads in of_spans for head in heads]
    order += [head for head in range(inputs.spec.num_heads) if head not in order]
    sizes = [*map(len, of_spans), len(order) - sum(map(len, of_spans))]
    *outputs, untouched = _taken(output, order, 1).split(sizes, 1)
    *lses, untouched_lse = _taken(lse, order, 1).split(sizes, 1)
    for at, span in enumerate(spans):
        start, stop = span.queries
        rows = [start, stop - start, inputs.spec.query_len - stop]
        first, own, last = outputs[at].split(rows, 2)
        first_lse, own_lse, last_lse = lses[at].split(rows, 2)
        more, more_lse = _call(inputs, span, True)
        assert more_lse is not None
        both, both_lse = merged(own, own_lse, more, more_lse)
        outputs[at] = torch.cat([first, both.to(own.dtype), last], 2)
        lses[at] = torch.cat([first_lse, both_lse, last_lse], 2)
    back = [order.index(head) for head in range(len(order))]
    return _taken(torch.cat([*outputs, untouched], 1), back, 1), _taken(torch.cat([*lses, untouched_lse], 1), back, 1)


def _taken(x: Tensor, heads: list[int], axis: int) -> Tensor:
    """Some heads of a tensor, in the given order. Copying an index to a GPU would synchronize."""
    index = index_of(heads)
    if isinstance(index, slice):
        return x if len(heads) == x.shape[axis] else x.narrow(axis, index.start, len(heads))
    of_head = x.split(1, axis)
    return torch.cat([of_head[head] for head in heads], axis)


def _call(inputs: RankInputs, span: KeySpan, needs_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attends to one span: (output [B, n·H / K, queries, D], lse)."""
    spec, heads = inputs.spec, query_heads(span.heads, inputs.spec.group)
    begin, stop = span.queries
    # Masks are per sequence: heads with different masks become sequences of a batch. With dropout, so do heads that are not
    # adjacent, because dropout counts heads from the first one.
    scattered = spec.dropout_p > 0 and not isinstance(index_of(heads), slice)
    count = len(span.heads) if span.requested is not None or scattered else 1
    seen = segments = None
    if span.marks is not None:
        seen = span.marks[..., 0].bool() if spec.key_mask is not None else None
        segments = span.marks[..., 1] if spec.key_segments is not None else None
    if span.requested is not None:
        seen = span.requested.expand(spec.batch, -1, -1) if seen is None else span.requested & seen[:, None]

    part = dataclasses.replace(spec, key_bias=None).of_heads(
        heads,
        lambda x, axis: _taken(x, heads, axis),
        query_start=None if inputs.start is None else (_taken(inputs.start, heads, 1) - span.first).clamp(min=0),
    )
    part = dataclasses.replace(
        part.on_queries(begin, stop),
        key_len=span.key.shape[2],
        query_offset=inputs.offset + begin - span.first,
        window=span.window,
        key_mask=seen,
        key_segments=segments,
        key_bias=span.bias,
        dropout_seed=_dropout_seed(inputs, span, count),
        return_lse=needs_lse,
    )
    query, key, value = _taken(inputs.query, heads, 1)[:, :, begin:stop], span.key, span.value
    if count > 1:
        part = _as_sequences(part, count)
        query, key, value = (_split(x, count) for x in (query, key, value))
    outputs = attend(part, query, key, value, inputs.backend)
    output, lse = outputs if isinstance(outputs, tuple) else (outputs, None)
    if count == 1:
        return output, lse
    together = output.unflatten(0, (-1, count)).flatten(1, 2)
    return together, None if lse is None else lse.unflatten(0, (-1, count)).flatten(1, 2)


def _as_sequences(spec: Spec, count: int) -> Spec:
    """The call whose key heads, `count` of them, are sequences of the batch; its key mask may be [B, count, W]."""

    def split(x: Tensor | None) -> Tensor | None:
        return None if x is None else _split(x, count)

    def repeated(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(count, 0)

    mask, right = spec.key_mask, spec.right_slopes
    return dataclasses.replace(
        spec,
        batch=spec.batch * count,
        num_heads=spec.group,
        num_kv_heads=1,
        slopes=_split(spec.slopes.expand(spec.batch, -1), count),
        right_slopes=None if right is None else _split(right.expand(spec.batch, -1), count),
        query_segments=repeated(spec.query_segments),
        key_segments=repeated(spec.key_segments),
        key_mask=mask.flatten(0, 1) if mask is not None and mask.ndim == 3 else repeated(mask),
        key_bias=split(spec.key_bias),
        query_bias=split(spec.query_bias),
        query_start=split(spec.query_start),
    )


def _split(x: Tensor, count: int) -> Tensor:
    """[B, n·m, …] -> [B·n, m, …]"""
    return x.unflatten(1, (count, -1)).flatten(0, 1)


def _dropout_seed(inputs: RankInputs, span: KeySpan, count: int) -> Tensor | None:
    """The seed, with the indices of a span's sequences, heads and rows in the full call; one row per sequence if split."""
    spec = inputs.spec
    if spec.dropout_seed is None:
        return None
    seed, row = int(spec.dropout_seed[0, 0]), span.first
    heads = [head * spec.group for head in span.heads]
    firsts = [(0, heads[0])] if count == 1 else [(b, head) for b in range(spec.batch) for head in heads]
    return spec.dropout_seed.new_tensor([[seed, b, head, row] for b, head in firsts])
