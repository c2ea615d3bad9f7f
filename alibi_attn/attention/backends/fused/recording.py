"""Records the launches of a call once, and replays them for calls that differ in addresses only.

Preparing some three hundred arguments in Python costs more than launching the kernels. But for given sizes, strides and options
all of them are known except for the addresses of tensors. The second call of a kind is recorded: which kernels it launches, and
which arguments are numbers, and which are addresses in which tensor. From then on a call fills in its addresses.

A cache grows with every token. So a decoding call is of the same kind as the one before it while its keys take as many tiles: it
also fills in the number of keys and the position of its first query, and all else that kernels get depends on the tiles only.
"""

import dataclasses
import itertools
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.call import FIELDS
from alibi_attn.attention.backends.fused.configs import DECODE_QUERIES
from alibi_attn.attention.backends.fused.launch import WATCHED, Argument, Varying, on
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import TILE

Spec = AttentionSpec[Tensor]

MOST = 512  # kinds of calls that are kept
ALIGNMENT = 32  # words; every part of the scratch memory begins at a multiple of 128 bytes

Body = Callable[..., None]
Picked = Callable[[Sequence[Any]], Any]  # what stands at some places of a list


def replayed(
    kind: Hashable,
    tensors: Sequence[Tensor | None],
    body: Body,
    varying: tuple[int, ...] = (),
    growing: Sequence[int] = (),
    made: int = 0,
) -> None:
    """Runs `body(*tensors)`, or launches what it launched for tensors of the same kind.

    Args:
        kind: the numbers and options that `body` depends on.
        tensors: all tensors that the kernels read or write, except `scratch`. `body` may depend on their sizes, strides and
            dtypes, and on whether their addresses are multiples of 16. None stays None.
        varying: those of `Varying` that `kind` leaves out, all or none; of several calls (`launch.begin`) one after the other.
        growing: which of the tensors are [B, K, S, D] with an S that `kind` leaves out.
        made: how many of the last tensors were allocated for this call; their sizes follow from `kind` and the other tensors.
    """
    device = next(x.device for x in tensors if x is not None)
    if device.type == "cpu":
        body(*tensors)
        return
    given = len(tensors) - made
    signatures: list[Any] = [
        None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & 15 == 0) for x in tensors[:given]
    ]
    for at in growing:  # without the length
        dtype, shape, *rest = signatures[at]
        signatures[at] = (dtype, shape[:2], shape[3:], *rest)
    key = (kind, device.index, *signatures, *[x is None for x in tensors[given:]])
    with on(device):
        known = _KNOWN.get(key)
        if isinstance(known, Recording):
            known.replay(device, tensors, varying)
        elif known is None:  # many kinds occur once: lengths of texts, and of caches
            _keep(key, _SEEN)
            body(*tensors)
        else:
            _keep(key, _recorded(tensors, body, varying=len(varying)))


def replayed_call(
    kind: Hashable,
    spec: Spec,
    tensors: Sequence[Tensor | None],
    body: Body,
    *,
    made: int = 0,
    caches: Sequence[int] = (),
) -> None:
    """Runs `body(spec, *tensors)` for a spec that is `in_place`, or launches what it launched for a call of the same kind.

    Args:
        made: as for `replayed`.
        caches: which of the tensors are keys and values that may grow from call to call.
    """
    fields = vars(spec)
    given = [x if x is not None and isinstance(x, Tensor) else None for x in map(fields.__getitem__, FIELDS)]
    offset = spec.query_offset if isinstance(spec.query_offset, int) else None
    length: int | None = spec.key_len
    varying: tuple[Any, ...] = ()
    growing: list[int] = []
    if caches and _may_grow(spec, given):
        varying, growing = (spec.key_len, spec.query_offset), [len(FIELDS) + at for at in caches]
        offset, length = None, -spec.key_len // TILE  # negative: no length
    numbers = kind, spec.causal, spec.window, spec.scale, offset, length, spec.dropout_p, spec.tolerance

    def run(*views: Tensor | None) -> None:
        changed = {name: x for name, x in zip(FIELDS, views, strict=False) if x is not None}
        body(spec.changed(**changed), *views[len(FIELDS) :])

    replayed(numbers, (*given, *tensors), run, varying, growing, made)


_OF_HEADS = [name in ("slopes", "right_slopes") for name in FIELDS]


def _may_grow(spec: Spec, given: Sequence[Tensor | None]) -> bool:
    """Whether the queries are the last few, and no mask or bias of the keys changes its shape with their number."""
    last = isinstance(spec.query_offset, int) and spec.query_offset == spec.key_len - spec.query_len
    return (
        last and spec.query_len <= DECODE_QUERIES and all(x is None or y for x, y in zip(given, _OF_HEADS, strict=True))
    )


_SEEN = object()
_KNOWN: dict[Hashable, object] = {}
_LOCK = threading.Lock()


def _keep(key: Hashable, known: object) -> None:
    with _LOCK:
        if key not in _KNOWN and len(_KNOWN) >= MOST:
            del _KNOWN[next(iter(_KNOWN))]  # the oldest
        _KNOWN[key] = known


