"""Decoding: the last few queries of a long text read only the keys within their reach.

`alibi_attention` reads every key once to compute its norm. With remembered norms (`norms.py`), the reach of a new query is
known before any far key is read. On a GPU the kernels' plan is computed from these norms, also for chunks of a long prompt. On a
CPU a kernel moves outward from each query and skips tile by tile. Without a compiler, with gates, or with numbers that are
not finite, each head of each row attends to a slice instead: its last keys, and the outlier tiles before them. Rows may be
padded: each is then relative to its last visible key.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.native import decoding as native
from alibi_attn.attention.backends.native.backend import WIDTH
from alibi_attn.attention.certificate.biased import gated_bounds, sums_behind
from alibi_attn.attention.certificate.bounds import bounds, worth_leaving_out
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms, norm_bound
from alibi_attn.attention.checks import check_numbers, dtype_name
from alibi_attn.attention.execution import scaled_by_sinks
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.attention.spec import GATE_FLOOR, AttentionSpec, index_of, query_heads
from alibi_attn.attention.validation import make_spec

MAX_QUERIES = 16  # of the CPU kernel
CHUNKS = 4  # for more than MAX_QUERIES queries, a CPU uses `attend_near` only with at least this many keys per query
# Elements of the cached keys of a sequence, on a CPU without the kernel: with fewer, reading all is as fast.
LONG = 2**23
FEW = 1024  # keys that cost less than a separate call: heads that need at most this many share a call

Runs = Sequence[tuple[int, int]]  # [start, stop) of the visible keys, per row


def reads_near(
    query: Tensor, key: Tensor, slopes: Tensor, *, masked: bool = False, gated: bool = False, remembered: bool = True
) -> bool:
    """Whether `attend_near` supports these queries and keys and is faster; decided without reading a tensor.

    `attend_near` has no gradient, and torch.compile cannot trace it.

    Args:
        masked: there is a key mask. `visible_runs` checks it for holes.
        gated: there are forget gates. A GPU scores all keys with a mask or gates, a CPU only with both.
        remembered: the norms of the keys and values are known; if not, the CPU kernel reads all keys.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if _on_cpu(query):
        long = remembered and key.shape[1:].numel() >= LONG
        if query.shape[2] > MAX_QUERIES:
            return long and not masked and not gated and key.shape[2] >= CHUNKS * query.shape[2]
        if masked and gated:
            return False
        return long or (not gated and has_kernel(query, key))
    return (
        remembered
        and not masked
        and not gated
        and fused.why_not(make_spec(query, key, key, slopes), query, key, key) is None
    )


def has_kernel(*tensors: Tensor) -> bool:
    """Whether the CPU kernel for decoding supports these queries, keys and values."""
    return tensors[0].shape[3] % WIDTH == 0 and native.takes(*tensors)


def measured_norms(key: Tensor, value: Tensor) -> Norms:
    """`Norms.of`, computed by the kernel in one pass if there is one."""
    if key.shape[3] == value.shape[3] and has_kernel(key, value):
        return Norms(native.tile_norms(key.detach()), native.tile_norms(value.detach()))
    return Norms.of(key, value)


def visible_runs(key_mask: Tensor) -> Runs | None:
    """[start, stop) of the visible keys in each row of a key mask [B, S], (0, 0) for none; None if some row has a hole.

    Reads the mask on the host.
    """
    flags = key_mask.view(torch.uint8)
    starts, stops = flags.argmax(1), key_mask.shape[1] - flags.flip(1).argmax(1)
    rows = torch.stack([starts, stops, key_mask.sum(1)], dim=1).tolist()
    if any(count not in (0, stop - start) for start, stop, count in rows):
        return None
    return [(start, stop) if count else (0, 0) for start, stop, count in rows]


