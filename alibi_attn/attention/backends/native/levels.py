"""The levels of instructions that a wheel has kernels for, the best first, and which of them this processor has.

A wheel holds one library a level (`build.shipped`); where it holds none, `NATIVE` is compiled on the first call. A level's name
is in the names of its files, its words are those of `alibi_instructions` in `forward.cpp`. x86-64-v3 and -v4 are the levels of
the x86-64 psABI; what belongs to them goes here by the names of /proc/cpuinfo, where Linux lists what it has switched on.
"""

from typing import NamedTuple

from alibi_attn.processor import features

V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


class Level(NamedTuple):
    """What the compiler may use (`flags`), and what a processor must have for it (`needs`)."""

    name: str
    words: str
    flags: tuple[str, ...]
    needs: frozenset[str]

    @property
    def lacks(self) -> list[str]:
        """What of it this processor does not have; empty: it runs here."""
        return sorted(self.needs - features())


LEVELS = (
    Level("avx512_bf16", "AVX512-BF16", ("-march=x86-64-v4", "-mavx512bf16"), V4 | {"avx512_bf16"}),
    Level("avx512", "AVX-512", ("-march=x86-64-v4",), V4),
    Level("avx2", "AVX2", ("-march=x86-64-v3",), V3),
)
NATIVE = Level("native", "this processor's", ("-march=native",), frozenset())  # in no wheel
