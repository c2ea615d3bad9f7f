"""The schema of operators: every argument, gradient and result of a backend's kernels has a name here.

`operator.py` makes torch operators of `Kernels`; the backends `native`, `banded` and `fused` provide them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.visibility import first_positions, may_see_nothing, plain_offset

Spec = AttentionSpec[Tensor]


class Saved(NamedTuple):
    """The tensors that the forward pass of a CPU backend saves for backward; the first axis is the batch, for vmap.

    Args:
        visited: [B, …] integers: the visited keys, which backward visits again.
        rows: [B, …] in fp32 or better: the other numbers that backward needs about the rows of the softmax.
    """

    visited: Tensor
    rows: Tensor


Tensors = tuple[Tensor, ...]


class Arguments(NamedTuple):
    """The arguments of an operator, in the order of its schema. Names are those of `AttentionSpec`.

    Args:
        first: [1] or [B] int64: the position of query 0.
        cpu_scale: [] fp64, a factor of `scale`: torch.compile makes a new graph for every value of a float, but not of a
            tensor. None on other devices, where reading it would synchronize.
        may_see_nothing: whether some query may see no key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor
    right_slopes: Tensor | None
    first: Tensor
    cpu_scale: Tensor | None
    key_mask: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None
    key_bias: Tensor | None
    query_bias: Tensor | None
    query_start: Tensor | None
    table: Tensor | None
    coordinates: Tensor | None
    query_coordinates: Tensor | None
    dropout_seed: Tensor | None
    query_numbers: Tensor | None
    key_numbers: Tensor | None
    causal: bool
    window: int | None
    scale: float
    tolerance: float
    dropout_p: float
    may_see_nothing: bool
    return_lse: bool

    @classmethod
    def of(cls, spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> "Arguments":
        on_cpu = query.device.type == "cpu"
        fields: dict[str, Any] = {name: getattr(spec, name) for name in _SHARED}
        return cls(
            query=query,
            key=key,
            value=value,
            first=first_positions(spec, query.device),
            cpu_scale=torch.ones((), dtype=torch.float64, device=query.device) * spec.scale if on_cpu else None,
            scale=1.0 if on_cpu else spec.scale,
            may_see_nothing=may_see_nothing(spec),
            **fields,
        )

    def spec(self) -> Spec:
        """The description of the call; on a CPU an offset that is one number becomes an int."""
        b, h, t, d = self.query.shape
        return AttentionSpec(
            batch=b,
            num_heads=h,
            num_kv_heads=self.key.shape[1],
            query_len=t,
            key_len=self.key.shape[2],
            head_dim=d,
            scale=self.scale if self.cpu_scale is None else self.scale * float(self.cpu_scale),
            query_offset=self.first if self.cpu_scale is None else plain_offset(self.first),
            **{name: getattr(self, name) for name in _SHARED},
        )


# The fields that a spec and its operator's arguments both have.
_SHARED = [
    field.name
    for field in dataclasses.fields(AttentionSpec)
    if field.name in Arguments._fields and field.name != "scale"
]
# The fields that operators carry; a backend with an operator reads no others.
READS = frozenset({*_SHARED, "query_offset"})


class BackwardInputs(NamedTuple):
    """The inputs of backward, in addition to the spec and the tensors that forward saved.

    Args:
        grad_output, grad_lse: the incoming gradients; None = lse has no gradient.
        may_see_nothing: whether some query may see no key.
        moderate: whether forward found all numbers finite, and so small that no product of them overflows.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None
    slopes_wanted: bool
    biases_wanted: bool
    may_see_nothing: bool = True
    moderate: bool = False


class Gradients(NamedTuple):
    """The gradients that backward returns.

    Args:
        query, key, value: in the shapes of the inputs.
        slopes: [2, B, H] fp64, of the slopes to the left and to the right; zeros if they are not wanted.
        key_bias, query_bias: [B, H, S] and [B, H, T] fp64, sums of the same ds over queries and over keys; or None.
        table: [H, N], sums of ds over the pairs of each distance; or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor
    key_bias: Tensor | None = None
    query_bias: Tensor | None = None
    table: Tensor | None = None


class Kernels(NamedTuple):
    """The functions of a backend that `operator` wraps; they do not involve autograd.

    Args:
        name: the operators are `alibi_attn::{name}_forward` and `alibi_attn::{name}_backward`.
        forward: (spec, query, key, value) -> (output, lse, saved, moderate), output and lse in the dtypes of the contract.
        backward: (spec, saved, inputs) -> gradients.
        empty_like: allocates the output or gradient for an input; reads its shape, dtype and strides only.
        empty_saved: allocates the tensors that forward saves; reads shapes and dtypes only.
        saves: the names of the saved tensors.
        infer: (spec, query, key, value) -> (output, lse) of a call without gradients; None = by `forward`.
    """

    name: str
    forward: Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensors, bool]]
    backward: Callable[[Spec, Tensors, BackwardInputs], Gradients]
    empty_like: Callable[[Tensor], Tensor]
    empty_saved: Callable[[Arguments], Tensors]
    saves: tuple[str, ...] = Saved._fields
    infer: Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


class Incoming(NamedTuple):
    """The first arguments of the backward operator; `Arguments` and the saved tensors follow."""

    grad_output: Tensor
    grad_lse: Tensor | None
    output: Tensor
    lse: Tensor
    slopes_wanted: bool
    biases_wanted: bool


class InputGradients(NamedTuple):
    """Gradients in the shapes, dtypes and order of the inputs; None if an input has no gradient."""

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor | None
    right_slopes: Tensor | None
    key_bias: Tensor | None
    query_bias: Tensor | None
    table: Tensor | None = None

    @classmethod
    def of(cls, spec: Spec, inputs: BackwardInputs, gradients: Gradients) -> "InputGradients":
        left = right = None
        if inputs.slopes_wanted:
            left, right = _slope_gradients(gradients.slopes, spec.slopes, spec.right_slopes)
        of_key_bias, of_query_bias, of_table = (
            None if b is None or of_b is None else of_b.to(b.dtype)
            for b, of_b in zip((spec.key_bias, spec.query_bias, spec.table), gradients[4:], strict=True)
        )
        dq, dk, dv = (x.to(inputs.query.dtype) for x in gradients[:3])
        return cls(dq, dk, dv, left, right, of_key_bias, of_query_bias, of_table)


def split(values: tuple[Any, ...]) -> tuple[Incoming, Arguments, Tensors]:
    """Splits the arguments of the backward operator into their parts."""
    first, last = len(Incoming._fields), len(Incoming._fields) + len(Arguments._fields)
    return Incoming(*values[:first]), Arguments(*values[first:last]), values[last:]


def _slope_gradients(sides: Tensor, slopes: Tensor, right_slopes: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of slopes and right slopes, [H] or [B, H] as the slopes are, from the gradients of both sides, [2, B, H]."""
    if right_slopes is None:  # one slope for both sides
        sides = sides.sum(0, keepdim=True)
    of_sides = [
        (side.clone() if m.ndim == 2 else side.sum(0)).to(slopes.dtype)
        for side, m in zip(sides, (slopes, right_slopes), strict=False)
        if m is not None
    ]
    return of_sides[0], of_sides[1] if right_slopes is not None else None
