"""forgetting_attention: its formula, equivalences, accuracy at great length, and errors."""

import math

import pytest
import torch
from attention_checks import WITH_KEY_BIAS
from torch.nn.functional import logsigmoid

from alibi_attn import alibi_attention, alibi_slopes, forgetting_attention, head_reach


def draw(
    t: int = 70, s: int | None = None, h: int = 4, k: int = 2, gates_of: int | None = None, gate_bias: float = 1.0
) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(t)
    s = t if s is None else s
    shapes = (2, h, t, 16), (2, k, s, 16), (2, k, s, 16), (2, gates_of or h, s)
    *inputs, gates = (torch.randn(shape, generator=rng) for shape in shapes)
    return [*inputs, logsigmoid(gates + gate_bias)]


def by_hand(query, key, value, log_fgate, slopes=None, *, window=None, key_mask=None, segment_ids=None, key_bias=None):
    """The paper's formula, gate by gate, in fp64: (output, lse)."""
    group, (h, t), s = query.shape[1] // key.shape[1], query.shape[1:3], key.shape[2]
    query, key, value, gates = (x.double() for x in (query, key, value, log_fgate))
    gates = gates.repeat_interleave(h // gates.shape[1], 1)
    bias = torch.zeros(*gates.shape[:2], t, s, dtype=torch.float64)
    seen = torch.zeros(query.shape[0], 1, t, s, dtype=torch.bool)
    for at in range(t):
        i = s - t + at
        for j in range(i + 1):
            bias[:, :, at, j] = gates[:, :, j + 1 : i + 1].sum(-1)
            if slopes is not None:
                bias[:, :, at, j] -= slopes * (i - j)
            may = torch.ones(query.shape[0], dtype=torch.bool)
            if window is not None and i - j >= window:
                may[:] = False
            if key_mask is not None:
                may &= key_mask[:, j]
            if segment_ids is not None:
                may &= segment_ids[:, j] == segment_ids[:, i]
            seen[:, 0, at, j] = may
    if key_bias is not None:
        bias = bias + key_bias.double()[:, :, None]
    scores = query @ key.repeat_interleave(group, 1).mT * query.shape[-1] ** -0.5 + bias
    scores = scores.masked_fill(~seen, -math.inf)
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return weights @ value.repeat_interleave(group, 1), scores.logsumexp(-1)


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"t": 20, "s": 45}, {"slopes": True, "key_bias": True}),
        ({"gates_of": 2}, {"window": 9}),
        ({"t": 40}, {"key_mask": True}),
        ({"t": 60}, {"segment_ids": True, "slopes": True}),
    ],
)
def test_it_is_the_papers_formula(backend: str, shape: dict, options: dict) -> None:
    inputs = draw(**shape)
    batch, h, s = 2, inputs[0].shape[1], inputs[1].shape[2]
    rng = torch.Generator().manual_seed(5)
    made = {
        "slopes": torch.tensor(alibi_slopes(h)),
        "window": 9,
        "key_bias": torch.randn(batch, h, s, generator=rng),
        "key_mask": torch.rand(batch, s, generator=rng) < 0.6,
        "segment_ids": torch.randint(0, 3, (batch, s), generator=rng).sort(-1)[0],
    }
    given = {name: made[name] if on is True else on for name, on in options.items()}
    found = []
    for attention, extra in ((forgetting_attention, {"backend": backend, "return_lse": True}), (by_hand, {})):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, lse = attention(*leaves, **given, **extra)
        total = (out * torch.linspace(-1, 1, 16)).sum() + lse.masked_fill(lse == -math.inf, 0.0).square().sum()
        found.append((out, lse, *torch.autograd.grad(total, leaves)))
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), right.double(), rtol=2e-5, atol=2e-5)


def test_four_tokens_say_which_gate_lies_where() -> None:
    f = torch.tensor([0.1, 0.5, 0.25, 0.2], dtype=torch.float64)
    q, v = torch.zeros(1, 1, 4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)[None, None]
    weights = forgetting_attention(q, q, v, f.log()[None, None])[0, 0]
    through = torch.tensor([f[1] * f[2] * f[3], f[2] * f[3], f[3], 1.0], dtype=torch.float64)
    torch.testing.assert_close(weights[3], through / through.sum())


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
def test_a_constant_gate_is_alibi(backend: str) -> None:
    q, k, v, _ = draw(300)
    slopes = torch.tensor(alibi_slopes(4))
    gates = -slopes[None, :, None].expand(2, 4, 300)
    for dtype, digits in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        inputs = [x.to(dtype) for x in (q, k, v)]
        ours = forgetting_attention(*inputs, gates.to(torch.float64), return_lse=True, backend=backend)
        plain = alibi_attention(*inputs, slopes, return_lse=True, backend="reference", tolerance=0.0)
        for x, y in zip(ours, plain, strict=True):
            torch.testing.assert_close(x, y, rtol=digits, atol=digits)


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


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"log_fgate": 0.1}, ValueError, "at most 0, the natural logarithm"),
        ({"log_fgate": math.nan}, ValueError, r"NaN, \+inf or a positive number"),
        ({"log_fgate": math.inf}, ValueError, "−inf for a cut"),
        ({"log_fgate": torch.zeros(2, 3, 70)}, ValueError, r"must be \[B, H, S\] = \[2, 4, 70\]"),
        ({"log_fgate": torch.zeros(2, 4, 69)}, ValueError, "log_fgate has shape"),
        ({"log_fgate": torch.zeros(2, 4, 70, dtype=torch.bfloat16)}, TypeError, "must be float32 or float64"),
        ({"log_fgate": [0.0]}, TypeError, "log_fgate must be a torch.Tensor but is list"),
        ({"query_offset": torch.tensor(0)}, ValueError, "does not support query_offset as an array"),
        ({"query_offset": 3}, ValueError, "every query must be among the keys"),
        ({"query_offset": -1}, ValueError, "every query must be among the keys"),
        ({"backend": "banded"}, ValueError, "it does not compute key_bias, log_fgate"),
    ],
)
def test_invalid_arguments_are_refused(changes: dict, error: type[Exception], said: str) -> None:
    q, k, v, gates = draw()
    if isinstance(changes.get("log_fgate"), float):
        gates[1, 2, 3] = changes["log_fgate"]
        changes = {"log_fgate": gates}
    with pytest.raises(error, match=said):
        forgetting_attention(q, k, v, **{"log_fgate": gates} | changes)


def test_causal_is_all_there_is() -> None:
    q, k, v, gates = draw()
    with pytest.raises(TypeError, match="causal"):
        forgetting_attention(q, k, v, gates, causal=False)
