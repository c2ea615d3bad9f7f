"""The key rule in the C++ kernels: gradients of queries, keys and values; `test_keys_attack.py` draws calls."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alibi_attn import alibi_attention
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.nn import ALiBiAttention

ROUNDING = 2.0**-7  # of a gradient in bf16, and a little more
TOLERANCE = 2.0**-7 / 32  # the default in bf16


def near_uniform(queries: int, keys: int | None = None, slopes: list[float] | None = None, **options: object) -> tuple:
    """A call in bf16 in which all scores are close to 0."""
    q, k, v = (0.02 * torch.randn(1, 1, n, 16) for n in (queries, keys or queries, keys or queries))
    return q, k, 50 * v, {"slopes": slopes or [0.0], "causal": False} | options


def last_tile_of_one_key() -> tuple:
    return near_uniform(64 * 65 + 1)


def small_sink() -> tuple:
    """Key 0, alone in its tile, has 0.85 of the tolerance of every query."""
    q, k, v, options = near_uniform(1984, 2048, causal=True, key_mask=(torch.arange(2048)[None] - 32).abs() > 31)
    q[..., 0], k[..., 0] = (0.85 * TOLERANCE * torch.arange(1, 1985)).log(), 0.0
    k[:, :, 0, 0] = 4.0
    return q, k, v, options


def light_key_with_a_large_norm() -> tuple:
    """Its score is that of the others, but its part of dq is not small."""
    q, k, v, options = near_uniform(64 * 65 + 1)
    q[..., 0], k[..., 0] = 0.0, 0.0
    k[:, :, -1, 0] = 50 * 0.02 * 4
    return q, k, v, options


def queries_that_grow_past_gates() -> tuple:
    """Queries aligned with key 0 make up for the gates' sums, so that key 0 has a share of TOLERANCE / 20 at any distance."""
    slope, length = 2.0**-8, 4096
    q, k, v, options = near_uniform(length, causal=True)
    q[..., 0] = slope * torch.arange(length) + math.log(TOLERANCE / 20 / (1 - math.exp(-slope)))
    k[..., 0] = 0.0
    k[:, :, 0, 0] = 4.0
    gates = slope * torch.arange(length, dtype=torch.float64)
    gates[1:TILE] = -math.inf  # the rest of key 0's tile, because certificates sum over tiles
    return q, k, v, options | {"key_bias": gates}


CASES = [
    last_tile_of_one_key,
    small_sink,
    light_key_with_a_large_norm,
    queries_that_grow_past_gates,
]


@pytest.mark.parametrize("case", CASES)
def test_every_key_keeps_its_gradient(case: Callable[[], tuple]) -> None:
    *tensors, options = case()
    found, full = (gradients(tensors, options | {"tolerance": tolerance}) for tolerance in (None, 0.0))
    errors = {}
    for name, of_row, right in zip("qkv", found, full, strict=True):
        norms = right.norm(dim=-1)
        errors[name] = float(((of_row - right).norm(dim=-1) / torch.maximum(norms, norms.mean())).max())
    assert max(errors.values()) <= ROUNDING, errors


def gradients(tensors: list[Tensor], options: dict) -> list[Tensor]:
    """Of q, k and v in bf16, as fp64."""
    tensors = [x.bfloat16().requires_grad_() for x in tensors]
    out = alibi_attention(*tensors, **options, backend="native")
    return [x.double() for x in torch.autograd.grad(out, tensors, torch.ones_like(out))]


@pytest.mark.parametrize(("bias", "is_zero"), [(-10.0, False), (-12.0, False), (-14.0, True)])
def test_a_key_bias_makes_a_gradient_0_once_the_tile_obeys_the_rule(bias: float, is_zero: bool) -> None:
    """64 of 512 keys, 385 tokens from the queries: all together ln(2·(385 + 64) / TOLERANCE) nats below a query's lse."""
    is_biased = torch.arange(512) < TILE
    assert (math.log(TOLERANCE / (2 * (385 + 64)) * 448 / 64) < bias) != is_zero
    *tensors, options = near_uniform(64, 512, key_bias=bias * is_biased)
    found, full = (gradients(tensors, options | {"tolerance": x})[2][:, :, is_biased] for x in (None, 0.0))
    error = (found - full).norm(dim=-1) / full.norm(dim=-1)
    assert bool((found == 0).all()) if is_zero else bool((error <= ROUNDING).all())


@pytest.mark.parametrize("tokens", [8193, 12289])
def test_cross_attention_keeps_the_gradient_of_the_last_tokens(tokens: int) -> None:
    layer = ALiBiAttention(16, 1, causal=False, kv_dim=16).bfloat16()
    memory, x = torch.randn(1, tokens, 16), torch.randn(1, 2048, 16)
    of_dtype = []
    for dtype in (torch.bfloat16, torch.float32):
        layer, given = layer.to(dtype), memory.to(torch.bfloat16).to(dtype).requires_grad_()
        (grad,) = torch.autograd.grad(layer(x.to(torch.bfloat16).to(dtype), memory=given).sum(), given)
        of_dtype.append(grad[0].double())
    found, right = of_dtype
    error = (found - right).norm(dim=-1) / torch.maximum(right.norm(dim=-1), right.norm(dim=-1).mean())
    assert error.max() <= 0.05
