"""What a quantized linear layer makes of zeros and of numbers that are not finite, by whichever products it computes."""

import torch
from torch import Tensor, nn

from alibi_attn.nn.linear.quantized import Kind, QuantizedLinear


def assert_rows_stay_apart(kind: Kind) -> None:
    """A row of zeros is zeros, one with NaN or inf is NaN, and no row depends on the others; no rows give none."""
    layer, x = QuantizedLinear(nn.Linear(24, 40, bias=False), kind), torch.randn(4, 24)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    y = layer(x)
    assert not y[0].any()
    assert y[1:3].isnan().all()
    assert torch.equal(y[3], layer(x[3:])[0])
    assert layer(x[:0]).shape == (0, 40)


def by_the_formula(layer: nn.Linear, x: Tensor, kind: Kind) -> Tensor:
    """One output and one token at a time, in fp64 but for the codes."""
    largest = {"int8": 127, "float8": 448}[kind]

    def code(row: Tensor) -> tuple[Tensor, Tensor]:
        scale = row.abs().max() / largest
        codes = (row / scale).round() if kind == "int8" else (row / scale).to(torch.float8_e4m3fn)
        return codes.double(), scale.double()

    weights, tokens = [code(row) for row in layer.weight.detach()], [code(row) for row in x.flatten(0, -2)]
    products = [[(q * w).sum() * of_q * of_w for w, of_w in weights] for q, of_q in tokens]
    products = torch.tensor(products, dtype=torch.float64).unflatten(0, x.shape[:-1])
    return products + (0 if layer.bias is None else layer.bias.detach().double())
