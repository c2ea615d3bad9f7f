"""Dropout in the Triton kernels; runs in the process with Triton's interpreter (see `fused_in_interpreter.py`)."""

import dataclasses
from typing import Any

import torch
from attention_cases import Case
from attention_oracle import Answer
from dropout_oracle import PARTS, PUBLISHED, masks_of_part
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend


def answer_with_dropout(case: Case) -> tuple[Answer, Answer]:
    """Returns (ours in fp32, `reference`'s in fp64) for one seed; first sequence, head and key are not 0."""
    from attention_checks import answer

    def attention(*args: Tensor, backend: str, return_lse: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
        options = dict.fromkeys(("right_slopes", "query_offset", "key_mask", "segment_ids", "key_bias")) | kwargs
        spec = make_spec(*args, **options, dropout_p=0.4, return_lse=return_lse)
        spec = dataclasses.replace(
            spec, dropout_seed=torch.tensor([[2**61 + 12345, 3, 5, (-7, 4)[case.query_len % 2]]])
        )
        return attend(spec, *args[:3], backend)

    return (
        answer(case, torch.float32, attention, backend="fused"),
        answer(case, torch.float64, attention, backend="reference"),
    )


def same_masks_of_part(kind: str) -> bool:
    return torch.equal(*masks_of_part(kind, "fused"))


def gradients_of_part(kind: str) -> list[tuple[Tensor, Tensor]]:
    """(ours in fp32, `dense`'s): output and gradients of a call in parts, with dropout."""
    t, options = PARTS[kind]
    given = {name: torch.from_numpy(x) if hasattr(x, "dtype") else x for name, x in options.items()}
    torch.manual_seed(3)
    leaves = [torch.randn(2, n, length, 16, requires_grad=True) for n, length in ((2, t), (1, 75), (1, 75))]
    found = []
    for backend in ("fused", "dense"):
        torch.manual_seed(4)
        output = alibi_attention(*leaves, [0.1, 0.0], dropout_p=0.3, backend=backend, **given)
        found.append([output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)])
    return list(zip(*found, strict=True))


def known_random_numbers() -> list[list[int]]:
    """The kernels' random numbers for the published inputs; one input is repeated to reach a power of two."""
    from random_numbers import drawn

    known = [*PUBLISHED, PUBLISHED[0]]
    return drawn(*([*column] for column in zip(*((key, *counter) for key, counter, _ in known), strict=True)))
