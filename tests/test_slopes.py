"""Slopes compared with the paper's numbers, the authors' rule for every head count, and the code of BLOOM and MPT."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from alibi_attn import alibi_bias, alibi_slopes, interpolate_slopes

# Press et al. 2022, sec. 3: "for our models that have 8 heads, the slopes that we used are 1/2^1, 1/2^2, ..., 1/2^8";
# for 16 heads "1/2^0.5, 1/2^1, 1/2^1.5, ..., 1/2^8".
PAPER_8 = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
PAPER_16 = [
    *[0.70710678, 0.5, 0.35355339, 0.25, 0.17677670, 0.125, 0.08838835, 0.0625],
    *[0.04419417, 0.03125, 0.02209709, 0.015625, 0.01104854, 0.0078125, 0.00552427, 0.00390625],
]
HEADS = [1, 2, 3, 6, 8, 12, 16, 20, 32, 40, 71, 112]


def authors_rule(num_heads: int) -> list[float]:
    """The rule of the authors' code: a recursion in Python floats, one product at a time."""
    exponent = math.log2(num_heads)
    if exponent.is_integer():
        ratio = 2.0 ** -(2.0 ** -(exponent - 3))
        slopes = [ratio]
        while len(slopes) < num_heads:
            slopes.append(slopes[-1] * ratio)
        return slopes
    power = 2 ** math.floor(exponent)
    return authors_rule(power) + authors_rule(2 * power)[0::2][: num_heads - power]


def assert_follows_authors(slopes: np.ndarray) -> None:
    np.testing.assert_allclose(slopes, authors_rule(len(slopes)), rtol=1e-13)


def test_eight_and_sixteen_heads_are_the_papers_numbers():
    assert alibi_slopes(8).tolist() == PAPER_8
    np.testing.assert_allclose(alibi_slopes(16), PAPER_16, rtol=0, atol=5e-9)


def test_every_head_count_follows_the_authors_rule():
    for num_heads in range(1, 257):
        assert_follows_authors(alibi_slopes(num_heads))


@pytest.mark.parametrize(
    "wrong", [np.sort(alibi_slopes(12)), np.roll(alibi_slopes(12), 1), alibi_slopes(12, rule="formula")]
)
def test_a_wrong_order_or_rule_is_noticed(wrong):
    with pytest.raises(AssertionError):
        assert_follows_authors(wrong)


@pytest.mark.parametrize("num_heads", HEADS)
def test_bloom_has_the_same_slopes_and_biases(num_heads):
    length = 9
    bloom = build_alibi_tensor(torch.ones(1, length, dtype=torch.int64), num_heads, torch.float32)  # [H, 1, S], m·j
    np.testing.assert_allclose(bloom[:, 0, 1], alibi_slopes(num_heads), rtol=3e-6)
    by_distance = bloom - bloom.transpose(1, 2)  # m·(j − i): softmax cannot tell it from m·j
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    expected = by_distance.masked_fill(hidden, -math.inf)
    torch.testing.assert_close(alibi_bias(alibi_slopes(num_heads), length), expected, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("bias_max", [4.0, 8.0, 16.0])
@pytest.mark.parametrize("num_heads", HEADS)
def test_mpt_has_the_same_slopes_and_biases(num_heads, bias_max):
    mpt = build_mpt_alibi_tensor(
        num_heads, 9, alibi_bias_max=bias_max
    )  # [H, 1, S], m·(j − (S − 1)): the last query's row
    ours = alibi_bias(alibi_slopes(num_heads, bias_max=bias_max), 1, 9)
    torch.testing.assert_close(ours, mpt, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_heads", HEADS)
def test_formula_is_the_sentence_of_the_paper(num_heads):
    expected = [2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)]
    np.testing.assert_allclose(alibi_slopes(num_heads, rule="formula"), expected, rtol=1e-13)


def test_both_rules_agree_exactly_on_powers_of_two_and_only_there():
    for num_heads in range(1, 130):
        same = np.allclose(alibi_slopes(num_heads), alibi_slopes(num_heads, rule="formula"), rtol=1e-12)
        assert same == math.log2(num_heads).is_integer(), num_heads


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads is 0 but there must be at least 1"),
        ({"num_heads": 8.0}, TypeError, r"must be an integer but is 8\.0"),
        ({"num_heads": True}, TypeError, "must be an integer but is True"),
        ({"num_heads": 8, "bias_max": 0.0}, ValueError, "bias_max is 0.0"),
        ({"num_heads": 8, "bias_max": math.nan}, ValueError, "bias_max is nan"),
        ({"num_heads": 8, "rule": "paper"}, ValueError, "'authors', 'formula'"),
    ],
)
def test_errors_for_wrong_arguments_say_what_is_allowed(arguments, error, message):
    with pytest.raises(error, match=message):
        alibi_slopes(**arguments)


