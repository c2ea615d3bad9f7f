"""`alibi bench gpu`: our Triton kernels compared with what users would run instead, on one CUDA GPU, in under ten minutes.

The benchmark ends within its time budget. The most important lengths come first, with all shapes at each; every peer has an
equal share of the time. Records are rewritten after each length and list what did not fit into the time or the memory.
The scale "smoke" tests this file: the same code at tiny sizes on a CPU, in Triton's interpreter.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from alibi_lab.measure.decoding import WITH_CACHE, peers_of_one_query
from alibi_lab.measure.gpu_checks import CHECKED, all_checked
from alibi_lab.measure.gpu_parts import device_at
from alibi_lab.measure.gpu_rows import KINDS, TOKENS, Inputs, measured, unmeasured
from alibi_lab.measure.harness import Row, Rows, Say, attention_config, keep, number, whole_ms
from alibi_lab.measure.peers import Peer, eager, flash_attn, flex, rank_two, sdpa_causal, sdpa_dense_bias
from alibi_lab.measure.peers.ours import ours, ours_with_cache
from alibi_lab.records import Json

Names = Mapping[tuple[tuple[int, int], str, bool], str]  # of records, by shape, kind and whether it is decoding

LENGTHS = tuple(2**n for n in range(10, 21))
SHAPES = ((16, 128), (32, 64))
PATIENCE_S = 3.0  # a peer whose forward plus backward would take longer is skipped
# The lengths that decide whether the kernels are worth their host time; they are measured first.
FIRST = (2048, 16384, 131072)
LONGEST_COMPILED = 131_072  # FlexAttention is compiled ahead up to here


def gpu_peers(*, compiled: bool = True) -> list[Peer]:
    """The peers of training steps. `compiled`: compile FlexAttention, as its users do."""
    causal = sdpa_causal.PEER
    flash, cudnn = (sdpa_causal.causal_by(x) for x in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION))
    return [
        Peer("ours", ours("fused"), "backend='fused'"),
        causal,
        replace(causal, name=f"{causal.name}, flash", prepare=flash, note=f"{causal.note}; flash kernel"),
        replace(causal, name=f"{causal.name}, cuDNN", prepare=cudnn, note=f"{causal.note}; cuDNN's kernel"),
        sdpa_dense_bias.PEER,
        rank_two.PEER,
        eager.PEER,
        Peer(
            flex.NAME,
            functools.partial(flex.flex, compiled=compiled),
            f"score_mod and BlockMask, {'compiled for each length' if compiled else 'not compiled and without backward'}",
            longest_backward=2**62 if compiled else 0,
        ),
        *flash_attn.installed(),
    ]


def gpu(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    kinds: Sequence[str] = KINDS,
    seconds: float = 540.0,
    scale: str = "full",
    say: Say = print,
) -> list[Path]:
    """Checks and measures, saves a training and a decoding record per kind and shape, and returns their paths.

    `forward_ms` is the forward pass of a training step, `backward_ms` the rest of the step; `host_us` is the time until the
    host has launched the step (or a decoding step), in microseconds. Errors are those of the last queries (see
    `correctness.py`). A batch has TOKENS tokens, at least one sequence.

    Args:
        lengths: sequence lengths, as in 2048,16384, and for decoding the cached tokens; default 1024 … 1048576.
        shapes: numbers and sizes of heads; default 16x128,32x64.
        kinds: kinds of input: noise is standard normal, peaked has queries three times as long; default both.
        seconds: time limit in seconds for the whole benchmark; later measurements are left out, with the reason in the record.
        scale: "full"; or "smoke", which runs on a CPU in Triton's interpreter (set TRITON_INTERPRET=1).

    Raises:
        ValueError: no CUDA device, or, at scale "smoke", no interpreter.
        RuntimeError: our kernels were wrong: nothing was timed if the checks found it, else the records are kept. A wrong peer is
            a row without times.
    """
    device, smoke = device_at(scale, "gpu"), scale == "smoke"
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds has {', '.join(sorted(unknown))} but must be of {', '.join(KINDS)}")
    end = time.perf_counter() + seconds
    dtypes = (torch.float32,) if smoke else (torch.bfloat16, torch.float16, torch.float32)
    folder = "gpu-smoke" if smoke else "gpu"
    names = {
        (shape, kind, decoding): f"{folder}/{'decoding-' if decoding else ''}{kind}-{shape[0]}x{shape[1]}"
        for shape, kind, decoding in itertools.product(shapes, kinds, (False, True))
    }
    about: dict[str, Json] = {"dtype": str(dtypes[0]).removeprefix("torch."), "smoke": smoke, "device": device.type}
    configs = {
        name: attention_config(_peers(decoding, device), lengths, heads=shape[0], head_dim=shape[1], kind=kind, **about)
        for (shape, kind, decoding), name in names.items()
    }
    checks: list[Row] = []

    def steps() -> Iterator[Mapping[str, Rows]]:
        cases = [(dtype, case) for dtype in dtypes for case in CHECKED[: 2 if smoke else None]]
        ahead = [
            (max(1, TOKENS // n), heads, n, size, dtypes[0])
            for n in by_importance(lengths)
            for heads, size in shapes
            if n <= LONGEST_COMPILED
        ]
        checks.extend(all_checked(cases, device, ahead, patience_s=seconds / 4))
        for row in checks:
            yield {name: {"correctness": row} for (_, _, decoding), name in names.items() if not decoding}
        yield from _measured(names, lengths, device, end)

    def summary(columns: object) -> dict[str, float | None]:
        return {"worst_error_share": max(number(row["error"]) / number(row["allowed"]) for row in checks)}

    return keep(out, configs, steps(), ours=lambda name, peer: peer.startswith("ours"), summary=summary, say=say)


def _peers(decoding: bool, device: torch.device) -> list[Peer]:
    if not decoding:
        return gpu_peers(compiled=device.type == "cuda")
    return [
        Peer("ours", ours_with_cache("fused"), WITH_CACHE),
        Peer("ours, untold", ours("fused"), "backend='fused', which meets all keys"),
        *peers_of_one_query(),
    ]


def by_importance(lengths: Sequence[int]) -> list[int]:
    """The lengths in the order in which they are measured: those of FIRST, then the others, shortest first."""
    return sorted(lengths, key=lambda length: (length not in FIRST, length))


class Budget:
    """An equal share of the time for every peer, so that a slow peer leaves time for the others.

    Args:
        names: of the peers. One more share is for drawing inputs and computing references.
        end: when all time is used, on this clock.
    """

    def __init__(self, names: Sequence[str], end: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._end = clock, end
        self._share = max(end - clock(), 0.0) / (len(names) + 1)
        self._spent = dict.fromkeys(names, 0.0)

    def why_not(self, peer: Peer, expected_s: float) -> str | None:
        """The reason to leave a peer out; None if it has time. Our own calls run as long as there is any."""
        if self._clock() > self._end:
            return "no time was left"
        if peer.is_ours:
            return None
        if expected_s > PATIENCE_S:
            return f"forward and backward would take {expected_s:.0f} s"
        spent = self._spent[peer.name]
        return f"it has used {spent:.0f} s, its share of the time" if spent > self._share else None

    def measured(self, peer: Peer, inputs: Inputs) -> dict[str, Row]:
        """The rows of a peer, whose time is counted."""
        start = self._clock()
        rows = measured(peer, inputs)
        self._spent[peer.name] += self._clock() - start
        return rows


def _measured(names: Names, lengths: Sequence[int], device: torch.device, end: float) -> Iterator[Mapping[str, Rows]]:
    """Yields the rows by record and peer of each length and shape: training steps, then decoding."""
    pace: dict[tuple[str, tuple[int, int]], float] = {}  # seconds of a peer's training step per score and head
    peers = {decoding: _peers(decoding, device) for decoding in (False, True)}
    budget = Budget(sorted({peer.name for some in peers.values() for peer in some}), end)
    shapes, kinds = dict.fromkeys(shape for shape, _, _ in names), [*dict.fromkeys(kind for _, kind, _ in names)]
    for length, shape in itertools.product(by_importance(lengths), shapes):
        scores = length * max(length, TOKENS)
        step: dict[str, dict[str, Row]] = {}
        for decoding in (False, True):
            inputs = None
            for peer in peers[decoding]:
                expected_s = 0.0 if decoding else pace.get((peer.name, shape), 0.0) * scores
                why_not = budget.why_not(peer, expected_s)
                if why_not is None:
                    inputs = inputs or Inputs.draw(kinds, length, shape, device, decoding=decoding)
                    rows = budget.measured(peer, inputs)
                else:
                    rows = {kind: unmeasured(peer, length, decoding=decoding, why_not=why_not) for kind in kinds}
                for kind, row in rows.items():
                    step.setdefault(names[shape, kind, decoding], {})[peer.name] = row
                slowest_ms = max(whole_ms(row) for row in rows.values())  # 0 = not timed
                if not decoding and slowest_ms > 0:
                    pace[peer.name, shape] = slowest_ms / 1e3 / scores
        yield step
