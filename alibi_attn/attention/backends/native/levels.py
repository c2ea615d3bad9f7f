"""The instruction levels that a wheel contains kernels for, best first, and which of them this processor supports.

A wheel holds one library per level (`build.shipped`); without one, the first call compiles `NATIVE`. A level's name is
part of its file name; its words are the result of `alibi_instructions` in `forward.cpp`. x86-64-v3 and -v4 are the
levels of the x86-64 psABI. Features have the names of /proc/cpuinfo, where Linux lists those it has enabled;
`processor.cpp` uses the same names.
"""

import platform
import sys
from typing import NamedTuple

from alibi_attn.processor import features

V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
# The same as -march=x86-64-v3 and -v4, names that zig's clang does not know.
_AVX2 = tuple(
    f"-m{x}" for x in ["avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe", "popcnt", "xsave", "cx16", "sahf"]
)
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")


class Level(NamedTuple):
    """The compiler's `flags` for the instructions of a level, and the features that a processor `needs` to run them."""

    name: str
    words: str
    flags: tuple[str, ...]
    needs: frozenset[str]

    @property
    def missing(self) -> list[str]:
        """The features that are missing on this processor; empty if it can run this level."""
        return sorted(self.needs - features())


OF_MACHINE = {  # by platform.machine()
    "x86_64": (
        Level("avx512_bf16", "AVX512-BF16", (*_AVX512, "-mavx512bf16"), V4 | {"avx512_bf16"}),
        Level("avx512", "AVX-512", _AVX512, V4),
        Level("avx2", "AVX2", _AVX2, V3),
    ),
    "aarch64": (
        # zig does not know -march=armv8.2-a+bf16; g++, clang and zig know this.
        Level("neon_bf16", "NEON-BF16", ("-mcpu=generic+bf16",), frozenset({"bf16"})),
        Level("neon", "NEON", (), frozenset()),  # every such processor has NEON; compilers use it by default
    ),
}
OF_MACHINE |= {"AMD64": OF_MACHINE["x86_64"], "arm64": OF_MACHINE["aarch64"]}  # on Windows and macOS
LEVELS = OF_MACHINE.get(platform.machine(), ())
# In no wheel. Compilers for macOS target its oldest processor by default; there and on Arm, -march=native does not
# select one.
_OF_THIS = ("-mcpu=native",) if platform.machine() == "aarch64" else ("-march=native",)
NATIVE = Level("native", "this processor's", () if sys.platform == "darwin" else _OF_THIS, frozenset())
