"""Products, log-sum-exps and biases at the limits of fp32; the fuzz draws isolated extremes of each."""

import pytest
import torch
from attention_checks import WITH_KEY_BIAS

from alibi_attn import alibi_attention, head_reach


@pytest.mark.parametrize("backend", [*WITH_KEY_BIAS, "banded"])
def test_products_beyond_fp32_are_not_a_number(backend: str) -> None:
    """No backend returns a wrong finite number; one step below overflow all of them are right."""
    q, k, v = torch.randn(3, 1, 2, 150, 16, generator=torch.Generator().manual_seed(3))
    assert bool(alibi_attention(q * 1e20, k * 1e20, v, [0.5, 0.01], backend=backend).isnan().any(-1).all())
    found = alibi_attention(q * 1e18, k * 1e18, v * 1e37, [0.5, 0.01], backend=backend)
    q, k, v = (q * 1e18).double(), (k * 1e18).double(), (v * 1e37).double()
    exact = alibi_attention(q, k, v, [0.5, 0.01], backend="reference")
    torch.testing.assert_close(found.double() / 1e37, exact / 1e37, rtol=0, atol=1e-6)


def test_a_certificate_still_skips_where_gates_cut() -> None:
    q, k, _ = torch.randn(3, 1, 2, 2048, 32, generator=torch.Generator().manual_seed(2))
    bias = torch.zeros(2048)
    for cut in range(100, 2048, 200):
        bias[cut:] += 1e9
    assert int(head_reach(q, k, [0.0, 0.0], key_bias=bias, backend="native").max()) < 400


def test_an_lse_that_fp32_cannot_hold_is_finite() -> None:
    """−inf is only for queries that see nothing: other queries keep their gradients."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 8, 16).unbind(0))
    seen = torch.arange(8)[None] < 2
    out, lse = alibi_attention(q, k, v, [3e38], key_mask=seen, return_lse=True, backend="native")
    assert bool(lse.isfinite().all())
    torch.testing.assert_close(out[:, :, 2:], v[:, :, 1:2].expand(-1, -1, 6, -1))
    (of_values,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(of_values[0, 0, :, 0], torch.tensor([1.0, 7, 0, 0, 0, 0, 0, 0]))
