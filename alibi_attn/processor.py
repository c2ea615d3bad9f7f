"""What this machine's processor is and has, by what Linux lists in /proc/cpuinfo; on other systems little is known of it.

A record says it, for the same name may stand for processors of very different speed; the CPU kernels choose by it.
"""

import functools
import platform
from pathlib import Path

# Instructions that decide how fast attention and matrix products are, the best first: cpuinfo's flag, and what it is called.
_INSTRUCTIONS = (
    ("amx_bf16", "AMX-BF16"), ("avx512_bf16", "AVX512-BF16"), ("avx512f", "AVX-512"), ("avx2", "AVX2"), ("bf16", "Arm BF16"),
)  # fmt: skip


@functools.cache
def features() -> frozenset[str]:
    """The flags that are listed: what the system has switched on; none where there is no such file or no such line."""
    return frozenset((_listed("flags") or _listed("Features") or "").split())


def name() -> str:
    """As its maker calls it."""
    return _listed("model name") or platform.processor() or platform.machine()


def is_intel() -> bool:
    """Whether Intel made it, as its own identification says; also on Windows, where Python knows that."""
    return "GenuineIntel" in (_listed("vendor_id") or platform.processor())


def instructions() -> str | None:
    """The best for attention and matrix products that it is known to have, as in "AVX2"; None where none is."""
    return next((words for flag, words in _INSTRUCTIONS if flag in features()), None)


def _listed(what: str) -> str | None:
    """What the first line of that name says; None without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == what), None)
