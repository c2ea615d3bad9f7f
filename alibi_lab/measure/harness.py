"""The path that every benchmark takes: check a peer against the truth, time the peers in turns, keep the rows as a record.

    case -> inputs -> truth in fp64 -> checked calls -> medians of turns -> rows by peer -> `keep`, which also prints them

A record grows by one row per peer and case and is rewritten after each case, so an interrupted benchmark keeps its measurements.
"""

import dataclasses
import datetime
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_lab import records
from alibi_lab.lab.config import check_choice
from alibi_lab.measure import timing
from alibi_lab.measure.inputs import Case, Inputs, draw
from alibi_lab.measure.peers import Peer, missing, reason
from alibi_lab.measure.truth import Truth, results_of

Row = Mapping[str, records.Json]
Rows = Mapping[str, Row]  # by peer
Columns = dict[str, dict[str, list[records.Json]]]  # the curves of a record: by peer, one list per column of its rows
Config = Mapping[str, records.Json]
Metrics = Mapping[str, float | None]
Say = Callable[[str], None]

GRAPH = ", graph"  # ends the name of a call that a CUDA graph replays


@dataclasses.dataclass(kw_only=True)
class Timed:
    """The columns of a call of attention, or of a whole model; None = not measured.

    Args:
        length, batch: keys per sequence, and sequences. Of a model: the longest text.
        tokens: of a model: of all texts together.
        relative_error, gradient_error: see `truth.Errors`.
        error: of a model's outputs, as a share of the norm of the true ones.
        right: whether rounding explains the errors.
        forward_ms: a call without gradients; a pass, or a token, of a model.
        backward_ms: what a forward and a backward pass take beyond it.
        attention_share: of a model's time, the share of attention without its linear layers.
        host_us: on a GPU, microseconds until the host has launched a step.
        peak_memory_bytes: of a step, with its inputs; on a CPU only for our call. What a model adds to a fresh process.
        why_not: why it was not timed.
    """

    length: int
    batch: int | None = None
    tokens: int | None = None
    relative_error: float | None = None
    gradient_error: float | None = None
    error: float | None = None
    right: bool | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    attention_share: float | None = None
    host_us: float | None = None
    peak_memory_bytes: int | None = None
    why_not: str | None = None


class Call(NamedTuple):
    """A peer that is prepared for a case.

    Args:
        results: the output and the gradients, each [B, H, T, D].
        forward: a call without gradients.
        step: forward and backward; None = only the forward pass is measured.
    """

    results: Callable[[], Sequence[Tensor]]
    forward: Callable[[], object]
    step: Callable[[], object] | None


@dataclasses.dataclass
class Budget:
    """How much may be measured.

    Args:
        repeats, seconds: most turns per call, and seconds of the turns of one case and direction; the median counts.
        end: on `time.perf_counter`, after which nothing more is measured.
        patience_s: a peer whose step would take longer, judged by the case before, is left out.
        backward, memory: also measure the backward pass, and our peak memory in a fresh process.
        graphs: also replay every call as a CUDA graph.
    """

    repeats: int = 5
    seconds: float = 20.0
    end: float = float("inf")
    patience_s: float = float("inf")
    backward: bool = True
    memory: bool = False
    graphs: bool = False
    pace: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of a peer's step per score

    def why_not(self, peer: Peer, case: Case) -> str | None:
        """Why a peer is not measured, or None."""
        expected = self.pace.get(peer.name, 0.0) * case.scores
        if case.length > peer.longest:
            return f"not tried beyond {peer.longest} tokens"
        if time.perf_counter() > self.end:
            return "no time was left"
        if not peer.is_ours and expected > self.patience_s:
            return f"a step would take {expected:.0f} s"
        return None


