"""One key that outweighs very many small ones in JAX, as in `attention/test_long_sums.py`."""

import math

import numpy as np
import pytest

from alibi_attn.jax import alibi_attention

KEYS, HEAD_DIM = 2**15, 8


@pytest.mark.parametrize("nats", [15.0, 17.4])
@pytest.mark.parametrize("backend", ["native", "loop", "dense"])
def test_backends_add_all(backend: str, nats: float) -> None:
    query, key = np.zeros((1, 1, 1, HEAD_DIM), np.float32), np.zeros((1, KEYS, 1, HEAD_DIM), np.float32)
    query[..., 0] = nats * math.sqrt(HEAD_DIM)
    key[:, KEYS // 2, :, 0] = 1.0
    value = np.random.default_rng(0).uniform(-1, 1, key.shape).astype(np.float32)
    value[..., 0] = 1.0
    score = np.where(np.arange(KEYS) == KEYS // 2, nats, 0.0)
    total = np.exp(score).sum()
    true = np.exp(score) / total @ value[0, :, 0].astype(np.float64)
    output, lse = alibi_attention(query, key, value, [0.0], causal=False, return_lse=True, backend=backend)
    assert np.abs(np.asarray(output)[0, 0, 0] - true).max() <= 1e-5
    assert abs(float(lse[0, 0, 0]) - math.log(total)) <= 1e-5
