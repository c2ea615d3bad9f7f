"""A differential fuzz test of the whole contract: compares random calls on every backend with float64.

    python tests/support/fuzz/differential_fuzz.py --draws 100000 --backends native banded --processes 2 --out results
    python tests/support/fuzz/differential_fuzz.py --first-seed 25 --draws 1 --backends native       # rerun one call
    python tests/support/fuzz/differential_fuzz.py --first-seed 25 --draws 1 --backends native --shrink   # minimized
    python tests/support/fuzz/differential_fuzz.py --draws 20000 --backends native --dtype bfloat16   # every call in one dtype

`differential_calls.py` draws, `differential_truth.py` has the truth and its error bounds, `differential_checks.py`
compares. Each failure is printed when it is found, as a call that reproduces it. Ctrl-C stops the run; the finished
draws are reported, and saved as a record with `--out`. To continue, start at the seed that the report names.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import torch
from differential_calls import Call, draw, plainer, settled
from differential_checks import Question, answerable, assert_agrees, assert_right
from hypothesis import HealthCheck, find, settings
from hypothesis.errors import NoSuchExample

from alibi_lab import records

JAX = ("jax-native", "jax-dense", "jax-loop")
KILLED = "the process was killed"
# Its forward and backward kernels add products in other orders, as all of FlashAttention's do. Scores of 10⁸ are rounded by
# 8, so exp(score − lse) could be e⁸; bounding it by 1 would cost an operation per score.
LARGEST_KEY_OF_FUSED = 1e4
TOGETHER = 25  # draws per task of a worker process
TASKS = 160  # of the worker processes, which are then replaced: JAX keeps what it compiled, about 1 MB per draw
# OpenMP and glibc read these when a process starts: waiting threads sleep (calls use up to 16 on busy cores), and
# memory is kept for the next draw, which avoids page faults.
FOR_WORKERS = {"OMP_WAIT_POLICY": "passive", "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
# An unexpected error counts as a failure, like a wrong number.
WRONG = (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclasses.dataclass
class Tally:
    """The outcome of some draws on one backend."""

    draws: int = 0
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # (seed, call and reason)
    shares: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # the worst, per result

    def add(self, other: "Tally") -> None:
        self.draws += other.draws
        self.failures += other.failures
        self.shares |= other.shares  # the larger of each


def drawn(seed: int, backend: str, dtype: str | None = None) -> Call:
    """The call of a seed, in the given dtype if any, reduced to what a backend supports."""
    return as_answered(_in(draw(seed), dtype), backend)


def _in(call: Call, dtype: str | None) -> Call:
    return call if dtype is None else settled(dataclasses.replace(call, dtype=dtype))


def as_answered(call: Call, backend: str) -> Call:
    """The call reduced to what a backend supports: some compile per shape, and Triton's interpreter is slow."""
    call = answerable(call, backend)
    if backend in JAX:
        from differential_jax import of_shape

        return of_shape(call, backend)
    if backend == "flex":  # torch.compile compiles for every shape and every layout
        plain = {
            f"layout_{x}": "contiguous" for x in ("query", "key", "value") if getattr(call, f"layout_{x}") != "negative"
        }
        one = {"batch": min(call.batch, 1), "heads": 4, "kv_heads": 2, "query_len": 150, "key_len": 210, "head_dim": 16}
        return settled(dataclasses.replace(call, **plain, **one))
    if backend == "fused":
        low = call.dtype if call.dtype in ("float16", "float32") else "float32"
        group = min(call.group, 2)
        call = dataclasses.replace(
            call,
            dtype=low,
            batch=min(call.batch, 2),
            kv_heads=1,
            heads=group,
            query_len=call.query_len % 200,
            key_len=call.key_len % 270,
            threads=1,
            slopes_as="float32",
            outlier_key=min(call.outlier_key, LARGEST_KEY_OF_FUSED),
        )
        return settled(call)
    return call


def check(question: Question, backend: str) -> dict[str, float]:
    """`assert_agrees` for every backend, including JAX's."""
    if backend not in JAX:
        return assert_agrees(question, backend)
    from differential_jax import jax_answer

    return assert_right(question, jax_answer(question.call, question.numbers, backend))


def fuzz(backends: Sequence[str], seeds: range, dtype: str | None = None) -> dict[str, Tally]:
    """Runs the calls of these seeds on each backend. Backends with the same call share its numbers and truth."""
    tallies = {backend: Tally() for backend in backends}
    for seed in seeds:
        call, questions = _in(draw(seed), dtype), {}
        for backend, tally in tallies.items():
            asked = as_answered(call, backend)
            tally.draws += 1
            try:
                if asked not in questions:
                    questions[asked] = Question(asked)
                tally.shares |= collections.Counter(check(questions[asked], backend))
            except WRONG as error:
                tally.failures.append((seed, f"{asked}\n    {type(error).__name__}: {error}"))
    return tallies


