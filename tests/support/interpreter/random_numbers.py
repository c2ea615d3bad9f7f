"""The numbers that dropout draws, from the kernels' own function; imported in the process with Triton's interpreter."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.dropout import drawn_words


@triton.jit
def _kernel(KEYS, COUNTERS, OTHERS, OUT, N: tl.constexpr):
    at = tl.arange(0, N)
    key, counter = tl.load(KEYS + at).to(tl.uint32), tl.load(COUNTERS + at).to(tl.uint32)
    x, y = drawn_words(key, counter, tl.load(OTHERS + at).to(tl.uint32))
    tl.store(OUT + 2 * at, x.to(tl.int64))
    tl.store(OUT + 2 * at + 1, y.to(tl.int64))


def drawn(keys: list[int], counters: list[int], others: list[int]) -> list[list[int]]:
    out = torch.empty(len(keys), 2, dtype=torch.int64)
    _kernel[(1,)](*map(torch.tensor, (keys, counters, others)), out, N=len(keys))
    return out.tolist()
