"""Each system's attention compared with its paper's formula, written as loops over heads, queries and keys in float64."""

import math

import pytest
import torch
from loops import by_loops
from torch import Tensor

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.language_model import Block
from alibi_lab.lab.model.position_method import LayerInput, Pass, PositionMethod
from alibi_lab.lab.systems import longformer, shaw
from alibi_lab.lab.systems.da_transformer import DATransformer
from alibi_lab.lab.systems.longformer import Longformer
from alibi_lab.lab.systems.shaw import Shaw
from alibi_lab.lab.systems.shortformer import Shortformer
from alibi_lab.lab.systems.transformer_xl import RelativeSinusoids

CONFIG = ModelConfig(num_layers=2, num_heads=2, embed_dim=16, ffn_dim=24)
LAYER, HEADS, HEAD_DIM = 1, 2, 8
SIZES = [(7, 7), (1, 9), (3, 40)]
every_size = pytest.mark.parametrize(("query_len", "key_len"), SIZES)


def drawn(method: type[PositionMethod]) -> PositionMethod:
    """The method with random parameters in float64, trained at 16 tokens."""
    made, generator = method(CONFIG, 16).double(), torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return made


def random_qkv(query_len: int, key_len: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, HEADS, n, HEAD_DIM, generator=generator, dtype=torch.float64)
        for n in (query_len, key_len, key_len)
    ]


def found_attention(method: PositionMethod, q: Tensor, k: Tensor, v: Tensor, **given) -> Tensor:
    """The method's hook in layer 1; it must not call the built-in attention unless `default` is given."""
    default, block = given.pop("default", None), given.pop("block", None)
    layer = LayerInput(torch.zeros(2, q.shape[2], 16, dtype=torch.float64), LAYER, block=block)
    with torch.no_grad():
        return method.attend(q, k, v, Pass(q.shape[2], k.shape[2], input=layer, **given), default)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@torch.no_grad()
@every_size
def test_shaw_adds_the_vector_of_the_clipped_distance_to_keys_and_values(monkeypatch, query_len, key_len):
    monkeypatch.setattr(shaw, "CLIP", 5)
    method, (q, k, v) = drawn(Shaw), random_qkv(query_len, key_len)
    keys, values = method.key_vectors[LAYER], method.value_vectors[LAYER]
    assert keys.shape == (HEADS, 6, HEAD_DIM)
    score = lambda h, d, q, k, j: float(q @ (k + keys[h, min(d, 5)])) / math.sqrt(8)  # noqa: E731
    value = lambda h, d, v: v + values[h, min(d, 5)]  # noqa: E731
    assert_same(found_attention(method, q, k, v), by_loops(q, k, v, score, value=value))
    assert_same(
        found_attention(method, q, k, v, window=3),
        by_loops(q, k, v, score, value=value, sees=lambda _, i, j: i - j < 3),
    )
    without = by_loops(q, k, v, score)
    with pytest.raises(AssertionError):  # values without their vectors
        assert_same(found_attention(method, q, k, v), without)


def expected_xl_terms(method: RelativeSinusoids):
    """(q + u)·k and (q + v)·W R_d, each over √D, one pair at a time: Dai et al. 2019, sec. 3.3."""

    def r(h: int, d: int) -> Tensor:
        waves = [math.sin(d / 10_000 ** (2 * c / 16)) for c in range(8)]
        waves += [math.cos(d / 10_000 ** (2 * c / 16)) for c in range(8)]
        return (method.projection[LAYER] @ torch.tensor(waves, dtype=torch.float64))[8 * h : 8 * h + 8]

    content = lambda h, q, k: float((q + method.u[8 * h : 8 * h + 8]) @ k) / math.sqrt(8)  # noqa: E731
    position = lambda h, d, q: float((q + method.v[8 * h : 8 * h + 8]) @ r(h, d)) / math.sqrt(8)  # noqa: E731
    return content, position


