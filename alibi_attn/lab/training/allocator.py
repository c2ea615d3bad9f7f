"""Memory of a process: keeps freed buffers for the next training step, and measures the peak.

The peak is that of the process on a CPU (Linux) and of the allocator on a GPU; None if the system does not report it.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

# mallopt(3): the parameters' numbers, their values while freed memory is kept, and their values afterwards. glibc
# raises its limits automatically until a program sets one; the values afterwards are the highest that it would reach.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_MIB = 1 << 20
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * _MIB}
_GIVE_BACK = {_MMAP_MAX: 65_536, _MMAP_THRESHOLD: 32 * _MIB, _TRIM_THRESHOLD: 64 * _MIB, _TOP_PAD: 128 << 10}
_keepers = 0


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Inside the block, the process keeps freed memory for the buffers of the next step, if its allocator is glibc.

    glibc maps each buffer of more than 32 MiB separately and returns it to the system when it is freed. A training step
    allocates the same buffers as the step before, and the system fills every page with zeros again: 64,000 page faults
    and a fifth of a step's time at the scale `medium` (`docs/log.md`). After the block, free memory is returned.

    This affects the whole process. Nested or simultaneous blocks count as one, which ends with the last of them.
    """
    global _keepers
    _keepers += 1
    if _keepers == 1:
        _set(_KEEP)
    try:
        yield
    finally:
        _keepers -= 1
        if not _keepers:
            _set(_GIVE_BACK)
            _call("malloc_trim", 0)


def reset_peak_memory(device: torch.device) -> bool:
    """Reset the peak; False if the system cannot, so that a later peak may include earlier work."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): 5 resets the peak of the resident set, VmHWM
    except OSError:
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int | None:
    """The peak since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024 if "VmHWM" in fields else None


def _set(parameters: dict[int, int]) -> None:
    for parameter, value in parameters.items():
        _call("mallopt", parameter, value)


def _call(name: str, *values: int) -> None:
    """Calls a function of glibc; does nothing if the process has another C library."""
    with contextlib.suppress(
        OSError, TypeError, AttributeError
    ):  # no library of the process (Windows), no such function
        getattr(ctypes.CDLL(None), name)(*values)
