"""ALiBi in Flax's attention layers, compared with a typed-out bias in Flax's own attention."""

import functools
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from alibi_attn.jax import alibi_dot_product_attention, mha_alibi

H, D_IN, WIDTH = 4, 6, 16
SLOPES = np.float32([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])  # 2^(−8(h + 1)/4)
BATCHES = {"unbatched": (), "two batch axes": (2, 3)}
LAYER = linen.MultiHeadDotProductAttention(num_heads=H, qkv_features=WIDTH)


@functools.cache
def parameters() -> dict:
    return jax.jit(LAYER.init)(jax.random.key(1), jnp.ones((1, D_IN)))


def apply(layer: linen.Module, *args: jax.Array, **kwargs) -> jax.Array:
    return jax.jit(partial(layer.apply, **kwargs))(parameters(), *args)


def typed_bias(query_len: int, key_len: int, first: int = 0, slopes: np.ndarray = SLOPES) -> jax.Array:
    i, j = jnp.arange(first, first + query_len)[:, None], jnp.arange(key_len)[None, :]
    return -slopes[:, None, None] * jnp.abs(i - j)


def ours(**options: object) -> linen.Module:
    """Flax's layer with our attention_fn."""
    fn = partial(alibi_dot_product_attention, **options) if options else alibi_dot_product_attention
    return linen.MultiHeadDotProductAttention(num_heads=H, qkv_features=WIDTH, attention_fn=fn)


def biased(bias: jax.Array, width: int = WIDTH) -> linen.Module:
    """Flax's layer with Flax's attention and this bias."""

    def attention_fn(query, key, value, mask=None):
        return linen.dot_product_attention(query, key, value, bias=bias, mask=mask)

    return linen.MultiHeadDotProductAttention(num_heads=len(bias), qkv_features=width, attention_fn=attention_fn)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_linen_layer_equals_the_bias_typed_out(batch: tuple[int, ...]) -> None:
    x = draw(*batch, 7, D_IN)
    assert_close(apply(ours(), x), apply(biased(typed_bias(7, 7)), x))


@pytest.mark.parametrize("kind", ["causal", "padding", "padding of one axis fewer"])
def test_masks_mean_what_they_mean_in_flax(kind: str) -> None:
    x = draw(3, 7, D_IN)
    if kind == "causal":
        mask = linen.make_causal_mask(jnp.ones((3, 7)))
    else:
        seen = jnp.arange(7) < jnp.asarray([[7], [4], [1]])
        mask = seen[:, None, None, :] if kind == "padding" else seen[:1, None, :]
    assert_close(apply(ours(), x, mask=mask), apply(biased(typed_bias(7, 7)), x, mask=mask))


@pytest.mark.parametrize("first", [0, None], ids=["from zero", "the last of the positions"])
def test_cross_attention(first: int | None) -> None:
    x, memory = draw(2, 5, D_IN), draw(2, 9, D_IN, seed=1)
    typed = biased(typed_bias(5, 9, first=9 - 5 if first is None else first))
    assert_close(apply(ours(query_offset=first), x, memory), apply(typed, x, memory))


def test_decoding_in_linen_equals_the_causal_pass() -> None:
    x = draw(2, 6, D_IN)
    layer = linen.MultiHeadDotProductAttention(
        num_heads=H, qkv_features=WIDTH, attention_fn=alibi_dot_product_attention, decode=True
    )
    variables = layer.init(jax.random.key(1), x)
    whole = ours(causal=True).apply({"params": variables["params"]}, x)
    step = jax.jit(partial(layer.apply, mutable=["cache"]))
    cache, outputs = variables["cache"], []
    for t in range(6):
        output, changed = step({"params": variables["params"], "cache": cache}, x[:, t : t + 1])
        cache = changed["cache"]
        outputs.append(output)
    assert_close(jnp.concatenate(outputs, axis=1), whole)


