"""Linear maps without gradients: the product to rounding, of any number of rows, and torch's own where these are not for."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from alibi_attn.nn import linear


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 70])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (31, 5), (64, 33), (300, 257)])
def test_it_is_the_product_to_rounding(dtype, rows, inputs, outputs):
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((1, rows, inputs), (outputs, inputs), (outputs,)))
    for b in (bias, None):
        got = linear.linear(x, weight, b)
        if got is None:
            assert dtype == torch.bfloat16, "torch's own product of many rows is by oneDNN already"
            assert rows > 4
            continue
        exact = nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        terms = nn.functional.linear(x.double().abs(), weight.double().abs()) + bias.double().abs()
        rounded = exact.abs() * torch.finfo(dtype).eps / 2
        # Sixteen sums and more run beside one another: what an error may be grows with their length.
        allowed = rounded + terms * (inputs / 16 + 16) * 2.0**-24
        assert got.shape == exact.shape
        assert got.dtype == dtype
        assert bool(((got.double() - exact).abs() <= allowed).all())


def test_rows_of_any_shape_and_stride():
    weight, bias = torch.randn(6, 8), torch.randn(6)
    for x in (torch.randn(8), torch.randn(2, 1, 2, 8), torch.randn(8, 3).mT, torch.randn(3, 5, 16)[..., ::2]):
        torch.testing.assert_close(linear.linear(x, weight, bias), nn.functional.linear(x, weight, bias))


def test_torch_computes_what_is_not_for_it(monkeypatch):
    x, weight, bias = torch.randn(1, 8), torch.randn(6, 8), torch.randn(6)
    assert linear.linear(x, weight, bias) is not None
    assert linear.linear(x.double(), weight.double(), bias.double()) is None
    assert linear.linear(x.bfloat16(), weight, bias) is None
    assert linear.linear(x, weight, bias.double()) is None
    assert linear.linear(x, torch.randn(8, 6).mT, bias) is None
    assert linear.linear(x[:0], weight, bias) is None
    assert linear.linear(x.to("meta"), weight.to("meta"), bias.to("meta")) is None
    with torch.enable_grad():
        assert linear.linear(x, weight, bias) is None
    with torch.autocast("cpu"):
        assert linear.linear(x, weight, bias) is None
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)  # as torch.backends.mkldnn.flags sets it
    assert linear.linear(x.expand(9, 8), weight, bias) is None
    with FlopCounterMode(display=False):
        assert linear.linear(x, weight, bias) is None


def test_in_the_place_of_a_forward():
    layer, x = nn.Linear(8, 6), torch.randn(2, 3, 8)
    torch.testing.assert_close(linear.forward(layer, x), layer(x))
    with torch.enable_grad():
        assert linear.forward(layer, x).requires_grad
    mapped = torch.vmap(lambda row: linear.forward(layer, row))(x)
    torch.testing.assert_close(mapped, layer(x))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear.forward(layer, torch.randn(3, 7))
