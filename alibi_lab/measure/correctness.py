"""Checks a peer: compares its last rows with fp64, allowing the rounding of its dtype.

The last queries see every key, and no other query sees the last keys. So their outputs and gradients, and the gradients of the
last keys and values, equal those of a call with these queries alone, which is cheap at any length.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alibi_attn.inspect import attention_of_head
from alibi_lab.measure.peers import Attention, Peer
from alibi_lab.measure.peers.eager import eager

ROWS = 64
SEED = 0  # of dropout masks
_ROWS_OF = ("its output", "the gradient of query", "the gradient of key", "the gradient of value")
EXPONENTIAL = 2.0**-20  # relative error of exp in torch's fused CPU kernels; GPU kernels keep 22 bits


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of a peer's last rows.

    Args:
        output: as a share of max‖v‖.
        gradient: the largest of three, each as a share of the largest gradient of the same tensor; None = no backward.
        wrong: the error that rounding cannot explain; None = the peer is right.
    """

    output: float
    gradient: float | None
    wrong: str | None


@dataclasses.dataclass(frozen=True)
class Reference:
    """The true last rows, by whether they have the bias, and the errors of hand-written attention in the inputs' dtype.

    Args:
        rows: fp64, (output, gradients of query, key and value), each [1, H, R, D].
        units: the divisors of the errors, one per row.
        by_hand: the errors of hand-written attention, whose bias is in the inputs' dtype.
        largest_bias: m·|i − j| for the farthest key.
        eps: machine epsilon of the inputs' dtype.
    """

    rows: dict[bool, list[Tensor]]
    units: dict[bool, list[float]]
    by_hand: dict[bool, list[float]]
    largest_bias: float
    eps: float

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, slopes: Tensor, *, dropout_p: float = 0.0
    ) -> "Reference":
        """The reference for causal attention of the last T of S positions; only the first sequence of a batch is checked."""
        ours = functools.partial(attention_of_head, dropout_p=dropout_p, seed=SEED)
        exact = functools.partial(ours, backend="reference")
        # Hand-written attention cannot have our dropout mask. `dense`, which materializes all weights, is the closest.
        plain = _eager if dropout_p == 0 else functools.partial(ours, backend="dense")
        longest_value = float(torch.linalg.vector_norm(value[:1], dim=-1, dtype=torch.float32).max())
        rows, units, by_hand = {}, {}, {}
        for biased, m in ((True, slopes), (False, torch.zeros_like(slopes))):
            true = _last_rows(exact, (query, key, value, grad), m, torch.float64)
            hand = _last_rows(plain, (query, key, value, grad), m, query.dtype)
            units[biased] = [longest_value, *(max(_longest(x), 1e-30) for x in true[1:])]
            by_hand[biased] = _relative(hand, true, units[biased])
            rows[biased] = true
        largest = float(slopes.abs().max()) * key.shape[2]
        return cls(rows, units, by_hand, largest, torch.finfo(query.dtype).eps)

    def compare(self, peer: Peer, outputs: list[Tensor]) -> Errors:
        """The errors of what `computed` returned.

        The allowed error is the sum of three terms. The first is twice the error of hand-written attention in the same
        dtype, whose bias is rounded like a dense bias. The second is two more roundings. The third is four times the
        error of a weight, from an approximate exponential and from the peer's `score_error` (scores off by δ change a
        weight by a factor of at most exp(2δ)). Four, because a gradient has three such weights and a difference of two.
        """
        true, units = self.rows[peer.biased], self.units[peer.biased]
        errors = _relative(outputs, true, units)
        excess = 4 * (EXPONENTIAL + math.expm1(min(2 * peer.score_error * self.largest_bias, 50.0)))
        wrong = None
        for what, error, hand, row, unit in zip(_ROWS_OF, errors, self.by_hand[peer.biased], true, units, strict=False):
            allowed = 2 * hand + 2 * self.eps * _longest(row) / unit + excess
            if wrong is None and not error <= allowed:
                wrong = f"{peer.name} is wrong: {what} is off by {error:.1e} but {allowed:.1e} is allowed"
        return Errors(errors[0], max(errors[1:]) if len(errors) > 1 else None, wrong)


def computed(attention: Attention, query: Tensor, key: Tensor, value: Tensor, grad: Tensor | None) -> list[Tensor]:
    """The last rows of one call: the output, and with `grad` the gradients. Dropout is seeded with SEED."""
    leaves = [x.detach().requires_grad_(grad is not None) for x in (query, key, value)]
    with torch.set_grad_enabled(grad is not None), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        output = attention(*leaves)
    gradients = () if grad is None else torch.autograd.grad(output, leaves, grad)
    return [x.detach()[:1, :, -ROWS:] for x in (output, *gradients)]


@torch.enable_grad()
def _last_rows(
    run: Callable[..., Tensor], inputs: Sequence[Tensor], slopes: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """(output, gradients of query, key and value) of the last rows alone, computed head by head to save memory.

    Args:
        run: (query, key, value, slope, head=its index) -> output
        inputs: (query, key, value, gradient of the output).
    """
    heads = []
    for h in range(inputs[0].shape[1]):
        q, near_k, near_v, do = (x[:1, h : h + 1, -ROWS:].detach().to(dtype) for x in inputs)
        far_k, far_v = (x[:1, h : h + 1, :-ROWS].detach().to(dtype) for x in inputs[1:3])
        leaves = [x.requires_grad_() for x in (q, near_k, near_v)]
        output = run(q, torch.cat([far_k, near_k], 2), torch.cat([far_v, near_v], 2), slopes[h : h + 1], head=h)
        heads.append([output.detach(), *torch.autograd.grad(output, leaves, do)])
    return [torch.cat(rows, 1) for rows in zip(*heads, strict=True)]


def _eager(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, head: int) -> Tensor:
    return eager(query, key, value, slopes)(query, key, value)


def _relative(outputs: list[Tensor], true: list[Tensor], units: list[float]) -> list[float]:
    return [_longest(x.double() - y) / unit for x, y, unit in zip(outputs, true, units, strict=False)]


def _longest(rows: Tensor) -> float:
    return float(rows.double().norm(dim=-1).max())
