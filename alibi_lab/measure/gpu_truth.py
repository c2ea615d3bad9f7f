"""The true results of one head for `gpu_parts.py`: a formula in fp64, and the same by hand in the dtype of the inputs."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alibi_lab.measure.harness import Row

Formula = Callable[..., Tensor]  # attention of one head from [T, D], [S, D] and [S, D]


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention of one head, written by hand; scores are fp32 unless all is fp64."""
    scores = (query @ key.T) * query.shape[-1] ** -0.5
    scores = scores + bias.to(torch.promote_types(query.dtype, torch.float32))
    return scores.softmax(-1).to(value.dtype) @ value


def biased_by(bias: Tensor) -> Formula:
    """Attention of one head with this bias."""
    return lambda query, key, value: attended(query, key, value, bias)


def causal_distance(length: int, device: torch.device) -> Tensor:
    """[T, T] fp64, i − j; infinite where the key is in the future."""
    places = torch.arange(length, device=device, dtype=torch.float64)
    distance = places[:, None] - places
    return distance.masked_fill_(distance < 0, torch.inf)


def with_slope(slopes: Tensor, length: int) -> Formula:
    """The causal formula of the middle head. Slopes of 0 are no bias."""
    distance = causal_distance(length, slopes.device)
    bias = -head(slopes[None, :, None].double()) * distance
    return biased_by(bias.masked_fill_(distance == torch.inf, -torch.inf))


def with_gates(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
    """The causal formula with one ln f per token."""
    sums, hidden = gates.double().cumsum(0), causal_distance(len(gates), gates.device) == torch.inf
    return attended(query, key, value, (sums[:, None] - sums).masked_fill(hidden, -torch.inf))


@dataclasses.dataclass(frozen=True)
class Truth:
    """Output and gradients of the middle head of the last sequence: in fp64, and by hand in the dtype of the inputs."""

    true: list[Tensor]
    plain: list[Tensor]
    eps: float

    @classmethod
    def of(cls, formula: Formula, inputs: Sequence[Tensor], grad: Tensor | None = None) -> "Truth":
        """Of the formula for [B, H, …] inputs; without `grad` of its output alone."""
        of_head = [head(x).detach() for x in inputs]
        exact = [x.double() for x in of_head]
        true, plain = (_results(formula, x, None if grad is None else head(grad)) for x in (exact, of_head))
        return cls(true, plain, torch.finfo(inputs[0].dtype).eps)

    def row(self, outputs: Sequence[Tensor]) -> Row:
        """The columns of the worst error of a call's outputs [B, H, …]."""
        _, error, allowed = worst_error([head(x) for x in outputs], self.plain, self.true, self.eps)
        return judged(error, allowed)


def worst_error(
    actual: Sequence[Tensor], plain: Sequence[Tensor], true: Sequence[Tensor], eps: float
) -> tuple[int, float, float]:
    """(the tensor, its error, the allowed error), where the error is the largest share of the allowed one; NaN is infinite.

    Errors are shares of the largest number of their tensor. Twice that of the plain results and four roundings are allowed.
    """
    errors = []
    for at, (found, by_hand, exact) in enumerate(zip(actual, plain, true, strict=True)):
        largest = max(float(exact.abs().max()), 1e-30)
        error, of_plain = (float((x.double() - exact).abs().max()) / largest for x in (found, by_hand))
        errors.append((at, error, 2 * of_plain + 4 * eps))
    return max(errors, key=lambda each: math.inf if math.isnan(share := each[1] / each[2]) else share)


def relative_error(actual: Tensor, true: Tensor) -> float:
    """The largest error as a share of the largest number."""
    return float((actual.detach().float() - true).abs().max() / true.abs().max())


def allowed_error(plain: float, dtype: torch.dtype) -> float:
    """Twice the original's error in this dtype, and four roundings."""
    return 2 * plain + 4 * torch.finfo(dtype).eps


def judged(error: float, allowed: float) -> Row:
    """The columns of an error; NaN is wrong."""
    right = error <= allowed
    why_not = None if right else f"it is wrong: off by {error:.1e} but {allowed:.1e} is allowed"
    return {"relative_error": error, "allowed_error": allowed, "right": right, "why_not": why_not}


def head(x: Tensor) -> Tensor:
    """The middle head of the last sequence."""
    return x[-1, x.shape[1] // 2]


def _results(formula: Formula, inputs: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    leaves = [x.requires_grad_(grad is not None) for x in inputs]
    with torch.set_grad_enabled(grad is not None):
        output = formula(*leaves)
    gradients = () if grad is None else torch.autograd.grad(output, leaves, grad.to(output.dtype))
    return [output.detach(), *gradients]
