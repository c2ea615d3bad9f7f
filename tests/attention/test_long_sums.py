"""One key that outweighs very many small ones: a long sum in fp32 would drop them, because 1 + 3e-8 is 1."""

import math

import pytest
import torch
from torch import Tensor

from alibi_attn import alibi_attention, attention_rows
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run import decoding

# How much the score of the large key is above the others: e^−15 is rounded next to 1, e^−17.4 is dropped.
NATS = (15.0, 17.4)


def drawn(queries: int, keys: int, nats: float, head_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, 1, …, D]; the first value is 1 everywhere, the others lie between −1 and 1."""
    query, key = torch.zeros(1, 1, queries, head_dim), torch.zeros(1, 1, keys, head_dim)
    query[..., 0] = nats * math.sqrt(head_dim)
    key[:, :, keys // 2, 0] = 1.0
    value = torch.rand(1, 1, keys, head_dim) * 2 - 1
    value[..., 0] = 1.0
    return query, key, value


def true(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(output, lse) without a bias, in fp64; every query sees all keys."""
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1)


def assert_adds_all(output: Tensor, expected: Tensor) -> None:
    assert float((output.double() - expected).abs().max()) <= 1e-5


@pytest.mark.parametrize("nats", NATS)
@pytest.mark.parametrize(
    ("backend", "queries", "keys"),
    [("reference", 1, 2**20), ("dense", 1, 2**20), ("dense", 9, 2**17), ("native", 9, 2**20), ("banded", 9, 2**18)],
)
@pytest.mark.parametrize("return_lse", [False, True])
def test_backends_add_all(backend: str, queries: int, keys: int, nats: float, return_lse: bool) -> None:
    inputs = drawn(queries, keys, nats)
    found = alibi_attention(*inputs, [0.0], causal=False, return_lse=return_lse, backend=backend)
    expected, lse = true(*inputs)
    assert_adds_all(found[0] if isinstance(found, tuple) else found, expected)
    if isinstance(found, tuple):
        assert float((found[1] - lse).abs().max()) <= 1e-5


@pytest.mark.parametrize("nats", NATS)
@pytest.mark.parametrize("head_dim", [16, 12], ids=["kernel", "slices"])
def test_decoding_adds_all(nats: float, head_dim: int) -> None:
    query, key, value = drawn(1, 2**20, nats, head_dim)
    assert decoding.has_kernel(query, key, value) == (head_dim == 16)
    output = decoding.attend_near(query, key, value, torch.zeros(1), Norms.of(key, value))
    assert_adds_all(output, true(query, key, value)[0])


def test_rows_of_weights_add_all() -> None:
    query, key, value = drawn(1, 2**20, 17.4)
    weights = attention_rows(query, key, [0.0], rows=[0], causal=False)
    assert_adds_all(weights.double() @ value.double(), true(query, key, value)[0])


def test_a_sum_in_fp32_is_detected() -> None:
    query, key, value = drawn(1, 2**20, 17.4)
    weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
    with pytest.raises(AssertionError):
        assert_adds_all(weights @ value, true(query, key, value)[0])
