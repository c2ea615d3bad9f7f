"""Exchanges among the ranks of a process group, each with a time limit: the same few numbers of all, and the rows of a halo.

Rows travel in one uneven all-to-all, one message for each pair of ranks that has any. Backward sends their gradients home by the
same way turned around, where they are added in the order of the ranks: the same bits every time.
"""

import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from alibi_attn.distributed.halos import Halo, Span

Pieces = list[list[Tensor]]  # of every key head, a tensor for each of its spans


@dataclasses.dataclass
class Traffic:
    """What this rank has sent and received, counted where it is sent; pass one to have your calls added.

    Attributes:
        rows_sent, rows_received: rows of keys with their values, of a key head each, over the batch.
        bytes_sent, bytes_received: of the rows, their biases, masks and segments; in backward, of their gradients.
    """

    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A process group, and how long this rank waits for the others.

    Args:
        group: None = all processes.
        timeout: seconds for each exchange.
    """

    group: dist.ProcessGroup | None
    timeout: float

    @property
    def rank(self) -> int:
        """This one, within the group."""
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """R"""
        return dist.get_world_size(self.group)

    def gathered(self, numbers: Tensor, what: str) -> Tensor:
        """[R, n]: the numbers [n] of every rank; all have as many.

        Raises:
            RuntimeError: a rank has gone, or did not come within the time limit.
        """
        found = list(torch.empty(self.count, numbers.numel(), dtype=numbers.dtype, device=numbers.device))
        self._wait(lambda: dist.all_gather(found, numbers.contiguous(), group=self.group, async_op=True), what)
        return torch.stack(found)

    def all_to_all(self, sent: Tensor, sent_to: list[int], received_from: list[int], what: str) -> Tensor:
        """[Σ received_from]: the numbers from every rank, in order; `sent` has those for every rank, in order."""
        found = sent.new_empty(sum(received_from))
        self._wait(
            lambda: dist.all_to_all_single(found, sent, received_from, sent_to, group=self.group, async_op=True), what
        )
        return found

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        try:
            begin().wait(datetime.timedelta(seconds=self.timeout))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RuntimeError(
                f"rank {self.rank} of {self.count} could not exchange {what} within {self.timeout:g} s ({reason}): another rank "
                "has ended, does something else, or needs longer than `timeout`; this process group is of no more use"
            ) from error


@dataclasses.dataclass(frozen=True)
class Transport:
    """Carries the rows that a halo names, of tensors whose axis 1 is heads and axis 2 the rows of this rank's shard.

    Args:
        halo: a tensor may have a multiple of its key heads: all heads of a group go with their key head.
        ranks: among whom.
        traffic: to which bytes are added, and rows where `counts_rows` is set.
    """

    halo: Halo
    ranks: Ranks
    traffic: Traffic | None = None
    counts_rows: bool = False

    @functools.cached_property
    def outgoing(self) -> list[list[tuple[int, int, Span]]]:
        """The pieces that this rank sends to each."""
        return [self.halo.pieces(other, self.ranks.rank) for other in range(self.ranks.count)]

    @functools.cached_property
    def incoming(self) -> list[list[tuple[int, int, Span]]]:
        """The pieces that come from each."""
        return [self.halo.pieces(self.ranks.rank, owner) for owner in range(self.ranks.count)]

    def carried(self, tensors: Sequence[Tensor], what: str) -> tuple[tuple[Tensor, ...], list[Pieces]]:
        """(the same tensors, to be used on), and of each what came: [B, heads of a group, rows, …] for every key head and span.

        Differentiable in all of them; every rank must then run backward, in the same order of calls.
        """
        *own, flat = _Carry.apply(self, what, *tensors)  # type: ignore[no-untyped-call]
        sizes = [size for pieces in self.incoming for size in self._sizes(pieces, tensors)]
        parts = iter(flat.split(sizes))
        spans = [len(self.halo.spans(self.ranks.rank, head)) for head in range(self.halo.num_kv_heads)]
        came: list[list[list[list[Tensor]]]] = [[[[] for _ in range(count)] for count in spans] for _ in own]
        for pieces in self.incoming:
            for head, at, (low, high) in pieces:
                for tensor, of_heads in zip(own, came, strict=True):
                    of_heads[head][at].append(next(parts).view(_piece_shape(tensor, self.halo, high - low)))
        return tuple(own), [
            [[_joined(parts_of, tensor, self.halo) for parts_of in of_spans] for of_spans in of_heads]
            for tensor, of_heads in zip(own, came, strict=True)
        ]

    def send(self, tensors: Sequence[Tensor], what: str) -> Tensor:
        """[n]: what came of all ranks, flat, in the order of `Halo.pieces`, and of the tensors for each piece."""
        parts, sent_to = [], []
        for pieces in self.outgoing:
            size = 0
            for head, _, (low, high) in pieces:
                for tensor in tensors:
                    part = _rows_of(tensor, self.halo, head, low, high).reshape(-1)
                    parts.append(part)
                    size += part.numel()
                if self.counts_rows and self.traffic is not None:
                    self.traffic.rows_sent += high - low
            sent_to.append(size)
        received_from = [sum(self._sizes(pieces, tensors)) for pieces in self.incoming]
        if self.counts_rows and self.traffic is not None:
            self.traffic.rows_received += sum(high - low for pieces in self.incoming for _, _, (low, high) in pieces)
        flat = torch.cat(parts) if parts else tensors[0].new_empty(0)
        return self._exchanged(flat, sent_to, received_from, what)

    def send_back(self, gradient: Tensor, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Gradients of the tensors: their own [B, heads, rows, …] with what all ranks send home of theirs, [n], added."""
        to = [sum(self._sizes(pieces, tensors)) for pieces in self.incoming]
        from_ = [sum(self._sizes(pieces, tensors)) for pieces in self.outgoing]
        home = self._exchanged(gradient.contiguous(), to, from_, what)
        # Sums of half precision are rounded once.
        sums = [x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in tensors]
        at = 0
        for pieces in self.outgoing:
            for head, _, (low, high) in pieces:
                for total in sums:
                    rows = _rows_of(total, self.halo, head, low, high)
                    rows += home[at : at + rows.numel()].view(rows.shape)
                    at += rows.numel()
        return [total.to(x.dtype) for total, x in zip(sums, tensors, strict=True)]

    def _sizes(self, pieces: list[tuple[int, int, Span]], tensors: Sequence[Tensor]) -> list[int]:
        """Numbers of each tensor in each piece."""
        row = [math.prod(_piece_shape(tensor, self.halo, 1)) for tensor in tensors]
        return [(high - low) * size for _, _, (low, high) in pieces for size in row]

    def _exchanged(self, flat: Tensor, sent_to: list[int], received_from: list[int], what: str) -> Tensor:
        if self.traffic is not None:
            self.traffic.bytes_sent += sum(sent_to) * flat.element_size()
            self.traffic.bytes_received += sum(received_from) * flat.element_size()
        if self.halo.is_empty:
            return flat.new_empty(0)  # nobody needs anything, as every rank knows
        return self.ranks.all_to_all(flat, sent_to, received_from, what)


