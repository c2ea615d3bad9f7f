"""Kernels with a mistake that must be detected; imported in the process with Triton's interpreter."""

# mypy: ignore-errors

import quick_interpreter
import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(OUT, A, B):
    tl.store(OUT, A * B)


def product(a: int, b: int) -> int:
    """a·b in 32 bits, with the overflow check on."""
    out = torch.zeros(1, dtype=torch.int32)
    quick_interpreter.check_overflow(on=True)
    try:
        _kernel[(1,)](out, a, b)
    finally:
        quick_interpreter.check_overflow(on=False)
    return int(out)


@triton.jit
def _with_none(x):
    return x, None


@triton.jit
def _kernel_with_none(OUT):
    x, _ = _with_none(1)
    tl.store(OUT, x)


def return_none_in_a_tuple() -> None:
    _kernel_with_none[(1,)](torch.zeros(1, dtype=torch.int32))
