"""The Triton kernels touch only tensors of their call, and no two programs write to an address; runs in the interpreter."""

from unittest import mock

import pytest
import torch

from alibi_attn import alibi_attention, alibi_slopes
from alibi_attn.attention.backends.fused import backend

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("head_dim", "query_len", "key_len"), [(72, 14, 93), (136, 40, 40)])
def test_kernels_stay_within_their_tensors(
    head_dim: int, query_len: int, key_len: int, large: bool, biased: bool
) -> None:
    """Also where a tile has more queries than a short call, whose plan has fewer rows."""
    from watched_memory import watched

    torch.manual_seed(0)
    shapes = (2, 4, query_len, head_dim), (2, 2, key_len, head_dim), (2, 2, key_len, head_dim)
    inputs = [torch.randn(shape, dtype=torch.float16).requires_grad_() for shape in shapes]
    slopes, causal = torch.tensor(alibi_slopes(4), dtype=torch.float32).requires_grad_(), query_len == key_len
    bias = torch.randn(2, 4, key_len).requires_grad_() if biased else None
    leaves = [*inputs, slopes, *([] if bias is None else [bias])]
    sent = torch.randn(shapes[0], dtype=torch.float16)
    with mock.patch.multiple(backend, is_large=lambda _: large, is_hopper=lambda _: large), watched():
        output = alibi_attention(*inputs, slopes, causal=causal, key_bias=bias, backend="fused")
        gradients = torch.autograd.grad(output, leaves, sent)
    true = alibi_attention(*(x.double() for x in inputs), slopes, causal=causal, key_bias=bias, backend="reference")
    for ours, wanted in zip(
        (output, *gradients), (true, *torch.autograd.grad(true, leaves, sent.double())), strict=True
    ):
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=4e-3, atol=4e-3 * float(wanted.abs().max()))