class _Carry(torch.autograd.Function):
    """The tensors, as they are, and what came of other ranks' tensors, flat."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, what: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.transport, ctx.what = transport, what
        flat = transport.send([tensor.detach() for tensor in tensors], what)
        return *(tensor.view_as(tensor) for tensor in tensors), flat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *own, flat = gradients
        return None, None, *ctx.transport.send_back(flat, own, f"gradients of {ctx.what}")


class ScannedSums(torch.autograd.Function):
    """Of every rank's numbers [n], the sum over the ranks before this one; its gradient is the sum over those behind."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, numbers: Tensor) -> Tensor:
        ctx.ranks = ranks
        return ranks.gathered(numbers, "sums of gates")[: ranks.rank].sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ranks: Ranks = ctx.ranks
        return None, ranks.gathered(gradient, "gradients of sums of gates")[ranks.rank + 1 :].sum(0)


def _rows_of(tensor: Tensor, halo: Halo, head: int, low: int, high: int) -> Tensor:
    """[B, heads of a group, rows, …], a view."""
    group = tensor.shape[1] // halo.num_kv_heads
    return tensor[:, head * group : (head + 1) * group, low:high]


def _piece_shape(tensor: Tensor, halo: Halo, rows: int) -> list[int]:
    return [tensor.shape[0], tensor.shape[1] // halo.num_kv_heads, rows, *tensor.shape[3:]]


def _joined(pieces: list[Tensor], tensor: Tensor, halo: Halo) -> Tensor:
    """The rows of one span, of which several ranks may have parts; they came in the order of the ranks."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, 2) if pieces else tensor.new_empty(_piece_shape(tensor, halo, 0))
