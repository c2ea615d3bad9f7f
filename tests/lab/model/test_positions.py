"""Each method compared with its paper's formula, and with another library if one has it."""

import dataclasses
import math
import re

import pytest
import torch
from loops import by_loops

from alibi_attn.attention.call.bias import alibi_bias
from alibi_attn.slopes import alibi_slopes
from alibi_lab.lab.config import ConfigError, ModelConfig
from alibi_lab.lab.model.attention import attend
from alibi_lab.lab.model.distances import Kerple, t5_bucket
from alibi_lab.lab.model.position_method import LayerInput, Pass
from alibi_lab.lab.model.positions import (
    METHODS,
    ALiBi,
    ALiBiHalf,
    ALiBiLearned,
    NoPositions,
    Sinusoidal,
    check_stretch,
)
from alibi_lab.lab.model.rotary import Rotary, rotary_frequencies
from alibi_lab.position_methods import LOOKS

CONFIG = ModelConfig(num_layers=1, num_heads=2, embed_dim=16)
AT = Pass(3, 3)


def assert_attention_is(out, q, k, v, bias_at, sees=lambda i, j: True):
    """Compares with a loop over i and j ≤ i where `sees(i, j)`; `bias_at(head, distance)` is added to q·k/√d."""
    score = lambda h, d, q, k, _: float(q @ k) / math.sqrt(len(q)) + bias_at(h, d)  # noqa: E731
    expected = by_loops(q, k, v, score, sees=lambda _, i, j: sees(i, j)).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return lambda t, s: [torch.randn(1, 2, length, 8, generator=generator) for length in (t, s, s)]


def test_sinusoidal_is_the_formula_of_the_paper():
    positions = torch.tensor([0, 1, 7, 2047])
    added = Sinusoidal(CONFIG, 8).add(torch.zeros(1, 4, 16), positions)[0]
    for row, p in enumerate(positions.tolist()):
        for c in range(8):
            angle = p / 10000 ** (2 * c / 16)
            assert float(added[row, 2 * c]) == pytest.approx(math.sin(angle), abs=2e-4)
            assert float(added[row, 2 * c + 1]) == pytest.approx(math.cos(angle), abs=2e-4)


def test_rotary_multiplies_complex_numbers_by_the_angle_of_their_position():
    positions = torch.tensor([0, 3, 100])
    q = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    turned, _ = Rotary(CONFIG, 8).rotate(q, q, positions, AT)
    for row, p in enumerate(positions.tolist()):
        for c in range(4):
            number = complex(q[0, 0, row, c], q[0, 0, row, c + 4]) * complex(
                math.cos(p * 10000 ** (-2 * c / 8)), math.sin(p * 10000 ** (-2 * c / 8))
            )
            assert complex(turned[0, 0, row, c], turned[0, 0, row, c + 4]) == pytest.approx(number, abs=1e-4)


def test_t5_buckets_are_those_of_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.cat([torch.arange(3000), torch.tensor([10_000, 1_000_000])])
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(t5_bucket(distance), theirs)
    assert t5_bucket(torch.tensor([15, 16, 127, 128])).tolist() == [15, 16, 31, 31]


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize(("query_len", "key_len"), [(5, 5), (1, 40), (3, 40)])
def test_attention_without_a_bias_is_the_loop_over_pairs(qkv, query_len, key_len, kernels, monkeypatch):
    monkeypatch.setattr("alibi_lab.lab.model.attention._has_kernels", lambda q: kernels)
    q, k, v = qkv(query_len, key_len)
    out = attend(q, k, v, NoPositions(CONFIG, 8).bias(Pass(query_len, key_len)))
    assert_attention_is(out, q, k, v, lambda head, d: 0.0)


def test_kerple_starts_in_the_ranges_of_its_authors_each_head_elsewhere():
    method = Kerple(ModelConfig(num_heads=64, embed_dim=128), 8)
    r1, r2 = method.log_r1.detach().exp(), method.log_r2.detach().exp()
    for value, top in ((r1, 2.0), (r2, 1.0)):  # evenly: every quarter of the range has a quarter of the heads
        assert torch.histc(value, 4, 0, top).tolist() == pytest.approx([16] * 4, abs=1)
    assert abs(float(torch.corrcoef(torch.stack([r1, r2]))[0, 1])) < 0.2


def test_half_of_the_heads_have_the_slopes_of_half_as_many_heads():
    for heads, slopes in ((4, [1 / 16, 1 / 256, 0, 0]), (1, [1 / 256]), (3, [1 / 16, 1 / 256, 0])):
        method = ALiBiHalf(ModelConfig(num_heads=heads, embed_dim=24), 8)
        assert method.bias(Pass(5, 5)).tolist() == slopes


