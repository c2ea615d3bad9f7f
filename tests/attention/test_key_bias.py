"""Biases of keys and forget gates: hidden keys, accuracy at great length, the limits of fp32, and which keys may be skipped."""

import math

import pytest
import torch
from attention_checks import ON_CPU
from torch.nn.functional import logsigmoid

from alibi_attn import alibi_attention, explain, forgetting_attention, head_reach


def draw(length: int, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 2, heads, length, dim, generator=torch.Generator().manual_seed(length)).unbind(0)


def gated(queries: int, keys: int, logit: float = 1.0) -> list[torch.Tensor]:
    """query, key, value and the logarithms of gates, of one head."""
    rng = torch.Generator().manual_seed(queries)
    *inputs, gates = (torch.randn(1, 1, *x, generator=rng) for x in ((queries, 16), (keys, 16), (keys, 16), (keys,)))
    return [*inputs, logsigmoid(gates + logit)]


def test_gates_shorten_the_reach_and_a_spike_costs_a_few_tiles() -> None:
    q, k, v = draw(2048, heads=2, dim=32)
    gates = torch.full((2, 2, 2048), 0.5).cumsum(-1)
    assert int(head_reach(q, k, [0.0] * 2, key_bias=gates, backend="native").max()) < 300
    spike = gates.clone()
    spike[:, :, 40] += 900.0
    told = str(explain(q, k, v, [0.0] * 2, key_bias=spike, backend="native"))
    share = float(told.split("scores computed: ")[1].split(" = ")[1].split("%")[0])
    assert share < 15
    assert "key bias" in told.splitlines()[0]
    exact = alibi_attention(*(x.double() for x in (q, k, v)), [0.0] * 2, key_bias=spike.double(), tolerance=0.0)
    torch.testing.assert_close(alibi_attention(q, k, v, [0.0] * 2, key_bias=spike), exact.float(), rtol=1e-4, atol=1e-4)


def test_values_of_hidden_keys_count_for_nothing() -> None:
    """A far value 10⁷ times longer than the near ones must not be skipped, whatever hidden keys contain."""
    q = torch.zeros(1, 1, 600, 8)
    v = torch.randn(1, 1, 600, 8, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(600)
    bias[1::2] = -math.inf
    v[:, :, 0], v[:, :, 1::2] = 1e7, 1e8
    found, exact = (
        alibi_attention(q, q, v, [0.02], key_bias=bias, tolerance=tolerance, backend=backend)
        for tolerance, backend in ((1e-2, "native"), (0.0, "reference"))
    )
    kept = float(v[:, :, 100::2].norm(dim=-1).max())
    assert float((found - exact)[:, :, 500:].norm(dim=-1).max()) <= 8 * 1e-2 * kept


def test_great_length_costs_no_digits() -> None:
    """The last queries of 131,072 tokens: sums of gates are 10⁵, where fp32 keeps two decimal places."""
    t, s = 64, 131_072
    q, k, v, gates = gated(t, s)
    out, lse = forgetting_attention(q, k, v, gates, return_lse=True, backend="native")
    near = slice(s - 2048, s)  # all that matters
    exact, exact_lse = forgetting_attention(
        *(x.double() for x in (q, k[:, :, near], v[:, :, near], gates[:, :, near])), return_lse=True, tolerance=0.0
    )
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=4e-6)


def test_a_gates_gradient_is_right_at_length() -> None:
    """It is a sum over all later rows: rounding errors of single rows must not accumulate."""
    inputs = gated(8192, 8192, logit=2.0)
    found = []
    for dtype, backend in ((torch.bfloat16, "native"), (torch.float64, "native")):
        leaves = [x.to(torch.bfloat16).to(dtype) for x in inputs[:3]]
        gates = inputs[3].double().requires_grad_()
        out = forgetting_attention(*leaves, gates, backend=backend)
        found.append(torch.autograd.grad((out.double() * inputs[0]).sum(), gates)[0])
    ours, exact = found
    assert float((ours - exact).abs().max()) < 0.03 * float(exact.std())


@pytest.mark.parametrize("backend", ON_CPU)
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
