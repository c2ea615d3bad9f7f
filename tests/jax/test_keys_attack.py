"""What keys lose in JAX: attacks of `support/fuzz/keys_attack.py`, and a last tile of one key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from keys_attack import BACKENDS, CERTIFIED, MEASURED, losses, random_attack, untrue

from alibi_attn.jax import alibi_attention


@pytest.mark.parametrize("backend", ["jax-native", pytest.param("jax-loop", marks=pytest.mark.long)])
def test_attacked_keys_lose_what_the_key_rule_allows(backend: str) -> None:
    one, losing = BACKENDS[backend], 0
    assert one.gradient is not None
    for seed in range(1, 9):
        attack = random_attack(seed, one)
        found = losses(attack, one)
        if found.off < 0.5:
            assert max(found.of_limit(by) for by in (CERTIFIED, MEASURED)) <= 1, attack
            assert untrue(attack, found, one.gradient(attack)) <= 1, attack
            losing += any(bool((lost > 0).any()) for lost in found.lost.values())
    assert losing > 0, "an attack on nothing: no key loses anything"


@pytest.mark.parametrize("backend", ["native", pytest.param("loop", marks=pytest.mark.long)])
def test_the_only_key_of_the_last_tile_keeps_its_gradient(backend: str) -> None:
    """A limit per query lets every query leave out a key of an ordinary share."""
    rng, length = np.random.default_rng(0), 64 * 65 + 1
    query, key = (jnp.asarray(0.02 * rng.standard_normal((1, length, 1, 16)), jnp.bfloat16) for _ in range(2))

    def weights(value: jax.Array) -> jax.Array:
        output = alibi_attention(query, key, value, [0.0], causal=False, backend=backend)
        return output.astype(jnp.float32)[..., 0].sum()

    gradient = jax.grad(weights)(jnp.ones_like(key))[0, :, 0, 0].astype(jnp.float32)
    np.testing.assert_allclose(gradient[-3:], 1.0, atol=2.0**-6)