def test_learned_slopes_start_published_stay_positive_and_get_the_biass_gradient(qkv):
    q, k, v = qkv(7, 9)
    method = ALiBiLearned(CONFIG, 8)
    torch.testing.assert_close(method.bias(Pass(7, 9)), torch.tensor([1 / 16, 1 / 256]))
    out = attend(q, k, v, method.bias(Pass(7, 9)))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (found,) = torch.autograd.grad((out * weights).sum(), method.log_slopes)
    dense = attend(q, k, v, alibi_bias(method.log_slopes.exp(), 7, 9, dtype=torch.float32))
    (expected,) = torch.autograd.grad((dense * weights).sum(), method.log_slopes)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        method.log_slopes.sub_(10)
    assert (method.bias(Pass(7, 9)) > 0).all()


@pytest.mark.parametrize("method", [NoPositions, ALiBi])  # of a table by distance, in test_distances.py
@pytest.mark.parametrize(("query_len", "key_len"), [(9, 9), (3, 20)])
def test_windows_and_documents_hide_what_they_say(qkv, method, query_len, key_len):
    q, k, v = qkv(query_len, key_len)
    bias = method(CONFIG, 8).bias(Pass(query_len, key_len))
    slopes = [0.0, 0.0] if bias is None else [1 / 16, 1 / 256]
    bias_at = lambda head, d: -slopes[head] * d  # noqa: E731
    documents = [(j * 3) // key_len for j in range(key_len)]
    with torch.no_grad():
        out = attend(q, k, v, bias, Pass(query_len, key_len, window=4))
        assert_attention_is(out, q, k, v, bias_at, lambda i, j: i - j < 4)
        with pytest.raises(AssertionError):  # a window off by one
            assert_attention_is(out, q, k, v, bias_at, lambda i, j: i - j < 5)
        out = attend(q, k, v, bias, Pass(query_len, key_len, window=4, segment_ids=torch.tensor([documents])))
        assert_attention_is(out, q, k, v, bias_at, lambda i, j: i - j < 4 and documents[i] == documents[j])


def test_rotary_frequencies_are_those_of_the_papers():
    head_dim, trained, length, s = 64, 128, 512, 4.0
    plain, linear, ntk, yarn = (
        rotary_frequencies(head_dim, trained, length, stretch).tolist() for stretch in ("none", "linear", "ntk", "yarn")
    )
    for c in range(32):
        theta = 10_000 ** (-2 * c / 64)
        assert plain[c] == pytest.approx(theta, rel=1e-5)
        assert linear[c] == pytest.approx(theta / 4, rel=1e-5)
        assert ntk[c] == pytest.approx((10_000 * s ** (64 / 62)) ** (-2 * c / 64), rel=1e-5)
        turns = 128 * theta / (2 * math.pi)  # r(c) = L/λ_c, λ_c = 2π/θ_c; α = 1, β = 32
        gamma = 0 if turns < 1 else 1 if turns > 32 else (turns - 1) / 31
        assert yarn[c] == pytest.approx((1 - gamma) * theta / s + gamma * theta, rel=1e-5)
    assert yarn[31] == pytest.approx(plain[31] / 4)  # turns less than once in 128 tokens
    assert rotary_frequencies(2, 128, 512, "ntk").tolist() == [1.0]


def test_stretched_rotary_turns_by_its_frequencies_and_yarn_sharpens(qkv):
    q, k, _ = qkv(5, 5)
    method, positions = Rotary(CONFIG, 8), torch.arange(5)
    near, _ = method.rotate(q, k, positions, AT)
    between, _ = method.stretched("linear", 32).rotate(q, k, positions * 4, AT)  # position 4p as if it were p
    torch.testing.assert_close(between, near)
    sharp, _ = method.stretched("yarn", 32).rotate(q, k, positions, AT)
    torch.testing.assert_close(sharp.norm(dim=-1), q.norm(dim=-1) * (0.1 * math.log(4) + 1))
    again, _ = method.rotate(q, k, positions, AT)
    assert torch.equal(again, near)  # stretching changes nothing of the method itself


@pytest.mark.parametrize("method", ["alibi", "alibi-learned", "alibi-half"])
def test_stretched_slopes_are_those_of_the_papers(method):
    config = ModelConfig(num_heads=4, embed_dim=16)
    slopes = {"alibi-half": [1 / 16, 1 / 256, 0, 0]}.get(method, [1 / 4, 1 / 16, 1 / 64, 1 / 256])
    made = METHODS[method](config, 128)
    linear, ntk = (made.stretched(stretch, 512).bias(Pass(5, 5)) for stretch in ("linear", "ntk"))
    assert linear.tolist() == pytest.approx([m / 4 for m in slopes])
    flattest = {"alibi-half": [1 / 16, 1 / 1024, 0, 0]}
    expected = flattest.get(method, [4 ** (-h - h / 3 - 1) for h in range(4)])  # m_h / 4^(h/3), counted from 0
    assert ntk.tolist() == pytest.approx(expected)
    assert not linear.requires_grad
    assert made.bias(Pass(5, 5)).tolist() == pytest.approx(slopes)


@pytest.mark.parametrize(
    ("method", "stretch", "message"),
    [
        ("t5", "linear", "'t5' has only none; linear is for rotary, alibi, alibi-learned, alibi-half"),
        ("alibi", "yarn", "'alibi' has only none, linear, ntk; yarn is for rotary"),
        ("kerple", "ntk", "'kerple' has only none"),
        ("learned", "linear", "'learned' has only none"),
    ],
)
def test_a_stretch_that_a_method_has_not_is_refused(tiny_model, method, stretch, message):
    with pytest.raises(ConfigError, match=message):
        check_stretch(method, stretch)
    with pytest.raises(ConfigError, match=message):
        tiny_model(method).stretched(stretch, 16)  # at once, even if it would change nothing


def test_the_checker_fails_on_a_wrong_bias(qkv):
    q, k, v = qkv(5, 5)
    out = attend(q, k, v, torch.tensor([0.5, 0.25]))
    with pytest.raises(AssertionError):
        assert_attention_is(out, q, k, v, lambda head, d: -[0.25, 0.5][head] * d)  # slopes off by one head
    with pytest.raises(AssertionError):
        assert_attention_is(
            out[:, :, 1:], q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], lambda head, d: -[0.5, 0.25][head] * d
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_method_learns_as_many_parameters_as_its_row_says(method):
    sizes = {"H": CONFIG.num_heads, "N": CONFIG.num_layers, "E": CONFIG.embed_dim, "L": 24}
    product = re.sub(r"(?<=[\w)])( × | )(?=[\w(])", "*", LOOKS[method].learned or "0")
    assert sum(parameter.numel() for parameter in METHODS[method](CONFIG, 24).parameters()) == eval(product, sizes)


def test_layers_alternate_rotary_windows_and_full_attention_without_positions(qkv):
    q, k, v = qkv(12, 12)
    made, positions = METHODS["nope-window"](CONFIG, 16), torch.arange(12)
    near, between = (Pass(12, 12, input=LayerInput(torch.zeros(1, 12, 16), index)) for index in range(2))
    turned = made.rotate(q, k, positions, near)
    assert all(torch.equal(x, y) for x, y in zip(turned, Rotary(CONFIG, 16).rotate(q, k, positions, near), strict=True))
    assert made.rotate(q, k, positions, between) == (q, k)
    out = attend(q, k, v, made.bias(near))
    assert_attention_is(out, q, k, v, lambda head, d: 0.0, sees=lambda i, j: i - j < 4)  # a quarter of 16
    out = attend(q, k, v, made.bias(near), Pass(12, 12, window=2))  # a test with a smaller window
    assert_attention_is(out, q, k, v, lambda head, d: 0.0, sees=lambda i, j: i - j < 2)
    assert_attention_is(attend(q, k, v, made.bias(between)), q, k, v, lambda head, d: 0.0)


def test_drope_turns_until_the_last_eighth_of_the_training(qkv):
    q, k, _ = qkv(6, 6)
    made = METHODS["drope"](CONFIG, 8)
    turned, _ = made.rotate(q, k, torch.arange(6), Pass(6, 6, progress=0.87))
    assert torch.equal(turned, Rotary(CONFIG, 8).rotate(q, k, torch.arange(6), AT)[0])
    assert made.rotate(q, k, torch.arange(6), Pass(6, 6, progress=0.88)) == (q, k)
    assert made.rotate(q, k, torch.arange(6), AT) == (q, k)  # after the training


@pytest.mark.parametrize("method", ["fox", "alibi-fox"])
def test_gates_are_the_papers_formula_in_every_layer(method):
    """ln f = logsigmoid(w·x + b), and the score of key j gets Σ ln f_l over l = j + 1 … i (Lin et al. 2025, eq. 9)."""
    config = dataclasses.replace(CONFIG, method=method, num_layers=2)
    made = METHODS[method](config, 8)
    torch.nn.init.normal_(made.gate_weight, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        made.gate_bias.copy_(torch.arange(made.gate_bias.numel()) / 4)
    x = torch.randn(2, 9, config.embed_dim)
    q, k, v = torch.randn(3, 2, config.num_heads, 9, 8)
    for index in range(2):
        bias = made.bias(Pass(9, 9, input=LayerInput(x, index)))
        logits = x @ made.gate_weight[index].T + made.gate_bias.view(2, -1)[index]
        gates = torch.log(1 / (1 + torch.exp(-logits))).mT
        scores = q @ k.mT / math.sqrt(8)
        for i in range(9):
            for j in range(9):
                scores[:, :, i, j] += gates[:, :, j + 1 : i + 1].sum(-1) if j <= i else -math.inf
                if method == "alibi-fox" and j <= i:
                    scores[:, :, i, j] -= torch.tensor(alibi_slopes(config.num_heads)).float() * (i - j)
        torch.testing.assert_close(attend(q, k, v, bias), scores.softmax(-1) @ v, rtol=1e-5, atol=1e-5)
