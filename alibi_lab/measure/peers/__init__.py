"""The peers: what users would run instead, one file per peer, each written the way its users write it.

A peer is prepared once per case: `prepare` builds what its users build once and keep (a bias, a mask, a compiled function) and
returns a function (query, key, value) -> output. Only that function is timed. The T queries are the last T of the S positions.
Each benchmark lists its peers as a literal; files whose names begin with `ours` hold our own calls.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch

Attention = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to compute attention.

    Args:
        prepare: inputs -> attention, for inputs of these shapes, dtype and device.
        biased: whether it computes ALiBi or the gates. If not, it is compared with attention without a bias.
        longest, longest_backward: the longest input to time; longer ones need too much memory or time. 0 = never timed.
        score_error: the error of its scores as a share of the largest bias, beyond the rounding of its inputs' dtype.
        dropout_p: its dropout probability, with our seeded mask.
        dtype: dtype of its inputs, if it is not the case's; they are converted before timing.
        gated: the gates are its fourth argument and get gradients.
        framework: "torch", or "jax" for a function of JAX arrays [B, T, H, D].
    """

    name: str
    prepare: Callable[..., Callable[..., Any]]
    _: dataclasses.KW_ONLY
    biased: bool = True
    longest: int = 2**62
    longest_backward: int = 2**62
    score_error: float = 0.0
    dropout_p: float = 0.0
    dtype: torch.dtype | None = None
    gated: bool = False
    framework: str = "torch"

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")


def missing(packages: Iterable[str]) -> str | None:
    """Why a peer that needs these packages cannot run; None if all of them are installed."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"{' and '.join(absent)} cannot be imported" if absent else None


def reason(refusal: Exception) -> str:
    """Why a peer cannot run: the first line of its error."""
    return (str(refusal).strip() or type(refusal).__name__).splitlines()[0][:200]
