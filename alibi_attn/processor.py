"""The name and the instructions of this machine's processor, from /proc/cpuinfo on Linux; other systems report little.

Records store both, because processors of one name may differ in speed. The instructions also select the CPU kernels.
"""

import functools
import platform
from pathlib import Path

# Instructions that determine the speed of attention and matrix products, best first: cpuinfo's flag, and the usual name.
_INSTRUCTIONS = (
    ("amx_bf16", "AMX-BF16"),
    ("avx512_bf16", "AVX512-BF16"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("bf16", "Arm BF16"),
)


@functools.cache
def features() -> frozenset[str]:
    """The flags in cpuinfo, which the system has enabled; empty if the file or the line is missing."""
    return frozenset((_listed("flags") or _listed("Features") or "").split())


def name() -> str:
    """The processor's name, as its manufacturer spells it; with x86's family and model, since many are just an "AMD EPYC"."""
    listed, family, model = map(_listed, ("model name", "cpu family", "model"))
    if listed and family and model:
        return f"{listed} (family {family}, model {model})"
    return listed or platform.processor() or platform.machine()


def is_intel() -> bool:
    """Whether its identification names Intel; also on Windows, where Python reports it."""
    return "GenuineIntel" in (_listed("vendor_id") or platform.processor())


def instructions() -> str | None:
    """The best known instructions for attention and matrix products, such as "AVX2"; None if there are none."""
    return next((words for flag, words in _INSTRUCTIONS if flag in features()), None)


def _listed(what: str) -> str | None:
    """The value of the first line with that name; None without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == what), None)
