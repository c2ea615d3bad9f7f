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
