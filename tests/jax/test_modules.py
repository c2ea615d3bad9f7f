"""Flax modules equal PyTorch's with the same weights, and a cached pass equals a full one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_checks import assert_close, draw

from alibi_attn import nn
from alibi_attn.jax import flax
from alibi_attn.jax.flax import converted_weights

B, T, E, H = 2, 11, 24, 4
WINDOWS = {"window": (2, 6, 11, 4), "sinks": 2}
OPTIONS = {
    "all": {"num_kv_heads": 2, "bias": True, "qk_norm": True, "learn_slopes": True, "ffn_dim": 40} | WINDOWS,
    "encoder": {"causal": False, "slopes": (0.7, 0.1, 0.3, 0.2), "bias": True},
    "gates": {"num_kv_heads": 2, "forget_gate": True, "slopes": (0.0, 0.1, 0.0, 0.2), "window": 9},
}


def torch_block(options: dict) -> torch.nn.Module:
    block = nn.ALiBiTransformerBlock(E, H, **options)
    for parameter in block.parameters():  # as if it had been trained
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    return block


def arrays(block: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy() for name, x in block.state_dict().items()}


def nnx_block(options: dict) -> flax.ALiBiTransformerBlock:
    return flax.ALiBiTransformerBlock(E, H, **options, rngs=nnx.Rngs(0))


def set_parameters(module: nnx.Module, parameters: dict) -> None:
    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, parameters)
    nnx.update(module, state)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_block_trained_in_torch_gives_the_same_in_flax_and_back(options: dict) -> None:
    torch.manual_seed(0)
    block, x, mask = torch_block(options), draw(B, T, E), np.arange(T) < np.array([[T], [7]])
    with torch.no_grad():
        expected = block(torch.tensor(x), key_mask=torch.tensor(mask)).numpy()
    for_nnx = nnx_block(options)
    set_parameters(for_nnx, converted_weights(arrays(block)))
    assert_close(nnx.jit(lambda m, x: m(x, key_mask=jnp.asarray(mask)))(for_nnx, x), expected)

    back = torch_block(options)
    returned = converted_weights(nnx.to_pure_dict(nnx.state(for_nnx, nnx.Param)))
    back.load_state_dict({name: torch.tensor(np.asarray(value)) for name, value in returned.items()})
    with torch.no_grad():
        assert_close(back(torch.tensor(x), key_mask=torch.tensor(mask)).numpy(), expected)


@pytest.mark.parametrize("name", ["prefix_len", "positions"])
def test_prefixes_and_positions_are_those_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "causal": True}
    block, x = torch_block(options), draw(B, T, E)
    given = {"prefix_len": np.array([4, 0]), "positions": np.cumsum(1 + np.arange(B * T) % 3).reshape(B, T) / 2.0}[name]
    with torch.no_grad():
        expected = block(torch.tensor(x), **{name: torch.tensor(given)}).numpy()
        assert np.abs(block(torch.tensor(x)).numpy() - expected).max() > 1e-3
    ours = nnx_block(options)
    set_parameters(ours, converted_weights(arrays(block)))
    assert_close(ours(x, **{name: jnp.asarray(given)}), expected)
    for refuses, cache in ((ours, ours.attention.new_cache(B, T)), (nnx_block(OPTIONS["gates"]), None)):
        with pytest.raises(ValueError, match="prefix_len and positions support neither a cache nor forget gates"):
            refuses(x, cache=cache, **{name: given})
    with pytest.raises(TypeError, match=r"ALiBiTransformerBlock takes x by position but .*: key_mask \[B, S\]"):
        ours(x, jnp.ones((B, T), bool))
    with pytest.raises(TypeError, match=r"ALiBiAttention takes x by position but got"):
        ours.attention(x, None)
    with pytest.raises(ValueError, match="forget_gate supports one window for all heads and no sinks"):
        nnx_block(OPTIONS["gates"] | {"sinks": 2})


def test_options_without_a_counterpart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embedding\.weight has no counterpart in Flax"):
        converted_weights({"embedding.weight": np.zeros((3, 4))})
    with pytest.raises(ValueError, match=r"embedding\.table has no counterpart in PyTorch"):
        converted_weights({"embedding": {"table": np.zeros((3, 4))}})


CHUNKS = (5, 1, 5)


@pytest.mark.parametrize("name", ["all", "gates"])
def test_cached_decoding_equals_the_full_pass_in_nnx(name: str) -> None:
    block, x = nnx_block(OPTIONS[name]), draw(B, T, E)
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


def test_gates_stay_in_fp32_where_all_else_is_bf16() -> None:
    x = jnp.asarray(draw(B, T, E), jnp.bfloat16)
    layer = flax.ALiBiAttention(E, H, forget_gate=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    set_parameters(layer, narrow)
    cache = layer.new_cache(B, T, dtype=jnp.bfloat16)
    output = layer(x, cache=cache)
    kernel = np.asarray(narrow["gate_proj"]["kernel"], np.float64)
    exact = -np.logaddexp(0.0, -(np.asarray(x, np.float64) @ kernel)).swapaxes(1, 2)
    assert output.dtype == cache.key[...].dtype == jnp.bfloat16
    assert cache.log_fgate[...].dtype == jnp.float32
    np.testing.assert_allclose(cache.log_fgate[...], exact, rtol=0, atol=2e-6)


def test_a_gate_starts_as_in_pytorch() -> None:
    gate = flax.ALiBiAttention(256, 8, forget_gate=True, rngs=nnx.Rngs(0)).gate_proj
    in_torch = nn.ALiBiAttention(256, 8, forget_gate=True).gate_proj
    for kernel, bias in (
        (gate.kernel[...], gate.bias[...]),
        (in_torch.weight.detach().numpy(), in_torch.bias.detach().numpy()),
    ):
        assert not np.any(bias)
        assert 0.99 / 16 < np.abs(kernel).max() <= 1 / 16  # √256
        assert abs(np.std(kernel) * 16 - 3**-0.5) < 0.03


def test_a_cache_has_gates_where_the_layer_has() -> None:
    gated, plain = (flax.ALiBiAttention(E, H, forget_gate=gates, rngs=nnx.Rngs(0)) for gates in (True, False))
    x = jnp.ones((1, 2, E))
    with pytest.raises(ValueError, match="gates were passed but the cache has no room for gates"):
        gated(x, cache=plain.new_cache(1, 4))
    with pytest.raises(ValueError, match="no gates were passed but the cache has room for gates"):
        plain(x, cache=gated.new_cache(1, 4))


@pytest.mark.parametrize("window", [None, 1])
def test_every_output_after_the_end_of_a_cache_is_nan_under_jit(window: int | None) -> None:
    layer = flax.ALiBiAttention(E, H, window=window, rngs=nnx.Rngs(0))
    cache, step = layer.new_cache(B, 3), nnx.jit(lambda m, x, cache: m(x, cache=cache))
    outputs = [step(layer, jnp.ones((B, 1, E)), cache) for _ in range(6)]
    assert [bool(jnp.isnan(output).all()) for output in outputs] == [False] * 3 + [True] * 3


@pytest.mark.parametrize(("batch", "kv_heads"), [(3, 2), (2, 4)], ids=["batch", "heads"])
def test_a_cache_of_another_shape_is_refused_and_stays_empty(batch: int, kv_heads: int) -> None:
    layer = flax.ALiBiAttention(E, H, num_kv_heads=2, rngs=nnx.Rngs(0))
    cache = flax.KVCache(batch, 8, kv_heads, E // H)
    for call in (layer, nnx.jit(lambda x, *, cache: layer(x, cache=cache))):
        with pytest.raises(ValueError, match=r"shape \[2, 1, 2, 6\] was passed but the cache holds"):
            call(jnp.ones((2, 1, E)), cache=cache)
    assert int(cache.length[...]) == 0
    assert not cache.key[...].any()


def test_dropout_only_in_training() -> None:
    x = draw(B, T, E)
    block = flax.ALiBiTransformerBlock(E, H, dropout_p=0.5, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda m, x: m(x))
    assert not jnp.array_equal(run(block, x), run(block, x))
    block.eval()
    assert jnp.array_equal(run(block, x), run(block, x))


def test_learned_slopes_get_a_gradient_and_fixed_ones_are_no_parameter() -> None:
    block, x = nnx_block(OPTIONS["all"]), draw(B, T, E)
    grads = nnx.jit(nnx.grad(lambda m, x: jnp.square(m(x)).sum()))(block, x)
    assert (jnp.abs(grads["attention"]["slopes"][...]) > 0).all()
    assert "slopes" not in nnx.to_pure_dict(nnx.state(nnx_block({}), nnx.Param))["attention"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads is 3 but must divide num_heads, 4"),
        ({"slopes": (0.5,)}, r"must be \[H\] = \[4\]"),
        ({"forget_gate": True, "causal": False}, "forget_gate needs causal=True"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flax.ALiBiAttention(E, H, **options, rngs=nnx.Rngs(0))


def test_a_cache_of_an_encoder_is_refused() -> None:
    encoder = flax.ALiBiAttention(E, H, causal=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="needs causal=True"):
        encoder(jnp.ones((1, 2, E)), cache=encoder.new_cache(1, 4))
