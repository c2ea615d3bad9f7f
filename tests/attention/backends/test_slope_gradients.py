"""Difficult gradients of slopes: negative slopes, queries far beyond the keys, sums that cancel, both sides."""

import pytest
import torch
from attention_cases import ONE_FAR_KEY, Case
from attention_checks import answer, assert_one_far_key

from alibi_attn import alibi_attention

CPU = pytest.mark.parametrize("backend", ["dense", "banded", "native"])


def gradients(backend, dtype, q, k, v, go, slopes, right=None, **options):
    leaf = [torch.tensor(m, dtype=dtype, requires_grad=True) for m in (slopes, right) if m is not None]
    right_slopes = None if right is None else leaf[1]
    inputs = (x.to(dtype) for x in (q, k, v))
    out = alibi_attention(*inputs, leaf[0], right_slopes=right_slopes, backend=backend, **options)
    return torch.autograd.grad(out, leaf, go.to(dtype))


@CPU
@pytest.mark.parametrize(("tokens", "slope"), [(1000, -0.1), (129, -0.5), (200, -0.5), (77, -3.0)])
@pytest.mark.parametrize("causal", [True, False])
def test_negative_slopes_with_a_partial_last_block(backend: str, tokens: int, slope: float, causal: bool) -> None:
    """A last block's lanes without a query have scores too, which are large for a negative slope."""
    q, k, v, go = torch.randn(4, 2, 4, tokens, 16)
    right = None if causal else [0.2, -0.01, slope, 0.0]
    true = gradients("reference", torch.float64, q, k, v, go, [slope] * 4, right, causal=causal)
    found = gradients(backend, torch.float32, q, k, v, go, [slope] * 4, right, causal=causal)
    for ours, exact in zip(found, true, strict=True):
        assert bool(ours.isfinite().all())
        assert float((ours - exact).abs().max()) <= 1e-4 * float(exact.abs().max())


@CPU
@pytest.mark.parametrize("case", ONE_FAR_KEY, ids=str)
def test_one_far_key_has_no_gradient_of_the_slope_but_through_lse(backend: str, case: Case) -> None:
    """With one key only lse depends on the slope: the gradient is exactly −Σ dlse·|i − j|."""
    assert_one_far_key(case, answer(case, torch.float32, backend=backend))


@CPU
def test_far_queries_lose_no_digits_of_a_flat_slope(backend: str) -> None:
    q, k, v, go = torch.randn(4, 1, 2, 130, 8)
    options = {"query_offset": 10**6, "causal": True}
    slopes = [2.0**-30, 2.0**-25]  # so flat that scores round as without a bias; their gradients sum ds·10⁶
    true = gradients("reference", torch.float64, q, k, v, go, slopes, **options)
    found = gradients(backend, torch.float32, q, k, v, go, slopes, **options)
    if backend == "dense":  # it computes the sum with torch, which adds products with 10⁶
        assert bool(found[0].isfinite().all())
    else:
        assert float((found[0] - true[0]).abs().max()) <= 1e-4 * float(true[0].abs().max())
