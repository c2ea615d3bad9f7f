"""What backward of the Triton kernels leaves out because forward measured it, interpreted."""

import dataclasses
from concurrent.futures import ProcessPoolExecutor

import measured_in_interpreter as inside
import pytest
from attention_cases import Case

PEAKED = Case("peaked", batch=1, heads=2, query_len=600, key_len=600, slopes="random", peaked=3.0)
CASES = (
    PEAKED,
    dataclasses.replace(PEAKED, name="both sides", causal=False),
    dataclasses.replace(PEAKED, name="sink", sink=60.0),
    dataclasses.replace(PEAKED, name="grouped, window", heads=4, kv_heads=2, window=400, query_len=330, offset=200),
    dataclasses.replace(PEAKED, name="masked, both sides", causal=False, mask="random", query_len=450, key_len=450),
    dataclasses.replace(PEAKED, name="padded", mask="left", batch=2, query_len=300, key_len=300),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_visits_exactly_the_measured_tiles(interpreter: ProcessPoolExecutor, case: Case) -> None:
    errors, (forward, queries, keys) = interpreter.submit(inside.gradient_over_measured_tiles, case, 0.2).result()
    assert max(errors.values()) < 2e-5, errors
    assert queries <= keys < 0.9 * forward, "nothing is left out"


def test_peaked_queries_need_far_fewer_keys_than_certified(interpreter: ProcessPoolExecutor) -> None:
    errors, (forward, queries, keys) = interpreter.submit(inside.gradient_over_measured_tiles, PEAKED, 1e-6).result()
    assert max(errors.values()) < 2e-5, errors
    assert queries < 0.7 * forward
    assert keys < 0.7 * forward


def test_a_tolerance_of_zero_leaves_out_nothing(interpreter: ProcessPoolExecutor) -> None:
    errors, (forward, queries, keys) = interpreter.submit(inside.gradient_over_measured_tiles, PEAKED, 0.0).result()
    assert max(errors.values()) < 2e-5, errors
    assert forward == queries == keys == 2 * 600 * 601 // 2
    every, of_backward = interpreter.submit(inside.computed, 0.0).result()
    assert every == of_backward


def test_a_call_through_autograd_uses_what_forward_measured(interpreter: ProcessPoolExecutor) -> None:
    for found, expected in interpreter.submit(inside.gradients_of_a_public_call, 0.2).result():
        assert bool((found == expected).all())


def test_the_scores_of_backward_are_counted(interpreter: ProcessPoolExecutor) -> None:
    every, of_backward = interpreter.submit(inside.computed, 1e-5).result()
    assert 0 < of_backward < 0.8 * every
    short_inference = interpreter.submit(inside.computed, 1e-5, trains=False).result()
    assert every < short_inference[0] == interpreter.submit(inside.computed, 0.0).result()[0]


@pytest.mark.parametrize("biased", [False, True])
def test_what_backward_leaves_out_weighs_at_most_the_tolerance(interpreter: ProcessPoolExecutor, biased: bool) -> None:
    found = interpreter.submit(inside.attacked, range(40), biased=biased).result()
    certain = [(lost, share) for lost, share, off in found if off < 0.5]
    assert max(certain)[0] <= 1, certain
    assert sum(share > 0 for _, share in certain) >= 5, "an attack on nothing: too few draws leave out a key"


def test_an_allowance_that_is_too_large_is_detected(interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(inside.attacked, range(20), biased=False, careless=1e5).result()
    assert any(lost > 1 and off < 0.5 for lost, _, off in found)


def test_a_long_value_shrinks_the_allowance(interpreter: ProcessPoolExecutor) -> None:
    plain, long = interpreter.submit(inside.with_a_long_value).result()
    assert bool((long <= plain).all())
    assert bool((long < plain).any())
