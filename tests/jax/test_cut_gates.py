"""Gates that close entirely, in JAX: the same results as PyTorch's reference."""

import functools
import math

import jax
import numpy as np
import pytest
import torch

from alibi_attn import forgetting_attention as of_pytorch
from alibi_attn.jax import forgetting_attention

LENGTH, CUTS = 192, [64, 128]


@pytest.mark.parametrize("closed", [-math.inf, -3e38, -1e16, -1e9])
@pytest.mark.parametrize("backend", ["dense", "native", "loop"])
def test_nothing_passes_a_cut_and_later_gates_keep_their_digits(backend: str, closed: float) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((1, LENGTH, 2, 16)).astype(np.float32) for _ in range(3)]
    gates = -np.logaddexp(0.0, -rng.standard_normal((1, 2, LENGTH)) - 1).astype(np.float32)
    gates[..., CUTS] = closed
    weights = rng.standard_normal((1, LENGTH, 2, 16)).astype(np.float32)

    leaves = [torch.tensor(x).double().transpose(1, 2).requires_grad_() for x in inputs]
    leaves.append(torch.tensor(gates).double().requires_grad_())
    exact, exact_lse = of_pytorch(*leaves, return_lse=True, backend="reference")
    output, lse = forgetting_attention(*inputs, gates, return_lse=True, backend=backend)
    np.testing.assert_allclose(output, exact.detach().transpose(1, 2), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(lse, exact_lse.detach(), rtol=1e-5, atol=2e-5)
    found = gradients(*inputs, gates, weights, backend=backend)
    expected = torch.autograd.grad((exact.transpose(1, 2) * torch.tensor(weights)).sum(), leaves)
    for x, y in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_allclose(x, y.transpose(1, 2), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-4, atol=1e-4)
    assert not np.asarray(found[3])[..., CUTS].any()


@functools.partial(jax.jit, static_argnames="backend")
@functools.partial(jax.grad, argnums=(0, 1, 2, 3))
def gradients(q: jax.Array, k: jax.Array, v: jax.Array, gates: jax.Array, weights, *, backend: str) -> jax.Array:
    return (forgetting_attention(q, k, v, gates, backend=backend) * weights).sum()