def test_nnx_layer_and_its_decoding_equal_the_bias_typed_out() -> None:
    x = draw(2, 6, D_IN)
    layer = nnx.MultiHeadAttention(
        H, D_IN, WIDTH, attention_fn=alibi_dot_product_attention, decode=False, rngs=nnx.Rngs(0)
    )

    def typed(query, key, value, mask=None, **_):
        return nnx.dot_product_attention(query, key, value, bias=typed_bias(6, 6)[None], mask=mask)

    mask = linen.make_causal_mask(jnp.ones((2, 6)))
    takes_is_causal = "is_causal" in inspect.signature(layer.__call__).parameters  # since Flax 0.12.8
    symmetric, causal = layer(x), layer(x, **({"is_causal": True} if takes_is_causal else {"mask": mask}))
    layer.init_cache(x.shape)
    steps = jnp.concatenate([layer(x[:, t : t + 1], decode=True) for t in range(6)], axis=1)
    layer.attention_fn = typed
    assert_close(symmetric, layer(x))
    assert_close(causal, layer(x, mask=mask))
    assert_close(steps, causal)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_sown_weights_are_the_softmax(batch: tuple[int, ...]) -> None:
    x = draw(*batch, 7, D_IN)
    output, sown = apply(ours(), x, sow_weights=True, mutable=["intermediates"])
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.shape == (*batch, H, 7, 7)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    assert_close(output, apply(ours(), x))


def test_dropout_draws_from_the_layer() -> None:
    x = draw(2, 40, D_IN)
    layer = linen.MultiHeadDotProductAttention(
        H, qkv_features=WIDTH, dropout_rate=0.5, attention_fn=alibi_dot_product_attention, deterministic=False
    )
    run = jax.jit(lambda x, key: layer.apply(parameters(), x, rngs={"dropout": key}))
    one, again, other = (run(x, jax.random.key(seed)) for seed in (0, 0, 1))
    assert jnp.array_equal(one, again)
    assert not jnp.allclose(one, other)


def test_mha_alibi_equals_the_layer_with_a_typed_bias() -> None:
    x, num_heads = draw(5, 7), 6
    slopes = np.float32([2 ** (-8 * (h + 1) / num_heads) for h in range(num_heads)])
    layer = biased(typed_bias(5, 5, slopes=slopes), width=12)
    expected, _ = jax.jit(layer.init_with_output)(jax.random.PRNGKey(3), x)
    got = mha_alibi(3, x, num_heads, 12)
    assert got.shape == (35,)
    assert_close(got, expected.ravel())


def test_the_checker_fails_on_wrong_slopes_and_shifts() -> None:
    x = draw(7, D_IN)
    for wrong in (typed_bias(7, 7)[::-1], typed_bias(7, 7, first=1), 0 * typed_bias(7, 7)):
        with pytest.raises(AssertionError):
            assert_close(apply(ours(), x), apply(biased(wrong), x))


def test_wrong_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 4\] but must be \[T, D_in\]"):
        mha_alibi(0, jnp.ones((2, 3, 4)), 2, 4)
    with pytest.raises(ValueError, match="must be"):
        alibi_dot_product_attention(jnp.ones((3, 4)), jnp.ones((3, 4)), jnp.ones((3, 4)))
    x, bias = jnp.ones((2, 3, H, 4)), jnp.zeros((2, H, 3, 3))
    for slopes, message in ((np.ones(2 * H), "slopes has 8 entries"), ([np.nan] * H, "slopes must be finite")):
        for given in (None, bias):  # without and with all weights
            with pytest.raises(ValueError, match=message):
                alibi_dot_product_attention(x, x, x, given, slopes=slopes)
    with pytest.raises(ValueError, match="dropout_p is 1"):
        alibi_dot_product_attention(x, x, x, bias, dropout_rate=1.0, dropout_rng=jax.random.key(0))


def assert_close(got: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
