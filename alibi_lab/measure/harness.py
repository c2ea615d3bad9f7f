"""The steps that all benchmarks share: check a peer against fp64, time the peers in turns, keep the rows as a record.

    inputs -> checked(peer, …) -> timed(candidates) -> rows by peer -> keep(…), which also prints them

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

WAYS = ("forward_ms", "backward_ms")
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
    return candidate(row, attention, (query, key, value), grad)


def candidate(row: Row, attention: Attention, inputs: Sequence[Tensor], grad: Tensor | None) -> Candidate:
    """The calls to time: a forward pass without gradients and, if `grad` is given, the backward pass alone."""
    forward = forward_pass(attention, inputs)
    if grad is None:
        return Candidate(row, forward)
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attention(*leaves)
    return Candidate(row, forward, lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True))


def forward_pass(attention: Callable[..., object], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """The call without gradients."""
    return torch.no_grad()(lambda: attention(*inputs))


def training_step(attention: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Callable[[], object]:
    """The call with gradients, forward and backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(attention(*leaves), leaves, grad)


def measured(
    peers: Iterable[Peer],
    inputs: Sequence[Tensor],
    slopes: Tensor,
    *,
    repeats: int,
    seconds: float,
    also: Mapping[str, Candidate] | None = None,
) -> dict[str, Row]:
    """Checks every peer and times them in turns, with other calls if given; returns their rows.

    Args:
        inputs: (query, key, value, gradient of the output).
    """
    query, key, value, grad = inputs
    by_dropout = {
        p: Reference.of(query, key, value, grad, slopes, dropout_p=p) for p in {peer.dropout_p for peer in peers}
    }
    candidates = {
        peer.name: checked(peer, by_dropout[peer.dropout_p], query, key, value, grad, slopes) for peer in peers
    }
    return timed({**(also or {}), **candidates}, repeats=repeats, seconds=seconds)


def timed(candidates: Mapping[str, Candidate], *, repeats: int, seconds: float) -> dict[str, Row]:
    """The rows with `forward_ms` and `backward_ms`: medians of forward passes in turns, and then of backward passes in turns."""
    rows = {name: {**each.row} for name, each in candidates.items()}
    for way in ("forward", "backward"):
        calls = {name: call for name, each in candidates.items() if (call := getattr(each, way)) is not None}
        medians = medians_ms(calls, repeats=repeats, seconds=seconds)
        for name, row in rows.items():
            row[f"{way}_ms"] = medians.get(name)
    return rows


def keep(
    out: Path,
    configs: Mapping[str, Config],
    steps: Iterable[Mapping[str, Rows]],
    *,
    say: Say,
    summary: Callable[[Columns], Metrics] = lambda columns: {},
    ours: Callable[[str, str], bool] = lambda name, peer: False,
) -> list[Path]:
    """Measures, prints and saves one benchmark record per config, rewritten after every step that has rows for it.

    Args:
        configs: by record name.
        steps: rows by record and peer. An iterator: each step is measured when it is read.
        summary: the metrics of a record from its curves.
        ours: (record, peer) -> whether a wrong result of the peer, a row with `right` False, is an error.

    Raises:
        FileExistsError: one of the records already exists; nothing is measured.
        RuntimeError: one of our results was wrong; the records are kept.
    """
    for name, config in configs.items():
        records.expect_new(out, "benchmark", name, config)
    curves: dict[str, Columns] = {name: {} for name in configs}
    started: dict[str, datetime.datetime] = {}
    paths: dict[str, Path] = {}
    wrong: list[str] = []
    begun = datetime.datetime.now(datetime.UTC)
    for step in steps:
        for name, rows in step.items():
            report(name, rows, say)
            for peer, row in rows.items():
                append(curves[name], peer, row)
                if row.get("right") is False and ours(name, peer):
                    wrong.append(f"{name}, {peer}: at {row['length']} tokens {row['why_not']}")
            record = records.make(
                "benchmark",
                name,
                config=configs[name],
                metrics=summary(curves[name]),
                curves=by_length(curves[name]),
                started=started.setdefault(name, begun),
            )
            paths[name] = records.grow(record, out)
        begun = datetime.datetime.now(datetime.UTC)
    for name in paths:
        if figures := summary(curves[name]):
            say(f"{name}: {figures_of(figures)}")
    if wrong:
        raise RuntimeError("; ".join(wrong))
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
                yield {f"{name}/{kind}": {"memory": {"length": length, "peak_memory_bytes": peak}}}

    named = {f"{name}/{kind}": config for kind, config in configs.items()}
    return keep(out, named, steps(), summary=summary, say=say)


def attention_config(peers: Iterable[Peer], lengths: Sequence[int], **more: records.Json) -> Config:
    """The config of a benchmark of attention; by default 8 heads × 64 in fp32."""
    notes = {peer.name: peer.note for peer in peers}
    sizes: Row = {"heads": 8, "head_dim": 64, "dtype": "float32"}
    return {**sizes, "lengths": list(lengths), "peers": notes, **more}


def append(columns: Columns, name: str, row: Mapping[str, records.Json]) -> None:
    """Adds a row to the columns of one peer."""
    for column, figure in row.items():
        columns.setdefault(name, {}).setdefault(column, []).append(figure)


def by_length(curves: Columns) -> Columns:
    """The same with the rows of every peer in the order of their lengths; they may be measured in another order."""
    found: Columns = {}
    for peer, columns in curves.items():
        order = torch.tensor(columns.get("length", [])).argsort(stable=True).tolist()
        found[peer] = {name: [rows[i] for i in order] if order else rows for name, rows in columns.items()}
    return found


def whole_times(columns: Mapping[str, list[records.Json]]) -> dict[int, float]:
    """By length, the milliseconds of forward and backward together, where both were measured."""
    times = zip(*(columns.get(name, []) for name in ("length", *WAYS)), strict=False)
    return {int(number(n)): number(f) + number(b) for n, f, b in times if f is not None and b is not None}


def whole_ms(row: Mapping[str, records.Json]) -> float:
    """The milliseconds of forward and backward together."""
    return sum(number(row[way]) for way in WAYS if row.get(way) is not None)


def number(value: records.Json) -> float:
    """A value of a row that is known to be a number."""
    assert isinstance(value, int | float)
    return float(value)


def report(name: str, rows: Rows, say: Say) -> None:
    """Prints a line per row: its numbers and its time over ours, or why it is left out."""
    ours = rows.get("ours", {})
    for peer, row in rows.items():
        described = str(row["why_not"]) if row.get("why_not") else figures_of(row)
        common = [way for way in WAYS if row.get(way) is not None and ours.get(way) is not None]
        if common and peer != "ours":
            ratio = sum(number(row[way]) for way in common) / sum(number(ours[way]) for way in common)
            described += f", {ratio:.2f}× ours"
        say(f"{name} {peer}: {described}")


def figures_of(row: Mapping[str, records.Json]) -> str:
    """The names and values of a row for the console."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if value is not None
    )
