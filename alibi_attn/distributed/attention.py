"""`context_parallel_attention`: attention over a sequence split across ranks, with the same result as in one process.

First the ranks determine which rows each of them needs (`halo_bounds.py`, certified). Then exactly those rows are sent
(`exchange.py`), while every rank computes its queries over its own keys (`rank_attention.py`). The rows that are not sent weigh
at most the tolerance, and so do the rows that a rank's calls skip: at most twice the tolerance in total.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor
from torch import distributed as dist

from alibi_attn.attention.call.bias import Slopes
from alibi_attn.attention.call.checks import dtype_name
from alibi_attn.attention.call.dropout import drawn_seed
from alibi_attn.attention.call.spec import GATE_FLOOR, AttentionSpec
from alibi_attn.attention.call.transforms import autocast
from alibi_attn.attention.forgetting import check_gates, gate_sums, with_gates
from alibi_attn.attention.operators.operator import requires_gradient
from alibi_attn.attention.run.dispatch import check_name
from alibi_attn.attention.run.execution import attend, scaled_by_sinks, without_sinks
from alibi_attn.distributed.argument_check import (
    Arguments,
    GatedShardOptions,
    ShardOptions,
    check_arguments,
    check_score_bound,
    shard_spec,
)
from alibi_attn.distributed.biased_halo_bounds import biased_requested_rows, tile_summary
from alibi_attn.distributed.exchange import Ranks, ScannedSums, Traffic, Transport
from alibi_attn.distributed.halo_bounds import (
    SIDES,
    RankSummary,
    Shard,
    halo_from_requests,
    rank_summary,
    requested_rows,
)
from alibi_attn.distributed.halos import Halo, static_halo
from alibi_attn.distributed.rank_attention import RankInputs, Reach, Received, attend_rank, static_reaches
from alibi_attn.distributed.simulation import row_bytes

Spec = AttentionSpec[Tensor]

TIMEOUT = 600.0  # seconds


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    score_bound: float | None = None,
    backend: str = "auto",
    timeout: float = TIMEOUT,
    traffic: Traffic | None = None,
    **options: Unpack[ShardOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`alibi_attention` over the rows of all ranks, for this rank's queries, [B, H, L, D] in query's dtype.

    Every rank of the group passes its *shard*: L consecutive rows of the sequence, in rank order. Shards may differ in length
    and may be empty. For each key head, only rows that the certificate cannot skip are sent. Differentiable once in query, key,
    value, slopes and key_bias, and through lse; every rank must then run backward, with its calls in the same order. The
    gradients of query, key, value and key_bias are complete for the shard. Slopes are shared by all ranks: each rank computes
    the gradient from its own queries, and the sum over the ranks is the full gradient, as for all parameters of a model.

    Args:
        query, key, value: the shard's rows, [B, H, L, D] and [B, K, L, D].
        slopes, causal, right_slopes, window, scale, tolerance, return_lse, backend: as for `alibi_attention`, equal on all
            ranks. The tolerance is spent twice: once on rows that are not sent, once on rows that are skipped.
        group: a process group; None = all processes.
        key_mask: [B, L] bool, for the shard's keys; a rank may pass None if none of its keys are hidden.
        segment_ids: [B, L] integers, for the shard's rows; a segment may cross shards.
        key_bias: for the shard's keys, broadcastable to [B, H, L].
        sink_logits: as for `alibi_attention`, equal on all ranks; its gradient comes from this rank's queries, as for
            slopes.
        dropout_p: as for `alibi_attention`, equal on all ranks. The first rank draws a seed from torch's generator. The dropped
            weights are those that one process with that generator would drop, however the rows are split.
        score_bound: U ≥ |scale·q·k|, such as `ALiBiAttention.score_bound()` with QK-norm. The slopes then determine which rows
            are sent. Not checked. Not allowed with masks or biases.
        timeout: time limit of each exchange, in seconds.
        traffic: a counter to which this rank's traffic is added.

    Returns:
        The output, or (output, lse [B, H, L]).

    Raises:
        ValueError, TypeError: as for `alibi_attention`; arguments differ between ranks (every rank reports the same rank and
            argument).
        RuntimeError: another rank has exited, or an exchange took longer than `timeout`.

    Source: docs/context-parallel.md; Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    query, key, value = autocast(query, key, value)

    def described() -> Spec:
        hides = any(options.get(name) is not None for name in ("key_mask", "key_bias"))
        check_score_bound(score_bound, hides=hides)
        return shard_spec(query, key, value, slopes, **options)

    return _Call(query, key, value, None, score_bound, backend, traffic).over(group, timeout, described)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_forgetting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_fgate: Tensor,
    slopes: Slopes | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    timeout: float = TIMEOUT,
    traffic: Traffic | None = None,
    **options: Unpack[GatedShardOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`forgetting_attention` over the rows of all ranks, for this rank's queries, [B, H, L, D].

    Cumulative sums of the gates continue across ranks, in backward too. The width of the halo depends on the gates.

    Args:
        log_fgate: ln f of the shard's rows, [B, H, L] or [B, K, L], as for `forgetting_attention`; its gradient is complete.
        query, key, value, group, key_mask, segment_ids, key_bias, sink_logits, dropout_p, timeout, traffic: as for
            `context_parallel_attention`.
        slopes, window, scale, tolerance, return_lse, backend: as for `forgetting_attention`.

    Raises:
        ValueError, TypeError, RuntimeError: as for `context_parallel_attention` and `forgetting_attention`.

    Source: Lin et al. 2025, Forgetting Transformer (arXiv:2503.02130), eq. 9 to 12; docs/context-parallel.md.
    """
    query, key, value = autocast(query, key, value)
    heads = query.shape[1] if isinstance(query, Tensor) and query.ndim == 4 else 0

    def described() -> Spec:
        none = [0.0] * heads if slopes is None else slopes
        spec = shard_spec(query, key, value, none, causal=True, right_slopes=None, **options)
        check_gates(spec, log_fgate, query, None)
        return spec

    return _Call(query, key, value, log_fgate, None, backend, traffic).over(group, timeout, described)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The tensors and computing options of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_fgate: Tensor | None
    score_bound: float | None
    backend: str
    traffic: Traffic | None

    def over(
        self, group: dist.ProcessGroup | None, timeout: float, described: Callable[[], Spec]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the call on this rank; `described` validates the arguments."""
        ranks = ranks_of(group, timeout)
        try:
            spec = described()
            check_name(self.backend)
        except (ValueError, TypeError):
            if ranks.count > 1:
                device = self.query.device if isinstance(self.query, Tensor) else torch.device("cpu")
                check_arguments(ranks, None, device)
            raise
        wide = torch.float64 in (self.query.dtype, None if spec.key_bias is None else spec.key_bias.dtype)
        if spec.dropout_p > 0:
            spec = dataclasses.replace(spec, dropout_seed=drawn_seed(self.query.device))
        sink_logits, returns_lse = spec.sink_logits, spec.return_lse
        spec = without_sinks(spec)
        if ranks.count == 1:
            if self.log_fgate is not None:
                spec = with_gates(spec, gate_sums(self.log_fgate), 0, self.log_fgate)
            outputs = attend(spec, self.query, self.key, self.value, self.backend)
            output, lse = outputs if isinstance(outputs, tuple) else (outputs, None)
        else:
            output, lse = self._together(spec, ranks)
        if lse is not None and sink_logits is not None:
            output = scaled_by_sinks(output, lse, sink_logits)
        if not returns_lse:
            return output
        assert lse is not None
        return output, lse.to(torch.float64 if wide else torch.float32)

    def _together(self, spec: Spec, ranks: Ranks) -> tuple[Tensor, Tensor | None]:
        device = self.query.device
        given = Arguments(spec, self.key, self.value, self.log_fgate, self.score_bound)
        lengths, masked, seed = check_arguments(ranks, given, device)
        if spec.dropout_seed is not None:
            spec = dataclasses.replace(spec, dropout_seed=spec.dropout_seed.new_tensor([[seed, 0, 0, 0]]))
        if masked and spec.key_mask is None:
            everything = torch.ones(spec.batch, spec.key_len, dtype=torch.bool, device=device)
            spec = dataclasses.replace(spec, key_mask=everything)
        spec = self._gated(spec, ranks)
        for_gradients = torch.is_grad_enabled() and requires_gradient(spec, self.query, self.key, self.value)
        with torch.no_grad():
            start, steps = self._cuts(spec, ranks, lengths)
            halo, reaches = self._planned(spec, ranks, lengths, steps, for_gradients=for_gradients)
        rows = Transport(halo, ranks, self.traffic, counts_rows=True)
        flight = rows.begun((self.key, self.value), "keys and values")
        key, value = flight.own
        of_bias = of_marks = bias = marks = None
        if spec.key_bias is not None:
            of_bias = Transport(halo, ranks, self.traffic).begun((spec.key_bias,), "biases of keys")
            (bias,) = of_bias.own
        if spec.hides_keys:
            of_marks = Transport(halo.widest(), ranks, self.traffic).begun((_marks(spec),), "masks and segments")
            (marks,) = of_marks.own

        def received() -> Received:
            keys, values = flight.pieces()
            return Received(keys, values, *(None if x is None else x.pieces()[0] for x in (of_bias, of_marks)))

        own = RankInputs(spec, halo, reaches, ranks.rank, self.query, key, value, bias, start, marks, self.backend)
        return attend_rank(own, received)

    def _gated(self, spec: Spec, ranks: Ranks) -> Spec:
        """Adds the sums of gates, counted from the first rank's first row, as biases of keys and queries."""
        if self.log_fgate is None:
            return spec
        sums = gate_sums(self.log_fgate)
        total = sums[..., -1:].sum(-1)  # 0 if the shard has no rows
        before: Tensor = ScannedSums.apply(ranks, total.flatten())  # type: ignore[no-untyped-call]
        return with_gates(spec, sums + before.view_as(total)[..., None], 0)

    def _cuts(self, spec: Spec, ranks: Ranks, lengths: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
        """(start, steps), or None for both if no rank has a cut.

        Returns:
            start: [B, H, L], the position in the whole sequence of each query's last cut, 0 without one.
            steps: [B, H, L], 2²⁰ for each cut up to a key; added to its bias, they hide the keys before a cut from the planning.
        """
        if self.log_fgate is None:
            return None, None
        position = torch.arange(spec.query_len, device=self.query.device) + sum(lengths[: ranks.rank])
        is_cut = self.log_fgate == -math.inf
        cuts = torch.where(is_cut, position, 0)
        last = cuts.amax(-1) if spec.query_len else cuts.new_zeros(cuts.shape[:2])
        of_ranks = ranks.gathered(torch.stack([last, is_cut.sum(-1)]).flatten(), "cuts")
        if not bool(of_ranks.any()):
            return None, None
        of_ranks = of_ranks[: ranks.rank].unflatten(1, (2, *last.shape))
        before = of_ranks[:, 0].amax(0) if ranks.rank else torch.zeros_like(last)
        start = torch.maximum(cuts.cummax(-1).values, before[..., None])
        steps = (of_ranks[:, 1].sum(0)[..., None] + is_cut.cumsum(-1)) * -int(GATE_FLOOR)
        if start.shape[1] != spec.num_heads:
            start, steps = start.repeat_interleave(spec.group, dim=1), steps.repeat_interleave(spec.group, dim=1)
        return start, steps

    def _planned(
        self, spec: Spec, ranks: Ranks, lengths: tuple[int, ...], steps: Tensor | None, *, for_gradients: bool
    ) -> tuple[Halo, list[Reach]]:
        """(the halo, the same on every rank; this rank's reach to the left and to the right, per key head)."""
        if steps is not None and spec.key_bias is not None:
            spec = dataclasses.replace(spec, key_bias=spec.key_bias + steps)
        if self.score_bound is not None:
            slopes, right = (
                None if x is None else x.detach().reshape(-1, spec.num_heads).amin(0).tolist()
                for x in (spec.slopes, spec.right_slopes)
            )
            assert slopes is not None
            halo = static_halo(
                lengths,
                slopes,
                score_bound=self.score_bound,
                causal=spec.causal,
                right_slopes=right,
                window=spec.window,
                tolerance=spec.tolerance,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                batch=spec.batch,
                dtype=dtype_name(self.query.dtype),
            )
            return halo, static_reaches(halo, ranks.rank)
        summary = RankSummary.of(
            spec, ranks.gathered(rank_summary(spec, self.key, self.value), "norms of keys and values")
        )
        shard = Shard(spec, ranks.rank, lengths, summary, self.query, self.key, self.value, for_gradients=for_gradients)
        if spec.key_bias is None:
            request = requested_rows(shard)
        else:
            request = biased_requested_rows(shard, ranks.gathered(tile_summary(shard), "biases of tiles"))
        # The one number that the host must read is how much to send and to receive.
        requests = ranks.gathered(request.flatten(), "requests for rows").unflatten(1, request.shape).tolist()
        reaches = [(head[SIDES], head[SIDES + 1]) for head in requests[ranks.rank]]
        return halo_from_requests(requests, lengths, row_bytes(spec, self.key)), reaches


def ranks_of(group: dist.ProcessGroup | None, timeout: float) -> Ranks:
    """The group, with its time limit.

    Raises:
        ValueError, TypeError: there is no process group, it does not include this process, or the timeout is invalid.
    """
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
        raise ValueError(
            f"group does not include this process (global rank {dist.get_rank()}); call only on its members"
        )
    return ranks


def _marks(spec: Spec) -> Tensor:
    """(visible, segment) of each key, [B, 1, L, 2] int64."""
    zeros = torch.zeros(spec.batch, spec.key_len, dtype=torch.int64, device=spec.slopes.device)
    seen = zeros if spec.key_mask is None else spec.key_mask.long()
    segments = zeros if spec.key_segments is None else spec.key_segments
    return torch.stack([seen, segments], -1)[:, None]
