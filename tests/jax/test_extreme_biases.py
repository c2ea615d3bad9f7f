"""Key biases from 10² to 3·10³⁸ anywhere in a block, cuts, windows, segments: every backend against float64."""

import numpy as np
import pytest
from jax_checks import BACKENDS, fixture_of_tiles

from alibi_attn.jax import alibi_attention

N, H, D = 96, 2, 4

small_tiles = fixture_of_tiles(16, 8, autouse=True)


def drawn(seed: int) -> tuple[list[np.ndarray], dict[str, np.ndarray | int]]:
    """([query, key, value, slopes, bias], options), in shapes that are compiled once."""
    random = np.random.default_rng(seed)
    query, key, value = (random.standard_normal((1, N, H, D)).astype(np.float32) for _ in range(3))
    slopes = random.choice([0.0, 0.02, 0.3, 2.0, -0.05], H).astype(np.float32)
    bias = random.standard_normal((1, H, N)) * random.choice([0, 1, 5])
    for _ in range(random.integers(1, 6)):
        bias[:, :, random.integers(N)] = random.choice([-1, 1]) * 10.0 ** random.uniform(2, 38.4)
    if random.random() < 0.3:  # gates, some of them nearly closed
        gates = -0.3 * np.abs(random.standard_normal((1, H, N)))
        gates[..., random.integers(N, size=3)] = -(10.0 ** random.uniform(1, 10))
        bias = -np.cumsum(gates, -1)
    if random.random() < 0.3:
        bias = np.where(random.random((1, H, N)) < 0.1, -np.inf, bias)
    segments = np.sort(random.integers(0, random.choice([1, 3]), (1, N)), 1).astype(np.int32)
    mask = random.random((1, N)) < random.choice([0.7, 1.0])
    options = {"window": int(random.choice([7, 40, 1000])), "segment_ids": segments, "key_mask": mask}
    return [query * random.choice(np.float32([0.3, 1, 3])), key, value, slopes, bias.astype(np.float32)], options


def truth(arrays: list[np.ndarray], options: dict, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(output [T, H, D], lse [H, T]) in float64."""
    query, key, value, slopes, bias = (x.astype(np.float64) for x in arrays)
    distance = np.arange(N)[:, None] - np.arange(N)
    seen = (np.abs(distance) < options["window"]) & options["key_mask"][0]
    seen &= options["segment_ids"][0][:, None] == options["segment_ids"][0]
    seen &= (distance >= 0) | (not causal)
    scores = np.einsum("thd,shd->hts", query[0], key[0]) * D**-0.5 + bias[0][:, None]
    scores = np.where(seen, scores - slopes[:, None, None] * np.abs(distance), -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    output = np.einsum("hts,shd->thd", weights / np.where(total == 0, 1.0, total), value[0])
    return output, np.where(total == 0, -np.inf, top + np.log(np.where(total == 0, 1.0, total)))[..., 0]


def assert_right(found: tuple, expected: tuple[np.ndarray, np.ndarray]) -> None:
    output, lse = (np.asarray(x, np.float64)[0] for x in found)
    np.testing.assert_allclose(output, expected[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_biases_cost_no_digits(backend: str, causal: bool) -> None:
    for seed in range(60):
        arrays, options = drawn(seed)
        *qkv, bias = arrays
        found = alibi_attention(*qkv, key_bias=bias, causal=causal, backend=backend, return_lse=True, **options)
        assert_right(found, truth(arrays, options, causal=causal))


def test_a_wrong_bias_is_detected() -> None:
    arrays, options = drawn(0)
    *qkv, bias = arrays
    found = alibi_attention(*qkv, key_bias=bias + 1e-2, backend="dense", return_lse=True, **options)
    with pytest.raises(AssertionError):
        assert_right(found, truth(arrays, options, causal=True))