def _recorded(tensors: Sequence[Tensor | None], body: Body, *, varying: int) -> "Recording":
    """Runs `body` and records what it launches."""
    # Distinct objects, because a call may pass one tensor as query and as key.
    views = [None if x is None else x.detach() for x in tensors]
    WATCHED.recorder = recorder = _Recorder(views, varying=varying)
    try:
        body(*views)
    finally:
        WATCHED.recorder = None
    return recorder.recording()


@dataclasses.dataclass(frozen=True)
class Recording:
    """The launches of a kind of call. Their arguments are built from one list of values: addresses, numbers, and groups of these.

    Args:
        words: of scratch memory.
        addresses: (which of the tensors, which come before the scratch memory; offset in bytes).
        constants: the numbers.
        groups, runs: for each tuple of arguments, and for each launch, what picks its members from the list. The list begins
            with the numbers of `Varying`, if these vary.
    """

    words: int
    addresses: list[tuple[int, int]]
    constants: list[Any]
    groups: list[Picked]
    runs: list[tuple[Any, Picked]]

    def replay(self, device: torch.device, tensors: Sequence[Tensor | None], varying: tuple[int, ...] = ()) -> None:
        """Launches the kernels on other tensors of the same kind; the device is the current one."""
        bases = [0 if x is None else x.data_ptr() for x in tensors]
        if self.words:
            scratch = torch.empty(self.words, dtype=torch.int32, device=device)  # lives until all are launched
            bases.append(scratch.data_ptr())
        values = [*varying, *[bases[tensor] + offset for tensor, offset in self.addresses], *self.constants]
        for group in self.groups:
            values.append(group(values))
        for run, arguments in self.runs:
            run(*arguments(values))


# (kind of value, index among those of its kind)
Place = tuple[int, int]
_VARYING, _ADDRESS, _CONSTANT, _GROUP = range(4)


class _Recorder:
    """Sees what a body launches, and makes a `Recording` of it, given its count of `Varying` numbers, which are no constants."""

    def __init__(self, tensors: Sequence[Tensor | None], *, varying: int) -> None:
        self._varying, self.call = varying, 0
        self._launched: list[tuple[Any, list[Argument], tuple[Any, ...], int]] = []
        self._words, self._count = 0, len(tensors)
        # By id, with the tensors, so that none is reused: (which of the tensors, its address, offset).
        self._owners = {id(x): (at, x.data_ptr(), 0, x) for at, x in enumerate(tensors) if x is not None}
        self._places: dict[int, Place] = {}
        self._addresses: list[tuple[int, int]] = []
        self._constants: list[Any] = []
        self._groups: list[list[Place]] = []

    def allocated(self, tensor: Tensor) -> None:
        """Scratch memory, which will be a part of one tensor."""
        self._owners[id(tensor)] = self._count, tensor.data_ptr(), 4 * self._words, tensor
        self._words += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT

    def taken(self, part: Tensor, tensor: Tensor) -> None:
        """A part of a known tensor."""
        self._owners[id(part)] = *self._owners[id(tensor)][:3], part

    def launched(self, run: Any, arguments: Sequence[Argument], constants: tuple[Any, ...]) -> None:
        self._launched.append((run, list(arguments), constants, self.call))

    def recording(self) -> Recording:
        runs = []
        for run, arguments, constants, call in self._launched:
            self.call = call
            runs.append((run, [*map(self._place, arguments), *map(self._constant, constants)]))
        counts = self._varying, len(self._addresses), len(self._constants)
        begin = [0, *itertools.accumulate(counts)]

        def picked(places: list[Place]) -> Picked:
            return operator.itemgetter(*[begin[kind] + n for kind, n in places])

        groups = [picked(places) for places in self._groups]
        return Recording(
            self._words, self._addresses, self._constants, groups, [(run, picked(places)) for run, places in runs]
        )

    def _place(self, argument: Argument) -> Place:
        known = self._places.get(id(argument))
        if known is None:
            known = self._places[id(argument)] = self._new_place(argument)
        return known

    def _new_place(self, argument: Argument) -> Place:
        value, owner = argument.value, argument.owner
        if owner is None:
            return self._constant(value)
        if isinstance(owner, Varying):
            return (_VARYING, self.call * len(Varying) + owner) if self._varying else self._constant(value)
        if not isinstance(owner, Tensor):
            members = [self._place(x) for x in owner]
            return self._constant(value) if all(kind == _CONSTANT for kind, _ in members) else self._group(members)
        if isinstance(value, tuple):  # Rows
            return self._group([self._address(value[0], owner), *map(self._constant, value[1:])])
        return self._address(value, owner)

    def _address(self, address: int, owner: Tensor) -> Place:
        tensor, base, offset, _ = self._owners[id(owner)]
        self._addresses.append((tensor, offset + address - base))
        return _ADDRESS, len(self._addresses) - 1

    def _constant(self, value: object) -> Place:
        self._constants.append(value)
        return _CONSTANT, len(self._constants) - 1

    def _group(self, members: list[Place]) -> Place:
        self._groups.append(members)
        return _GROUP, len(self._groups) - 1
