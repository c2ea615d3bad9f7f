"""Linear layers in int8 and float8 as a GPU computes them, on a CPU: stand-ins for torch's products check what CUDA requires."""

import types
from typing import Any

import pytest
import torch
from quantized_checks import assert_rows_stay_apart, by_the_formula
from torch import Tensor, nn

from alibi_attn.nn.linear import quantized
from alibi_attn.nn.linear.quantized import Kind, QuantizedLinear

SHAPES = [(1, 24, 40), (5, 64, 48), (17, 7, 9), (40, 33, 16)]  # tokens, inputs, outputs


def int_mm(left: Tensor, right: Tensor) -> Tensor:
    """`torch._int_mm`, with CUDA's requirements."""
    assert len(left) > 16
    assert not len(left) % 16
    assert not left.shape[1] % 8
    assert not right.shape[1] % 8
    assert left.is_contiguous()
    assert right.t().is_contiguous()
    return (left.double() @ right.double()).to(torch.int32)


def scaled_mm(
    left: Tensor, right: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **_: Any
) -> Tensor:
    """`torch._scaled_mm` with scales by row and column, with CUDA's requirements."""
    assert not len(left) % 16
    assert not left.shape[1] % 16
    assert not right.shape[1] % 16
    assert scale_a.shape == (len(left), 1)
    assert scale_b.shape == (1, right.shape[1])
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert left.is_contiguous()
    assert right.t().is_contiguous()
    assert out_dtype == torch.bfloat16
    return ((left.double() @ right.double()) * scale_a.double() * scale_b.double()).to(out_dtype)


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in quantized._LARGEST:
        monkeypatch.setitem(quantized._PRODUCTS, (kind, "cpu"), quantized._PRODUCTS[kind, "cuda"])
    monkeypatch.setattr(quantized, "check_supported", lambda *_: None)
    monkeypatch.setattr(torch, "_int_mm", int_mm)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
def test_outputs_are_those_of_the_formula(kind: Kind, tokens: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs, bias=tokens != 5), torch.randn(tokens, inputs)
    small = QuantizedLinear(layer, kind)
    expected = by_the_formula(layer, x, kind)
    error = (small(x) - expected).abs().max() / expected.abs().max()
    assert error <= (2.0**-20 if kind == "int8" else 2.0**-8)
    assert small(x[None].half()).dtype == torch.float16
    assert small(x[None].half()).shape == (1, tokens, outputs)
    assert torch.equal(small(x.t().contiguous().t()), small(x))
    assert small.codes().shape == (outputs, inputs)
    assert small.packed.dtype == small.state_dict()["codes"].dtype == quantized._DTYPES[kind]


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_zeros_and_numbers_that_are_not_finite_stay_in_their_rows(kind: Kind) -> None:
    assert_rows_stay_apart(kind)
    layer = QuantizedLinear(nn.Linear(24, 40, bias=False), kind)
    with pytest.raises(ValueError, match=rf"linear layer in {kind} runs on its device, cpu, without gradients"):
        layer(torch.randn(4, 24, requires_grad=True))


def test_a_layer_moves_with_the_model_and_keeps_its_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To another device and back; "meta" stands for it, and its layer for what was moved."""
    layer = QuantizedLinear(nn.Linear(24, 40))
    codes, moved = layer.codes(), list[torch.device]()
    monkeypatch.setattr(layer, "_place", lambda _, device: moved.append(device))
    layer.half().to("cpu").to("meta")
    assert [device.type for device in moved] == ["meta"]
    assert torch.equal(layer.codes(), codes)
    assert layer.scales.dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "device", "capability", "words"),
    [
        (
            "int8",
            "cuda",
            (7, 5),
            r"int8 needs .* or an NVIDIA GPU of .* 8\.0 or later \(torch\._int_mm\), but 'cuda' is of 7\.5",
        ),
        (
            "float8",
            "cuda",
            (8, 6),
            r"float8 needs an NVIDIA GPU of .* 8\.9 or later \(torch\._scaled_mm\), .* 8\.6; use int8",
        ),
        ("float8", "cpu", None, "but the device is 'cpu'; use int8"),
        ("int8", "mps", None, "but the device is 'mps'; use bfloat16 or float32"),
        ("int8", "cuda", (8, 0), None),
        ("float8", "cuda", (8, 9), None),
    ],
)
def test_a_device_without_such_products_is_refused_by_name(
    kind: Kind, device: str, capability: tuple[int, int] | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if words is None:
        quantized.check_supported(kind, device)
    else:
        with pytest.raises(ValueError, match=words):
            quantized.check_supported(kind, device)


def test_amd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch, "version", types.SimpleNamespace(hip="6.4"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    with pytest.raises(ValueError, match="but 'cuda' is AMD's"):
        quantized.check_supported("float8", "cuda")


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="torch's own sums of 8 bits need a processor with VNNI")
def test_the_stand_ins_are_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)
    for kind in quantized._LARGEST:
        small = QuantizedLinear(layer, kind)
        expected = small(x)
        with monkeypatch.context() as real:
            real.undo()
            actual = quantized._PRODUCTS[kind, "cuda"].multiply(small, x)
        torch.testing.assert_close(actual.float(), expected, rtol=2.0**-7, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_layer_compiles_as_one_graph(kind: Kind) -> None:
    layer, x = QuantizedLinear(nn.Linear(24, 40), kind), torch.randn(5, 24)
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), expected)
