"""Dropout in the Triton kernels, interpreted: the mask of the definition, forward, backward and decoding."""

from concurrent.futures import ProcessPoolExecutor

import dropout_in_interpreter as dropout
import pytest
import torch
from attention_cases import CASES, KEY_BIASES, SHORT_INSIDE
from dropout_oracle import PARTS, PUBLISHED


def test_random_numbers_are_the_published_ones(interpreter: ProcessPoolExecutor) -> None:
    drawn = interpreter.submit(dropout.known_random_numbers).result()
    assert [tuple(words) for words in drawn[:3]] == [words for _, _, words in PUBLISHED]


DROPPED = (
    "grouped-query",
    "one query",
    "queries at the end of longer keys",
    "more queries than keys",
    "offset partly before",
    "everything",
    "key bias, hidden keys",
    "key bias, gates",
    "short inside, right slopes",
)


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_is_that_of_the_definition(interpreter: ProcessPoolExecutor, name: str) -> None:
    case = next(case for case in (*CASES, *KEY_BIASES, *SHORT_INSIDE) if case.name == name)
    ours, true = interpreter.submit(dropout.answer_with_dropout, case).result()
    assert torch.equal(ours.lse.isinf(), true.lse.isinf())
    assert_near(ours.output, true.output)
    assert_near(ours.lse.nan_to_num(neginf=0.0), true.lse.nan_to_num(neginf=0.0))
    for leaf, gradient in true.gradients.items():
        assert_near(ours.gradients[leaf], gradient)


@pytest.mark.parametrize("kind", PARTS)
def test_parts_have_the_mask_of_the_definition(interpreter: ProcessPoolExecutor, kind: str) -> None:
    assert interpreter.submit(dropout.same_masks_of_part, kind).result()


@pytest.mark.parametrize("kind", ["prefix", "queries anywhere"])
def test_gradients_of_parts_have_that_mask_too(interpreter: ProcessPoolExecutor, kind: str) -> None:
    for ours, true in interpreter.submit(dropout.gradients_of_part, kind).result():
        assert_near(ours, true)


def assert_near(ours: torch.Tensor, true: torch.Tensor) -> None:
    """Within 3·10⁻⁵ of the largest entry: a wrongly kept or dropped weight causes an error a hundred times that."""
    assert float((ours.double() - true).abs().max()) <= 3e-5 * max(1.0, float(true.abs().max()))
