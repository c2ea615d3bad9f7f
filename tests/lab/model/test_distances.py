"""Distance biases compared with their papers' formulas, written out for one head and pair of tokens."""

import math

import pytest
import torch

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.attention import attend
from alibi_lab.lab.model.distances import t5_bucket
from alibi_lab.lab.model.position_method import ByDistance, LayerInput, Pass
from alibi_lab.lab.model.positions import METHODS

CONFIG = ModelConfig(num_layers=1, num_heads=2, embed_dim=16)


SLOPES = [1 / 16, 1 / 256]


def _tisa(made):
    a, b, c = (x.view(1, 2, 5)[0].tolist() for x in (made.amplitude, made.sharpness, made.center))
    return lambda head, d: sum(a[head][s] * math.exp(-abs(b[head][s]) * (d - c[head][s]) ** 2) for s in range(5))


def _kerple(made):
    r1, r2 = made.log_r1.exp().tolist(), made.log_r2.exp().tolist()
    return lambda head, d: -r1[head] * math.log(1 + r2[head] * d)


# Each bias by its paper's formula, for one head and distance.
FORMULAS = {
    "alibi-log": lambda made: lambda head, d: -SLOPES[head] * math.log(1 + d),
    "alibi-clamp": lambda made: lambda head, d: max(-SLOPES[head] * d, -92.18),
    "sandwich": lambda made: (
        lambda head, d: (sum(math.cos(d / 10_000 ** (2 * c / 128)) for c in range(1, 65)) - 64) / (4 * (head + 1))
    ),
    "tisa": _tisa,
    "t5": lambda made: lambda head, d: made.weight[head, t5_bucket(torch.tensor([d]))[0]].item(),
    "kerple": _kerple,
}


def _bias(method, made, query_len, key_len, rows=1):
    return made.bias(Pass(query_len, key_len, input=LayerInput(torch.zeros(rows, query_len, 16), 0)))


BY_DISTANCE = [name for name, kind in METHODS.items() if isinstance(_bias(name, kind(CONFIG, 8), 2, 2), ByDistance)]


@pytest.mark.parametrize(("query_len", "key_len"), [(5, 5), (1, 40), (3, 2000)])
@pytest.mark.parametrize("method", FORMULAS)
def test_a_bias_of_the_distance_is_the_formula_of_its_paper(method, query_len, key_len):
    made = METHODS[method](CONFIG, 8)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        found = made.bias(Pass(query_len, key_len, input=LayerInput(torch.zeros(1, query_len, 16), 0))).table
    expected = FORMULAS[method](made)
    assert found.shape == (2, key_len)
    for head in range(2):
        for d in {0, 1, 2, key_len // 2, key_len - 1}:
            assert float(found[head, d]) == pytest.approx(expected(head, d), abs=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("query_len", "key_len"), [(200, 200), (1, 40), (3, 40)])
@pytest.mark.parametrize("method", BY_DISTANCE)
def test_attention_is_that_of_the_bias_written_out_pair_by_pair_and_so_are_gradients(
    method, query_len, key_len, masked
):
    generator = torch.Generator().manual_seed(0)
    made = METHODS[method](CONFIG, 8)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    lengths = query_len, key_len, key_len
    q, k, v = (torch.randn(2, 2, n, 8, generator=generator, requires_grad=True) for n in lengths)
    leaves = [q, k, v, *made.parameters()]
    documents = (torch.arange(key_len) * 3 // key_len).expand(2, -1)
    given = {"window": 30, "segment_ids": documents} if masked else {}
    bias = made.bias(Pass(query_len, key_len, input=LayerInput(torch.zeros(2, query_len, 16), 0)))
    position = [key_len - query_len + row for row in range(query_len)]
    away = torch.tensor([[i - j for j in range(key_len)] for i in position])
    seen = away >= 0
    if masked:
        seen &= (away < 30) & (documents[0, position][:, None] == documents[0])
    written_out = bias.table.double()[:, away.clamp(min=0)].masked_fill(~seen, -math.inf)
    scores = q.double() @ k.double().mT / math.sqrt(8) + written_out
    expected, found = scores.softmax(-1) @ v.double(), attend(q, k, v, bias, Pass(query_len, key_len, **given))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(found.shape, generator=generator)
    right = torch.autograd.grad((expected * weights).sum(), leaves, retain_graph=True)
    for ours, exact in zip(torch.autograd.grad((found * weights).sum(), leaves), right, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_the_clamp_acts_where_bfloat16_is_blind():
    table = METHODS["alibi-clamp"](CONFIG, 8).bias(Pass(1, 3000)).table
    assert float(table[0, 2999]) == pytest.approx(-92.18)  # 1/16 · 2,999 is more
    assert float(table[1, 2999]) == pytest.approx(-2999 / 256)


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
