"""Linear layers on a CPU: exact up to rounding for any number of rows, gradients, and fallbacks to torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from alibi_attn import processor
from alibi_attn.nn.linear import fastest

pytestmark = pytest.mark.usefixtures("no_gradients")
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[False, True], ids=["as this processor is", "without half precision, MKL slow"])
def poor(request, monkeypatch) -> bool:
    """Whether to simulate a processor without half-precision products and with a slow MKL."""
    if request.param:
        monkeypatch.setattr(fastest, "is_slow", lambda dtype: dtype in HALF)
        monkeypatch.setattr(fastest, "mkl_is_slow", lambda: True)
    return request.param


@pytest.fixture
def slow_half(monkeypatch) -> None:
    monkeypatch.setattr(fastest, "is_slow", lambda dtype: dtype in HALF)


def assert_is_the_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Equality up to one rounding to the dtype and the rounding of fp32 sums."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs()) + (0.0 if bias is None else bias.double().abs())
    rounded = exact.abs() * torch.finfo(got.dtype).eps / 2
    # The error bound grows with the length of the sums.
    allowed = rounded + terms * (x.shape[-1] / 16 + 16) * 2.0**-24 + torch.finfo(got.dtype).smallest_normal
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 256), *((half, 2) for half in HALF)])
def test_the_comparison_fails_for_a_product_that_is_a_little_off(dtype, units):
    x, weight = torch.randn(9, 40).to(dtype), torch.randn(30, 40).to(dtype)
    wrong = F.linear(x.double(), weight.double()) * (1 + units * torch.finfo(dtype).eps)
    with pytest.raises(AssertionError):
        assert_is_the_product(wrong.to(dtype), x, weight, None)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("rows", [1, 4, 5, 70])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (31, 5), (64, 33), (300, 257)])
def test_it_is_the_product_to_rounding(dtype, rows, inputs, outputs, poor):
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((1, rows, inputs), (outputs, inputs), (outputs,)))
    for b in (bias, None):
        got = fastest.quicker(x, weight, b)
        if got is None:
            assert rows <= 4 or not poor, "this is what it is for"
            continue
        assert got.dtype == dtype
        assert_is_the_product(got, x, weight, b)


def test_rows_of_any_shape_and_stride(poor):
    weight, bias = torch.randn(6, 8), torch.randn(6)
    for x in (torch.randn(8), torch.randn(2, 1, 2, 8), torch.randn(8, 3).mT, torch.randn(3, 5, 16)[..., ::2]):
        for dtype in (torch.float32, torch.bfloat16):
            narrow = (x.to(dtype), weight.to(dtype), bias.to(dtype))
            assert_is_the_product(fastest.linear(*narrow), *narrow)
            turned = (x.to(dtype), weight.to(dtype).T.contiguous().T, bias.to(dtype))
            assert_is_the_product(fastest.linear(*turned), *turned)


def test_weights_are_widened_some_at_a_time(slow_half, monkeypatch):
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((2, 9, 12), (50, 12), (50,)))
    for at_once in (1, 12 * 7, 12 * 50):
        monkeypatch.setattr(fastest, "_WIDENED_AT_ONCE", at_once)
        assert_is_the_product(fastest.linear(x, weight, bias), x, weight, bias)
        assert_is_the_product(fastest.linear(x, weight), x, weight, None)


@pytest.mark.parametrize("dtype", HALF)
@torch.enable_grad()
def test_gradients_of_widened_products(dtype, slow_half):
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((3, 20, 16), (24, 16), (24,))]
    upstream = torch.randn(3, 20, 24).to(dtype)
    got = torch.autograd.grad(fastest.linear(*tensors), tensors, upstream)
    x, weight, _ = (tensor.detach() for tensor in tensors)
    rows = upstream.flatten(0, 1)
    assert_is_the_product(got[0], upstream, weight.T, None)
    assert_is_the_product(got[1], rows.T, x.flatten(0, 1).T, None)
    assert_is_the_product(got[2][None], torch.ones(1, 60).to(dtype), rows.T, None)
    assert [gradient.dtype for gradient in got] == [dtype] * 3
    only = torch.autograd.grad(fastest.linear(*tensors), tensors[1:2], upstream)  # one of three
    torch.testing.assert_close(only[0], got[1])


@torch.enable_grad()
def test_autocast_narrows_both_and_keeps_the_gradient_wide(slow_half):
    layer, x = fastest.Linear(16, 24), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
    expected = layer.bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected)
    layer.float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.double()(x.double()).dtype == torch.float64  # autocast does not affect fp64
        layer.float()(x).float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_torch_computes_what_is_not_for_it(monkeypatch):
    monkeypatch.setattr(fastest, "mkl_is_slow", lambda: True)
    x, weight, bias = torch.randn(9, 8), torch.randn(6, 8), torch.randn(6)
    assert fastest.quicker(x, weight, bias) is not None
    assert fastest.quicker(x.double(), weight.double(), bias.double()) is None
    assert fastest.quicker(x.bfloat16(), weight, bias) is None
    assert fastest.quicker(x, weight, bias.double()) is None
    assert fastest.quicker(x, torch.randn(8, 6).mT, bias) is None
    assert fastest.quicker(x[:0], weight, bias) is None
    assert fastest.quicker(x.to("meta"), weight.to("meta"), bias.to("meta")) is None
    with torch.enable_grad():
        assert fastest.quicker(x, weight, bias) is None
    with torch.autocast("cpu"), monkeypatch.context() as quick:
        quick.setattr(fastest, "is_slow", lambda dtype: False)
        assert fastest.quicker(x, weight, bias) is None
    with FlopCounterMode(display=False):
        assert fastest.quicker(x, weight, bias) is None
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)  # as torch.backends.mkldnn.flags sets it
    assert fastest.quicker(x, weight, bias) is None


def test_the_processor_determines_which_dtypes_are_slow():
    assert not fastest.is_slow(torch.float32)
    for dtype in HALF:
        assert fastest.is_slow(dtype) != getattr(torch.ops.mkldnn, fastest._SUPPORTED[dtype])()
    if processor.is_intel():
        assert not fastest.mkl_is_slow()


@torch.enable_grad()
def test_rounded_maps_are_torchs_but_for_what_the_processor_cannot(monkeypatch):
    layer = fastest.RoundedLinear(8, 6)
    of_torch = nn.Linear(8, 6)
    of_torch.load_state_dict(layer.state_dict())
    for supported in (True, False):
        monkeypatch.setattr(fastest, "is_slow", lambda dtype, supported=supported: not supported and dtype in HALF)
        for rows in (1, 9):
            x = torch.randn(rows, 8)
            assert torch.equal(layer.float()(x), of_torch.float()(x))
            narrow = x.bfloat16()
            got = layer.bfloat16()(narrow)
            assert_is_the_product(got, narrow, layer.weight, layer.bias)
            if supported:
                assert torch.equal(got, of_torch.bfloat16()(narrow))
        left, right = torch.randn(2, 3, 5, 7).half(), torch.randn(2, 3, 7, 4).half()
        expected = torch.matmul(left.double(), right.double())
        torch.testing.assert_close(
            fastest.matmul(left, right).double(), expected, rtol=2**-11, atol=1e-5 if supported else 1e-6
        )
        assert torch.equal(fastest.matmul(left.float(), right.float()), left.float() @ right.float())


def test_layers_that_are_quantized_adapted_or_hooked_stay_torchs(slow_half, monkeypatch):
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    calls, real = [], fastest.linear
    monkeypatch.setattr(fastest, "linear", lambda *given, **named: calls.append(1) or real(*given, **named))
    layer, x = nn.Linear(8, 6), torch.randn(9, 8)
    expected = layer(x)

    def ours(module: nn.Module) -> bool:
        before = len(calls)
        torch.testing.assert_close(fastest.mapped(module, x), module(x))
        return len(calls) > before

    assert ours(layer)
    assert not ours(Adapted(8, 6))
    assert not ours(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)))
    hook = layer.register_forward_hook(lambda module, given, output: output + 1)
    torch.testing.assert_close(fastest.mapped(layer, x), expected + 1)
    hook.remove()
    every = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, given: (given[0] * 0,))
    torch.testing.assert_close(fastest.mapped(layer, x), layer.bias.expand(9, 6))
    every.remove()
    assert ours(layer)
    layer.forward = lambda input: input[:, :6]
    assert torch.equal(fastest.mapped(layer, x), x[:, :6])


def test_in_the_place_of_a_forward(poor):
    layer, x = nn.Linear(8, 6), torch.randn(2, 3, 8)
    ours = fastest.Linear(8, 6)
    ours.load_state_dict(layer.state_dict())
    for forward in (ours, lambda x: fastest.forward(layer, x)):
        torch.testing.assert_close(forward(x), layer(x))
        with torch.enable_grad():
            assert forward(x).requires_grad
        torch.testing.assert_close(torch.vmap(forward)(x), layer(x))
        torch.testing.assert_close(torch.func.jacrev(forward)(x[0, 0]), layer.weight)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            forward(torch.randn(3, 7))


@pytest.mark.parametrize("rows", [1, 70])
def test_torch_handles_a_bias_of_another_length(rows, poor):
    x, weight = torch.randn(rows, 8).bfloat16(), torch.randn(600, 8).bfloat16()
    for length in (300, 1200):
        with pytest.raises(RuntimeError, match="size"):
            fastest.linear(x, weight, torch.randn(length).bfloat16())
    one = torch.randn(1).bfloat16()
    assert_is_the_product(fastest.linear(x, weight, one), x, weight, one)
