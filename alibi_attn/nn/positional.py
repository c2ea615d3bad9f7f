"""The slopes a module holds, kept in fp32, and the module that turns them into a dense bias.

Press et al. 2022, sec. 3 (arXiv:2108.12409). Next: `attention.py`, which never builds the dense bias.
"""

from collections.abc import Callable
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alibi_attn.attention.call.bias import Slopes, alibi_bias
from alibi_attn.lazy import OURS
from alibi_attn.nn.constructor_arguments import checks_names
from alibi_attn.slopes import alibi_slopes


class HeadSlopes(nn.Module):
    """One slope per head, `values` [H], fp32 whatever dtype the model is cast to.

    Fixed slopes are a buffer outside the state dict: the arguments determine them, like the number of
    heads, so that loading a checkpoint does not undo `slopes=interpolate_slopes(...)`. Learned slopes are a parameter.
    """

    values: Tensor

    def __init__(self, num_heads: int, slopes: Slopes | None = None, *, learned: bool = False) -> None:
        super().__init__()
        self.initial = _checked(num_heads, slopes)
        values = torch.tensor(self.initial, dtype=torch.float32)
        if learned:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by Module.to, .half, .cuda and so on: changes the device but not the dtype."""

        def keep_fp32(old: Tensor) -> Tensor:
            new = fn(old)
            if old.is_meta and not new.is_meta and not isinstance(self.values, nn.Parameter):
                return torch.tensor(self.initial, dtype=torch.float32, device=new.device)
            return new if new.dtype == torch.float32 else old.to(new.device)

        super()._apply(keep_fp32, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return f"num_heads={len(self.initial)}, learned={isinstance(self.values, nn.Parameter)}"


class ALiBiPositionalBias(nn.Module):
    """Called as `(query_len, key_len=None)`, returns the bias −m·|i − j|, [H, T, S] fp32, to be added to scaled scores.

    The queries are the last `query_len` of the keys; entries a query may not see are −inf. Any length works, and
    nothing quadratic is stored between calls. `alibi_attn.alibi_attention` computes attention without this bias.

    Args:
        num_heads: H.
        slopes: [H]; default `alibi_slopes(num_heads)`.
        causal: False gives the symmetric bias of encoders.

    Raises:
        ValueError: there is not one finite slope per head, or a length is below 1.

    >>> ALiBiPositionalBias(num_heads=8)(query_len=2, key_len=4)[0]
    tensor([[-1.0000, -0.5000,  0.0000,    -inf],
            [-1.5000, -1.0000, -0.5000,  0.0000]])

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """

    @checks_names()
    def __init__(self, num_heads: int, *, slopes: Slopes | None = None, causal: bool = True) -> None:
        super().__init__()
        self.slopes = HeadSlopes(num_heads, slopes)
        self.causal = causal

    def forward(self, query_len: int, key_len: int | None = None) -> Tensor:
        return alibi_bias(self.slopes.values, query_len, key_len, causal=self.causal)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name in OURS:
            raise AttributeError(f"ALiBiPositionalBias has no {name!r}; here it is {OURS[name]}")
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"causal={self.causal}"


def _checked(num_heads: int, slopes: Slopes | None) -> NDArray[np.float64]:
    if slopes is None:
        return alibi_slopes(num_heads)
    try:
        plain = slopes.detach().cpu().double() if isinstance(slopes, Tensor) else slopes
        values = np.asarray(plain, np.float64)
    except OverflowError:
        raise ValueError("slopes must be finite but hold an integer too large for float64") from None
    if values.shape != (num_heads,):
        raise ValueError(
            f"slopes has shape {list(values.shape)} but there are {num_heads} heads: "
            f"pass one slope per head, [{num_heads}], or None for alibi_slopes({num_heads})"
        )
    if not np.all(np.isfinite(values)):
        raise ValueError(f"slopes must be finite but are {values.tolist()}; a head without position has slope 0")
    return values
