"""key_bias in JAX: its allowed shapes, hidden keys, accuracy, and transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_checks import BACKENDS, assert_close, assert_own_gradient, draw, fixture_of_tiles

from alibi_attn.jax import alibi_attention
from alibi_attn.slopes import alibi_slopes

B, N, H, K, D = 2, 40, 4, 2, 8
small_tiles = fixture_of_tiles(16, 8, autouse=True)

QKV = draw(B, N, H, D, seed=1), draw(B, N, K, D, seed=2), draw(B, N, K, D, seed=3)
BIAS = draw(B, H, N, seed=4)


def loss(query, key, value, key_bias, **kwargs) -> jax.Array:
    output, lse = alibi_attention(query, key, value, key_bias=key_bias, return_lse=True, **kwargs)
    return (jnp.sin(output) * output).sum() + jnp.where(lse > -jnp.inf, jnp.cos(lse), 0.0).sum()


ALL = (0, 1, 2, 3)
# Not under jit, and symmetric everywhere, so that all tests share the compiled functions.
ANSWER = {name: jax.value_and_grad(partial(loss, backend=name, causal=False), argnums=ALL) for name in BACKENDS}


def test_biases_that_broadcast_are_equal() -> None:
    for given in (BIAS, BIAS[:1], BIAS[:, :1], BIAS[0], BIAS[0, :1], BIAS[0, 0]):
        _, (*_, found) = ANSWER["dense"](*QKV, given)
        _, (*_, whole) = ANSWER["dense"](*QKV, np.broadcast_to(given, BIAS.shape))
        assert found.shape == given.shape
        axes = tuple(range(3 - given.ndim)) + tuple(3 - given.ndim + a for a, n in enumerate(given.shape) if n == 1)
        np.testing.assert_allclose(found.ravel(), whole.sum(axes).ravel(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("bias", "error", "said"),
    [
        (BIAS[..., :-1], ValueError, r"key_bias has shape \[2, 4, 39\] but must be \[B, H, S\] = \[2, 4, 40\]"),
        (BIAS[None], ValueError, "broadcastable to it"),
        (BIAS[..., :1], ValueError, "key_bias has shape"),
        (BIAS.astype(np.float16), TypeError, "float16 but must be float32 or float64"),
        (BIAS.astype(int), TypeError, "int64 but must be float32 or float64"),
        (np.full(N, np.nan), ValueError, "NaN or \\+inf"),
        (np.full(N, np.inf), ValueError, "−inf for a hidden key"),
        ([0.0] * N, TypeError, "key_bias must be a jax.Array or numpy array but is list"),
    ],
)
def test_invalid_biases_are_refused(bias: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        alibi_attention(*QKV, key_bias=bias)
    with pytest.raises(error, match=said):
        jax.jit(lambda: alibi_attention(*QKV, key_bias=bias))()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hidden_key_is_never_used(backend: str) -> None:
    bias = np.where(draw(B, H, N, seed=5) < -0.5, -np.inf, BIAS)
    bias[0, :, 10:30] = -np.inf
    bias[1, 2] = -np.inf  # a head that sees nothing
    bias[1, :2, 7] = -np.inf  # one key head, hidden from both of its query heads
    answers = []
    for bad in (0.0, np.nan, np.inf, 3e38):
        key, value = QKV[1].copy(), QKV[2].copy()
        for x, sign in ((key, 1), (value, -1)):
            x[0, 10:30], x[1, 7, 0] = sign * bad, sign * bad
        answers.append(ANSWER[backend](QKV[0], key, value, bias))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(answers[0]))
    for answer in answers[1:]:
        assert_close(answer, answers[0])
    assert (answers[0][1][3][np.isinf(bias)] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_that_one_head_hides_spoils_only_the_others(backend: str) -> None:
    bias, key = BIAS.copy(), QKV[1].copy()
    bias[:, 0, 0] = -np.inf
    clean = alibi_attention(QKV[0], key, QKV[2], key_bias=bias, backend=backend, causal=False)
    key[:, 0, 0] = 3e38
    huge = alibi_attention(QKV[0], key, QKV[2], key_bias=bias, backend=backend, causal=False)
    np.testing.assert_allclose(huge[:, :, 0], clean[:, :, 0], rtol=1e-5, atol=1e-6)
    key[:, 0, 0] = np.nan
    spoiled = alibi_attention(QKV[0], key, QKV[2], key_bias=bias, backend=backend, causal=False)
    assert np.isnan(spoiled[:, :, 1]).all()
    np.testing.assert_allclose(spoiled[:, :, [0, 2, 3]], clean[:, :, [0, 2, 3]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("much", [2.0**17, -(2.0**17)])
def test_large_numbers_cost_the_rounding_of_their_differences(backend: str, much: float) -> None:
    def answer(bias: np.ndarray) -> tuple[jax.Array, ...]:
        call = partial(alibi_attention, causal=False, backend=backend, return_lse=True)
        (output, lse), pull = jax.vjp(lambda *x: call(*x[:3], key_bias=x[3]), *QKV, jnp.asarray(bias, jnp.float32))
        return output, *pull((output, jnp.ones_like(lse))), lse

    bias = np.round(BIAS * 16) / 16
    *near, near_lse = answer(bias)
    *far, far_lse = answer(bias + much)
    assert_close(far, near)
    np.testing.assert_allclose(far_lse, near_lse + much, rtol=2.0**-23)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_bias_costs_no_digits_in_queries_that_do_not_see_it(backend: str) -> None:
    """Earlier queries get the same results as if the key were hidden, wherever it is in a block."""

    def before(bias: np.ndarray) -> tuple[jax.Array, ...]:
        call = partial(alibi_attention, backend=backend, return_lse=True)
        (output, lse), pull = jax.vjp(lambda *x: call(*x[:3], key_bias=x[3]), *QKV, jnp.asarray(bias))
        early = np.arange(N) < 21
        grads = pull((output * early[:, None, None], jnp.cos(lse) * early))
        return output[:, :21], lse[..., :21], *grads

    bias = BIAS.copy()
    bias[..., 21] = -np.inf
    hidden = before(bias)
    for much in (1e3, 1e6, 1e9, 1e30, 3e38):
        bias[..., 21] = much
        assert_close(before(bias), hidden)


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


def test_a_constant_gate_is_a_slope() -> None:
    slopes = alibi_slopes(H).astype(np.float32)
    bias = slopes[:, None] * np.arange(N, dtype=np.float32)
    gated = alibi_attention(*QKV, [0.0] * H, key_bias=bias)
    np.testing.assert_allclose(gated, alibi_attention(*QKV, slopes), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_vmap_equals_a_loop() -> None:
    many = tuple(jnp.stack([x, 2 * x]) for x in (*QKV, BIAS))
    mapped = jax.vmap(ANSWER["loop"])(*many)
    for n in range(2):
        assert_close(jax.tree.map(lambda x, n=n: x[n], mapped), ANSWER["loop"](*(x[n] for x in many)))


@pytest.mark.long
def test_dropout_has_its_own_gradient() -> None:
    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x, jnp.float64) for x in (*QKV, BIAS))
        call = partial(loss, backend="loop", dropout_p=0.4, dropout_key=jax.random.key(7), window=30)
        assert_own_gradient(jax.value_and_grad(call, argnums=ALL), *args)
