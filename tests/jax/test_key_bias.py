"""Biases of keys and forget gates in JAX: accuracy at great length without fp64, huge biases, and transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_checks import BACKENDS, assert_close, draw, fixture_of_tiles

from alibi_attn import forgetting_attention as of_pytorch
from alibi_attn.jax import alibi_attention, forgetting_attention
from alibi_attn.jax.forgetting import _running_sums

small_tiles = fixture_of_tiles(16, 8, autouse=False)
QKV = draw(2, 40, 4, 8, seed=1), draw(2, 40, 2, 8, seed=2), draw(2, 40, 2, 8, seed=3)
BIAS = draw(2, 4, 40, seed=4)


def log_gates(logits: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -logits).astype(np.float32)


def gated(t: int, s: int, h: int = 4, k: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(t)
    shapes = (2, t, h, 16), (2, s, k, 16), (2, s, k, 16)
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [*inputs, log_gates(1.0 + rng.standard_normal((2, h, s)))]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 1000, 131_072])
def test_sums_of_gates_keep_the_digits_that_fp32_does_not_have(length: int, reverse: bool) -> None:
    gates = log_gates(2 * np.random.default_rng(0).standard_normal((2, length)))
    high, low = jax.jit(partial(_running_sums, reverse=reverse))((gates, np.zeros_like(gates)))
    wide = gates.astype(np.float64)
    exact = wide[:, ::-1].cumsum(-1)[:, ::-1] if reverse else wide.cumsum(-1)
    assert np.abs(np.float64(high) + np.float64(low) - exact).max() < 1e-7
    assert length < 131_072 or np.abs(np.float64(high) - exact).max() > 1e-3


@pytest.mark.parametrize("backend", ["native", "loop"])
def test_great_length_costs_no_digits(backend: str) -> None:
    """The last queries of 131,072 tokens: sums of gates are 10⁵, where fp32 keeps two decimal places."""
    t, s, near = 64, 131_072, 512
    query, key, value, gates = (x[:1] for x in gated(t, s, h=1, k=1))
    output, lse = jax.jit(partial(forgetting_attention, return_lse=True, backend=backend))(query, key, value, gates)
    rows = [torch.tensor(x, dtype=torch.float64).transpose(1, 2) for x in (query, key[:, -near:], value[:, -near:])]
    last = torch.tensor(gates[..., -near:], dtype=torch.float64)
    exact, exact_lse = of_pytorch(*rows, last, return_lse=True, backend="reference")
    np.testing.assert_allclose(output, exact.transpose(1, 2).numpy(), rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, exact_lse.numpy(), rtol=0, atol=8e-6)


@pytest.mark.parametrize("backend", ["native", pytest.param("loop", marks=pytest.mark.long)])
def test_a_gates_gradient_is_right_at_length(backend: str) -> None:
    """It is a sum over all later rows: rounding errors of single rows must not accumulate."""
    inputs = [x[:1] for x in gated(6144, 6144, h=1, k=1)]
    inputs[3] = log_gates(2.0 + np.random.default_rng(1).standard_normal(inputs[3].shape))
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]

    def loss(gates: jax.Array) -> jax.Array:
        output = forgetting_attention(*narrow, gates, backend=backend)
        return (output.astype(jnp.float32) * inputs[0]).sum()

    ours = np.asarray(jax.grad(loss)(jnp.asarray(inputs[3])))
    wide = [torch.tensor(np.asarray(x, np.float64)).transpose(1, 2) for x in narrow]
    gates = torch.tensor(inputs[3], dtype=torch.float64, requires_grad=True)
    output = of_pytorch(*wide, gates).transpose(1, 2)
    exact = torch.autograd.grad((output * torch.tensor(inputs[0])).sum(), gates)[0].numpy()
    assert np.abs(ours - exact).max() < 0.03 * exact.std()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", ["native", "dense"])
def test_vmap_and_jit_carry_gates(backend: str) -> None:
    inputs = gated(40, 40)
    one = lambda *x: forgetting_attention(*(y[None] for y in x), backend=backend)[0]  # noqa: E731
    mapped = jax.jit(jax.vmap(jax.grad(lambda *x: jnp.square(one(*x)).sum(), argnums=3)))(*inputs)
    whole = jax.grad(lambda *x: jnp.square(forgetting_attention(*x, backend=backend)).sum(), argnums=3)(*inputs)
    np.testing.assert_allclose(mapped, whole, rtol=1e-5, atol=1e-5)
    assert (np.asarray(whole)[:, :, 0] == 0).all()  # no key lies before the first gate


def test_the_log_sum_exp_is_unshifted_and_as_wide_as_the_bias() -> None:
    with jax.enable_x64(True):
        bias = BIAS.astype(np.float64) + 2.0**30
        call = partial(alibi_attention, *QKV, causal=False, return_lse=True, backend="dense")
        (_, lse), (_, near) = call(key_bias=bias), call(key_bias=bias - 2.0**30)
        assert lse.dtype == near.dtype == jnp.float64
        np.testing.assert_allclose(lse - 2.0**30, near, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("soft", [-1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_soft_mask_of_a_huge_number_costs_the_others_no_digit(backend: str, soft: float) -> None:
    mask = np.arange(40) < 27
    bias = np.where(mask, BIAS, np.float32(soft))
    soft_answer, hard_answer = (
        alibi_attention(*QKV, key_bias=b, backend=backend, causal=False, return_lse=True)
        for b in (bias, np.where(mask, BIAS, -np.inf))
    )
    assert_close(soft_answer, hard_answer)
