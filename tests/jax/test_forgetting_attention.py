"""forgetting_attention in JAX: its formula, equivalences, accuracy at great length without fp64, and errors."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_checks import fixture_of_tiles

from alibi_attn import forgetting_attention as of_pytorch
from alibi_attn.jax import forgetting_attention
from alibi_attn.jax.forgetting import _running_sums

small_tiles = fixture_of_tiles(16, 8, autouse=False)


def log_gates(logits: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -logits).astype(np.float32)


def draw(t: int = 40, s: int | None = None, h: int = 4, k: int = 2, gates_of: int | None = None) -> list[np.ndarray]:
    rng, s = np.random.default_rng(t), t if s is None else s
    shapes = (2, t, h, 16), (2, s, k, 16), (2, s, k, 16)
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [*inputs, log_gates(1.0 + rng.standard_normal((2, gates_of or h, s)))]


def by_hand(query, key, value, gates):
    """The paper's formula in PyTorch, fp64: (output [B, T, H, D], lse)."""
    t, s = query.shape[1], key.shape[1]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    i, j, at = torch.arange(s - t, s)[:, None, None], torch.arange(s)[:, None], torch.arange(s)
    lies_between = ((at > j) & (at <= i)).double()  # [T, S, l]
    scores = query @ key.mT * query.shape[-1] ** -0.5 + torch.einsum("ijl,bhl->bhij", lies_between, gates)
    scores = scores.masked_fill((i < j)[..., 0], -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


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
    query, key, value, gates = (x[:1] for x in draw(t, s, h=1, k=1))
    output, lse = jax.jit(partial(forgetting_attention, return_lse=True, backend=backend))(query, key, value, gates)
    last = [torch.tensor(x, dtype=torch.float64) for x in (query, key[:, -near:], value[:, -near:], gates[..., -near:])]
    exact, exact_lse = by_hand(*last)
    np.testing.assert_allclose(output, exact.numpy(), rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, exact_lse.numpy(), rtol=0, atol=8e-6)


@pytest.mark.parametrize("backend", ["native", pytest.param("loop", marks=pytest.mark.long)])
def test_a_gates_gradient_is_right_at_length(backend: str) -> None:
    """It is a sum over all later rows: rounding errors of single rows must not accumulate."""
    inputs = [x[:1] for x in draw(6144, h=1, k=1)]
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
    inputs = draw(40)
    one = lambda *x: forgetting_attention(*(y[None] for y in x), backend=backend)[0]  # noqa: E731
    mapped = jax.jit(jax.vmap(jax.grad(lambda *x: jnp.square(one(*x)).sum(), argnums=3)))(*inputs)
    whole = jax.grad(lambda *x: jnp.square(forgetting_attention(*x, backend=backend)).sum(), argnums=3)(*inputs)
    np.testing.assert_allclose(mapped, whole, rtol=1e-5, atol=1e-5)
    assert (np.asarray(whole)[:, :, 0] == 0).all()  # no key lies before the first gate


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"log_fgate": 0.1}, ValueError, "at most 0, the natural logarithm"),
        ({"log_fgate": np.zeros((2, 3, 40), np.float32)}, ValueError, r"must be \[B, H, S\] = \[2, 4, 40\]"),
        ({"log_fgate": [0.0]}, TypeError, "log_fgate must be a jax.Array or numpy array but is list"),
        ({"query_offset": np.int32(0)}, ValueError, "does not support query_offset as an array"),
        ({"query_offset": 3}, ValueError, "every query must be among the keys"),
        ({"causal": False}, TypeError, r"forgetting_attention\(\) got an unexpected keyword argument 'causal'"),
        ({"attn_mask": None}, TypeError, r"forgetting_attention\(\) got .* 'attn_mask'; here it is slopes"),
    ],
)
def test_invalid_arguments_are_refused(changes: dict, error: type[Exception], said: str) -> None:
    given = dict(zip(("query", "key", "value", "log_fgate"), draw(), strict=True))
    if isinstance(changes.get("log_fgate"), float):
        given["log_fgate"][1, 2, 3] = changes["log_fgate"]
        changes = {}
    with pytest.raises(error, match=said):
        forgetting_attention(**given | changes)
