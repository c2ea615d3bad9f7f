"""Rules for `torch.func.vmap`: the mapped axis of an operator's tensors is folded into the batch, and unfolded afterwards."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from alibi_attn.attention.operators.schema import Arguments, split


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A vmapped axis with `count` entries and a batch of B: folds tensors into one batch, and unfolds them."""

    count: int
    batch: int

    @classmethod
    def of(cls, count: int, query: Tensor, axis: int | None) -> "Mapped":
        """From query, [B, …] plus the mapped axis."""
        return cls(count, query.shape[0 if axis is None or axis > 0 else 1])

    def into_batch(self, tensor: Tensor | None, axis: int | None) -> Tensor | None:
        """[B, …] plus the mapped axis -> [count·B, …]."""
        if tensor is None:
            return None
        tensor = tensor.expand(self.count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        return tensor.flatten(0, 1)

    def slopes(self, slopes: Tensor | None, axis: int | None) -> Tensor | None:
        """[H] or [B, H] plus the mapped axis -> [count·B, H]."""
        if slopes is not None and slopes.ndim == (1 if axis is None else 2):
            slopes = slopes[None] if axis is None else slopes.movedim(axis, 0)[:, None]
            return slopes.expand(self.count, self.batch, -1).flatten(0, 1)
        return self.into_batch(slopes, axis)

    def first(self, first: Tensor, axis: int | None) -> Tensor:
        """[1] or [B] plus the mapped axis -> [count·B]; an unmapped [1] does not change."""
        if axis is None and first.numel() == 1:
            return first
        first = first[None] if axis is None else first.movedim(axis, 0)
        return first.expand(self.count, self.batch).flatten()

    def out_of_batch(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[count·B, …] -> [count, B, …]."""
        return tuple(tensor.unflatten(0, (self.count, self.batch)) for tensor in tensors)


def map_forward(
    forward_op: Any, info: Any, axes: tuple[Any, ...], *values: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule of the forward operator; dropout seeds are folded into the batch too."""
    arguments = Arguments(*values)
    at: Any = Arguments(*axes)
    mapped = Mapped.of(info.batch_size, arguments.query, at.query)
    outputs = mapped.out_of_batch(forward_op(*_in_batch(mapped, arguments, at)))
    return outputs, (0,) * len(outputs)


def map_backward(
    backward_op: Any, info: Any, axes: tuple[Any, ...], *values: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule of the backward operator."""
    incoming, arguments, saved = split(values)
    incoming_at, at, saved_at = cast("tuple[Any, Any, Any]", split(axes))
    mapped = Mapped.of(info.batch_size, arguments.query, at.query)
    dq, dk, dv, left, right, *rest = backward_op(
        *(_tensor_in_batch(mapped, x, axis) for x, axis in zip(incoming, incoming_at, strict=True)),
        *_in_batch(mapped, arguments, at),
        *(mapped.into_batch(x, axis) for x, axis in zip(saved, saved_at, strict=True)),
    )
    sides = [(left, arguments.slopes, at.slopes)]
    if arguments.right_slopes is None:  # no gradient is read
        sides.append((torch.zeros_like(left), arguments.slopes, at.slopes))
    else:
        sides.append((right, arguments.right_slopes, at.right_slopes))
    dslopes = []
    for side, m, axis in sides:
        (of_side,) = mapped.out_of_batch([side])
        per_sequence = m.ndim - (axis is not None) == 2
        dslopes.append(of_side if per_sequence else of_side.sum(1, dtype=torch.float64).to(side.dtype))
    outputs = *mapped.out_of_batch((dq, dk, dv)), *dslopes, *mapped.out_of_batch(rest)
    return outputs, (0,) * len(outputs)


def _in_batch(mapped: Mapped, arguments: Arguments, axes: Any) -> Arguments:
    """The arguments with a mapped axis in the batch."""
    batched = (_tensor_in_batch(mapped, x, axis) for x, axis in zip(arguments, axes, strict=True))
    slopes = mapped.slopes(arguments.slopes, axes.slopes)
    assert slopes is not None
    return Arguments(*batched)._replace(
        slopes=slopes,
        right_slopes=mapped.slopes(arguments.right_slopes, axes.right_slopes),
        first=mapped.first(arguments.first, axes.first),
    )


def _tensor_in_batch(mapped: Mapped, value: Any, axis: int | None) -> Any:
    return mapped.into_batch(value, axis) if isinstance(value, Tensor) and value.ndim > 0 else value
