"""Flax modules equal PyTorch's with the same weights, and a cached pass equals a full one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from alibi_attn import nn
from alibi_attn.jax import flax, linen
from alibi_attn.jax.layers import converted_weights

B, T, E, H = 2, 11, 24, 4
OPTIONS = {
    "all": {"num_kv_heads": 2, "bias": True, "qk_norm": True, "learn_slopes": True, "window": 6, "ffn_dim": 40},
    "encoder": {"causal": False, "slopes": (0.7, 0.1, 0.3, 0.2), "bias": True},
}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def torch_block(options: dict) -> torch.nn.Module:
    block = nn.ALiBiTransformerBlock(E, H, **options)
    for parameter in block.parameters():  # as if it had been trained
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    return block


def arrays(block: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy() for name, x in block.state_dict().items()}


def nnx_block(options: dict, parameters: dict | None = None) -> flax.ALiBiTransformerBlock:
    block = flax.ALiBiTransformerBlock(E, H, **options, rngs=nnx.Rngs(0))
    if parameters is not None:
        state = nnx.state(block, nnx.Param)
        nnx.replace_by_pure_dict(state, parameters)
        nnx.update(block, state)
    return block


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_block_trained_in_torch_gives_the_same_in_flax_and_back(options: dict) -> None:
    torch.manual_seed(0)
    block, x, mask = torch_block(options), draw(B, T, E), np.arange(T) < np.array([[T], [7]])
    with torch.no_grad():
        expected = block(torch.tensor(x), key_mask=torch.tensor(mask)).numpy()
    parameters = converted_weights(arrays(block))
    for_nnx = nnx_block(options, parameters)
    assert_close(nnx.jit(lambda m, x: m(x, key_mask=jnp.asarray(mask)))(for_nnx, x), expected)
    for_linen = linen.ALiBiTransformerBlock(E, H, **options)
    assert_close(jax.jit(for_linen.apply)({"params": parameters}, x, key_mask=mask), expected)

    back = torch_block(options)
    returned = converted_weights(nnx.to_pure_dict(nnx.state(for_nnx, nnx.Param)))
    back.load_state_dict({name: torch.tensor(np.asarray(value)) for name, value in returned.items()})
    with torch.no_grad():
        assert_close(back(torch.tensor(x), key_mask=torch.tensor(mask)).numpy(), expected)


def test_linen_has_the_parameters_that_are_converted() -> None:
    options = OPTIONS["all"]
    shapes = jax.eval_shape(linen.ALiBiTransformerBlock(E, H, **options).init, jax.random.key(0), jnp.ones((B, T, E)))
    converted = converted_weights(arrays(torch_block(options)))
    assert jax.tree.map(jnp.shape, converted) == jax.tree.map(jnp.shape, shapes["params"])


def test_what_has_no_counterpart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"embedding\.weight has no counterpart in Flax"):
        converted_weights({"embedding.weight": np.zeros((3, 4))})
    with pytest.raises(ValueError, match=r"embedding\.table has no counterpart in PyTorch"):
        converted_weights({"embedding": {"table": np.zeros((3, 4))}})


CHUNKS = (5, 1, 5)


def test_cached_decoding_equals_the_full_pass_in_nnx() -> None:
    block, x = nnx_block(OPTIONS["all"]), draw(B, T, E)
    full = nnx.jit(lambda m, x: m(x))(block, x)
    cache = block.attention.new_cache(B, T + 3)
    step = nnx.jit(lambda m, x, cache: m(x, cache=cache))
    outputs, first = [], 0
    for size in CHUNKS:
        outputs.append(step(block, x[:, first : first + size], cache))
        first += size
    assert_close(jnp.concatenate(outputs, axis=1), full)
    assert int(cache.length[...]) == T
    with pytest.raises(ValueError, match="holds 11 of 14 positions and 5 more do not fit"):
        block(x[:, :5], cache=cache)
    assert jnp.isnan(step(block, x[:, :5], cache)).any()


def test_cached_decoding_equals_the_full_pass_in_linen() -> None:
    x = draw(B, T, E)
    make = partial(linen.ALiBiTransformerBlock, E, H, **OPTIONS["all"])
    variables = jax.jit(make(decode=True).init)(jax.random.key(0), x)
    full = jax.jit(make().apply)({"params": variables["params"]}, x)
    step = jax.jit(partial(make(decode=True).apply, mutable=["cache"]))
    cache, outputs, first = variables["cache"], [], 0
    for size in CHUNKS:
        chunk = x[:, first : first + size]
        output, changed = step({"params": variables["params"], "cache": cache}, chunk)
        cache = changed["cache"]
        outputs.append(output)
        first += size
    assert_close(jnp.concatenate(outputs, axis=1), full)


def test_dropout_only_in_training() -> None:
    x = draw(B, T, E)
    block = flax.ALiBiTransformerBlock(E, H, dropout_p=0.5, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda m, x: m(x))
    assert not jnp.array_equal(run(block, x), run(block, x))
    block.eval()
    assert jnp.array_equal(run(block, x), run(block, x))
    module = linen.ALiBiTransformerBlock(E, H, dropout_p=0.5)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    train = jax.jit(partial(module.apply, deterministic=False))
    one, other = (train(variables, x, rngs={"dropout": jax.random.key(seed)}) for seed in (0, 1))
    assert not jnp.array_equal(one, other)


def test_learned_slopes_get_a_gradient_and_fixed_ones_are_no_parameter() -> None:
    block, x = nnx_block(OPTIONS["all"]), draw(B, T, E)
    grads = nnx.jit(nnx.grad(lambda m, x: jnp.square(m(x)).sum()))(block, x)
    assert (jnp.abs(grads["attention"]["slopes"][...]) > 0).all()
    assert "slopes" not in nnx.to_pure_dict(nnx.state(nnx_block({}), nnx.Param))["attention"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 25, "num_heads": 4}, "must be a multiple of num_heads"),
        ({"embed_dim": 24, "num_heads": 4, "num_kv_heads": 3}, "must be a multiple of num_kv_heads"),
        ({"embed_dim": 24, "num_heads": 4, "slopes": (0.5,)}, "must be [H] = [4]"),
        ({"embed_dim": 24, "num_heads": 4, "dropout_p": 1.0}, "must be a probability"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        flax.ALiBiAttention(**options, rngs=nnx.Rngs(0))
    assert message in str(error.value)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(linen.ALiBiAttention(**options).init, jax.random.key(0), jnp.ones((1, 2, options["embed_dim"])))
    assert message in str(error.value)


def test_a_cache_of_an_encoder_is_refused() -> None:
    encoder = flax.ALiBiAttention(E, H, causal=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="needs causal=True"):
        encoder(jnp.ones((1, 2, E)), cache=encoder.new_cache(1, 4))


def assert_close(got: object, expected: object) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=2e-5, atol=2e-5)
