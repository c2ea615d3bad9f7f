"""Dropout in the Triton kernels: the mask of the definition, forward, backward and decoding; runs in the interpreter."""

import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import CASES, KEY_BIASES, SHORT_INSIDE
from attention_checks import answer
from dropout_oracle import PARTS, PUBLISHED, masks_of_part
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend

pytestmark = pytest.mark.usefixtures("interpreter")


def test_random_numbers_are_the_published_ones() -> None:
    from random_numbers import drawn

    known = [*PUBLISHED, PUBLISHED[0]]  # a power of two
    found = drawn(*([*column] for column in zip(*((key, *counter) for key, counter, _ in known), strict=True)))
    assert [tuple(words) for words in found] == [words for _, _, words in known]


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
def test_dropout_is_that_of_the_definition(name: str) -> None:
    """For one seed; the first sequence, head and key are not 0."""
    case = next(case for case in (*CASES, *KEY_BIASES, *SHORT_INSIDE) if case.name == name)

    def attention(*args: Tensor, backend: str, return_lse: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
        spec = make_spec(*args, **kwargs, dropout_p=0.4, return_lse=return_lse)
        seed = torch.tensor([[2**61 + 12345, 3, 5, (-7, 4)[case.query_len % 2]]])
        return attend(dataclasses.replace(spec, dropout_seed=seed), *args[:3], backend)

    ours = answer(case, torch.float32, attention, backend="fused")
    true = answer(case, torch.float64, attention, backend="reference")
    assert torch.equal(ours.lse.isinf(), true.lse.isinf())
    assert_near(ours.output, true.output)
    assert_near(ours.lse.nan_to_num(neginf=0.0), true.lse.nan_to_num(neginf=0.0))
    for leaf, gradient in true.gradients.items():
        assert_near(ours.gradients[leaf], gradient)


@pytest.mark.parametrize("kind", PARTS)
def test_parts_have_the_mask_of_the_definition(kind: str) -> None:
    assert torch.equal(*masks_of_part(kind, "fused"))


@pytest.mark.parametrize("kind", ["prefix", "queries anywhere"])
def test_gradients_of_parts_have_that_mask_too(kind: str) -> None:
    t, options = PARTS[kind]
    given = {name: torch.from_numpy(x) if hasattr(x, "dtype") else x for name, x in options.items()}
    leaves = [torch.randn(2, n, length, 16, requires_grad=True) for n, length in ((2, t), (1, 75), (1, 75))]
    found = []
    for backend in ("fused", "dense"):
        torch.manual_seed(4)
        output = alibi_attention(*leaves, [0.1, 0.0], dropout_p=0.3, backend=backend, **given)
        found.append([output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)])
    for ours, true in zip(*found, strict=True):
        assert_near(ours, true)


def assert_near(ours: Tensor, true: Tensor) -> None:
    """Within 3·10⁻⁵ of the largest entry: a wrongly kept or dropped weight causes an error a hundred times that."""
    assert float((ours.double() - true).abs().max()) <= 3e-5 * max(1.0, float(true.abs().max()))
