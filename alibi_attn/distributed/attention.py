"""`context_parallel_attention`: attention over a sequence whose rows lie on several ranks, as if one process had computed it.

Who needs which rows is found first (`need.py`, certified), then exactly those travel (`exchange.py`), and then every rank
computes its own queries (`local.py`). What is not sent weighs at most the tolerance, and what a rank's own call skips of what is
there again: twice the tolerance in all.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist

from alibi_attn.attention.bias import Slopes
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.dispatch import BACKENDS
from alibi_attn.attention.dropout import drawn_seed
from alibi_attn.attention.execution import attend, autocast
from alibi_attn.attention.forgetting import check_gates, with_gates
from alibi_attn.attention.spec import AttentionSpec, dtype_name
from alibi_attn.attention.validation import make_spec
from alibi_attn.distributed.agreement import agreed, check_score_bound
from alibi_attn.distributed.biased_need import TilesTold, asked_with_biases, tell_tiles
from alibi_attn.distributed.exchange import Pieces, Ranks, ScannedSums, Traffic, Transport
from alibi_attn.distributed.halos import Halo, static_halo
from alibi_attn.distributed.local import Mine, attended
from alibi_attn.distributed.need import Shard, Told, asked, halo_of, tell
from alibi_attn.distributed.simulation import row_bytes

Spec = AttentionSpec[Tensor]

TIMEOUT = 600.0  # seconds


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, slopes: Slopes | None = None, *, group: dist.ProcessGroup | None = None,
    causal: bool = True, right_slopes: Slopes | None = None, window: int | None = None, scale: float | None = None,
    key_mask: Tensor | None = None, segment_ids: Tensor | None = None, key_bias: Tensor | None = None,
    score_bound: float | None = None, dropout_p: float = 0.0, tolerance: float | None = None, return_lse: bool = False,
    backend: str = "auto", timeout: float = TIMEOUT, traffic: Traffic | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`alibi_attention` over the rows of all ranks, for this rank's queries, [B, H, L, D] in query's dtype.

    Every rank of the group calls it with its *shard*, L consecutive rows of the sequence, in the order of the ranks; shards may
    differ in length, and be empty. Only rows that the certificate cannot leave out travel, per key head. Differentiable once in
    query, key, value, slopes and key_bias, and through lse; every rank must then run backward, in the same order of calls. The
    gradients of query, key, value and key_bias are whole, those of the shard. Slopes are parameters that all ranks share: each
    rank has the gradient of its own queries, and their sum over the ranks is the whole, as for all parameters of a model.

    Args:
        query, key, value: the shard's rows, [B, H, L, D] and [B, K, L, D].
        slopes, causal, right_slopes, window, scale, tolerance, return_lse, backend: as for `alibi_attention`, the same on all
            ranks. The default of the tolerance is spent twice, once on what is not sent and once on what is skipped.
        group: a process group; None = all processes.
        key_mask: [B, L] bool, of the shard's keys; ranks without one may pass None.
        segment_ids: [B, L] integers, of the shard's rows; a segment may cross shards.
        key_bias: [B, H, L] or what broadcasts to it, of the shard's keys.
        dropout_p: as for `alibi_attention`, the same on all ranks. Which weights are dropped follows from a seed that the first
            rank draws from torch's generator: what one process with that generator drops, however the rows are cut.
        score_bound: U, which no |scale·q·k| exceeds, `ALiBiAttention.score_bound()` with QK-norm: then who needs which rows
            follows from the slopes. Without masks and biases only. It is trusted.
        timeout: seconds that each exchange may take.
        traffic: to which what this rank sends and receives is added.

    Returns:
        The output, or (output, lse [B, H, L]).

    Raises:
        ValueError, TypeError: as `alibi_attention`; ranks were called differently, which all of them say, with rank and argument.
        RuntimeError: a rank has ended, or an exchange took longer than `timeout`.

    Source: docs/context-parallel.md; Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    query, key, value = autocast(query, key, value)

    def described() -> Spec:
        _check_segments(segment_ids)
        check_score_bound(score_bound, hides=key_mask is not None or key_bias is not None)
        return make_spec(
            query, key, value, slopes, causal=causal, right_slopes=right_slopes, window=window, scale=scale,
            key_mask=key_mask, segment_ids=segment_ids, key_bias=key_bias, dropout_p=dropout_p, tolerance=tolerance,
            return_lse=return_lse,
        )  # fmt: skip

    return _Call(query, key, value, key_bias, None, score_bound, backend, traffic).over(group, timeout, described)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_forgetting_attention(
    query: Tensor, key: Tensor, value: Tensor, log_fgate: Tensor, slopes: Slopes | None = None, *,
    group: dist.ProcessGroup | None = None, window: int | None = None, scale: float | None = None,
    key_mask: Tensor | None = None, segment_ids: Tensor | None = None, key_bias: Tensor | None = None,
    dropout_p: float = 0.0, tolerance: float | None = None, return_lse: bool = False, backend: str = "auto",
    timeout: float = TIMEOUT, traffic: Traffic | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`forgetting_attention` over the rows of all ranks, for this rank's queries, [B, H, L, D].

    Sums of gates go on from rank to rank, and their gradients back. The gates decide how wide a halo is.

    Args:
        log_fgate: ln f of the shard's rows, [B, H, L] or [B, K, L], as for `forgetting_attention`; its gradient is whole.
        query, key, value, group, key_mask, segment_ids, key_bias, dropout_p, timeout, traffic: as for
            `context_parallel_attention`.
        slopes, window, scale, tolerance, return_lse, backend: as for `forgetting_attention`.

    Raises:
        ValueError, TypeError, RuntimeError: as `context_parallel_attention` and `forgetting_attention`.

    Source: Lin et al. 2025, Forgetting Transformer (arXiv:2503.02130), eq. 9 to 12; docs/context-parallel.md.
    """
    query, key, value = autocast(query, key, value)
    heads = query.shape[1] if isinstance(query, Tensor) and query.ndim == 4 else 0

    def described() -> Spec:
        _check_segments(segment_ids)
        spec = make_spec(
            query, key, value, [0.0] * heads if slopes is None else slopes, window=window, scale=scale, key_mask=key_mask,
            segment_ids=segment_ids, key_bias=key_bias, dropout_p=dropout_p, tolerance=tolerance, return_lse=return_lse,
        )  # fmt: skip
        check_gates(spec, log_fgate, query, None)
        return spec

    return _Call(query, key, value, key_bias, log_fgate, None, backend, traffic).over(group, timeout, described)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The tensors of one call, and how it is to be computed."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor | None
    log_fgate: Tensor | None
    score_bound: float | None
    backend: str
    traffic: Traffic | None

    def over(
        self, group: dist.ProcessGroup | None, timeout: float, described: Callable[[], Spec]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the call returns, with the ranks of a group; `described` checks the arguments."""
        ranks = ranks_of(group, timeout)
        try:
            spec = self._checked(described())
        except (ValueError, TypeError):
            if ranks.count > 1:
                device = self.query.device if isinstance(self.query, Tensor) else torch.device("cpu")
                agreed(ranks, None, device)
            raise
        if spec.dropout_p > 0:
            spec = dataclasses.replace(spec, dropout_seed=drawn_seed(self.query.device))
        if ranks.count > 1:
            lengths, masked, seed = agreed(
                ranks, spec, self.query.device, key=self.key, value=self.value, key_bias=self.key_bias,
                log_fgate=self.log_fgate, score_bound=self.score_bound,
            )  # fmt: skip
            check_score_bound(self.score_bound, hides=masked)
            if spec.dropout_seed is not None:
                spec = dataclasses.replace(spec, dropout_seed=spec.dropout_seed.new_tensor([[seed, 0, 0, 0]]))
            if masked and spec.key_mask is None:
                seen = torch.ones(spec.batch, spec.key_len, dtype=torch.bool, device=self.query.device)
                spec = dataclasses.replace(spec, key_mask=seen)
        wide = torch.float64 in (self.query.dtype, None if self.key_bias is None else self.key_bias.dtype)
        if self.log_fgate is not None:
            spec = _gated(spec, ranks, self.log_fgate)
        if ranks.count > 1:
            output, lse = self._together(spec, ranks, lengths)
        else:
            found = attend(spec, self.query, self.key, self.value, self.backend)
            output, lse = found if isinstance(found, tuple) else (found, None)
        if not spec.return_lse:
            return output
        assert lse is not None
        return output, lse.to(torch.float64 if wide else torch.float32)

    def _checked(self, spec: Spec) -> Spec:
        if spec.query_len != spec.key_len:
            raise ValueError(
                f"query has {spec.query_len} rows and key {spec.key_len} but a shard has as many of both: self-attention of a "
                "sequence that is cut into shards"
            )
        if self.backend != "auto" and self.backend not in BACKENDS:
            raise ValueError(
                f"backend is {self.backend!r} but must be 'auto' or one of {', '.join(map(repr, BACKENDS))}"
            )
        return spec

    def _together(self, spec: Spec, ranks: Ranks, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            halo = _planned(spec, ranks, lengths, self.query, self.key, self.value, self.score_bound)
        rows = Transport(halo, ranks, self.traffic, counts_rows=True)
        (key, value), (keys, values) = rows.carried((self.key, self.value), "keys and values")
        bias = marks = None
        if spec.key_bias is not None:
            (own,), (pieces,) = Transport(halo, ranks, self.traffic).carried((spec.key_bias,), "biases of keys")
            bias = own, pieces
        if spec.hides_keys:
            marks = _marks(spec, ranks, halo, self.traffic)
        mine = Mine(spec, halo, ranks.rank, self.query, (key, keys), (value, values), bias, marks, self.backend)
        return attended(mine)


def _check_segments(segment_ids: Tensor | None) -> None:
    if isinstance(segment_ids, tuple | list):
        raise TypeError(
            "segment_ids is a pair but the queries of a shard stand at its keys: pass one tensor [B, L], of the shard"
        )


def ranks_of(group: dist.ProcessGroup | None, timeout: float) -> Ranks:
    """This rank within the group, which must be there."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "there is no process group: start the processes with torchrun and call torch.distributed.init_process_group first"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds but is {timeout!r}")
    if not 0.0 < timeout < 1e9:
        raise ValueError(f"timeout is {timeout} but must be a number of seconds, above 0 and below 10⁹")
    ranks = Ranks(group, float(timeout))
    if ranks.rank < 0:
        raise ValueError(f"rank {dist.get_rank()} of all processes is not in the group that was passed")
    return ranks


