"""In JAX, keys before a cut are never used, and a query whose keys after the cut are hidden sees nothing."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from alibi_attn import forgetting_attention as of_pytorch
from alibi_attn.jax import forgetting_attention

LENGTH, CUT = 192, 100
BACKENDS = ["dense", "native", "loop"]
AFTER = np.broadcast_to(np.arange(LENGTH) >= CUT, (2, LENGTH))
# All calls have all masks, so that each backend is compiled once; `test_cut_gates.py` has none.
ZEROS = np.zeros((2, LENGTH), np.int32)
NOTHING_HIDDEN = {
    "key_mask": np.ones((2, LENGTH), bool),
    "key_bias": np.zeros((2, 1, LENGTH), np.float32),
    "segment_ids": (ZEROS, ZEROS),
}


def drawn(kv_heads: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((2, LENGTH, heads, 16)).astype(np.float32) for heads in (2, kv_heads, kv_heads)]
    gates = -np.logaddexp(0.0, -rng.standard_normal((2, 2, LENGTH)) - 1).astype(np.float32)
    gates[..., CUT] = -math.inf
    gates[1, 1, 150] = -math.inf
    return [*inputs, gates]


def answer(backend: str, arrays: list[np.ndarray], rows: np.ndarray, **masks) -> list[np.ndarray]:
    """(output, lse, gradients of the results in these rows [B, T])."""
    options = NOTHING_HIDDEN | masks

    def weighted(*leaves: jax.Array) -> jax.Array:
        output, lse = forgetting_attention(*leaves, return_lse=True, backend=backend, **options)
        output = jnp.where(rows[..., None, None], output, 0.0)  # no gradient of NaN goes back
        seen = rows[:, None] & (lse > -jnp.inf)
        return (output * jnp.cos(output)).sum() + jnp.where(seen, lse, 0.0).sum()

    found = forgetting_attention(*arrays, return_lse=True, backend=backend, **options)
    return [np.asarray(x) for x in (*found, *jax.grad(weighted, argnums=(0, 1, 2, 3))(*arrays))]


@functools.cache
def clean_answer(backend: str) -> list[np.ndarray]:
    return answer(backend, drawn(), AFTER)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4])
def test_keys_before_a_cut_are_never_used(backend: str, bad: float) -> None:
    spoiled = drawn()
    spoiled[1][0, 90, 0] = spoiled[2][1, 30, 0] = bad
    clean, found = clean_answer(backend), answer(backend, spoiled, AFTER)
    np.testing.assert_allclose(found[0][:, CUT:], clean[0][:, CUT:], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1][..., CUT:], clean[1][..., CUT:], rtol=1e-5, atol=1e-5)
    for x, y in zip(found[2:5], clean[2:5], strict=True):
        np.testing.assert_allclose(x[:, CUT:], y[:, CUT:], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[5][..., CUT + 1 :], clean[5][..., CUT + 1 :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden", ["key_mask", "key_bias", "segment_ids"])
def test_a_query_whose_keys_since_the_cut_are_hidden_sees_nothing(backend: str, hidden: str) -> None:
    inputs = drawn()
    seen = np.ones((2, LENGTH), bool)
    seen[:, CUT : CUT + 20] = seen[1, 150:] = False
    options: dict = {"key_mask": seen}
    if hidden == "key_bias":
        options = {"key_bias": np.where(seen, 0.0, -math.inf)[:, None].astype(np.float32)}
    if hidden == "segment_ids":
        options = {"segment_ids": (np.zeros((2, LENGTH), np.int32), np.where(seen, 0, 2).astype(np.int32))}
    everything = np.ones((2, LENGTH), bool)
    found = answer(backend, inputs, everything, **options)
    leaves = [torch.tensor(x).double() for x in inputs]
    leaves = [x.transpose(1, 2) if at < 3 else x for at, x in enumerate(leaves)]
    leaves = [x.requires_grad_() for x in leaves]
    of_torch = {
        name: tuple(map(torch.tensor, x)) if isinstance(x, tuple) else torch.tensor(x) for name, x in options.items()
    }
    output, lse = of_pytorch(*leaves, return_lse=True, backend="reference", **of_torch)
    assert bool((lse[:, 0, CUT : CUT + 20] == -math.inf).all())
    np.testing.assert_allclose(found[0], output.detach().transpose(1, 2), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(found[1], lse.detach(), rtol=1e-5, atol=2e-5)
    loss = (output * output.cos()).sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
    for at, (x, y) in enumerate(zip(found[2:], torch.autograd.grad(loss, leaves), strict=True)):
        np.testing.assert_allclose(x, y.transpose(1, 2) if at < 3 else y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["dense", "loop"])
def test_scores_beyond_a_cut_s_bias_stay_before_it(backend: str) -> None:
    inputs = drawn()
    spoiled = [x.copy() for x in inputs]
    spoiled[1][0, 90] = spoiled[2][0, 90] = 1e8
    found, clean = (forgetting_attention(*some, backend=backend, **NOTHING_HIDDEN) for some in (spoiled, inputs))
    np.testing.assert_allclose(found[:, CUT:], clean[:, CUT:], rtol=1e-5, atol=1e-5)
