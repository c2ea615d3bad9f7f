"""The clock that times trainings and evaluations, so that other programs on the machine hardly change the result."""

import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> Callable[[], float]:
    """A function that returns seconds; differences count.

    On a CPU with one thread it is the processor time of this process: other programs that share the core slow the training
    down, but are not counted. Otherwise it is the time that passes.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def cuda_ms(call: Callable[[], object], calls: int) -> float:
    """The milliseconds of a call on CUDA, between events: the mean of this many calls, back to back."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(calls):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / calls
