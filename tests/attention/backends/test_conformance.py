"""Every backend computes the definition: outputs, lse and gradients against a loop over i and j in float64.

`test_fused.py` interprets `fused` on the same cases; `test_flex.py` tests `flex`, which has neither lse nor backward on a CPU.
"""

import dataclasses

import pytest
import torch
from attention_cases import CASES, KEY_BIASES, ONE_FAR_KEY, SOME, Case
from attention_checks import EPS, ON_CPU, WITH_KEY_BIAS, answer, assert_exact, assert_one_far_key


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ON_CPU)
def test_fp32_equals_the_definition(backend: str, case: Case) -> None:
    assert_exact(case, torch.float32, answer(case, torch.float32, backend=backend), tolerance=EPS[torch.float32] / 32)


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ON_CPU)
def test_other_dtypes_equal_the_definition(backend: str, dtype: torch.dtype, case: Case) -> None:
    assert_exact(case, dtype, answer(case, dtype, backend=backend), tolerance=EPS[dtype] / 32)


@pytest.mark.parametrize("case", KEY_BIASES, ids=str)
@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
def test_a_bias_per_key_equals_the_definition(backend: str, case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert_exact(case, dtype, answer(case, dtype, backend=backend), tolerance=EPS[dtype] / 32)


@pytest.mark.parametrize("case", ONE_FAR_KEY, ids=str)
@pytest.mark.parametrize("backend", ["dense", "banded", "native"])
def test_one_far_key_has_no_gradient_of_the_slope_but_through_lse(backend: str, case: Case) -> None:
    assert_one_far_key(case, answer(case, torch.float32, backend=backend))


def _wrong(case: Case, **changes: object) -> None:
    """Computes another call than `case`; the checker must fail."""
    other = answer(dataclasses.replace(case, **changes), torch.float32, backend="reference")
    with pytest.raises(AssertionError):
        assert_exact(case, torch.float32, other)


def test_the_checker_fails_on_wrong_answers() -> None:
    case = Case("checked", window=5, offset=6, query_len=7, key_len=13)
    assert_exact(case, torch.float32, answer(case, torch.float32, backend="reference"))
    _wrong(case, window=6)
    _wrong(case, window=4)
    _wrong(case, offset=5)
    _wrong(case, offset=7)
    _wrong(case, causal=False)
    _wrong(case, scale=1.0)
    _wrong(case, slopes="steep")
    _wrong(case, seed=1)


def test_the_checker_fails_on_each_wrong_part() -> None:
    case = Case("checked", heads=2)
    right = answer(case, torch.float32, backend="reference")
    shifted = dataclasses.replace(right, output=right.output.roll(1, dims=1))
    with pytest.raises(AssertionError, match="output"):
        assert_exact(case, torch.float32, shifted)
    with pytest.raises(AssertionError, match="lse"):
        assert_exact(case, torch.float32, dataclasses.replace(right, lse=right.lse + 1e-4))
    for name in right.gradients:
        wrong = right.gradients | {name: right.gradients[name] * (1 + 1e-4)}
        with pytest.raises(AssertionError, match=name):
            assert_exact(case, torch.float32, dataclasses.replace(right, gradients=wrong))
    with pytest.raises(AssertionError, match="finite"):
        assert_exact(case, torch.float32, dataclasses.replace(right, output=right.output * float("nan")))
