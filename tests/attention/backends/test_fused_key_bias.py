"""`key_bias` in the Triton kernels, interpreted: the definition, hidden keys, accuracy, and the certificate."""

from concurrent.futures import ProcessPoolExecutor

import fused_in_interpreter as inside
import key_bias_in_interpreter as biased
import pytest
import torch
from attention_cases import KEY_BIASES, Case
from attention_checks import assert_exact
from attention_oracle import Answer

LONG = tuple(
    pytest.param(
        case, id=str(case), marks=pytest.mark.long if "long" in case.name and "rising" not in case.name else ()
    )
    for case in KEY_BIASES
)
HALF = tuple(case for case in KEY_BIASES if case.name in {"key bias, gates", "key bias, hidden keys"})


@pytest.mark.parametrize("case", LONG)
def test_fp32_equals_the_definition(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert_exact(case, torch.float32, _answer(interpreter, case, "float32"), tolerance=2.0**-28)


@pytest.mark.parametrize("case", HALF, ids=str)
def test_fp16_equals_the_definition(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert_exact(case, torch.float16, _answer(interpreter, case, "float16"), tolerance=2.0**-15)


@pytest.mark.parametrize(("query_len", "bad"), [(100, float("nan")), (3, 3e38)])
def test_hidden_keys_are_never_used(interpreter: ProcessPoolExecutor, query_len: int, bad: float) -> None:
    interpreter.submit(biased.hidden_keys_change_nothing, query_len, bad).result()


@pytest.mark.parametrize(
    ("query_len", "bad"),
    [
        (150, float("nan")),
        (150, 1e18),
        (3, float("nan")),
        (3, float("inf")),
        (3, 1e18),
        pytest.param(150, float("inf"), marks=pytest.mark.long),
    ],
)
def test_cuts_are_strict(interpreter: ProcessPoolExecutor, query_len: int, bad: float) -> None:
    interpreter.submit(biased.cuts_are_strict, query_len, bad).result()


@pytest.mark.parametrize("query_len", [150, 3])
def test_large_numbers_cost_the_rounding_of_their_differences(interpreter: ProcessPoolExecutor, query_len: int) -> None:
    of_output, of_lse = interpreter.submit(biased.cost_of_large_numbers, query_len).result()
    assert of_output < 2e-6
    assert of_lse < 5e-6


@pytest.mark.parametrize(("dtype", "share"), [("float32", 2e-6), pytest.param("float16", 2e-3, marks=pytest.mark.long)])
def test_a_gate_has_its_gradient(interpreter: ProcessPoolExecutor, dtype: str, share: float) -> None:
    error, largest = interpreter.submit(biased.gradient_of_gates, dtype).result()
    assert error < share * largest


def test_no_attack_breaks_the_certificate(interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(biased.attacked, range(16)).result()
    worst = max(lost for lost, _, _ in found)
    assert worst <= 1, f"{worst} of the tolerance is dropped"
    assert sum(share > 0 for _, share, _ in found) >= 5, "an attack on nothing: too few draws skip a key"
    ours, theirs = (sum(draw[at] for draw in found) for at in (1, 2))
    assert ours > theirs / 2, (
        f"the kernels skip {ours / len(found):.3f} of the keys, those of a CPU {theirs / len(found):.3f}"
    )


def test_a_certificate_that_ignores_the_bias_is_detected(interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(biased.attacked, (42, 45, 67, 68), forgetful=True).result()
    assert min(lost for lost, _, _ in found) > 1


def test_gates_shorten_the_reach(interpreter: ProcessPoolExecutor) -> None:
    most, every = interpreter.submit(biased.tiles_of_gates, 1500).result()
    assert most <= 5 < every


def test_transforms_and_graphs_carry_it(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(biased.transformed_and_checked).result()


def _answer(interpreter: ProcessPoolExecutor, case: Case, dtype: str) -> Answer:
    got = {n: torch.from_numpy(x) for n, x in interpreter.submit(inside.case_answer, case, dtype).result().items()}
    return Answer(got.pop("output"), got.pop("lse"), got)