def measured(peers: Sequence[Peer], case: Case, inputs: Inputs, budget: Budget) -> dict[str, Timed]:
    """A row per peer: each is compared with the truth, then the right ones are timed in turns."""
    truth_of = functools.cache(functools.partial(Truth.of, inputs))
    rows, calls = dict[str, Timed](), dict[str, Call]()
    for peer in peers:
        rows[peer.name] = row = Timed(length=case.length, batch=len(inputs.key), why_not=budget.why_not(peer, case))
        if row.why_not is not None:
            continue
        truth = truth_of(biased=peer.biased, dropout_p=peer.dropout_p)
        try:
            call = prepared(peer, inputs, backward=budget.backward and case.length <= peer.longest_backward)
            row.relative_error, row.gradient_error, row.why_not = truth.compare(peer, call.results())
            row.right = row.why_not is None
            if row.right:
                calls[peer.name] = call
        except failures() as refusal:
            row.right, row.why_not = (False if peer.is_ours else None), reason(refusal)
    for name, call in list(calls.items()) if budget.graphs else ():
        step = None if call.step is None else timing.replayable(call.step, case.device)
        calls[name + GRAPH] = Call(call.results, timing.replayable(call.forward, case.device), step)
        rows[name + GRAPH] = dataclasses.replace(rows[name])
    _time(rows, calls, case, budget)
    if budget.memory and case.device.type == "cpu" and "ours" in calls:
        ours = next(peer for peer in peers if peer.name == "ours")
        rows["ours"].peak_memory_bytes = timing.in_fresh_process(_peak_bytes, ours, case, budget.backward)
    return {way: rows[way] for peer in peers for way in (peer.name, peer.name + GRAPH) if way in rows}


@functools.cache
def failures() -> tuple[type[Exception], ...]:
    """What ends a peer and not the benchmark: its row has the reason. Time on a GPU is rare."""
    known: list[type[Exception]] = [ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError]
    known += [RuntimeError, TypeError, ValueError]
    if missing(["triton"]) is None:
        from triton.errors import TritonError  # of its compiler

        known.append(TritonError)
    return tuple(known)


def prepared(peer: Peer, inputs: Inputs, *, backward: bool) -> Call:
    """The calls of a peer on these inputs."""
    inputs = inputs.converted(peer.dtype or inputs.query.dtype)
    if peer.framework == "jax":
        from alibi_lab.measure.peers.dot_product_attention import jax_call

        return jax_call(peer, inputs, backward=backward)
    attention = peer.prepare(inputs)
    leaves = [inputs.query, inputs.key, inputs.value]
    if peer.gated and inputs.log_fgate is not None:
        leaves.append(inputs.log_fgate)
    return Call(
        functools.partial(results_of, attention, leaves, inputs.grad if backward else None),
        forward_pass(attention, leaves),
        training_step(attention, leaves, inputs.grad) if backward else None,
    )