def _gated(spec: Spec, ranks: Ranks, log_fgate: Tensor) -> Spec:
    """With the sums of gates from the first rank's first row on as biases of keys and queries."""
    gates = log_fgate.double()
    kept = gates.cumsum(-1)
    if ranks.count > 1:
        total = gates.sum(-1)
        before: Tensor = ScannedSums.apply(ranks, total.flatten())  # type: ignore[no-untyped-call]
        kept = kept + before.view_as(total)[..., None]
    return with_gates(spec, kept, 0)


def _planned(
    spec: Spec,
    ranks: Ranks,
    lengths: tuple[int, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_bound: float | None,
) -> Halo:
    """Who needs which rows: the same on every rank."""
    if score_bound is not None:
        slopes, right = (
            None if x is None else x.detach().reshape(-1, spec.num_heads).amin(0).tolist()
            for x in (spec.slopes, spec.right_slopes)
        )
        assert slopes is not None
        return static_halo(
            lengths, slopes, score_bound=score_bound, causal=spec.causal, right_slopes=right, window=spec.window,
            tolerance=spec.tolerance, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, batch=spec.batch,
            dtype=dtype_name(query.dtype),
        )  # fmt: skip
    shard = Shard(ranks.rank, lengths)
    told = Told.of(spec, ranks.gathered(tell(spec, key, value), "norms of keys and values"))
    if spec.key_bias is None:
        needs = asked(spec, told, shard, query, key, value)
    else:
        count = -(-max(lengths) // TILE)
        tiles = TilesTold.of(spec, ranks.gathered(tell_tiles(spec, key, count), "biases of tiles"))
        needs = asked_with_biases(spec, told, tiles, shard, query, key, value)
    all_needs = ranks.gathered(needs.flatten(), "which rows they need").unflatten(1, needs.shape)
    return halo_of(all_needs.tolist(), lengths, row_bytes(spec, key))


def _marks(spec: Spec, ranks: Ranks, halo: Halo, traffic: Traffic | None) -> tuple[Tensor, Pieces]:
    """[B, 1, L, 2] int64, whether a key may be seen and its segment, and those of the rows that came."""
    zeros = torch.zeros(spec.batch, spec.key_len, dtype=torch.int64, device=spec.slopes.device)
    seen = zeros if spec.key_mask is None else spec.key_mask.long()
    segments = zeros if spec.key_segments is None else spec.key_segments
    own = torch.stack([seen, segments], -1)[:, None]
    _, (pieces,) = Transport(halo.widest(), ranks, traffic).carried((own,), "masks and segments")
    return own, pieces
