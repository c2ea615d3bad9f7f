"""What a quantized linear layer makes of zeros and of numbers that are not finite, by whichever products it computes."""

import torch
from torch import nn

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
