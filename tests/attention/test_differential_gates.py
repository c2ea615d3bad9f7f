"""The fuzz's truth is right for gates and extreme biases, and its checker finds wrong results."""

import dataclasses

import numpy as np
import pytest
import torch
from differential_arrays import GATE_FLOOR, arrays
from differential_calls import Call
from differential_checks import Answer, Question, assert_right, plainly
from differential_truth import truth

GATED = Call(5, "float32", 2, 4, 2, query_len=19, key_len=23, head_dim=8, window=7, offset=3, gates="cuts")
WIDE = {"slopes_as": "float64", "gates_as": "float64", "tolerance": 0.0}


@pytest.mark.parametrize("gates", ["open", "isolated", "cuts", "both"])
def test_the_truth_with_gates_is_that_of_autograd(gates: str) -> None:
    """Autograd through a softmax whose scores get the sum of the gates between key and query, pair by pair."""
    call = Call(8, "float64", 2, 4, 2, query_len=19, key_len=23, head_dim=8, offset=2, gates=gates, **WIDE)
    numbers = arrays(call)
    query, key, value, slopes, leaf = (
        torch.from_numpy(x).requires_grad_()
        for x in (numbers.query, numbers.key, numbers.value, numbers.slopes, numbers.log_fgate)
    )
    i, j = 2 + torch.arange(19)[:, None], torch.arange(23)
    between = (torch.arange(23) > j[:, None]) & (torch.arange(23) <= i[..., None])  # [T, S, l]
    counted = leaf.masked_fill((leaf < GATE_FLOOR) & (leaf > -torch.inf), GATE_FLOOR)
    bias = torch.where(between, counted[:, :, None, None], 0.0).sum(-1)
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5 + bias - slopes[:, None, None] * (i - j)
    scores = scores.masked_fill(j > i, -torch.inf)
    output, lse = scores.softmax(-1) @ value.repeat_interleave(2, 1), scores.logsumexp(-1)
    grads = torch.from_numpy(numbers.grad_output), torch.from_numpy(numbers.grad_lse)
    names = ("output", "lse", "query", "key", "value", "slopes", "log_fgate")
    leaves = (query, key, value, slopes, leaf)
    found = (output.detach(), lse.detach(), *torch.autograd.grad((output, lse), leaves, grads))
    true = truth(call, numbers)
    for name, expected in zip(names, found, strict=True):
        if name == "log_fgate":
            expected = expected.masked_fill(leaf == -torch.inf, 0.0)
        exact = true.exact[name]
        np.testing.assert_allclose(
            exact,
            expected.numpy(),
            rtol=1e-15,
            atol=1e-12 * max(1.0, float(np.abs(exact).max()) * (name != "lse")),
            err_msg=name,
        )


def test_a_gate_one_position_too_late_is_detected() -> None:
    call = GATED
    numbers = arrays(call)
    plain = plainly(call, numbers)
    assert_right(Question(call, numbers), plain)
    for wrong in (np.roll(numbers.log_fgate, 1, -1), numbers.log_fgate[:, [1, 2, 3, 0]]):
        changed = plainly(call, dataclasses.replace(numbers, log_fgate=wrong))
        with pytest.raises(AssertionError):
            assert_right(Question(call, numbers), changed)


def test_a_bias_out_of_sight_excuses_no_error() -> None:
    """A key bias of 1e30 that half of the queries see must not make the checker accept errors of the others."""
    call = Call(seed=2, heads=2, kv_heads=2, query_len=60, key_len=60, head_dim=8, key_bias="noise")
    numbers = arrays(call)
    bias = numbers.key_bias.copy()
    bias[..., 30] = 1e30
    question = Question(call, dataclasses.replace(numbers, key_bias=bias))
    right = plainly(call, question.numbers)
    assert_right(question, right)
    for row in (29, 30):
        wrong = right.results["output"].clone()
        wrong[0, 1, row] += 1e-4
        with pytest.raises(AssertionError, match="output"):
            assert_right(question, Answer(right.results | {"output": wrong}))
