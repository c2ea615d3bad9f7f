"""Random calls of the whole contract, answered by the JAX function; see `tests/attention/test_differential_fuzz.py`."""

import dataclasses

import pytest
from differential_arrays import arrays
from differential_calls import Call
from differential_checks import Question, assert_right
from differential_fuzz import drawn, fuzz
from differential_jax import SHAPES, jax_answer

DRAWS = {"jax-native": 200, "jax-dense": 15, "jax-loop": 15}


@pytest.mark.parametrize("backend", SHAPES)
def test_random_calls_are_answered_as_the_truth_has_it(backend: str) -> None:
    tally = fuzz([backend], range(DRAWS[backend]))[backend]
    assert not tally.failures, "\n".join(f"seed {seed}: {words}" for seed, words in tally.failures)


@pytest.mark.parametrize("backend", SHAPES)
def test_an_answer_to_another_call_is_found_out(backend: str) -> None:
    call = dataclasses.replace(Call(seed=1, slopes="published", window=7), **SHAPES[backend])
    numbers = arrays(call)
    question = Question(call, numbers)
    assert_right(question, jax_answer(call, numbers, backend))
    for changed in (dataclasses.replace(call, window=8), dataclasses.replace(call, scale=0.3)):
        with pytest.raises(AssertionError):
            assert_right(question, jax_answer(changed, numbers, backend))
    assert drawn(3, backend).key_len == call.key_len
