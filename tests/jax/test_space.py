"""Coordinates and registers in JAX, against the definition written with jax.numpy, with gradients by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alibi_attn.jax import alibi_attention, attention, explain
from alibi_attn.jax.flax import ALiBiAttention

B, H, K, D = 2, 4, 2, 8
SLOPES = np.array([0.5, 0.1, 0.3, 0.0])


def definition(query, key, value, slopes, of_query, of_key, registers=0, key_mask=None):
    """(output [B, T, H, D], lse [B, H, T])."""
    squares = jnp.square(of_query[:, :, None] - of_key[:, None]).sum(-1)
    at_query = jnp.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1]
    is_register = (at_query < registers) | (jnp.arange(key.shape[1]) < registers)
    distance = jnp.where(is_register & (registers > 0), 0.0, jnp.sqrt(squares))
    key, value = (jnp.repeat(x, H // K, 2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / D**0.5 - slopes[:, None, None] * distance[:, None]
    if key_mask is not None:
        scores = jnp.where(key_mask[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value), jax.nn.logsumexp(scores, -1)


def drawn(query_len: int, key_len: int, axes: int, seed: int = 0):
    """(query, key, value, positions of queries and keys, incoming gradients)."""
    draw = np.random.default_rng(seed)
    query, grad = draw.standard_normal((2, B, query_len, H, D))
    key, value = draw.standard_normal((2, B, key_len, K, D))
    of_key = 20 * draw.random((B, key_len, axes))
    of_key[:, key_len // 2] = of_key[:, 0]  # two tokens at one place
    of_query = of_key[:, key_len - query_len :] if query_len <= key_len else 20 * draw.random((B, query_len, axes))
    return query, key, value, of_query, of_key, grad, draw.standard_normal((B, H, query_len))


@pytest.mark.parametrize(
    ("query_len", "key_len", "axes", "registers"),
    [(70, 70, 3, 3), (20, 70, 2, 60), (90, 40, 3, 0), (1, 1, 2, 0)],
)
def test_outputs_and_gradients_agree_with_the_definition(query_len, key_len, axes, registers):
    with jax.enable_x64(True):
        *rows, of_query, of_key, grad, grad_lse = drawn(query_len, key_len, axes)
        own = {} if query_len <= key_len else {"query_positions": of_query}

        def loss(function, *given):
            output, lse = function(*given)
            return (output * grad).sum() + (lse * grad_lse).sum(), (output, lse)

        def ours(*given):
            options = {"causal": False, "positions": of_key, "registers": registers, "return_lse": True} | own
            return alibi_attention(*given, **options)

        found = jax.grad(lambda *given: loss(ours, *given), (0, 1, 2, 3), has_aux=True)(*rows, SLOPES)
        expected = jax.grad(
            lambda *given: loss(lambda *x: definition(*x, of_query, of_key, registers), *given),
            (0, 1, 2, 3),
            has_aux=True,
        )(*rows, SLOPES)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11), found, expected)


def test_coordinates_of_ten_million_keep_their_digits():
    query, key, value, _, of_key, *_ = drawn(60, 60, 2)
    mask = np.arange(60) < np.array([[60], [31]])
    rows = [x.astype(np.float32) for x in (query, key, value)]
    found = alibi_attention(*rows, SLOPES, causal=False, positions=of_key + 1e7, key_mask=mask)
    with jax.enable_x64(True):
        expected, _ = definition(query, key, value, SLOPES, of_key, of_key, key_mask=mask)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", [None, "dense", "native", "loop"])
def test_registers_on_a_line_are_computed_by_every_backend(backend):
    query, key, value, *_ = (x.astype(np.float32) for x in drawn(150, 150, 2))
    index = np.broadcast_to(np.arange(150.0, dtype=np.float32)[:, None], (B, 150, 1))
    expected, _ = definition(query, key, value, SLOPES, index, index, registers=4)
    found = alibi_attention(query, key, value, SLOPES, causal=False, registers=4, backend=backend or "auto")
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_a_backend_without_coordinates_is_refused_by_name():
    query, key, value, _, of_key, *_ = drawn(70, 70, 2)
    for name in attention.READS:
        if name != "dense":
            with pytest.raises(
                ValueError, match=f"'{name}' cannot run this: it does not compute positions in the plane"
            ):
                alibi_attention(query, key, value, SLOPES, causal=False, positions=of_key, backend=name)
    assert explain(query, key, value, SLOPES, causal=False, positions=of_key).backend == "dense"


@pytest.mark.parametrize("axes", [1, 2])
def test_a_layer_passes_them_on(axes):
    *_, of_key, _, _ = drawn(40, 40, axes)
    places = np.sort(of_key[..., 0], 1) if axes == 1 else of_key
    x = np.random.default_rng(1).standard_normal((B, 40, 32)).astype(np.float32)
    layer = ALiBiAttention(32, H, num_kv_heads=K, causal=False, registers=3, slopes=SLOPES, rngs=nnx.Rngs(0))
    rows = [layer._heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj)]
    points = places[..., None] if axes == 1 else places
    mixed, _ = definition(*rows, SLOPES.astype(np.float32), *(2 * [points.astype(np.float32)]), registers=3)
    expected = layer.out_proj(mixed.reshape(B, 40, 32))
    np.testing.assert_allclose(layer(x, positions=places.astype(np.float32)), expected, rtol=2e-5, atol=2e-5)
