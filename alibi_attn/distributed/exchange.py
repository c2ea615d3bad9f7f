"""Exchanges among the ranks of a process group, each with a time limit: all-gathers of a few numbers, and the rows of a halo.

Rows are sent in one uneven all-to-all, with one message per pair of ranks that shares any. Backward sends the gradients back to
the owners, which add them in rank order, so results are bitwise reproducible.
"""

import dataclasses
import datetime
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from alibi_attn.distributed.halos import Halo, Piece

Pieces = list[list[Tensor]]  # one tensor per key head and span


@dataclasses.dataclass
class Traffic:
    """Counts the rows and bytes that this rank sends and receives; a call adds its traffic to the given counter.

    Attributes:
        rows_sent, rows_received: rows of one key head; a row is a key and its value for the whole batch.
        bytes_sent, bytes_received: bytes of rows, biases, masks and segments; in backward, of gradients.
    """

    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A process group with a time limit.

    Args:
        group: None = all processes.
        timeout: time limit of each exchange, in seconds.
    """

    group: dist.ProcessGroup | None
    timeout: float

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """R"""
        return dist.get_world_size(self.group)

    def gathered(self, numbers: Tensor, what: str) -> Tensor:
        """The numbers [n] of every rank, [R, n]; n is the same on all ranks. `what` names them in errors.

        Raises:
            RuntimeError: a rank has exited, or the time limit has passed.
        """
        rows = list(torch.empty(self.count, numbers.numel(), dtype=numbers.dtype, device=numbers.device))
        self._wait(lambda: dist.all_gather(rows, numbers.contiguous(), group=self.group, async_op=True), what)
        return torch.stack(rows)

    def all_to_all(self, sent: Tensor, sent_to: list[int], received_from: list[int], what: str) -> Tensor:
        """The numbers received from all ranks, [Σ received_from]; `sent` holds the numbers for all ranks, both in rank order."""
        received = sent.new_empty(sum(received_from))
        self._wait(
            lambda: dist.all_to_all_single(received, sent, received_from, sent_to, group=self.group, async_op=True),
            what,
        )
        return received

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        started = time.monotonic()
        try:
            begin().wait(datetime.timedelta(seconds=self.timeout))
        except RuntimeError as error:
            reason, waited = str(error).splitlines()[0], time.monotonic() - started
            if waited < 0.9 * self.timeout:
                happened = f"failed after {waited:.1f} s ({reason}): another rank has exited or lost its connection"
            else:
                happened = (
                    f"did not finish within {self.timeout:g} s ({reason}): another rank hangs, runs other code, or needs a "
                    "longer `timeout`"
                )
            raise RuntimeError(
                f"rank {self.rank} of {self.count}: exchanging {what} {happened}; this process group can no longer be used"
            ) from error


@dataclasses.dataclass(frozen=True)
class Transport:
    """Exchanges the rows of a halo, for tensors [B, heads, rows of the shard, …].

    Args:
        halo: the rows to send. A tensor may have a multiple of its key heads; all heads of a group go with their key head.
        ranks: the process group.
        traffic: a counter to which bytes are added, and rows if `counts_rows` is set.
    """

    halo: Halo
    ranks: Ranks
    traffic: Traffic | None = None
    counts_rows: bool = False

    @functools.cached_property
    def outgoing(self) -> list[list[Piece]]:
        """The pieces that this rank sends to each rank."""
        return [self.halo.pieces(other, self.ranks.rank) for other in range(self.ranks.count)]

    @functools.cached_property
    def incoming(self) -> list[list[Piece]]:
        """The pieces that this rank receives from each rank."""
        return [self.halo.pieces(self.ranks.rank, owner) for owner in range(self.ranks.count)]

    def carried(self, tensors: Sequence[Tensor], what: str) -> tuple[tuple[Tensor, ...], list[Pieces]]:
        """(the tensors, the pieces received for each of them); a piece is [B, heads of a group, rows, …].

        Use the returned tensors in place of the inputs: gradients from other ranks flow through them. Differentiable in all
        tensors; every rank must then run backward, with its calls in the same order.
        """
        *own, flat = _Carry.apply(self, what, *tensors)  # type: ignore[no-untyped-call]
        sizes = [size for pieces in self.incoming for size in self._sizes(pieces, tensors)]
        parts = iter(flat.split(sizes))
        spans = [len(self.halo.spans(self.ranks.rank, head)) for head in range(self.halo.num_kv_heads)]
        received: list[list[list[list[Tensor]]]] = [[[[] for _ in range(count)] for count in spans] for _ in own]
        for pieces in self.incoming:
            for head, at, (low, high) in pieces:
                for tensor, of_heads in zip(own, received, strict=True):
                    of_heads[head][at].append(next(parts).view(_piece_shape(tensor, self.halo, high - low)))
        return tuple(own), [
            [[_joined(parts_of, tensor, self.halo) for parts_of in of_spans] for of_spans in of_heads]
            for tensor, of_heads in zip(own, received, strict=True)
        ]

    def send(self, tensors: Sequence[Tensor], what: str) -> Tensor:
        """Sends this rank's pieces; returns the values from all ranks, flattened, by rank, piece and tensor."""
        parts = [
            _rows_of(tensor, self.halo, head, low, high).reshape(-1)
            for pieces in self.outgoing
            for head, _, (low, high) in pieces
            for tensor in tensors
        ]
        if self.counts_rows and self.traffic is not None:
            self.traffic.rows_sent += _count_rows(self.outgoing)
            self.traffic.rows_received += _count_rows(self.incoming)
        flat = torch.cat(parts) if parts else tensors[0].new_empty(0)
        return self._exchanged(flat, self._totals(self.outgoing, tensors), self._totals(self.incoming, tensors), what)

    def send_back(self, gradient: Tensor, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The gradients of the tensors, [B, heads, rows, …], plus the gradients that other ranks send back.

        `gradient` [n] belongs to the received rows and is sent to their owners.
        """
        to, from_ = self._totals(self.incoming, tensors), self._totals(self.outgoing, tensors)
        received = self._exchanged(gradient.contiguous(), to, from_, what)
        # Half precision is summed in fp32 and rounded once.
        sums = [x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in tensors]
        at = 0
        for pieces in self.outgoing:
            for head, _, (low, high) in pieces:
                for total in sums:
                    rows = _rows_of(total, self.halo, head, low, high)
                    rows += received[at : at + rows.numel()].view(rows.shape)
                    at += rows.numel()
        return [total.to(x.dtype) for total, x in zip(sums, tensors, strict=True)]

    def _totals(self, pieces_by_rank: list[list[Piece]], tensors: Sequence[Tensor]) -> list[int]:
        """The element count of all pieces of each rank."""
        return [sum(self._sizes(pieces, tensors)) for pieces in pieces_by_rank]

    def _sizes(self, pieces: list[Piece], tensors: Sequence[Tensor]) -> list[int]:
        """The element count of each tensor in each piece."""
        row = [math.prod(_piece_shape(tensor, self.halo, 1)) for tensor in tensors]
        return [(high - low) * size for _, _, (low, high) in pieces for size in row]

    def _exchanged(self, flat: Tensor, sent_to: list[int], received_from: list[int], what: str) -> Tensor:
        if self.traffic is not None:
            self.traffic.bytes_sent += sum(sent_to) * flat.element_size()
            self.traffic.bytes_received += sum(received_from) * flat.element_size()
        if self.halo.is_empty:
            return flat.new_empty(0)  # every rank has the same halo, so all of them skip the exchange
        return self.ranks.all_to_all(flat, sent_to, received_from, what)


class _Carry(torch.autograd.Function):
    """(*tensors unmodified, the values received from other ranks, flattened)."""

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
    """The sum of the numbers [n] over all ranks before this one. The gradient is the sum over all ranks after it."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, numbers: Tensor) -> Tensor:
        ctx.ranks = ranks
        return ranks.gathered(numbers, "sums of gates")[: ranks.rank].sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ranks: Ranks = ctx.ranks
        return None, ranks.gathered(gradient, "gradients of sums of gates")[ranks.rank + 1 :].sum(0)


def _count_rows(pieces_by_rank: list[list[Piece]]) -> int:
    return sum(high - low for pieces in pieces_by_rank for _, _, (low, high) in pieces)


def _rows_of(tensor: Tensor, halo: Halo, head: int, low: int, high: int) -> Tensor:
    """A view, [B, heads of a group, rows, …]."""
    group = tensor.shape[1] // halo.num_kv_heads
    return tensor[:, head * group : (head + 1) * group, low:high]


def _piece_shape(tensor: Tensor, halo: Halo, rows: int) -> list[int]:
    return [tensor.shape[0], tensor.shape[1] // halo.num_kv_heads, rows, *tensor.shape[3:]]


def _joined(pieces: list[Tensor], tensor: Tensor, halo: Halo) -> Tensor:
    """Joins the parts of one span, which several ranks may hold; parts are in rank order."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, 2) if pieces else tensor.new_empty(_piece_shape(tensor, halo, 0))
