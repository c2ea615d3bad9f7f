"""Sink logits in JAX: results and gradients of an extra column of scores in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_attn.jax import alibi_attention, explain, forgetting_attention

SINKS = np.float32([0.0, 3.0, -4.0, -np.inf])
SLOPES = np.float32([0.5, 0.25, 0.1, 0.02])


def drawn():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, h, 8)).astype(np.float32) for n, h in ((60, 4), (80, 2), (80, 2)))
    mask = rng.random((2, 80)) > 0.3
    mask[1] = False
    return q, k, v, mask


def exact(q, k, v, mask, gates):
    q, k, v = (np.moveaxis(x.astype(np.float64), 1, 2) for x in (q, k, v))
    k, v = (np.repeat(x, 2, 1) for x in (k, v))
    distance = np.arange(20, 80)[:, None] - np.arange(80)
    scores = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(8) - SLOPES[:, None, None] * np.abs(distance)
    if gates is not None:
        sums = gates.astype(np.float64).cumsum(-1)
        scores = scores + sums[:, :, 20:, None] - sums[:, :, None]
    weights = np.where((distance >= 0) & mask[:, None, None], np.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True) + np.exp(SINKS.astype(np.float64))[:, None, None]
    return np.moveaxis((weights / np.where(total == 0, 1.0, total)) @ v, 1, 2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", ["native", "loop", "dense"])
def test_output_and_gradient_of_sinks_equal_an_extra_column(backend: str, *, gated: bool) -> None:
    q, k, v, mask = drawn()
    gates = np.log(np.random.default_rng(1).uniform(0.8, 1.0, (2, 4, 80))).astype(np.float32) if gated else None

    def ours(sinks):
        options = {"key_mask": mask, "sink_logits": sinks, "backend": backend, "return_lse": True}
        if gates is None:
            return alibi_attention(q, k, v, SLOPES, **options)
        return forgetting_attention(q, k, v, gates, SLOPES, **options)

    (output, lse), pull = jax.vjp(ours, jnp.asarray(SINKS))
    true = exact(q, k, v, mask, gates)
    np.testing.assert_allclose(output, true, rtol=2e-5, atol=2e-6)
    assert bool((output[1] == 0).all())
    assert bool((lse[1] == -jnp.inf).all())
    grad = np.random.default_rng(2).standard_normal(output.shape).astype(np.float32)
    (found,) = pull((jnp.asarray(grad), jnp.zeros_like(lse)))
    # d output / d sink = −output·exp(sink) / (exp(sink) + Σ exp(scores))
    with np.errstate(invalid="ignore"):  # a query without keys, in a head without a sink
        of_sink = np.where(
            np.isinf(lse), 0.0, np.exp(SINKS)[:, None] / (np.exp(SINKS)[:, None] + np.exp(np.float64(lse)))
        )
    expected = -(grad * true).sum(-1).swapaxes(1, 2) * of_sink
    np.testing.assert_allclose(found, expected.sum((0, 2)), rtol=1e-4, atol=1e-5)


def test_wrong_sinks_are_refused_and_explain_mentions_them() -> None:
    q, k, v, _ = drawn()
    for sinks, error in (
        (np.zeros(3, np.float32), ValueError),
        (np.float32([0, np.inf, 0, 0]), ValueError),
        ([0.0], TypeError),
    ):
        with pytest.raises(error, match="sink_logits"):
            alibi_attention(q, k, v, SLOPES, sink_logits=sinks)
    assert "sink logits" in explain(q, k, v, SLOPES, sink_logits=jnp.zeros(4)).call
