"""A large key bias, a nearly closed gate or an extreme slope costs no row its accuracy, at any place in a block."""

import math

import numpy as np
import pytest
import torch
from attention_checks import WITH_KEY_BIAS
from extreme_biases import assert_right, biases_of, random_call, slopes_of, truth, visible

from alibi_attn import alibi_attention, forgetting_attention, head_reach

CUTS = (-60.0, -1e3, -1e4, -1e6, -1e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(24))
def test_random_extremes(seed: int, dtype: torch.dtype) -> None:
    for backend in WITH_KEY_BIAS:
        assert_right(random_call(seed), backend, dtype)


@pytest.mark.parametrize("seed", range(24))
def test_banded_takes_extreme_slopes(seed: int) -> None:
    call = random_call(seed)
    call.options.pop("key_bias", None)
    assert_right(call, "banded", torch.float32)


@pytest.mark.parametrize("backend", [*WITH_KEY_BIAS, "banded"])
def test_products_beyond_fp32_are_not_a_number(backend: str) -> None:
    """No backend returns a wrong finite number; one step below overflow all of them are right."""
    q, k, v = torch.randn(3, 1, 2, 150, 16, generator=torch.Generator().manual_seed(3))
    assert bool(alibi_attention(q * 1e20, k * 1e20, v, [0.5, 0.01], backend=backend).isnan().any(-1).all())
    found = alibi_attention(q * 1e18, k * 1e18, v * 1e37, [0.5, 0.01], backend=backend)
    q, k, v = (q * 1e18).double(), (k * 1e18).double(), (v * 1e37).double()
    exact = alibi_attention(q, k, v, [0.5, 0.01], backend="reference")
    torch.testing.assert_close(found.double() / 1e37, exact / 1e37, rtol=0, atol=1e-6)


def test_outputs_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v = torch.randn(3, 2, 4, 700, 16, generator=torch.Generator().manual_seed(4))
    found = []
    threads = torch.get_num_threads()
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        found.append(alibi_attention(q, k, v, backend="native", return_lse=True))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
@pytest.mark.parametrize("slopes", [None, [0.5, 2.0**-8]])
def test_a_nearly_closed_gate_cuts_documents(backend: str, slopes: list[float] | None) -> None:
    """Every row is as accurate as with a cut of −60, which leaves as little weight on earlier keys."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, 330, 32, generator=draw)
    gates = torch.nn.functional.logsigmoid(torch.randn(1, 2, 330, generator=draw) + 4)
    errors = []
    for cut in CUTS:
        gates[..., [30, 100, 163, 300]] = cut
        found = []
        for dtype, name in ((torch.float32, backend), (torch.float64, "reference")):
            leaves = [x.to(dtype).clone().requires_grad_() for x in (q, k, v, gates)]
            out = forgetting_attention(*leaves, slopes, backend=name)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))])
        errors.append(
            [float((ours - right).abs().max() / right.abs().max()) for ours, right in zip(*found, strict=True)]
        )
    assert max(errors[0]) < 1e-5
    for worse in errors[1:]:
        assert max(np.array(worse) / errors[0]) < 4
        assert max(worse) < 1e-5


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
@pytest.mark.parametrize("at", [0, 1, 40, 63, 64])
@pytest.mark.parametrize("size", [1e6, -1e6, 5e29, 1e31, 3e38, -3e38])
def test_one_bias_spoils_no_row_that_cannot_see_it(backend: str, at: int, size: float) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 130, 16, generator=draw)
    bias = torch.zeros(130)
    bias[at] = size
    found, lse = alibi_attention(q, k, v, [0.0, 0.25], key_bias=bias, backend=backend, return_lse=True)
    clean = alibi_attention(q.double(), k.double(), v.double(), [0.0, 0.25], key_mask=None, backend="reference")
    if size > 0:
        torch.testing.assert_close(found[:, :, :at], clean[:, :, :at].float(), rtol=0, atol=5e-6)
        torch.testing.assert_close(
            found[:, :, at:], v[:, :, at : at + 1].expand_as(found[:, :, at:]), rtol=0, atol=5e-6
        )
        torch.testing.assert_close(lse[..., at:] / size, torch.ones(1, 2, 130 - at), rtol=1e-4, atol=0)
    else:
        hidden = (bias == 0).expand(1, 130)
        clean = alibi_attention(
            q.double(), k.double(), v.double(), [0.0, 0.25], key_mask=hidden, backend="reference"
        ).float()
        clean[:, :, :1] = v[:, :, :1] if at == 0 else clean[:, :, :1]  # the first query sees nothing but that key
        torch.testing.assert_close(found, clean, rtol=0, atol=5e-6)


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


def test_wrong_results_are_detected() -> None:
    """A bias rounded with the scores; a window off by one; a forgotten cut."""

    def rounded(q, k, v, m, *, key_bias, **options):
        return alibi_attention(q, k, v, m, key_bias=key_bias + 1e6, **options)

    def wider(*args, window=None, **options):
        return alibi_attention(*args, window=None if window is None else window + 1, **options)

    def clamped(*args, key_bias=None, **options):
        return alibi_attention(*args, key_bias=key_bias.clamp(-1e30, 1e30), **options)

    for wrong, name in ((rounded, "key_bias"), (wider, "window"), (clamped, "key_bias")):
        calls = [call for call in map(random_call, range(120)) if name in call.options]
        failed = 0
        for call in calls:
            try:
                assert_right(call, "native", torch.float32, wrong)
            except AssertionError:
                failed += 1
        assert failed > 5, f"{wrong.__name__}: {failed} of {len(calls)}"


def test_draws_cover_extremes_and_every_option() -> None:
    calls = [random_call(seed) for seed in range(300)]
    assert any(bool((call.slopes.abs() > 1e30).any()) for call in calls)
    biases = [call.options["key_bias"] for call in calls if "key_bias" in call.options]
    sizes = [float(b.abs().masked_fill(b == -math.inf, 0).max()) for b in biases]
    assert sum(size > 1e30 for size in sizes) > 30
    for name in ("window", "key_mask", "segment_ids", "right_slopes", "query_offset"):
        assert sum(name in call.options for call in calls) > 20
    assert biases_of((1, 1, 5), np.random.default_rng(0)).shape == (1, 1, 5)
    assert slopes_of("extreme", 3, np.random.default_rng(0)).shape == (3,)
    seen, _ = visible(calls[0])
    assert truth(calls[0])[0].shape[:3] == seen.shape[:3]


@pytest.mark.parametrize("backend", ["dense", "native"])
def test_biases_that_differ_by_a_hundred_cost_a_query_no_digits(backend: str) -> None:
    """A query that sees one key has its score as lse, to a few units of fp32, whatever biases others see."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 256, 8)
    bias = 60 * torch.rand(256, dtype=torch.float64)
    _, lse = alibi_attention(q, k, v, [0.0], window=1, key_bias=bias, scale=0.1, return_lse=True, backend=backend)
    exact = 0.1 * (q.double() * k.double()).sum(-1) + bias
    rounding = 2.0**-24 * exact.abs()  # of the result itself
    assert float(((lse.double() - exact).abs() - rounding).max()) <= 1.2e-6
