"""Exchanges among the ranks of a process group, each with a time limit: all-gathers of a few numbers, and the rows of a halo.

Rows are sent in one uneven all-to-all, with one message per pair of ranks that shares any. They travel while the rank computes
what needs none of them. Backward sends the gradients back to the owners, again while the rank computes its own; the owners add
them in rank order, so results are bitwise reproducible.
"""

import contextlib
import dataclasses
import datetime
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
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
        self._begun(lambda: dist.all_gather(rows, numbers.contiguous(), group=self.group, async_op=True), what).wait()
        return torch.stack(rows)

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_from: list[int], sent_to: list[int], what: str
    ) -> "Pending":
        """Starts to send the numbers for all ranks, in rank order, and to fill `received` with theirs for this rank."""
        return self._begun(
            lambda: dist.all_to_all_single(received, sent, received_from, sent_to, group=self.group, async_op=True),
            what,
        )

    def _begun(self, begin: Callable[[], Any], what: str) -> "Pending":
        with self.reported(what):
            return Pending(self, begin(), what)

    @contextlib.contextmanager
    def reported(self, what: str) -> Iterator[None]:
        """Explains what an exchange that failed or took too long means."""
        started = time.monotonic()
        try:
            yield
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
class Pending:
    """An exchange that has been started; `wait` makes what follows use its result. NCCL blocks the stream and not the host."""

    ranks: Ranks
    work: Any
    what: str

    def wait(self) -> None:
        """Waits at most the time limit.

        Raises:
            RuntimeError: a rank has exited, or the time limit has passed.
        """
        with self.ranks.reported(self.what):
            self.work.wait(datetime.timedelta(seconds=self.ranks.timeout))


