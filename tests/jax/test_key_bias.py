"""key_bias in JAX: its allowed shapes, hidden keys, accuracy, and transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_checks import BACKENDS, assert_close, draw, fixture_of_tiles

from alibi_attn.jax import alibi_attention

B, N, H, K, D = 2, 40, 4, 2, 8
small_tiles = fixture_of_tiles(16, 8, autouse=True)

QKV = draw(B, N, H, D, seed=1), draw(B, N, K, D, seed=2), draw(B, N, K, D, seed=3)
BIAS = draw(B, H, N, seed=4)


@pytest.mark.parametrize(
    ("bias", "error", "said"),
    [
        (BIAS[..., :-1], ValueError, r"key_bias has shape \[2, 4, 39\] but must be \[B, H, S\] = \[2, 4, 40\]"),
        (BIAS.astype(np.float16), TypeError, "float16 but must be float32 or float64"),
        (np.full(N, np.nan), ValueError, "NaN or \\+inf"),
        ([0.0] * N, TypeError, "key_bias must be a jax.Array or numpy array but is list"),
    ],
)
def test_invalid_biases_are_refused(bias: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        alibi_attention(*QKV, key_bias=bias)
    with pytest.raises(error, match=said):
        jax.jit(lambda: alibi_attention(*QKV, key_bias=bias))()


def test_the_log_sum_exp_is_unshifted_and_as_wide_as_the_bias() -> None:
    with jax.enable_x64(True):
        bias = BIAS.astype(np.float64) + 2.0**30
        call = partial(alibi_attention, *QKV, causal=False, return_lse=True, backend="dense")
        (_, lse), (_, near) = call(key_bias=bias), call(key_bias=bias - 2.0**30)
        assert lse.dtype == near.dtype == jnp.float64
        np.testing.assert_allclose(lse - 2.0**30, near, atol=1e-5)


@pytest.mark.parametrize("soft", [-1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_soft_mask_of_a_huge_number_costs_the_others_no_digit(backend: str, soft: float) -> None:
    mask = np.arange(N) < 27
    bias = np.where(mask, BIAS, np.float32(soft))
    soft_answer, hard_answer = (
        alibi_attention(*QKV, key_bias=b, backend=backend, causal=False, return_lse=True)
        for b in (bias, np.where(mask, BIAS, -np.inf))
    )
    assert_close(soft_answer, hard_answer)