@torch.no_grad()
@every_size
def test_transformer_xl_is_its_four_terms(query_len, key_len):
    method, (q, k, v) = drawn(RelativeSinusoids), random_qkv(query_len, key_len)
    content, position = expected_xl_terms(method)
    found = found_attention(method, q, k, v)
    waves_are_fp32 = {"rtol": 1e-4, "atol": 1e-5}
    expected = by_loops(q, k, v, lambda h, d, q, k, j: content(h, q, k) + position(h, d, q))
    torch.testing.assert_close(found, expected, **waves_are_fp32)
    late = by_loops(q, k, v, lambda h, d, q, k, j: content(h, q, k) + position(h, d + 1, q))
    with pytest.raises(AssertionError):  # distances off by one
        torch.testing.assert_close(found, late, **waves_are_fp32)


@torch.no_grad()
@every_size
def test_longformer_sees_a_window_with_positions_and_the_first_tokens_by_content(monkeypatch, query_len, key_len):
    monkeypatch.setattr(longformer, "GLOBAL_TOKENS", 2)
    method, (q, k, v) = drawn(Longformer), random_qkv(query_len, key_len)
    content, position = expected_xl_terms(method)
    assert [method.layer_window(layer) for layer in range(2)] == [4, 8]  # of 16 tokens
    score = lambda h, d, q, k, j: content(h, q, k) + (position(h, d, q) if d < 8 else 0.0)  # noqa: E731
    expected = by_loops(q, k, v, score, sees=lambda _, i, j: i - j < 8 or j < 2)
    torch.testing.assert_close(found_attention(method, q, k, v), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@every_size
def test_da_transformer_multiplies_positive_scores_by_its_function_of_the_distance(query_len, key_len):
    method, (q, k, v) = drawn(DATransformer), random_qkv(query_len, key_len)
    w, v_ = (each.float().double().view(2, HEADS)[LAYER] for each in (method.w, method.v))

    def score(h, d, q, k, j):
        factor = (1 + math.exp(v_[h])) / (1 + math.exp(v_[h] - w[h] * d))
        return max(float(q @ k), 0.0) * factor / math.sqrt(8)

    torch.testing.assert_close(found_attention(method, q, k, v), by_loops(q, k, v, score), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_function_of_the_distance_starts_at_1_and_has_the_limits_of_the_paper():
    method = DATransformer(CONFIG, 16)
    assert method.w.view(2, 2).tolist() == [[-1, 1]] * 2
    method.v.copy_(torch.tensor([0.0, 0.0, 0.5, 3.0]))
    factors = method.factors(100_000, LAYER)
    assert factors[:, 0].tolist() == [1, 1]
    assert factors[:, -1].tolist() == pytest.approx([0, 1 + math.exp(3)])
    assert (factors[0].diff() <= 0).all()
    assert (factors[1].diff() >= 0).all()


@torch.no_grad()
@every_size
@pytest.mark.parametrize("architecture", ["modern", "baevski-auli"])  # with and without biases
def test_shortformer_infuses_queries_and_keys_with_positions_of_the_subsequence(query_len, key_len, architecture):
    config = ModelConfig(**{**vars(CONFIG), "architecture": architecture})
    block = Block(config, LAYER).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    x = torch.randn(2, key_len, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    waves = torch.zeros(key_len, 16, dtype=torch.float64)
    for p in range(key_len):
        for c in range(8):
            waves[p, c], waves[p, 8 + c] = (wave(p / 10_000 ** (2 * c / 16)) for wave in (math.sin, math.cos))
    heads = lambda y: y.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)  # noqa: E731
    q, k, v = heads(block.q(x[:, -query_len:])), heads(block.k(x)), heads(block.v(x))
    infused_q, infused_k = heads(block.q(x + waves)[:, -query_len:]), heads(block.k(x + waves))
    dot = lambda q, k, v: by_loops(q, k, v, lambda h, d, q, k, j: float(q @ k) / math.sqrt(8))  # noqa: E731
    found = found_attention(Shortformer(config, 16), q, k, v, default=dot, block=block)
    torch.testing.assert_close(found, dot(infused_q, infused_k, v), rtol=1e-4, atol=1e-5)