@dataclasses.dataclass(eq=False)
class Transport:
    """One exchange of the rows of a halo, for tensors [B, heads, rows of the shard, …], and in backward of their gradients.

    It holds no tensor of the graph, because the graph holds it.

    Args:
        halo: the rows to send. A tensor may have a multiple of its key heads; all heads of a group go with their key head.
        ranks: the process group.
        traffic: a counter to which bytes are added, and rows if `counts_rows` is set.
    """

    halo: Halo
    ranks: Ranks
    traffic: Traffic | None = None
    counts_rows: bool = False
    _what: str = ""  # names what is under way, in errors
    _row_size: int = 0  # the number of values in a row of a key head
    _pending: Pending | None = None
    _gradients: Tensor | None = None

    @functools.cached_property
    def outgoing(self) -> list[list[Piece]]:
        """The pieces that this rank sends to each rank."""
        return [self.halo.pieces(other, self.ranks.rank) for other in range(self.ranks.count)]

    @functools.cached_property
    def incoming(self) -> list[list[Piece]]:
        """The pieces that this rank receives from each rank."""
        return [self.halo.pieces(self.ranks.rank, owner) for owner in range(self.ranks.count)]

    def begun(self, tensors: Sequence[Tensor], what: str) -> "Flight":
        """Starts to send the rows of the tensors, and to receive those of other ranks."""
        self._what = what
        self._row_size = sum(math.prod(_piece_shape(tensor, self.halo, 1)) for tensor in tensors)
        *own, flat = _Begin.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return Flight(self, own, flat)

    def send(self, tensors: Sequence[Tensor]) -> Tensor:
        """Starts to send the rows for all ranks, by rank, piece and tensor; returns the buffer for those of other ranks."""
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
        received, self._pending = self._exchanged(flat, self.outgoing, self.incoming, self._what)
        return received

    def unpacked(self, flat: Tensor, tensors: Sequence[Tensor]) -> list[Pieces]:
        """The pieces received for each of the tensors; a piece is [B, heads of a group, rows, …]."""
        shapes = [
            _piece_shape(tensor, self.halo, high - low)
            for pieces in self.incoming
            for _, _, (low, high) in pieces
            for tensor in tensors
        ]
        parts = iter(flat.split([math.prod(shape) for shape in shapes]))
        views = iter([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
        spans = [len(self.halo.spans(self.ranks.rank, head)) for head in range(self.halo.num_kv_heads)]
        received: list[list[list[list[Tensor]]]] = [[[[] for _ in range(count)] for count in spans] for _ in tensors]
        for pieces in self.incoming:
            for head, at, _ in pieces:
                for of_heads in received:
                    of_heads[head][at].append(next(views))
        return [
            [[_joined(parts_of, tensor, self.halo) for parts_of in of_spans] for of_spans in of_heads]
            for tensor, of_heads in zip(tensors, received, strict=True)
        ]

    def added(self, received: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the tensors, [B, heads, rows, …], plus those that other ranks have sent back."""
        # Half precision is summed in fp32 and rounded once.
        sums = [x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in gradients]
        at = 0
        for pieces in self.outgoing:
            for head, _, (low, high) in pieces:
                for total in sums:
                    rows = _rows_of(total, self.halo, head, low, high)
                    rows += received[at : at + rows.numel()].view(rows.shape)
                    at += rows.numel()
        return [total.to(x.dtype) for total, x in zip(sums, gradients, strict=True)]

    def send_back(self, gradient: Tensor) -> None:
        """Starts to send the gradient of the received rows to their owners, unless that has been done."""
        if self._gradients is None:
            self._gradients, self._pending = self._exchanged(
                gradient.contiguous(), self.incoming, self.outgoing, f"gradients of {self._what}"
            )

    def wait(self) -> None:
        """Waits for what is under way."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def gradients(self) -> Tensor:
        """The gradients that other ranks send back, when they have come."""
        self.wait()
        received, self._gradients = self._gradients, None
        assert received is not None
        return received

    def _exchanged(
        self, flat: Tensor, to: list[list[Piece]], from_: list[list[Piece]], what: str
    ) -> tuple[Tensor, Pending | None]:
        sent_to, received_from = (
            [_count_rows([of_rank]) * self._row_size for of_rank in pieces] for pieces in (to, from_)
        )
        if self.traffic is not None:
            self.traffic.bytes_sent += sum(sent_to) * flat.element_size()
            self.traffic.bytes_received += sum(received_from) * flat.element_size()
        received = flat.new_empty(sum(received_from))
        if self.halo.is_empty:
            return received, None  # every rank has the same halo, so all of them skip the exchange
        return received, self.ranks.all_to_all(received, flat, received_from, sent_to, what)


@dataclasses.dataclass(frozen=True)
class Flight:
    """Rows on their way: `own` replaces the tensors sent, and `pieces` waits for the rows of other ranks.

    Differentiable in all tensors; every rank must then run backward, with its calls in the same order. The autograd engine runs
    what was called last first: if a rank calls what needs only `own` before `pieces`, then backward starts to send gradients
    back, computes those of `own`, and only then waits for the other ranks.
    """

    transport: Transport
    own: list[Tensor]
    flat: Tensor

    def pieces(self) -> list[Pieces]:
        """The pieces received for each of the tensors."""
        flat = _Finish.apply(self.transport, self.flat)  # type: ignore[no-untyped-call]
        return self.transport.unpacked(flat, self.own)


class _Begin(torch.autograd.Function):
    """(*tensors unmodified, the buffer for the values from other ranks). Backward waits for gradients and adds them."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.transport = transport
        flat = transport.send([tensor.detach() for tensor in tensors])
        return *(tensor.view_as(tensor) for tensor in tensors), flat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *own, flat = gradients
        transport: Transport = ctx.transport
        transport.send_back(flat)  # `_Finish` has done so, except on a rank that received no rows
        return None, *transport.added(transport.gradients(), own)


class _Finish(torch.autograd.Function):
    """The values from other ranks. Backward starts to send their gradients back."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, flat: Tensor) -> Tensor:
        ctx.transport = transport
        transport.wait()
        return flat.view_as(flat)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.transport.send_back(gradient)
        return None, gradient


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
