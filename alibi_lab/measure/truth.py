"""The truth in fp64 on the device of a case, and how far a peer may be from it: the rounding of its dtype.

Of causal attention the last queries of the first sequence are compared, for all heads. They see every key, and no other query
sees the last keys, so their outputs and gradients, and the gradients of the last keys and values, equal those of a call with
these queries alone, which is cheap at any length. Of symmetric attention one head of the last sequence is compared as a whole.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_attn.inspect import attention_of_head
from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Attention, Peer
from alibi_lab.measure.peers.ours import ours

ROWS = 64
SEED = 0  # of dropout masks
NAMES = ("output", "gradient of query", "gradient of key", "gradient of value", "gradient of the gates")
EXPONENTIAL = 2.0**-20  # relative error of exp in torch's fused CPU kernels; GPU kernels keep 22 bits


class Errors(NamedTuple):
    """The errors of a peer.

    Args:
        output: as a share of max‖v‖.
        gradient: the largest one, each as a share of the largest gradient of the same tensor; None = no backward.
        wrong: the error that rounding cannot explain; None = the peer is right.
    """

    output: float
    gradient: float | None
    wrong: str | None


@dataclasses.dataclass(frozen=True)
class Truth:
    """The true rows, and the errors of plain attention in the inputs' dtype.

    Args:
        rows: fp64, (output, gradients of query, key, value and gates).
        units: the divisors of the errors, one per row.
        plain: the errors of attention that materializes all weights, whose bias is in the inputs' dtype.
    """

    rows: Sequence[Tensor]
    units: Sequence[float]
    plain: Sequence[float]
    inputs: Inputs

    @classmethod
    def of(cls, inputs: Inputs, *, biased: bool = True, dropout_p: float = 0.0) -> "Truth":
        """The truth of attention with these inputs, or without their bias."""
        longest_value = float(torch.linalg.vector_norm(inputs.value[:1].double(), dim=-1).max())
        call = functools.partial(_results, inputs, biased=biased, dropout_p=dropout_p)
        rows = call(dtype=torch.float64, backend="reference")
        units = [longest_value, *(max(_longest(x), 1e-30) for x in rows[1:])]
        plain = _relative(call(dtype=inputs.query.dtype, backend="dense"), rows, units)
        return cls(rows, units, plain, inputs)

    def compare(self, peer: Peer, results: Sequence[Tensor]) -> Errors:
        """The errors of a peer's output and gradients.

        The allowed error is the sum of three terms. The first is twice the error of plain attention in the same dtype, whose
        bias is rounded like a dense bias. The second is two more roundings. The third is four times the error of a weight, from
        an approximate exponential and from the peer's `score_error` (scores off by δ change a weight by a factor of at most
        exp(2δ)). Four, because a gradient has three such weights and a difference of two.
        """
        errors = _relative([self.compared(x) for x in results], self.rows, self.units)
        eps = torch.finfo(self.inputs.query.dtype).eps
        largest_bias = float(self.inputs.slopes.abs().max()) * self.inputs.key.shape[2]
        excess = 4 * (EXPONENTIAL + math.expm1(min(2 * peer.score_error * largest_bias, 50.0)))
        wrong = None
        for what, error, plain, row, unit in zip(NAMES, errors, self.plain, self.rows, self.units, strict=False):
            allowed = 2 * plain + 2 * eps * _longest(row) / unit + excess
            if wrong is None and not error <= allowed:
                wrong = f"{peer.name} is wrong: its {what} is off by {error:.1e} but {allowed:.1e} is allowed"
        return Errors(errors[0], max(errors[1:]) if len(errors) > 1 else None, wrong)

    def compared(self, result: Tensor) -> Tensor:
        """The part of an output or a gradient [B, H, T, …] that is compared."""
        sequence, heads, rows = _part(self.inputs)
        return (result.detach() if result.ndim == 4 else result.detach()[..., None])[sequence, heads, -rows:]


def results_of(attention: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    """The output of one call, and with `grad` the gradients of its leaves. Dropout is seeded with SEED."""
    leaves = [x.detach().requires_grad_(grad is not None) for x in leaves]
    with torch.set_grad_enabled(grad is not None), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        output = attention(*leaves)
    return [output.detach(), *(() if grad is None else torch.autograd.grad(output, leaves, grad))]


def _part(inputs: Inputs) -> tuple[slice, slice, int]:
    """The sequence, the heads and the number of the last rows that are compared; not causal, the middle head as a whole."""
    heads, length = inputs.key.shape[1:3]
    if inputs.causal:
        return slice(1), slice(heads), ROWS
    return slice(-1, None), slice(heads // 2, heads // 2 + 1), length


@torch.enable_grad()
def _results(inputs: Inputs, *, biased: bool, dropout_p: float, dtype: torch.dtype, backend: str) -> list[Tensor]:
    """The rows that are compared, (output, gradients), computed head by head to save memory."""
    (sequence, heads, rows), found = _part(inputs), []
    for head in range(len(inputs.slopes))[heads]:
        at = sequence, slice(head, head + 1)
        query, key, value, grad = (x[at].to(dtype) for x in (inputs.query, inputs.key, inputs.value, inputs.grad))
        mask, points = (None if x is None else x[sequence] for x in (inputs.key_mask, inputs.points))
        gates = None if inputs.log_fgate is None or not biased else inputs.log_fgate[at]
        table = None if inputs.table is None or not biased else inputs.table[at[1]]
        slopes = inputs.slopes[at[1]] * biased
        attention = ours(backend, tolerance=0.0)(Inputs(query, key, value, grad, slopes, gates, mask, table, points))
        if dropout_p > 0:
            options: Any = {"slopes": slopes, "dropout_p": dropout_p, "seed": SEED, "head": head, "backend": backend}
            attention = functools.partial(attention_of_head, **options)
        wide = [key, value, *([] if gates is None else [gates])]
        near = [x[:, :, -rows:] for x in (query, *wide)]
        results = results_of(_joined(attention, [x[:, :, :-rows] for x in wide]), near, grad[:, :, -rows:])
        found.append([x if x.ndim == 4 else x[..., None] for x in results])
    return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]


def _joined(attention: Attention, far: Sequence[Tensor]) -> Attention:
    """Attention of the last queries as a function of the last keys, values and gates alone."""

    def call(q: Tensor, *near: Tensor) -> Tensor:
        wide = [torch.cat(parts, 2) for parts in zip(far, near, strict=True)]
        return attention(q, *(x.to(torch.promote_types(q.dtype, x.dtype)) for x in wide))

    return call


def _relative(results: Sequence[Tensor], true: Sequence[Tensor], units: Sequence[float]) -> list[float]:
    return [_longest(x.double() - y) / unit for x, y, unit in zip(results, true, units, strict=False)]


def _longest(rows: Tensor) -> float:
    return float(rows.double().norm(dim=-1).max())
