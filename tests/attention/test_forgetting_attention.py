"""forgetting_attention: its formula, equivalences, accuracy at great length, and errors."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from alibi_attn import forgetting_attention, head_reach


def draw(
    t: int = 70, s: int | None = None, h: int = 4, k: int = 2, gates_of: int | None = None, gate_bias: float = 1.0
) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(t)
    s = t if s is None else s
    shapes = (2, h, t, 16), (2, k, s, 16), (2, k, s, 16), (2, gates_of or h, s)
    *inputs, gates = (torch.randn(shape, generator=rng) for shape in shapes)
    return [*inputs, logsigmoid(gates + gate_bias)]


def test_four_tokens_say_which_gate_lies_where() -> None:
    f = torch.tensor([0.1, 0.5, 0.25, 0.2], dtype=torch.float64)
    q, v = torch.zeros(1, 1, 4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)[None, None]
    weights = forgetting_attention(q, q, v, f.log()[None, None])[0, 0]
    through = torch.tensor([f[1] * f[2] * f[3], f[2] * f[3], f[3], 1.0], dtype=torch.float64)
    torch.testing.assert_close(weights[3], through / through.sum())


def test_great_length_costs_no_digits() -> None:
    """The last queries of 131,072 tokens: sums of gates are 10⁵, where fp32 keeps two decimal places."""
    t, s = 64, 131_072
    q, k, v, gates = draw(t, s, h=1, k=1)
    out, lse = forgetting_attention(q, k, v, gates, return_lse=True, backend="native")
    near = slice(s - 2048, s)  # all that matters
    exact, exact_lse = forgetting_attention(
        *(x.double() for x in (q, k[:, :, near], v[:, :, near], gates[:, :, near])), return_lse=True, tolerance=0.0
    )
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=4e-6)


def test_a_gates_gradient_is_right_at_length() -> None:
    """It is a sum over all later rows: rounding errors of single rows must not accumulate."""
    inputs = [x[:1] for x in draw(8192, h=1, k=1, gate_bias=2.0)]
    found = []
    for dtype, backend in ((torch.bfloat16, "native"), (torch.float64, "native")):
        leaves = [x.to(torch.bfloat16).to(dtype) for x in inputs[:3]]
        gates = inputs[3].double().requires_grad_()
        out = forgetting_attention(*leaves, gates, backend=backend)
        found.append(torch.autograd.grad((out.double() * inputs[0]).sum(), gates)[0])
    ours, exact = found
    assert float((ours - exact).abs().max()) < 0.03 * float(exact.std())


def test_gates_say_how_far_to_look() -> None:
    q, k, v, gates = draw(2048, h=2, k=2)
    bias = -gates.double().cumsum(-1)
    assert int(head_reach(q, k, [0.0, 0.0], key_bias=bias, backend="native").max()) < 300
    out = forgetting_attention(q, k, v, gates)
    exact = forgetting_attention(q, k, v, gates, tolerance=0.0)
    torch.testing.assert_close(out, exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_gates_alone(dtype: torch.dtype) -> None:
    q, k, v, gates = draw(600)
    with torch.autocast("cpu", dtype):
        out = forgetting_attention(q, k, v, gates.requires_grad_())
    assert out.dtype == dtype
    assert torch.autograd.grad(out.float().sum(), gates)[0].dtype == torch.float32
