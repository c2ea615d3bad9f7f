"""Sink logits in JAX: results and gradients of an extra column of scores in fp64."""

import jax.numpy as jnp
import numpy as np
import pytest

from alibi_attn.jax import alibi_attention, explain


def test_wrong_sinks_are_refused_and_explain_mentions_them() -> None:
    q = k = v = np.ones((1, 5, 4, 8), np.float32)
    for sinks, error in (
        (np.zeros(3, np.float32), ValueError),
        (np.float32([0, np.inf, 0, 0]), ValueError),
        ([0.0], TypeError),
    ):
        with pytest.raises(error, match="sink_logits"):
            alibi_attention(q, k, v, sink_logits=sinks)
    assert "sink logits" in explain(q, k, v, sink_logits=jnp.zeros(4)).call
