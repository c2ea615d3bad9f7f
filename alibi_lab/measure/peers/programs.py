"""Other programs that run a whole BLOOM: llama.cpp and CTranslate2, if their packages are installed.

The weights are written to a temporary folder in each program's format. Each program is called the way its users do.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from transformers import BloomForCausalLM

from alibi_lab.measure import peers
from alibi_lab.measure.peers.ctranslate2 import CTranslate2
from alibi_lab.measure.peers.llama_cpp import LlamaCpp

# The packages that each program needs.
_LLAMA = ("llama_cpp", "gguf")
PROGRAMS = {"llama.cpp": _LLAMA, "llama.cpp, flash attention": _LLAMA, "CTranslate2": ("ctranslate2",)}


class Program(Protocol):
    """A model in another program, loaded with our weights."""

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits [V] of the last token, from one pass over all tokens."""

    def several(self, tokens: Sequence[int], count: int) -> Callable[[], float]:
        """A function that decodes `count` more tokens after these and returns the mean seconds of a step."""


def why_not() -> dict[str, str | None]:
    """By program: the reason why it is left out, or None."""
    return {name: peers.missing(packages) for name, packages in PROGRAMS.items()}


def installed(say: Callable[[str], None]) -> list[str]:
    """The programs that are installed; reports why the others are left out."""
    return peers.installed(why_not(), say)


@contextlib.contextmanager
def opened(
    name: str, model: BloomForCausalLM, *, room: int, threads: int, precision: str = "float32"
) -> Iterator[Program]:
    """The named program, with the model's weights and room for the given number of tokens.

    Args:
        precision: float32, bfloat16 (llama.cpp only) or int8, which is Q8_0 in llama.cpp.
    """
    with tempfile.TemporaryDirectory(prefix="alibi-attn-") as folder:
        if name == "CTranslate2":
            yield CTranslate2(model, Path(folder), threads=threads, precision=precision)
        else:
            flash = "flash" in name
            yield LlamaCpp(model, Path(folder), room=room, threads=threads, flash=flash, precision=precision)
