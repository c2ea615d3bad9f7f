"""Timing that can be trusted a little on a busy machine: peers take turns, medians are kept, and memory is a fresh process's."""

import concurrent.futures.process
import functools
import multiprocessing
import multiprocessing.connection
import random
import resource
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

Result = TypeVar("Result")


def medians_ms(calls: Mapping[str, Callable[[], object]], *, repeats: int, budget_s: float) -> dict[str, float]:
    """The median milliseconds of every call; they take turns, so that a slow moment of the machine hits all of them, each turn in
    another order (the same in every run), so that nobody always meets the caches that one neighbor has left.

    Every call is warmed up once, and then runs `repeats` times or until `budget_s` seconds are spent, at least once.
    """
    timed = {name: functools.partial(elapsed_ms, call) for name, call in calls.items()}
    return medians_told(timed, repeats=repeats, budget_s=budget_s)


def elapsed_ms(call: Callable[[], object]) -> float:
    """The milliseconds that the call takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def medians_told(calls: Mapping[str, Callable[[], float]], *, repeats: int, budget_s: float) -> dict[str, float]:
    """`medians_ms` of calls that say themselves how many milliseconds they took: in another process, say."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end, shuffle = time.perf_counter() + budget_s, random.Random(0)
    for turn in range(repeats):
        if turn > 0 and time.perf_counter() > end:
            break
        for name in shuffle.sample(sorted(calls), len(calls)):
            spent[name].append(calls[name]())
    return {name: statistics.median(times) for name, times in spent.items()}


FILL_MS = (
    5.0  # a GPU is given so much work at a time: what a call costs the host counts only where the GPU waits for it
)


def device_ms(call: Callable[[], object], device: torch.device, *, repeats: int = 7, budget_s: float = 0.5) -> float:
    """The median milliseconds of a call that has been run before; on CUDA between events, calls one behind the other.

    It runs `repeats` times or until `budget_s` seconds are spent, at least once; on a CPU once.
    """
    if device.type != "cuda":
        return elapsed_ms(call)
    first = _between_events(call, 1)
    calls = max(1, min(50, int(FILL_MS / first)))
    taken = [first] if calls == 1 else []
    end = time.perf_counter() + budget_s
    while not taken or (len(taken) < repeats and time.perf_counter() < end):
        taken.append(_between_events(call, calls))
    return statistics.median(taken)


def _between_events(call: Callable[[], object], calls: int) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(calls):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / calls


MATRIX_SIZE = 2048


def matrix_product(dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    """A call that multiplies two matrices of MATRIX_SIZE²; timed in turn with others it says what the machine can do now."""
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE).to(dtype)
    return lambda: a @ b


def matrix_rate_gflops(milliseconds: float) -> float:
    """The rate of a `matrix_product` that took so long."""
    return 2 * MATRIX_SIZE**3 / milliseconds / 1e6


def peak_memory_bytes(function: Callable[..., object], *arguments: object) -> int:
    """How much the call raises the peak memory of a fresh process (the inputs it makes included)."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(send, function, arguments))
    process.start()
    send.close()
    try:
        peak: int = receive.recv()
    except EOFError:
        raise RuntimeError(
            f"the process of {arguments} died while its memory was measured, most likely for lack of it"
        ) from None
    finally:
        process.join()
    return peak


def _measured(
    send: multiprocessing.connection.Connection, function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    before = peak_rss_bytes()
    function(*arguments)
    send.send(peak_raised_by(before))


def peak_raised_by(before: int) -> int:
    """Bytes that the peak memory rose by since it was `before`; Linux counts so roughly that one that did not rise may fall."""
    return max(peak_rss_bytes() - before, 0)


def peak_rss_bytes() -> int:
    """The most memory that this process has had so far."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux: getrusage, in bytes on a Mac, which a child inherits from its parent
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def available_bytes() -> int | None:
    """What can still be used, on Linux."""
    try:
        about = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(about.split("MemAvailable:")[1].split()[0]) * 1024


def in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    """What the call returns, in a process of its own.

    Raises:
        RuntimeError: the process died.
    """
    with concurrent.futures.process.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except concurrent.futures.process.BrokenProcessPool:
            raise RuntimeError(
                f"{function.__name__}{arguments} died, most likely for lack of memory; pass shorter lengths"
            ) from None


def time_attention(model: nn.Module, layers: Collection[str], seconds: list[float]) -> None:
    """From now on add the time that modules of these classes take to `seconds[0]`, without that of their linear maps."""

    def time_into(module: nn.Module, sign: float) -> None:
        started = [0.0]

        def start(*_: object) -> None:
            started[0] = time.perf_counter()

        def stop(*_: object) -> None:
            seconds[0] += sign * (time.perf_counter() - started[0])

        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop)

    for layer in model.modules():
        if type(layer).__name__ in layers:
            time_into(layer, 1.0)
            for part in layer.modules():
                if isinstance(part, nn.Linear):
                    time_into(part, -1.0)