def plainest(call: Call, backend: str) -> Call:
    """A simpler call that raises the same type of exception."""

    def kind(call: Call) -> type[Exception] | None:
        try:
            check(Question(call), backend)
        except WRONG as error:
            return type(error)
        return None

    first = kind(call)
    return call if first is None else shrunk(call, lambda simpler: kind(simpler) is first)


def shrunk(call: Call, fails: Callable[[Call], bool]) -> Call:
    """The simplest call that hypothesis finds between the defaults and this one and that still fails."""
    quietly = settings(max_examples=2000, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    try:
        return find(plainer(call), fails, settings=quietly, random=random.Random(0))
    except NoSuchExample:
        return call


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--backends", nargs="+", default=["reference", "dense", "banded", "native"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the records; without it none is saved")
    parser.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16", "float16"), help="of every call; drawn by default"
    )
    parser.add_argument(
        "--shrink", action="store_true", help="reduce every failing call to the simplest that still fails"
    )
    asked = parser.parse_args(arguments)
    started = datetime.datetime.now(datetime.UTC)
    tallies, stopped = _over_processes(asked)
    for backend, tally in tallies.items():
        print(_report(backend, tally), flush=True)
        if asked.out is not None and tally.draws:
            print(records.save(_record(backend, asked, tally, started), asked.out))
    if stopped:
        done = min(tally.draws for tally in tallies.values())
        print(f"stopped; continue with --first-seed {asked.first_seed + done}")
        return 130
    return int(any(tally.failures for tally in tallies.values()))


def _over_processes(asked: argparse.Namespace) -> tuple[dict[str, Tally], bool]:
    """Returns (the outcome per backend, in the order of seeds; whether the run was stopped early)."""
    tallies, end = {backend: Tally() for backend in asked.backends}, asked.first_seed + asked.draws
    parts = [range(start, min(start + TOGETHER, end)) for start in range(asked.first_seed, end, TOGETHER)]
    results = _results(asked, parts)
    try:
        for number, part in enumerate(results):
            for backend, tally in part.items():
                tallies[backend].add(tally)
                for seed, words in tally.failures:
                    print(f"WRONG {backend} seed {seed}: {words}", flush=True)
                    if asked.shrink and KILLED not in words:
                        plain = plainest(drawn(seed, backend, asked.dtype), backend)
                        print(f"    the simplest call that still fails: {plain}", flush=True)
            if number % 20 == 19:
                wrong = ", ".join(f"{backend} {len(tally.failures)} failures" for backend, tally in tallies.items())
                print(f"{(number + 1) * TOGETHER} draws: {wrong}", flush=True)
    except KeyboardInterrupt:
        results.close()
        return tallies, True
    return tallies, False


def _results(asked: argparse.Namespace, parts: list[range]) -> Generator[dict[str, Tally], None, None]:
    """Yields the outcome of every part. If a part kills its process, its calls are repeated one by one."""
    os.environ |= FOR_WORKERS | os.environ
    while parts:
        executor = _workers(asked.processes)
        try:
            for result in executor.map(functools.partial(fuzz, asked.backends, dtype=asked.dtype), parts[:TASKS]):
                parts = parts[1:]
                yield result
        except BrokenProcessPool:
            yield {backend: _call_by_call(backend, parts[0], asked.dtype) for backend in asked.backends}
            parts = parts[1:]
        finally:
            executor.shutdown(wait=not parts, cancel_futures=True)


def _call_by_call(backend: str, seeds: range, dtype: str | None) -> Tally:
    tally, executor = Tally(), _workers(1)
    for seed in seeds:
        try:
            tally.add(executor.submit(fuzz, [backend], range(seed, seed + 1), dtype).result()[backend])
        except BrokenProcessPool:
            tally.add(Tally(draws=1, failures=[(seed, f"{drawn(seed, backend, dtype)}\n    {KILLED}")]))
            executor = _workers(1)
    executor.shutdown()
    return tally


def _workers(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare)


def _report(backend: str, tally: Tally) -> str:
    worst = ", ".join(f"{name} {share:.3f}" for name, share in sorted(tally.shares.items()))
    return f"{backend}: {tally.draws} draws, {len(tally.failures)} failures; worst share of the allowed error: {worst}"


def _record(backend: str, asked: argparse.Namespace, tally: Tally, started: datetime.datetime) -> records.Record:
    config = {"draws": tally.draws, "first_seed": asked.first_seed} | ({"dtype": asked.dtype} if asked.dtype else {})
    metrics: dict[str, float | None] = {"draws": tally.draws, "failures": len(tally.failures)}
    metrics |= {f"worst_share_{name}": tally.shares[name] for name in sorted(tally.shares)}
    return records.make(
        "conformance",
        "/".join(filter(None, ("differential", backend, asked.dtype))),
        config=config,
        metrics=metrics,
        started=started,
        curves={
            "failures": {"seed": [seed for seed, _ in tally.failures], "call": [words for _, words in tally.failures]}
        },
    )


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module="torch")  # its compiler's own
    # The interpreter also computes masked-out values.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton|numpy")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
