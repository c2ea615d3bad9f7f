"""Dropout in JAX: the definition's mask for a key's two words, on every backend, in chunks, and equal to PyTorch's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dropout_oracle import PUBLISHED, factors
from jax_checks import BACKENDS, fixture_of_tiles

from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend
from alibi_attn.jax import alibi_attention
from alibi_attn.jax.call.dropout import philox, seed_words

SEED = 2**33 + 12345
P = 0.3

small_tiles = fixture_of_tiles(16, 32, autouse=True)


def key_of(seed: int) -> jax.Array:
    """jax.random.key(seed) as with x64, which is not enabled in every session."""
    return jax.random.wrap_key_data(jnp.asarray([seed // 2**32, seed % 2**32], jnp.uint32))


def test_the_words_are_the_published_ones() -> None:
    for key, counter, published in PUBLISHED:
        assert tuple(int(word) for word in philox(*map(jnp.uint32, (key, *counter)))) == published


def test_a_key_is_the_seed_of_its_number() -> None:
    assert seed_words(jax.random.key(7)).tolist() == [0, 7]
    assert seed_words(jax.random.PRNGKey(7)).tolist() == [0, 7], "a key of the old kind"
    assert seed_words(jax.random.key(7, impl="rbg")).shape == (2,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_the_mask_of_the_definition(backend: str) -> None:
    b, t, h, s = 2, 37, 2, 75
    zeros, ones = jnp.zeros((b, t, h, s)), jnp.broadcast_to(jnp.eye(s)[:, None], (b, s, 1, s))
    for offset in (38, -20, 2**27 + 1):
        options = {"causal": False, "query_offset": offset, "dropout_p": P, "dropout_key": key_of(SEED)}
        output = alibi_attention(zeros, jnp.zeros((b, s, 1, s)), ones, np.zeros(h), backend=backend, **options)
        at = np.full((b, 1), offset) + np.arange(t)
        defined = factors(SEED, P, batch=b, heads=h, positions=at, key_len=s) / s
        np.testing.assert_allclose(output.swapaxes(1, 2), defined, rtol=1e-6)


STAMPS = np.random.default_rng(2).random((2, 45)).cumsum(-1).astype(np.float32)
PARTS = {
    "heads, sinks, prefix": {"window": [5, 9, 400, 9], "sinks": 3, "prefix_len": np.int32([17, 40])},
    "positions on both sides": {"positions": STAMPS, "causal": False, "right_slopes": [0.1, 0.3, 0.0, 1.0]},
    "queries anywhere": {"positions": STAMPS, "query_positions": STAMPS[:, ::-2][:, ::-1] + 0.2, "causal": False},
}


@pytest.mark.parametrize("words", PARTS)
@pytest.mark.parametrize("backend", [x if x == "native" else pytest.param(x, marks=pytest.mark.long) for x in BACKENDS])
def test_parts_drop_the_weights_that_pytorch_drops(backend: str, words: str) -> None:
    rng, options = np.random.default_rng(0), PARTS[words]
    arrays = [rng.standard_normal((2, n, h, 8)).astype(np.float32) for n, h in ((23, 4), (45, 2), (45, 2))]
    output = alibi_attention(*arrays, dropout_p=P, dropout_key=key_of(SEED), backend=backend, **options)
    given = {name: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    tensors = [torch.from_numpy(x).transpose(1, 2) for x in arrays]
    spec = dataclasses.replace(make_spec(*tensors, dropout_p=P, **given), dropout_seed=torch.tensor([[SEED, 0, 0, 0]]))
    np.testing.assert_allclose(output, attend(spec, *tensors, "dense").transpose(1, 2), atol=3e-6)
