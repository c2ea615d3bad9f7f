"""Memory of a process: keeps freed buffers for the next step or layer, and measures the peak.

The peak is that of the process on a CPU (Linux) and of the allocator on a GPU; None if the system does not report it.
"""

import contextlib
import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn.attention.call.transforms import may_read

# mallopt(3): the parameters' numbers, their values while freed memory is kept, and their values afterwards. glibc
# raises its limits automatically until a program sets one; the values afterwards are the highest that it would reach.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_MIB = 1 << 20
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * _MIB}
_GIVE_BACK = {_MMAP_MAX: 65_536, _MMAP_THRESHOLD: 32 * _MIB, _TRIM_THRESHOLD: 64 * _MIB, _TOP_PAD: 128 << 10}
_ROWS = range(64, 8193)
MOST_MIB = 128  # kept for the next text: what 1,000 tokens need in an encoder of base size
_lock, _keepers, _smallest_mib = threading.Lock(), 0, float("inf")


@contextlib.contextmanager
def kept_memory(most_mib: float = 0) -> Iterator[None]:
    """Inside the block, the process keeps freed memory for the next buffers, if its allocator is glibc.

    glibc maps each buffer of more than 32 MiB separately and returns it to the system when it is freed, as it returns the
    end of its heap. A training step allocates the same buffers as the step before, a layer those of the layer before, and
    the system fills every page with zeros again: a fifth of a step's time at the scale `medium`, an eighth of an
    encoder's (`docs/log.md`).

    This affects the whole process. Nested or simultaneous blocks count as one, which ends with the last of them.

    Args:
        most_mib: free memory is returned after the block if the process has grown by more than this since it was last
            returned, or since the first block.
    """
    global _keepers, _smallest_mib
    with _lock:
        _keepers += 1
        if _keepers == 1:
            _smallest_mib = min(_smallest_mib, _resident_mib())
            _set(_KEEP)
    try:
        yield
    finally:
        with _lock:
            _keepers -= 1
            if not _keepers:
                _set(_GIVE_BACK)
                if most_mib == 0 or _resident_mib() - _smallest_mib > most_mib:
                    _call("malloc_trim", 0)
                    _smallest_mib = _resident_mib()


def memory_of_layers(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """For a loop over layers of x, [..., E]: without gradients, on a CPU, a layer takes the buffers that the last one freed.

    Nothing is kept for a few rows, whose buffers are small; for more than 8,192, because a heap with gaps raises the peak
    (by a quarter at 16,384 tokens, in fp32); or outside the main thread, where glibc allocates large buffers outside the
    heap that it can keep.
    """
    keeps = not torch.is_grad_enabled() and may_read(x) and x[..., 0].numel() in _ROWS
    if keeps and threading.current_thread() is threading.main_thread():
        return kept_memory(MOST_MIB)
    return contextlib.nullcontext()


def reset_peak_memory(device: torch.device) -> bool:
    """Reset the peak. Returns False if the system does not allow it; the next peak may then include earlier work."""
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
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024 if "VmHWM" in fields else None


def resident_bytes() -> int:
    """The resident memory of this process, including mapped files; raises OSError if the system does not report it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _set(parameters: dict[int, int]) -> None:
    for parameter, value in parameters.items():
        _call("mallopt", parameter, value)


def _call(name: str, *values: int) -> None:
    if function := _of_libc(name):
        function(*values)


@functools.cache
def _of_libc(name: str) -> Callable[..., int] | None:
    """A function of glibc; None if the process has another C library."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # no library of the process (Windows)
        return None


def _resident_mib() -> float:
    """0 if the system does not report it."""
    try:
        return resident_bytes() / _MIB
    except OSError:
        return 0.0
