"""Is a peer right? Its last rows against fp64, and against what rounding in its dtype explains.

The last queries see every key, and nobody but them sees the last keys: so their outputs and gradients, and the gradients of the
last keys and values, are those of a call with these queries alone, which is cheap at any length.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.bench.peers import Attention, Peer, eager

ROWS = 64
_ROWS_OF = ("its output", "the gradient of query", "the gradient of key", "the gradient of value")
EXPONENTIAL = 2.0**-20  # what torch's fused kernels on a CPU keep of one; those of a GPU keep 22 bits


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far the last rows of a peer are off.

    Args:
        output: as a share of max‖v‖.
        gradient: the worst of three, as a share of the largest gradient of the same tensor; None = no backward.
        wrong: why that cannot be rounding; None = it is right.
    """

    output: float
    gradient: float | None
    wrong: str | None


@dataclasses.dataclass(frozen=True)
class Reference:
    """What is true of the last rows, with the bias and without, and how far attention by hand in the inputs' dtype is off.

    Args:
        rows: fp64, (output, gradients of query, key and value), each [1, H, R, D].
        units: what errors are divided by, for each of the rows.
        by_hand: the errors of attention written by hand, with the bias in the inputs' dtype.
        largest_bias: m·|i − j| of the farthest key.
        eps: of the inputs' dtype.
    """

    rows: dict[bool, list[Tensor]]
    units: dict[bool, list[float]]
    by_hand: dict[bool, list[float]]
    largest_bias: float
    eps: float

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, slopes: Tensor) -> "Reference":
        """For causal attention of the last T of S positions; only the first sequence of the batch is looked at."""
        longest_value = float(torch.linalg.vector_norm(value[:1], dim=-1, dtype=torch.float32).max())
        rows, units, by_hand = {}, {}, {}
        for biased, m in ((True, slopes), (False, torch.zeros_like(slopes))):
            true = _last_rows(_reference, query, key, value, grad, m, torch.float64)
            hand = _last_rows(_eager, query, key, value, grad, m, query.dtype)
            units[biased] = [longest_value, *(max(_longest(x), 1e-30) for x in true[1:])]
            by_hand[biased] = _relative(hand, true, units[biased])
            rows[biased] = true
        largest = float(slopes.abs().max()) * key.shape[2]
        return cls(rows, units, by_hand, largest, torch.finfo(query.dtype).eps)

    def compare(self, peer: Peer, found: list[Tensor]) -> Errors:
        """The errors of what `computed` found.

        Twice the error of attention by hand in the same dtype is allowed, which rounds the bias as a dense bias is rounded; two
        roundings more; and four times what changes a weight: an approximate exponential, and the peer's own `score_error` (scores
        off by δ change it by a factor exp(2δ) at most), for a gradient has three such weights and a difference of two.
        """
        true, units = self.rows[peer.biased], self.units[peer.biased]
        errors = _relative(found, true, units)
        excess = 4 * (EXPONENTIAL + math.expm1(min(2 * peer.score_error * self.largest_bias, 50.0)))
        wrong = None
        for what, error, hand, row, unit in zip(_ROWS_OF, errors, self.by_hand[peer.biased], true, units, strict=False):
            allowed = 2 * hand + 2 * self.eps * _longest(row) / unit + excess
            if wrong is None and not error <= allowed:
                wrong = f"{peer.name} is wrong: {what} is off by {error:.1e} but {allowed:.1e} is allowed"
        return Errors(errors[0], max(errors[1:]) if len(errors) > 1 else None, wrong)


def computed(attention: Attention, query: Tensor, key: Tensor, value: Tensor, grad: Tensor | None) -> list[Tensor]:
    """The last rows of one call: the output, and with `grad` the gradients of query, key and value."""
    leaves = [x.detach().requires_grad_(grad is not None) for x in (query, key, value)]
    with torch.set_grad_enabled(grad is not None):
        output = attention(*leaves)
    gradients = () if grad is None else torch.autograd.grad(output, leaves, grad)
    return [x.detach()[:1, :, -ROWS:] for x in (output, *gradients)]


def _last_rows(
    run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, slopes: Tensor, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """(output, gradients of query, key and value) of the last rows alone, a head at a time for the memory."""
    heads = []
    for h in range(query.shape[1]):
        q, near_k, near_v, do = (x[:1, h : h + 1, -ROWS:].detach().to(dtype) for x in (query, key, value, grad))
        far_k, far_v = (x[:1, h : h + 1, :-ROWS].detach().to(dtype) for x in (key, value))
        leaves = [x.requires_grad_() for x in (q, near_k, near_v)]
        output = run(q, torch.cat([far_k, near_k], 2), torch.cat([far_v, near_v], 2), slopes[h : h + 1])
        heads.append([output.detach(), *torch.autograd.grad(output, leaves, do)])
    return [torch.cat(rows, 1) for rows in zip(*heads, strict=True)]


def _reference(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    return alibi_attention(query, key, value, slopes, tolerance=0.0, backend="reference")


def _eager(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    return eager(query, key, value, slopes)(query, key, value)


def _relative(found: list[Tensor], true: list[Tensor], units: list[float]) -> list[float]:
    return [_longest(x.double() - y) / unit for x, y, unit in zip(found, true, units, strict=False)]


def _longest(rows: Tensor) -> float:
    return float(rows.double().norm(dim=-1).max())
