"""As docs/design.md says: outputs are bit-identical for any number of threads, gradients for up to eight."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from alibi_attn import alibi_attention, forgetting_attention

SLOPES = [0.1, 0.01, 0.003]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def answers(threads: int, kind: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(output and lse, gradients) of one call."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 1300, 32, dtype=dtype).requires_grad_() for heads in (3, 1, 1)]
    if kind == "gates":
        inputs.append(logsigmoid(torch.randn(2, 3, 1300) + 5).requires_grad_())
        found = forgetting_attention(*inputs, return_lse=True, backend="native")
    else:
        options = {"dropout": {"dropout_p": 0.1}, "symmetric": {"causal": False}, "plain": {}}[kind]
        inputs.append(torch.tensor(SLOPES, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_())
        found = alibi_attention(*inputs, return_lse=True, backend="native", **options)
    return list(found), list(torch.autograd.grad(found, inputs, [x.detach().cos() for x in found]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "symmetric", "dropout", "gates"])
def test_bits_depend_on_more_than_eight_threads_in_gradients_only(kind: str, dtype: torch.dtype) -> None:
    outputs, gradients = answers(1, kind, dtype)
    for threads in (2, 8):
        for x, y in zip(answers(threads, kind, dtype), (outputs, gradients), strict=True):
            assert all(torch.equal(ours, first) for ours, first in zip(x, y, strict=True))
    (again, of_again), (theirs, of_theirs) = answers(16, kind, dtype), answers(16, kind, dtype)
    for x, y, first in zip(again, theirs, outputs, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, first)
    for x, y, first in zip(of_again, of_theirs, gradients, strict=True):
        assert torch.equal(x, y)
        # The order of sums differs: rounding errors relative to the largest sum.
        unit = torch.finfo(dtype).eps
        assert (x - first).abs().max() <= 64 * unit * first.abs().max()
    assert not all(torch.equal(x, y) for x, y in zip(of_again, gradients, strict=True)), "keys have several tasks"


def test_gradients_of_a_row_do_not_depend_on_the_batch() -> None:
    """Rows whose keys are in several tasks, next to cheap and expensive ones."""
    torch.manual_seed(0)
    query = torch.randn(3, 3, 1300, 32) * torch.tensor([0.1, 1.0, 10.0])[:, None, None, None]
    inputs = [query.requires_grad_(), *(torch.randn(3, 1, 1300, 32).requires_grad_() for _ in range(2))]
    grad = torch.randn(3, 3, 1300, 32)

    def gradients(rows: slice) -> tuple[torch.Tensor, ...]:
        own = [x[rows] for x in inputs]
        return torch.autograd.grad(alibi_attention(*own, SLOPES, backend="native"), own, grad[rows])

    for threads in (1, 3, 16):
        torch.set_num_threads(threads)
        whole = gradients(slice(None))
        for row in range(3):
            at = slice(row, row + 1)
            assert all(torch.equal(x[at], y) for x, y in zip(whole, gradients(at), strict=True))