def test_linear_interpolation_makes_every_distance_shorter():
    slopes = alibi_slopes(12)
    bias = alibi_bias(slopes, 8, causal=False)
    stretched = alibi_bias(interpolate_slopes(slopes, 1024, 4096), 8, causal=False)
    torch.testing.assert_close(stretched, bias / 4)


def test_ntk_is_the_published_sequence():
    # keezen/ntk_alibi: m_h = 1 / (2^(8h/H)·a^((h−1)/(H−1))), a = target / trained
    published = [1 / (2.0**head * 4.0 ** ((head - 1) / 7)) for head in range(1, 9)]
    np.testing.assert_allclose(interpolate_slopes(alibi_slopes(8), 512, 2048, method="ntk"), published, rtol=1e-12)


@given(
    slopes=st.lists(st.floats(2.0**-16, 4.0), min_size=1, max_size=24),
    stretch=st.integers(1, 64),
    zeros=st.integers(0, 3),
)
def test_ntk_keeps_the_steepest_head_and_divides_the_flattest(slopes, stretch, zeros):
    given_slopes = np.array(slopes + [0.0] * zeros)
    result = interpolate_slopes(given_slopes, 512, 512 * stretch, method="ntk")
    assert np.all(result[len(slopes) :] == 0)
    result, given_slopes = result[: len(slopes)], given_slopes[: len(slopes)]
    steepest, flattest = given_slopes.argmax(), given_slopes.argmin()
    np.testing.assert_allclose(result[flattest], given_slopes[flattest] / stretch)
    if given_slopes[steepest] > given_slopes[flattest]:
        assert result[steepest] == given_slopes[steepest]
    assert np.all((result <= given_slopes * (1 + 1e-12)) & (result >= given_slopes / stretch * (1 - 1e-12)))


@given(order=st.permutations(range(12)))
def test_ntk_depends_on_the_slope_and_not_on_the_place_of_the_head(order):
    slopes = alibi_slopes(12)
    expected = interpolate_slopes(slopes, 512, 4096, method="ntk")[list(order)]
    np.testing.assert_array_equal(interpolate_slopes(slopes[list(order)], 512, 4096, method="ntk"), expected)


@pytest.mark.parametrize("method", ["linear", "ntk"])
def test_one_distinct_slope_zeros_and_shorter_targets(method):
    assert interpolate_slopes([0.25, 0.25, 0.0], 100, 400, method=method).tolist() == [0.0625, 0.0625, 0.0]
    assert interpolate_slopes([0.0, 0.0], 100, 400, method=method).tolist() == [0.0, 0.0]
    assert interpolate_slopes(PAPER_8, 400, 100, method=method).tolist() == PAPER_8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, -0.1], 1, 2), "not negative"),
        (([0.5, math.inf], 1, 2), "finite"),
        (([], 1, 2), r"\[H\]"),
        ((np.ones((2, 2)), 1, 2), r"shape \[2, 2\]"),
        (([0.5], 0, 2), "trained is 0"),
        (([0.5], 1, 0), "target is 0"),
    ],
)
def test_interpolation_refuses_what_has_no_meaning(arguments, message):
    with pytest.raises(ValueError, match=message):
        interpolate_slopes(*arguments)
    with pytest.raises(ValueError, match="'linear', 'ntk'"):
        interpolate_slopes([0.5], 1, 2, method="yarn")
