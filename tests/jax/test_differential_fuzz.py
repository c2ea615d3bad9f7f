"""Random calls of the whole contract on JAX's backends; see `tests/attention/test_differential_fuzz.py`."""

import dataclasses

import pytest
from differential_arrays import arrays
from differential_calls import Call
from differential_checks import Question, assert_right
from differential_fuzz import drawn, fuzz
from differential_jax import SHAPES, jax_answer

# The kernels of jax-native meet 200 draws in PyTorch too.
DRAWS = [
    ("jax-native", range(40)),
    pytest.param("jax-native", range(40, 200), marks=pytest.mark.long),
    ("jax-dense", range(8)),
    pytest.param("jax-dense", range(8, 15), marks=pytest.mark.long),
    ("jax-loop", range(4)),
    pytest.param("jax-loop", range(4, 15), marks=pytest.mark.long),
]

# Calls that were once computed incorrectly, with their backend.
FOUND = [
    ("jax-dense", Call(seed=204, batch=0, gates="both")),
    ("jax-dense", Call(seed=116, batch=0, causal=False, key_bias="gates")),
    # Forward and backward shifted scores of 10⁸ by different keys' scores: weights above 1.
    (
        "jax-loop",
        Call(
            seed=290,
            causal=False,
            segments="sorted",
            segment_ids="negative",
            segments_as="pair",
            peaked=-1.0,
            outlier_key=1e8,
            through="output",
            key_bias="gates",
        ),
    ),
    # Scores beyond the bias of a cut.
    *((backend, Call(seed=8, gates="cuts", mask="random", outlier_key=1e8)) for backend in ("jax-dense", "jax-loop")),
]


@pytest.mark.parametrize(("backend", "call"), FOUND, ids=str)
def test_calls_that_once_failed_stay_right(backend: str, call: Call) -> None:
    call = dataclasses.replace(call, **(SHAPES[backend] | {"batch": call.batch}))
    numbers = arrays(call)
    assert_right(Question(call, numbers), jax_answer(call, numbers, backend))


# What draws contain rarely, in the shape of each backend: dropout, extreme biases and gates, hidden keys, cuts, and sinks.
RARE = (
    Call(seed=1, gates="isolated", key_bias="isolated", mask="random", segments="sorted", window=60),
    Call(seed=2, causal=False, key_bias="isolated", window=40, mask="random", segments="sorted", segments_as="pair"),
    Call(seed=3, causal=False, key_bias="hidden", bad="unseen", slopes="published"),
    Call(seed=4, gates="both", sinks="some none"),
    Call(seed=6, key_bias="wide", sinks="noise"),
    Call(seed=9, dropout_p=0.5, torch_seed=2**31),
    # Nothing before a cut is used; a query whose keys since a cut are hidden sees nothing.
    Call(seed=3, gates="cuts", bad="seen", mask="random"),
    Call(seed=14, gates="cuts", bad="seen"),
    Call(seed=8, gates="cuts", mask="random", outlier_key=1e4),
    Call(seed=12, gates="cuts", key_bias="hidden", mask="random", segments="unsorted", segments_as="pair"),
)


@pytest.mark.parametrize("call", RARE, ids=repr)
@pytest.mark.parametrize("backend", SHAPES)
def test_rare_calls_are_answered_as_the_truth_has_it(backend: str, call: Call) -> None:
    call = dataclasses.replace(call, **SHAPES[backend])
    numbers = arrays(call)
    assert_right(Question(call, numbers), jax_answer(call, numbers, backend))


@pytest.mark.parametrize(("backend", "seeds"), DRAWS)
def test_random_calls_are_answered_as_the_truth_has_it(backend: str, seeds: range) -> None:
    tally = fuzz([backend], seeds)[backend]
    assert not tally.failures, "\n".join(f"seed {seed}: {words}" for seed, words in tally.failures)


@pytest.mark.parametrize("backend", SHAPES)
def test_the_result_of_another_call_is_detected(backend: str) -> None:
    call = dataclasses.replace(Call(seed=1, slopes="published", window=7), **SHAPES[backend])
    numbers = arrays(call)
    question = Question(call, numbers)
    assert_right(question, jax_answer(call, numbers, backend))
    for changed in (dataclasses.replace(call, window=8), dataclasses.replace(call, scale=0.3)):
        with pytest.raises(AssertionError):
            assert_right(question, jax_answer(changed, numbers, backend))
    assert drawn(3, backend).key_len == call.key_len
