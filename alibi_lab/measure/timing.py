"""Timing that is robust to noise: calls take turns and medians count. Peak memory is measured in a fresh process."""

import concurrent.futures.process
import functools
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from alibi_attn.nn import allocator
from alibi_lab.lab.clock import cuda_ms

Result = TypeVar("Result")

SPARE_BYTES = 2 << 30  # left free for weights, Python and other processes


def elapsed_ms(call: Callable[[], object]) -> float:
    """The wall-clock milliseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """The function that times a call on this device, on a GPU between events."""
    return elapsed_ms if device.type == "cpu" else device_ms


def medians_of(
    calls: Mapping[str, Callable[[], Result]],
    timed: Callable[[Callable[[], Result]], float],
    *,
    repeats: int,
    seconds: float,
    end: float = math.inf,
) -> dict[str, float]:
    """The median time of every call, in the unit of `timed`.

    The calls take turns, so that a slow moment of the machine affects all of them. The order changes from turn to turn (in the
    same way in every run), so that no call always runs after the same other call, with the caches in the same state.
    Every call is warmed up once and then runs `repeats` times or until `seconds` have passed, at least once.

    Args:
        timed: runs a call and returns its time; `operator.call` for calls that return their own.
        end: on `time.perf_counter`; calls that are not warm by then are left out.
    """
    spent: dict[str, list[float]] = {}
    for name, call in calls.items():
        if time.perf_counter() < end:
            timed(call)
            spent[name] = []
    end, shuffle = min(time.perf_counter() + seconds, end), random.Random(0)
    for turn in range(repeats):
        if turn > 0 and time.perf_counter() > end:
            break
        for name in shuffle.sample(sorted(spent), len(spent)):
            spent[name].append(timed(calls[name]))
    return {name: statistics.median(times) for name, times in spent.items()}


# GPU work per measurement: with this much queued, the host's overhead counts only if the GPU waits for it.
FILL_MS = 5.0


def device_ms(call: Callable[[], object]) -> float:
    """The milliseconds of a warm call on CUDA, between events, with calls back to back."""
    first = cuda_ms(call, 1)
    calls = max(1, min(50, int(FILL_MS / first)))
    return first if calls == 1 else cuda_ms(call, calls)


def host_us(call: Callable[[], object]) -> float:
    """The median microseconds until a warm call on CUDA returns, with an idle device; its kernels may still be running."""
    taken = []
    for _ in range(7):
        torch.cuda.synchronize()
        taken.append(elapsed_ms(call) * 1e3)
    return statistics.median(taken)


def replayable(call: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """The call as a CUDA graph, which returns the same tensors at every replay; on a CPU the call itself.

    It runs three times before it is recorded, which compiles what it needs.
    """
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay() -> Result:
        graph.replay()
        return output

    return replay


def peak_raised_by(before: int) -> int:
    """The bytes by which the peak memory rose since `before`; at least 0, because Linux's counter is approximate and can fall."""
    return max(peak_rss_bytes() - before, 0)


def peak_rss_bytes() -> int:
    """The peak resident memory of this process so far, in bytes."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    peak = allocator.peak_memory_bytes(torch.device("cpu"))
    if peak is not None:
        return peak
    import resource  # macOS: it counts bytes there, and child processes inherit the peak; Windows does not have it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def too_large(needed: float) -> str | None:
    """Why a measurement that may need this many bytes is skipped; None if it fits or the available memory is unknown."""
    try:
        memory = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return None
    available = int(memory.split("MemAvailable:")[1].split()[0]) * 1024
    if needed < available - SPARE_BYTES:
        return None
    return f"it may need {needed / 2**30:.0f} GiB but {available / 2**30:.0f} GiB are available"


def in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Runs the call in its own process and returns its result.

    Raises:
        RuntimeError: the process died.
    """
    with fresh_process() as process:
        return result(process.submit(function, *arguments), f"{function.__name__}{arguments}", "pass shorter lengths")


def fresh_process(threads: int | None = None) -> concurrent.futures.process.ProcessPoolExecutor:
    """An executor with one new process; `threads` is torch's number of threads there, None its default."""
    context = multiprocessing.get_context("spawn")
    set_threads = None if threads is None else functools.partial(torch.set_num_threads, threads)
    return concurrent.futures.process.ProcessPoolExecutor(1, mp_context=context, initializer=set_threads)


def result(future: "concurrent.futures.Future[Result]", what: str, advice: str) -> Result:
    """The result of a call in another process, or a RuntimeError with advice if the process died."""
    try:
        return future.result()
    except concurrent.futures.process.BrokenProcessPool:
        raise RuntimeError(f"{what} died, most likely because it ran out of memory; {advice}") from None


def time_attention(model: nn.Module, layers: Collection[str], seconds: list[float]) -> None:
    """Hooks the model so that `seconds[0]` sums the time of modules of these classes, excluding their linear layers."""

    def add_time(sign: float, *_: object) -> None:
        seconds[0] += sign * time.perf_counter()

    for layer in model.modules():
        if type(layer).__name__ in layers:
            linears = (part for part in layer.modules() if isinstance(part, nn.Linear))
            for module, sign in ((layer, 1.0), *((part, -1.0) for part in linears)):
                module.register_forward_pre_hook(functools.partial(add_time, -sign))
                module.register_forward_hook(functools.partial(add_time, sign))
