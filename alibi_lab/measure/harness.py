"""The steps that all benchmarks share: check a peer against fp64, time the peers in turns, keep the rows as a record.

    inputs -> checked(peer, …) -> timed(candidates) -> rows by peer -> keep(…)

A record grows by one row per peer and length and is rewritten after each length, so an interrupted benchmark keeps its
measurements.
"""

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_lab import records
from alibi_lab.measure.correctness import Reference, computed
from alibi_lab.measure.peers import Attention, Peer, reason
from alibi_lab.measure.timing import medians_ms, peak_memory_bytes

Row = dict[str, records.Json]
Rows = Mapping[str, Mapping[str, records.Json]]  # by peer
Columns = dict[str, dict[str, list[records.Json]]]  # the curves of a record: by peer, one list per column of its rows
Config = Mapping[str, records.Json]
Metrics = Mapping[str, float | None]
Say = Callable[[str], None]

MEMORY_LENGTHS = (8192, 16384, 32768, 65536)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A peer that passed its check and can be timed, or one that is left out, with the reason in its row.

    Args:
        forward, backward: the calls to time; None = not timed.
    """

    row: Row
    forward: Callable[[], object] | None = None
    backward: Callable[[], object] | None = None


def checked(
    peer: Peer, reference: Reference, query: Tensor, key: Tensor, value: Tensor, grad: Tensor | None, slopes: Tensor
) -> Candidate:
    """Prepares a peer for these inputs and compares it with fp64. Without `grad` only the forward pass is compared.

    Raises:
        RuntimeError: the peer is wrong, or it is one of our calls and cannot run.
    """
    length = key.shape[2]
    row: Row = {"length": length, "relative_error": None, "gradient_error": None, "why_not": None}
    if length > peer.longest:
        return Candidate({**row, "why_not": f"not tried beyond {peer.longest} tokens"})
    query, key, value = (x if peer.dtype is None else x.to(peer.dtype) for x in (query, key, value))
    grad = None if grad is None or length > peer.longest_backward else grad.to(query.dtype)
    try:
        attention = peer.prepare(query, key, value, slopes)
        outputs = computed(attention, query, key, value, grad)
    except (RuntimeError, ImportError) as refusal:
        if peer.is_ours:
            raise
        return Candidate({**row, "why_not": reason(refusal)})
    errors = reference.compare(peer, outputs)
    if errors.wrong is not None:
        raise RuntimeError(f"at {length} tokens {errors.wrong}")
    row |= {"relative_error": errors.output, "gradient_error": errors.gradient}
    return candidate(row, attention, query, key, value, grad)


def candidate(
    row: Row, attention: Attention, query: Tensor, key: Tensor, value: Tensor, grad: Tensor | None
) -> Candidate:
    """The calls to time: a forward pass without gradients and, if `grad` is given, the backward pass alone."""

    def forward() -> object:
        with torch.no_grad():
            return attention(query, key, value)

    if grad is None:
        return Candidate(row, forward)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = attention(*leaves)
    return Candidate(row, forward, lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True))


def timed(candidates: Mapping[str, Candidate], *, repeats: int, seconds: float) -> dict[str, Row]:
    """The rows with `forward_ms` and `backward_ms`: medians of forward passes in turns, and then of backward passes in turns."""
    forward, backward = (
        medians_ms({n: call for n, call in calls.items() if call is not None}, repeats=repeats, seconds=seconds)
        for calls in ({n: c.forward for n, c in candidates.items()}, {n: c.backward for n, c in candidates.items()})
    )
    return {
        name: {**each.row, "forward_ms": forward.get(name), "backward_ms": backward.get(name)}
        for name, each in candidates.items()
    }


def keep(
    out: Path,
    configs: Mapping[str, Config],
    steps: Iterable[Mapping[str, Rows]],
    *,
    summary: Callable[[Columns], Metrics] = lambda columns: {},
) -> list[Path]:
    """Measures and saves one benchmark record per config. A record is rewritten after every step that has rows for it.

    Args:
        configs: by record name.
        steps: rows by record and peer. An iterator: each step is measured when it is read.
        summary: the metrics of a record from its curves.

    Raises:
        FileExistsError: one of the records already exists; nothing is measured.
    """
    for name, config in configs.items():
        records.expect_new(out, "benchmark", name, config)
    curves: dict[str, Columns] = {name: {} for name in configs}
    started: dict[str, datetime.datetime] = {}
    paths: dict[str, Path] = {}
    begun = datetime.datetime.now(datetime.UTC)
    for step in steps:
        for name, rows in step.items():
            for peer, row in rows.items():
                append(curves[name], peer, row)
            record = records.make(
                "benchmark",
                name,
                config=configs[name],
                metrics=summary(curves[name]),
                curves=curves[name],
                started=started.setdefault(name, begun),
            )
            paths[name] = records.grow(record, out)
        begun = datetime.datetime.now(datetime.UTC)
    return [paths[name] for name in configs]


def keep_by_length(
    out: Path,
    name: str,
    configs: Mapping[str, Config],
    *,
    lengths: Sequence[int],
    measure: Callable[[str, int], Rows],
    say: Say,
    train_step: Callable[[str, int], None] | None = None,
    summary: Callable[[Columns], Metrics] = lambda columns: {},
) -> list[Path]:
    """`keep` for one record "name/kind" per kind of input in `configs`, measured length by length.

    Args:
        measure: (kind, length) -> a row per peer.
        train_step: (kind, length), run in a fresh process to measure its peak memory; None = not measured.
    """

    def steps() -> Iterator[Mapping[str, Rows]]:
        for kind in configs:
            for length in sorted(lengths):
                yield {f"{name}/{kind}": measure(kind, length)}
            for length in [n for n in MEMORY_LENGTHS if n in lengths and train_step is not None]:
                peak = peak_memory_bytes(train_step, kind, length)  # type: ignore[arg-type]
                say(f"{kind} {length:>6}: forward + backward adds {peak / 2**30:.2f} GiB to a fresh process")
                yield {f"{name}/{kind}": {"memory": {"length": length, "peak_memory_bytes": peak}}}

    return keep(out, {f"{name}/{kind}": config for kind, config in configs.items()}, steps(), summary=summary)


def append(columns: Columns, name: str, row: Mapping[str, records.Json]) -> None:
    """Adds a row to the columns of one peer."""
    for column, figure in row.items():
        columns.setdefault(name, {}).setdefault(column, []).append(figure)


def whole_times(columns: Mapping[str, list[records.Json]]) -> dict[int, float]:
    """By length, the milliseconds of forward and backward together, where both were measured."""
    times = zip(*(columns.get(name, []) for name in ("length", "forward_ms", "backward_ms")), strict=False)
    return {int(number(n)): number(f) + number(b) for n, f, b in times if f is not None and b is not None}


def whole_ms(row: Mapping[str, records.Json]) -> float:
    """The milliseconds of forward and backward together."""
    return sum(number(row[name]) for name in ("forward_ms", "backward_ms") if row[name] is not None)


def number(value: records.Json) -> float:
    """A value of a row that is known to be a number."""
    assert isinstance(value, int | float)
    return float(value)


def compared(times_ms: Mapping[str, float], digits: int = 0) -> str:
    """A line for the console: every peer's time, and its ratio to ours."""
    return ", ".join(f"{name} {ms:.{digits}f} ms ({ms / times_ms['ours']:.2f}×)" for name, ms in times_ms.items())