def attend_near(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, known_norms: Norms | None, *, visible: Runs | None = None,
    log_fgate: Tensor | None = None, window: int | None = None, scale: float | None = None, tolerance: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of the last T positions, [B, H, T, D], if `reads_near` allows it; on a CPU reads the reach on the host.

    Args:
        query, key, value, slopes, window, scale, tolerance: as for `alibi_attention`.
        sink_logits: as for `alibi_attention`; the CPU kernel, which returns no lse, is then not used.
        known_norms: norms of the keys and values, of all but the last few; None = unknown.
        visible: the keys that each row may see, CPU only; None = all.
        log_fgate: [B, H, S] gates as for `forgetting_attention`, CPU only and with all keys visible.
    """
    scale, tolerance = check_numbers(
        causal=True, has_right_slopes=False, window=window, scale=scale, dropout_p=0.0, tolerance=tolerance,
        head_dim=query.shape[3], dtype=dtype_name(query.dtype),
    )  # fmt: skip
    few = query.shape[2] <= MAX_QUERIES
    if few and _on_cpu(query) and log_fgate is None and sink_logits is None and has_kernel(query, key, value):
        output = native.decode(
            query, key, value, slopes, norms=known_norms, visible=visible, window=window, scale=scale, tolerance=tolerance
        )  # fmt: skip
        if output is not None:
            return output
    # Many queries skip again inside their slice, so each step gets half of the tolerance.
    inside = 0.0 if few or not _on_cpu(query) else tolerance / 2
    spec = make_spec(
        query, key, value, slopes, window=window, scale=scale, tolerance=tolerance - inside, sink_logits=sink_logits
    )
    if log_fgate is not None and bool((log_fgate[..., key.shape[2] - query.shape[2] + 1 :] < GATE_FLOOR).any()):
        # A cut between the queries: biases of keys cannot express which queries it applies to.
        output = forgetting_attention(
            query,
            key,
            value,
            log_fgate,
            slopes,
            window=window,
            scale=scale,
            tolerance=tolerance,
            sink_logits=sink_logits,
        )
        assert isinstance(output, Tensor)
        return output
    with torch.no_grad():
        known_norms = Norms.of(key, value) if known_norms is None else known_norms
        if not _on_cpu(query):
            assert visible is None and log_fgate is None, "reads_near excludes key masks and gates here"  # noqa: PT018
            output, lse = fused.decode(spec, query, key, value, known_norms)
            return output if sink_logits is None else scaled_by_sinks(output, lse, sink_logits)
        runs = [(0, spec.key_len)] * spec.batch if visible is None else visible
        rows = needed_keys(spec, query, key, value, known_norms, runs, log_fgate)
    output = torch.empty_like(query)
    for b, row in enumerate(rows):
        if row.start == row.stop:
            output[b] = 0.0
            continue
        for keys, members in _buckets(row.needed):
            heads = index_of(query_heads(members, spec.group))
            of_heads = slopes[heads] if slopes.ndim == 1 else slopes[b : b + 1, heads]
            one = slice(b, b + 1)
            output[one, heads] = _attend(
                query[one, heads], key[one], value[one], index_of(members), of_heads, row.spans(keys, members), window,
                spec.scale, None if log_fgate is None else log_fgate[one, heads],
                None if sink_logits is None else sink_logits[heads], inside,
            )  # fmt: skip
    return output


@dataclasses.dataclass
class Row:
    """The keys that one row reads.

    Args:
        start, stop: the range of its visible keys.
        needed: for each key head, how many of the last visible keys are read.
        outlier_tiles: for each key head, the tiles that are read in addition; −1 = none.
    """

    start: int
    stop: int
    needed: list[int]
    outlier_tiles: list[list[int]]

    def spans(self, keys: int, members: Sequence[int]) -> list[tuple[int, int]]:
        """The ranges of keys that these key heads read, if none needs more than the last `keys`."""
        low = max(self.start, self.stop - keys)
        tiles = sorted({tile for k in members for tile in self.outlier_tiles[k] if tile >= 0})
        spans = [(max(tile * TILE, self.start), min((tile + 1) * TILE, low)) for tile in tiles]
        return [(low, self.stop), *(span for span in spans if span[0] < span[1])]


def needed_keys(
    spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor, known_norms: Norms, visible: Runs,
    log_fgate: Tensor | None = None,
) -> list[Row]:  # fmt: skip
    """The keys that each row must read: all visible ones if they are few, else those within its queries' certified reach.

    The log-sum-exp is bounded by the last keys of a row alone, which are visible, and no norm includes hidden keys.
    """
    rows = [Row(start, stop, [stop - start] * spec.num_kv_heads, [[]] * spec.num_kv_heads) for start, stop in visible]
    many = [b for b, row in enumerate(rows) if row.stop - row.start > FEW]
    if not many:
        return rows
    norms, in_sight = _norms_in_sight(spec, key, value, known_norms, visible)
    far = spec.key_len if spec.window is None else min(spec.key_len, spec.window)
    if any(rows[b].stop == spec.key_len for b in many):
        if log_fgate is None:
            outliers = worth_leaving_out(norms[0], times=2, count=in_sight)
            certified = bounds(spec, query, key, value, tile_norms=norms, outliers=outliers)
        else:
            certified = gated_bounds(spec, query, key, value, log_fgate, tile_norms=norms)
        # Keys that the first query needs, and those between it and the last.
        needed = _of_key_heads(spec, certified.left.amax(-1).clamp(max=far) + spec.query_len - 1).amax(-1).tolist()
        outlier_tiles = _of_key_heads(spec, certified.outlier_tiles).flatten(2).tolist()
    for b in many:
        row = rows[b]
        if row.stop == spec.key_len:
            row.needed = [min(keys, row.stop - row.start) for keys in needed[b]]
            row.outlier_tiles = outlier_tiles[b]
        elif spec.window is None:
            of_row = (norms[0][b : b + 1], norms[1][b : b + 1])
            one = query[b : b + 1], key[b : b + 1], value[b : b + 1]
            rows[b] = _after_last_visible_key(spec, *one, of_row, row, b)
        else:
            within = max(row.stop - max(row.start, spec.key_len - spec.query_len - far + 1), 0)
            row.needed = [within] * spec.num_kv_heads
    return rows


def _after_last_visible_key(
    spec: AttentionSpec[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: tuple[Tensor, Tensor],
    row: Row,
    b: int,
) -> Row:
    """The keys needed by a row whose last positions are hidden, such as a finished sequence.

    Moving a query from there to the last visible position shortens the distance to every key by the same amount, so the softmax
    does not change: without a window, the reach is the same as for a query at the position of its last visible key.
    """
    slopes = spec.slopes if spec.slopes.ndim == 1 else spec.slopes[b : b + 1]
    needed, outlier_tiles = torch.ones(spec.num_kv_heads, dtype=torch.int64, device=query.device), []
    for t in range(spec.query_len):
        stop = min(spec.key_len - spec.query_len + t, row.stop - 1) + 1
        known = norms[0][..., : -(-stop // TILE)], norms[1][..., : -(-stop // TILE)]
        one = query[:, :, t : t + 1], key[:, :, :stop], value[:, :, :stop]
        at = make_spec(*one, slopes, scale=spec.scale, tolerance=spec.tolerance)
        certified = bounds(at, *one, tile_norms=known)
        reach = _of_key_heads(spec, certified.left.amax(-1)).amax(-1)[0]
        needed = torch.maximum(needed, reach.clamp(max=stop) + row.stop - stop)
        outlier_tiles.append(_of_key_heads(spec, certified.outlier_tiles).flatten(2)[0])
    most = row.stop - row.start
    return dataclasses.replace(
        row, needed=needed.clamp(max=most).tolist(), outlier_tiles=torch.cat(outlier_tiles, 1).tolist()
    )


def _norms_in_sight(
    spec: AttentionSpec[Tensor], key: Tensor, value: Tensor, known_norms: Norms, visible: Runs
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """(norms of the visible keys and values per tile; the number of tiles with visible keys, [B, 1], None for all)."""
    norms = known_norms.tile_norms(key, value)
    if all(run == (0, spec.key_len) for run in visible):
        return norms, None
    tile = torch.arange(norms[0].shape[-1], device=key.device)
    start, stop = torch.tensor(visible, device=key.device).T[..., None]
    hidden = ((tile + 1) * TILE <= start) | (tile * TILE >= stop)
    keys, values = (of_tiles.masked_fill(hidden[:, None], 0.0) for of_tiles in norms)
    for b, (first, end) in enumerate(visible):
        edges = {edge // TILE for edge in (first, end) if first < end and edge % TILE and edge < spec.key_len}
        for at in edges:  # part of the tile is visible
            seen = slice(max(first, at * TILE), min(end, (at + 1) * TILE))
            keys[b, :, at], values[b, :, at] = (norm_bound(x[b, :, seen]).amax(-1) for x in (key, value))
    return (keys, values), (~hidden).sum(-1, keepdim=True)


def _of_key_heads(spec: AttentionSpec[Tensor], of_heads: Tensor) -> Tensor:
    """[B, H, ...] -> [B, K, H / K, ...]"""
    return of_heads.unflatten(1, (spec.num_kv_heads, spec.group))


def _on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _buckets(needed: list[int]) -> list[tuple[int, list[int]]]:
    """(the most keys that any head of a group needs, the key heads of the group): grouped by powers of two from FEW on.

    Above FEW only neighboring heads are grouped, because their keys can be read without a copy.
    """
    by_power: dict[int, list[int]] = {}
    for head, keys in enumerate(needed):
        by_power.setdefault((max(keys, FEW) - 1).bit_length(), []).append(head)
    few = (FEW - 1).bit_length()
    together = [by_power.pop(few)] if few in by_power else []
    for heads in by_power.values():
        starts = [at for at, head in enumerate(heads) if at == 0 or heads[at - 1] != head - 1]
        together += [heads[start:stop] for start, stop in itertools.pairwise([*starts, len(heads)])]
    return [(max(needed[h] for h in heads), heads) for heads in together]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, members: list[int] | slice, slopes: Tensor, spans: list[tuple[int, int]],
    window: int | None, scale: float, log_fgate: Tensor | None, sink_logits: Tensor | None, tolerance: float,
) -> Tensor:  # fmt: skip
    """Attention of some key heads over some spans of keys."""

    def attended(low: int, high: int, *, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
        keys, values = key[:, :, low:high][:, members], value[:, :, low:high][:, members]
        # Counted from the last position: the rest of a query's gates is the same for all keys.
        bias = None
        if log_fgate is not None:
            after = log_fgate[..., high:].sum(-1, keepdim=True, dtype=torch.float64)
            bias = sums_behind(log_fgate[..., low:high]) + after
        return alibi_attention(
            query, keys, values, slopes, window=window, scale=scale, query_offset=key.shape[2] - query.shape[2] - low,
            key_bias=bias, tolerance=tolerance, return_lse=return_lse,
        )  # fmt: skip

    if len(spans) == 1 and sink_logits is None:
        output = attended(*spans[0], return_lse=False)
        assert isinstance(output, Tensor)
        return output
    outputs, lses = zip(*(attended(*span, return_lse=True) for span in spans), strict=True)
    lse = torch.stack(lses)
    whole = lse.logsumexp(0)
    # A query that sees no key has lse −inf in every span, and zeros as output.
    share = (lse - whole.masked_fill(whole == -math.inf, 0.0)).exp()[..., None]
    output = (torch.stack(outputs) * share).sum(0).to(query.dtype)
    if sink_logits is None:
        return output
    if log_fgate is not None:  # the gates after a query, up to the last position
        whole = whole - sums_behind(log_fgate[..., key.shape[2] - query.shape[2] :])
    return scaled_by_sinks(output, whole, sink_logits)
