"""Biases of the distance against the formulas of their papers, written out for one head and pair of tokens."""

import math

import pytest
import torch

from alibi_attn.lab.config import ModelConfig
from alibi_attn.lab.hooks import LayerInput, Pass
from alibi_attn.lab.positions import METHODS

CONFIG = ModelConfig(num_layers=1, num_heads=2, embed_dim=16)


def _of_distance(method, made):
    """Each bias as its paper writes it, for one head and distance."""
    if method.startswith("alibi-"):
        slope = [1 / 16, 1 / 256]
        if method == "alibi-log":
            return lambda head, d: -slope[head] * math.log(1 + d)
        return lambda head, d: max(-slope[head] * d, -92.18)
    if method == "sandwich":
        ratio = [8 * 1 / 2, 8 * 2 / 2]
        return lambda head, d: (sum(math.cos(d / 10_000 ** (2 * c / 128)) for c in range(1, 65)) - 64) / ratio[head]
    a, b, c = (x.view(1, 2, 5)[0].tolist() for x in (made.amplitude, made.sharpness, made.center))
    return lambda head, d: sum(a[head][s] * math.exp(-abs(b[head][s]) * (d - c[head][s]) ** 2) for s in range(5))


@pytest.mark.parametrize(("query_len", "key_len"), [(5, 5), (1, 40), (3, 2000)])
@pytest.mark.parametrize("method", ["alibi-log", "alibi-clamp", "sandwich", "tisa"])
def test_a_bias_of_the_distance_is_the_formula_of_its_paper(method, query_len, key_len):
    made = METHODS[method](CONFIG, 8)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        found = made.bias(Pass(query_len, key_len, input=LayerInput(torch.zeros(1, query_len, 16), 0)))
    expected = _of_distance(method, made)
    assert found.shape == (2, query_len, key_len)
    for head in range(2):
        for row in range(query_len):
            i = key_len - query_len + row
            for j in {0, i // 2, max(i - 1, 0), i}:
                assert float(found[head, row, j]) == pytest.approx(expected(head, i - j), abs=1e-4)
            assert bool((found[head, row, i + 1 :] == -math.inf).all())


def test_the_clamp_acts_where_bfloat16_is_blind():
    bias = METHODS["alibi-clamp"](CONFIG, 8).bias(Pass(1, 3000))
    assert float(bias[0, 0, 0]) == pytest.approx(-92.18)  # 1/16 · 2,999 is more
    assert float(bias[1, 0, 0]) == pytest.approx(-2999 / 256)


@pytest.mark.parametrize(("query_len", "key_len"), [(5, 5), (1, 40), (300, 301)])
def test_fire_interpolates_between_near_and_far_as_its_authors_do(query_len, key_len):
    made = METHODS["fire"](CONFIG, 32)
    torch.nn.init.normal_(made.hidden_weight, generator=torch.Generator().manual_seed(1))
    torch.nn.init.normal_(made.head_weight, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = made.bias(Pass(query_len, key_len))
        assert found.shape == (2, query_len, key_len)
        for row in {0, query_len // 2, query_len - 1}:
            i = key_len - query_len + row
            for j in {0, i // 3, i}:
                x = math.log(1 + 0.1 * (i - j)) / math.log(1 + 0.1 * max(i, 32 / 4))
                hidden = [
                    max(0.0, float(w) * x + float(b))
                    for w, b in zip(made.hidden_weight[:, 0], made.hidden_bias, strict=True)
                ]
                for head in range(2):
                    expected = sum(float(w) * h for w, h in zip(made.head_weight[head], hidden, strict=True))
                    assert float(found[head, row, j]) == pytest.approx(expected, abs=1e-4)
            assert bool((found[:, row, i + 1 :] == -math.inf).all())
