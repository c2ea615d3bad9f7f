"""Peak memory: of the process on a CPU (Linux), of the allocator on a GPU; None where the system does not tell."""

from pathlib import Path

import torch


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
