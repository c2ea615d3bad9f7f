"""key_bias: its allowed shapes, hidden keys, accuracy, and which keys may be skipped."""

import math

import torch

from alibi_attn import alibi_attention, explain, head_reach


def draw(length: int = 150, heads: int = 4, dim: int = 16) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 2, heads, length, dim, generator=torch.Generator().manual_seed(length)).unbind(0)


def test_autocast_casts_no_bias() -> None:
    q, k, v = draw(700)
    bias = (torch.rand(2, 4, 700).cumsum(-1) * 100).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = alibi_attention(q, k, v, [0.0] * 4, key_bias=bias)
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.float().sum(), bias)[0].dtype == torch.float32
    exact = alibi_attention(*(x.bfloat16().double() for x in (q, k, v)), [0.0] * 4, key_bias=bias.detach().double())
    assert float((out.detach() - exact).abs().max()) < 0.02  # in bf16 sums of 10⁴ would be off by 64


def test_maps_and_graphs_carry_it() -> None:
    q, k, v = draw(80)
    bias = torch.randn(2, 4, 80)
    right = alibi_attention(q, k, v, key_bias=bias, backend="reference")
    one = lambda q, k, v, bias: alibi_attention(q[None], k[None], v[None], key_bias=bias[None], backend="native")[0]  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(one)(q, k, v, bias), right, rtol=1e-5, atol=1e-5)
    of_bias = torch.func.grad(lambda b: alibi_attention(q, k, v, key_bias=b, backend="native").square().sum())(bias)
    leaf = bias.clone().requires_grad_()
    wanted = torch.autograd.grad(alibi_attention(q, k, v, key_bias=leaf, backend="reference").square().sum(), leaf)[0]
    torch.testing.assert_close(of_bias, wanted, rtol=1e-4, atol=1e-5)
    call = torch.compile(
        lambda *x: alibi_attention(*x[:3], key_bias=x[3], backend="native"), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(call(q, k, v, leaf), right, rtol=1e-5, atol=1e-5)


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
