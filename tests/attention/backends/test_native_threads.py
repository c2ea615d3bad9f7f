"""As docs/design.md says: outputs are bit-identical for any number of threads, gradients for the same number."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from alibi_attn import alibi_attention, forgetting_attention


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def answers(threads: int, kind: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(output and lse, gradients) of one call."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 700, 32, dtype=dtype).requires_grad_() for heads in (3, 1, 1)]
    if kind == "gates":
        inputs.append(logsigmoid(torch.randn(2, 3, 700) + 4).requires_grad_())
        found = forgetting_attention(*inputs, return_lse=True, backend="native")
    else:
        options = {"dropout": {"dropout_p": 0.1}, "symmetric": {"causal": False}, "plain": {}}[kind]
        inputs.append(torch.tensor([0.5, 0.1, 0.01], dtype=torch.promote_types(dtype, torch.float32)).requires_grad_())
        found = alibi_attention(*inputs, return_lse=True, backend="native", **options)
    return list(found), list(torch.autograd.grad(found, inputs, [x.detach().cos() for x in found]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "symmetric", "dropout", "gates"])
def test_bits_depend_on_the_number_of_threads_in_gradients_only(kind: str, dtype: torch.dtype) -> None:
    outputs, gradients = answers(1, kind, dtype)
    for threads in (1, 2, 4):
        again, (theirs, of_theirs) = answers(threads, kind, dtype), answers(threads, kind, dtype)
        for x, y, first in zip(again[0], theirs, outputs, strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x, first)
        for x, y, first in zip(again[1], of_theirs, gradients, strict=True):
            assert torch.equal(x, y)
            # The order of sums differs: rounding errors relative to the largest sum.
            unit = torch.finfo(dtype).eps
            assert (x - first).abs().max() <= 64 * unit * first.abs().max()
