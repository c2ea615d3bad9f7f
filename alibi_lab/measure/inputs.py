"""Inputs of benchmarks: noise, peaked noise, and noise with a sink."""

import dataclasses

import torch
from torch import Tensor

from alibi_attn import alibi_slopes


@dataclasses.dataclass(frozen=True)
class Case:
    """One input for causal attention with the published slopes."""

    kind: str
    length: int
    batch: int = 1
    num_heads: int = 8
    head_dim: int = 64


def published_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """[H] fp32."""
    return torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)


def draw(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, key, value, gradient of the output), each [B, H, n, D] in fp32.

    "noise" is standard normal; "peaked" has queries three times as long; "sink" has a first key ten times as long.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.num_heads, case.length, case.head_dim)
    query, key, value, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    if case.kind == "peaked":
        query *= 3
    elif case.kind == "sink":
        key[:, :, 0] *= 10
    elif case.kind != "noise":
        raise ValueError(f"case kind is {case.kind!r} but must be 'noise', 'peaked' or 'sink'")
    return query, key, value, grad
