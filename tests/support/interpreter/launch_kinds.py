"""Counts the kernels that calls of several layouts compile, as on a device; a standalone program, which prints JSON.

python tests/support/interpreter/launch_kinds.py
"""

import json

import torch
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import launch
from alibi_lab.measure.absent_device import absent_device


def counts() -> dict[str, int]:
    """How many more kernels are compiled after each of these calls."""
    found = {}
    with absent_device():
        for name, inputs, options in (
            ("first", rows(2, 4, 4, 200, 16), {}),
            ("again", rows(2, 4, 4, 200, 16), {}),
            ("other sizes", rows(3, 6, 6, 333, 16), {}),
            ("transposed", [x.transpose(1, 2) for x in rows(2, 200, 200, 4, 16)], {}),
            ("one head and one sequence", rows(1, 1, 1, 200, 16), {}),
            ("groups", rows(2, 4, 2, 200, 16), {}),
            ("other groups", rows(2, 6, 2, 200, 16), {}),
            ("misaligned", [x[..., 1:] for x in rows(2, 4, 4, 200, 17)], {}),
            ("far strides", [x.as_strided(x.shape, (2**33, *x.stride()[1:])) for x in rows(1, 4, 4, 200, 16)], {}),
            ("a window", rows(2, 4, 4, 200, 16), {"window": 50}),
            ("another window", rows(2, 4, 4, 200, 16), {"window": 16}),
        ):
            before = len(launch._COMPILED)
            if name == "far strides":  # views for autograd would change the stride of a single sequence
                alibi_attention(*inputs, **options)
            else:
                leaves = [x.requires_grad_() for x in inputs]
                output = alibi_attention(*leaves, **options)
                torch.autograd.grad(output, leaves, output)
            found[name] = len(launch._COMPILED) - before
    return found


def rows(b: int, h: int, k: int, n: int, d: int) -> list[Tensor]:
    return [torch.randn(b, heads, n, d).to(torch.bfloat16) for heads in (h, k, k)]


if __name__ == "__main__":
    print(json.dumps(counts()))
