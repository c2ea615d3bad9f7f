"""Forget gates: a number between 0 and 1 per head and token, computed from the token. Next: `attention.py`, which uses them."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class ForgetGates(nn.Linear):
    """ln f of every head and position, [B, H, T]: ln sigmoid(w·x + b) for x [B, T, embed_dim]; b starts at 0.

    Kept in fp32 whatever the model is cast to, and not cast by autocast, because gates are summed over the whole text.
    fp64 stays fp64.

    Source: Lin et al. 2025, eq. 9 (arXiv:2503.02130).
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logarithms of the gates, [B, H, T]."""
        work = torch.promote_types(x.dtype, self.weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.to(work), self.weight.to(work), self.bias.to(work))
        return nn.functional.logsigmoid(logits).transpose(1, 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by Module.to, .half, .cuda and so on: changes the device, but never casts to half precision."""

        def keep_digits(old: Tensor) -> Tensor:
            new = fn(old)
            return old.to(new.device) if new.dtype in (torch.float16, torch.bfloat16) else new

        super()._apply(keep_digits, recurse)  # type: ignore[no-untyped-call]
        return self
