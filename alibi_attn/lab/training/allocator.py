"""Memory of a process: freed buffers kept for the next step, and the peak.

The peak is of the process on a CPU (Linux), of the allocator on a GPU; None where the system does not tell.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

# mallopt(3): the parameters' numbers, what they are while freed memory is kept, and afterwards. glibc's own limits rise by
# themselves until one is set: afterwards they are at the end of that rise.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_MIB = 1 << 20
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * _MIB}
_GIVE_BACK = {_MMAP_MAX: 65_536, _MMAP_THRESHOLD: 32 * _MIB, _TRIM_THRESHOLD: 64 * _MIB, _TOP_PAD: 128 << 10}
_keepers = 0


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Inside, the process keeps what is freed for the buffers of the next step, where its allocator is glibc's (Linux).

    glibc maps a buffer of more than 32 MiB for itself and gives it back when it is freed. A step of training asks for the
    same buffers as the one before, and the system fills every page of them with zeros again: at the scale `medium` 64,000
    page faults and a fifth of a step's time (`docs/log.md`). Outside, everything that is free is given back.

    It is the whole process that keeps its memory; several that do so at once count as one, which the last one ends.
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
    """Forget the peak so far; False where the system cannot, and a later peak would not be this work's own."""
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
    """A function of glibc; nothing where the process has another C library."""
    with contextlib.suppress(
        OSError, TypeError, AttributeError
    ):  # no library of the process (Windows), no such function
        getattr(ctypes.CDLL(None), name)(*values)
