"""Each method against its own paper's formula, and against another library where one has it."""

import math

import pytest
import torch

from alibi_attn.attention.bias import alibi_bias
from alibi_attn.lab.attention import attend
from alibi_attn.lab.config import ModelConfig
from alibi_attn.lab.positions import (
    METHODS,
    ALiBi,
    Learned,
    NoPositions,
    PositionError,
    Rotary,
    Sinusoidal,
    T5Bias,
    t5_bucket,
)

CONFIG = ModelConfig(num_layers=1, num_heads=2, embed_dim=16)


def assert_attention_is(out, q, k, v, bias_at):
    """Compare with a loop over i and j; `bias_at(head, distance)` is added to q·k/√d."""
    heads, query_len, key_len = q.shape[1], q.shape[2], k.shape[2]
    for head in range(heads):
        for row in range(query_len):
            i = key_len - query_len + row
            scores = torch.stack(
                [q[0, head, row] @ k[0, head, j] / math.sqrt(q.shape[3]) + bias_at(head, i - j) for j in range(i + 1)]
            )
            expected = scores.softmax(0) @ v[0, head, : i + 1]
            torch.testing.assert_close(out[0, head, row], expected, rtol=1e-5, atol=1e-6)


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
    turned, _ = Rotary(CONFIG, 8).rotate(q, q, positions)
    for row, p in enumerate(positions.tolist()):
        for c in range(4):
            number = complex(q[0, 0, row, c], q[0, 0, row, c + 4]) * complex(
                math.cos(p * 10000 ** (-2 * c / 8)), math.sin(p * 10000 ** (-2 * c / 8))
            )
            assert complex(turned[0, 0, row, c], turned[0, 0, row, c + 4]) == pytest.approx(number, abs=1e-4)


def test_rotary_scores_depend_on_the_distance_only(qkv):
    q, k, _ = qkv(6, 6)
    rotary = Rotary(CONFIG, 8)
    near, far = (rotary.rotate(q, k, torch.arange(6) + shift) for shift in (0, 500))
    torch.testing.assert_close(near[0] @ near[1].mT, far[0] @ far[1].mT, rtol=0, atol=2e-3)
    assert not torch.allclose(near[0] @ near[1].mT, q @ k.mT, atol=0.1)


def test_t5_buckets_are_those_of_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.cat([torch.arange(3000), torch.tensor([10_000, 1_000_000])])
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(t5_bucket(distance), theirs)
    assert t5_bucket(torch.tensor([15, 16, 127, 128])).tolist() == [15, 16, 31, 31]


@pytest.mark.parametrize(("query_len", "key_len"), [(5, 5), (1, 1), (1, 40), (3, 40)])
def test_t5_attention_is_the_loop_over_pairs(qkv, query_len, key_len):
    q, k, v = qkv(query_len, key_len)
    method = T5Bias(CONFIG, 8)
    torch.nn.init.normal_(method.weight, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = attend(q, k, v, method.bias(query_len, key_len))
        assert_attention_is(out, q, k, v, lambda head, d: method.weight[head, t5_bucket(torch.tensor([d]))[0]])


@pytest.mark.parametrize(("query_len", "key_len"), [(5, 5), (1, 40), (3, 40)])
def test_attention_without_a_bias_is_the_loop_over_pairs(qkv, query_len, key_len):
    q, k, v = qkv(query_len, key_len)
    out = attend(q, k, v, NoPositions(CONFIG, 8).bias(query_len, key_len))
    assert_attention_is(out, q, k, v, lambda head, d: 0.0)


@pytest.mark.parametrize(("query_len", "key_len"), [(5, 5), (1, 40), (3, 40)])
def test_alibi_attention_is_the_loop_over_pairs_and_the_explicit_bias(qkv, query_len, key_len):
    q, k, v = qkv(query_len, key_len)
    slopes = ALiBi(CONFIG, 8).bias(query_len, key_len)
    out = attend(q, k, v, slopes)
    assert_attention_is(out, q, k, v, lambda head, d: -(2.0 ** -(4 * (head + 1))) * d)  # two heads: 1/16 and 1/256
    dense = attend(q, k, v, alibi_bias(slopes, query_len, key_len, dtype=torch.float32))
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-6)


def test_the_checker_fails_on_a_wrong_bias(qkv):
    q, k, v = qkv(5, 5)
    out = attend(q, k, v, torch.tensor([0.5, 0.25]))
    with pytest.raises(AssertionError):
        assert_attention_is(out, q, k, v, lambda head, d: -[0.25, 0.5][head] * d)  # slopes off by one head
    with pytest.raises(AssertionError):
        assert_attention_is(
            out[:, :, 1:], q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], lambda head, d: -[0.5, 0.25][head] * d
        )


def test_learned_positions_end_at_the_trained_length():
    method = Learned(CONFIG, 8)
    torch.nn.init.normal_(method.table)
    x = torch.zeros(1, 8, 16)
    assert torch.equal(method.add(x, torch.arange(8))[0], method.table)
    with pytest.raises(
        PositionError, match="position 9 was asked for, but learned positions end at the trained length, 8"
    ):
        method.add(x, torch.arange(1, 9))


@pytest.mark.parametrize(
    ("method", "count"),
    [("none", 0), ("sinusoidal", 0), ("learned", 24 * 16), ("rotary", 0), ("t5", 2 * 32), ("alibi", 0)],
)
def test_what_each_method_learns(method, count):
    assert sum(parameter.numel() for parameter in METHODS[method](CONFIG, 24).parameters()) == count