def forward_pass(attention: Callable[..., object], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """The call without gradients."""
    return torch.no_grad()(lambda: attention(*inputs))


def training_step(attention: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Callable[[], object]:
    """The call with gradients, forward and backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.enable_grad()(lambda: torch.autograd.grad(attention(*leaves), leaves, grad))


def _time(rows: Mapping[str, Timed], calls: Mapping[str, Call], case: Case, budget: Budget) -> None:
    """Fills the times of the rows that have calls: forward passes in turns, and then steps in turns."""
    timed = timing.timer(case.device)
    turns = functools.partial(
        timing.medians_of, timed=timed, repeats=budget.repeats, seconds=budget.seconds, end=budget.end
    )
    forward = turns({name: call.forward for name, call in calls.items()})
    steps = turns({name: call.step for name, call in calls.items() if call.step is not None})
    for name, ms in forward.items():
        rows[name].forward_ms = ms
        if name in steps:
            rows[name].backward_ms = max(steps[name] - ms, 0.0)
        if not name.endswith(GRAPH):
            budget.pace[name] = steps.get(name, ms) / 1e3 / case.scores
        if case.device.type == "cuda":
            whole = calls[name].step or calls[name].forward
            rows[name].host_us = timing.host_us(whole)
            torch.cuda.reset_peak_memory_stats()
            whole()
            rows[name].peak_memory_bytes = torch.cuda.max_memory_allocated()


def _peak_bytes(peer: Peer, case: Case, backward: bool) -> int:
    """The bytes by which a call raises the peak memory of this process, with its inputs."""
    before = timing.peak_rss_bytes()
    call = prepared(peer, draw(case), backward=backward)
    (call.step or call.forward)()
    return timing.peak_raised_by(before)


def keep(
    out: Path,
    configs: Mapping[str, Config],
    steps: Iterable[Mapping[str, Mapping[str, Timed | Row]]],
    *,
    say: Say,
    summary: Callable[[str, Columns], Metrics] = lambda name, columns: {},
) -> list[Path]:
    """Measures, prints and saves one benchmark record per config, rewritten after every step that has rows for it.

    Args:
        configs: by record name.
        steps: rows by record and peer. An iterator: each step is measured when it is read.
        summary: the metrics of a record from its name and its curves.

    Raises:
        FileExistsError: one of the records already exists; nothing is measured.
        RuntimeError: one of our results was wrong, a row of "ours…" with `right` False; the records are kept.
    """
    for name, config in configs.items():
        records.expect_new(out, "benchmark", name, config)
    curves: dict[str, Columns] = {name: {} for name in configs}
    started: dict[str, datetime.datetime] = {}
    paths: dict[str, Path] = {}
    wrong: list[str] = []
    begun = datetime.datetime.now(datetime.UTC)
    for step in steps:
        for name, of_peers in step.items():
            rows = {peer: dataclasses.asdict(row) if isinstance(row, Timed) else row for peer, row in of_peers.items()}
            report(name, rows, say)
            for peer, row in rows.items():
                for column, figure in row.items():
                    curves[name].setdefault(peer, {}).setdefault(column, []).append(figure)
                if row.get("right") is False and peer.startswith("ours"):
                    wrong.append(f"{name}, {peer}: at {row['length']} tokens {row['why_not']}")
            record = records.make(
                "benchmark",
                name,
                config=configs[name],
                metrics=summary(name, curves[name]),
                curves=by_length(curves[name]),
                started=started.setdefault(name, begun),
            )
            paths[name] = records.grow(record, out)
        begun = datetime.datetime.now(datetime.UTC)
    for name in paths:
        if figures := summary(name, curves[name]):
            say(f"{name}: {figures_of(figures)}")
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return [paths[name] for name in configs if name in paths]


def table(
    cases: Mapping[str, Sequence[Case]],
    peers: Callable[[Case, Inputs], Sequence[Peer]],
    budget: Budget,
    more: Callable[[Case, Inputs, dict[str, Timed]], Rows] = lambda case, inputs, rows: {},
) -> Iterator[dict[str, dict[str, Timed | Row]]]:
    """The steps of `keep`: cases × peers, one record per entry of `cases`.

    Args:
        more: further rows of a case, from its inputs and the rows of its peers.
    """
    for name, each in cases.items():
        budget.pace.clear()
        for case in each:
            inputs = draw(case)
            rows = measured(peers(case, inputs), case, inputs, budget)
            yield {name: {**rows, **more(case, inputs, rows)}}
            if case.device.type == "cuda":
                torch.cuda.empty_cache()


def by_length(curves: Columns) -> Columns:
    """The same with the rows of every peer in the order of their lengths; columns without any number are left out."""
    found: Columns = {}
    for peer, columns in curves.items():
        order = torch.tensor(columns["length"]).argsort(stable=True).tolist()
        used = {name: rows for name, rows in columns.items() if any(x is not None for x in rows)}
        found[peer] = {name: [rows[i] for i in order] for name, rows in used.items()}
    return found


def check_names(**options: tuple[Sequence[str], Iterable[str]]) -> None:
    """Raises ValueError if an option, given as (names, allowed ones), has a name that is not allowed."""
    for option, (given, allowed) in options.items():
        for name in given:
            check_choice(option, name, tuple(allowed))


def whole_ms(row: Row) -> float:
    """The milliseconds of forward and backward together."""
    return sum(number(row[way]) for way in ("forward_ms", "backward_ms") if row.get(way) is not None)


def number(value: records.Json) -> float:
    """A value of a row that is known to be a number."""
    assert isinstance(value, int | float)
    return float(value)


def report(name: str, rows: Rows, say: Say) -> None:
    """Prints a line per row: its numbers and its time over ours, or why it is left out."""
    ours = rows.get("ours", {})
    for peer, row in rows.items():
        described = str(row["why_not"]) if row.get("why_not") else figures_of(row)
        if peer != "ours" and row.get("forward_ms") is not None and ours.get("forward_ms") is not None:
            both = row.get("backward_ms") is not None
            base = whole_ms(ours) if both else number(ours["forward_ms"])
            described += f", {whole_ms(row) / max(base, 1e-9):.2f}× ours"
        say(f"{name} {peer}: {described}")


def figures_of(row: Row) -> str:
    """The names and values of a row for the console."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if value is not None
    )
