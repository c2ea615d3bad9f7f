"""Every backend computes the definition: outputs, lse and gradients against a loop over i and j in float64."""

import dataclasses

import pytest
import torch
from attention_cases import CASES, KEY_BIASES, ONE_FAR_KEY, Case
from attention_checks import answer, assert_exact, assert_one_far_key

from alibi_attn.attention.run.dispatch import BACKENDS

# Skipping is tested with the default tolerance of each dtype.
TOLERANCE = {d: torch.finfo(d).eps / 32 for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
# Backends that run no case here. `fused` needs CUDA; test_fused interprets it on the same cases. `flex` has neither lse nor
# backward on a CPU; test_flex tests its forward.
REFUSED = ("fused", "flex")
RUN_HERE = [name for name in BACKENDS if name not in REFUSED]

SOME = tuple(
    case
    for case in CASES
    if case.name
    in {
        "plain",
        "grouped-query",
        "queries at the end of longer keys",
        "heads that never look right",
        "symmetric window",
        "NaN in masked keys, inf in their values",
        "everything",
        "steep, long",
        "steep, long, segments",
        "right slopes a batch",
    }
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_equals_the_definition(backend: str, case: Case) -> None:
    if backend in REFUSED:
        with pytest.raises(ValueError, match="cannot run this"):
            answer(case, torch.float32, backend=backend)
        return
    assert_exact(case, torch.float32, answer(case, torch.float32, backend=backend), tolerance=TOLERANCE[torch.float32])


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", RUN_HERE)
def test_other_dtypes_equal_the_definition(backend: str, dtype: torch.dtype, case: Case) -> None:
    assert_exact(case, dtype, answer(case, dtype, backend=backend), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("case", KEY_BIASES, ids=str)
@pytest.mark.parametrize("backend", RUN_HERE)
def test_a_bias_per_key_equals_the_definition(backend: str, case: Case) -> None:
    if "key_bias" not in BACKENDS[backend].READS:
        with pytest.raises(ValueError, match="it does not compute key_bias"):
            answer(case, torch.float32, backend=backend)
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert_exact(case, dtype, answer(case, dtype, backend=backend), tolerance=TOLERANCE[dtype])


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
