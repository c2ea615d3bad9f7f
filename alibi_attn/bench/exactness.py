"""Is a peer right? Its last rows against fp64, and against what rounding in its dtype explains.

The last queries see every key, and nobody but them sees the last keys: so their outputs and gradients, and the gradients of the
last keys and values, are those of a call with these queries alone, which is cheap at any length.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from alibi_attn.attention.dropout import drawn_seed
from alibi_attn.attention.execution import attend
from alibi_attn.attention.validation import make_spec
from alibi_attn.bench.peers import Attention, Peer, eager

ROWS = 64
SEED = 0  # of the masks of dropout
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
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, slopes: Tensor, *, dropout_p: float = 0.0
    ) -> "Reference":
        """For causal attention of the last T of S positions; only the first sequence of the batch is looked at."""
        exact = functools.partial(_ours, backend="reference", dropout_p=dropout_p)
        # Nobody writes our mask by hand: what all weights are built for, in the inputs' dtype, comes next to it.
        plain = _eager if dropout_p == 0 else functools.partial(_ours, backend="dense", dropout_p=dropout_p)
        longest_value = float(torch.linalg.vector_norm(value[:1], dim=-1, dtype=torch.float32).max())
        rows, units, by_hand = {}, {}, {}
        for biased, m in ((True, slopes), (False, torch.zeros_like(slopes))):
            true = _last_rows(exact, query, key, value, grad, m, torch.float64)
            hand = _last_rows(plain, query, key, value, grad, m, query.dtype)
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
    """The last rows of one call: the output, and with `grad` the gradients of query, key and value. Masks are those of SEED."""
    leaves = [x.detach().requires_grad_(grad is not None) for x in (query, key, value)]
    with torch.set_grad_enabled(grad is not None), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        output = attention(*leaves)
    gradients = () if grad is None else torch.autograd.grad(output, leaves, grad)
    return [x.detach()[:1, :, -ROWS:] for x in (output, *gradients)]


def _last_rows(
    run: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor],
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, slopes: Tensor, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """(output, gradients of query, key and value) of the last rows alone, a head at a time for the memory.

    Args:
        run: (query, key, value, slope, number of the head) -> output
    """
    heads = []
    for h in range(query.shape[1]):
        q, near_k, near_v, do = (x[:1, h : h + 1, -ROWS:].detach().to(dtype) for x in (query, key, value, grad))
        far_k, far_v = (x[:1, h : h + 1, :-ROWS].detach().to(dtype) for x in (key, value))
        leaves = [x.requires_grad_() for x in (q, near_k, near_v)]
        output = run(q, torch.cat([far_k, near_k], 2), torch.cat([far_v, near_v], 2), slopes[h : h + 1], h)
        heads.append([output.detach(), *torch.autograd.grad(output, leaves, do)])
    return [torch.cat(rows, 1) for rows in zip(*heads, strict=True)]


def _ours(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, head: int, *, backend: str, dropout_p: float
) -> Tensor:
    """With everything computed; one head has the mask that it has among all."""
    spec = make_spec(query, key, value, slopes, dropout_p=dropout_p, tolerance=0.0)
    if dropout_p > 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            seed = drawn_seed(query.device)
        spec = dataclasses.replace(spec, dropout_seed=seed + torch.tensor([0, 0, head, 0]))
    output = attend(spec, query, key, value, backend)
    assert isinstance(output, Tensor)  # no lse was asked for
    return output


def _eager(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, head: int) -> Tensor:
    return eager(query, key, value, slopes)(query, key, value)


def _relative(found: list[Tensor], true: list[Tensor], units: list[float]) -> list[float]:
    return [_longest(x.double() - y) / unit for x, y, unit in zip(found, true, units, strict=False)]


def _longest(rows: Tensor) -> float:
    return float(rows.double().norm(dim=-1).max())
