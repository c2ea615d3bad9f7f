"""Wraps a backend as a torch operator that works with autograd, torch.func, torch.compile, torch.export and vmap.

A backend provides `Kernels`: a forward and a backward over a spec. `Arguments` (`schema.py`) is the schema of the resulting
operator: arguments, gradients and mapped axes are always accessed by name. Ordinary tensors in eager code skip the operator:
an autograd.Function calls the same kernels at a fraction of the overhead (docs/backends.md).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alibi_attn.attention.schema import (
    Arguments,
    BackwardInputs,
    Gradients,
    Incoming,
    InputGradients,
    Kernels,
    Saved,
    Spec,
    Tensors,
)
from alibi_attn.attention.spec import DIFFERENTIABLE
from alibi_attn.attention.transforms import Mapped, are_ordinary, transformable
from alibi_attn.attention.visibility import (
    in_rows,
    may_see_nothing,
    rounded_lse,
    row_major,
    with_plain_offset,
    without_bad_numbers,
)

Forward = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Saved]]
Backward = Callable[[Spec, Saved, BackwardInputs], Gradients]
Run = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def on_finite_numbers(
    name: str, forward: Forward, backward: Backward, empty_saved: Callable[[Arguments], Saved]
) -> Kernels:
    """Builds CPU kernels from two functions that support neither NaN nor fp16: they get finite tensors only.

    Args:
        forward: (spec, query, key, value) -> (output, lse, saved), all tensors finite and with a last stride of 1; lse without
            the query's bias, −inf if a query sees no key. output and lse in fp32 or better.
        backward: its inputs are finite too; a query that sees no key has lse 0, and its incoming gradients are 0.
    """

    def attend(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensors, bool]:
        q, k, v, poison, moderate = without_bad_numbers(spec, query, key, value)
        output, lse, saved = forward(spec, q, k, v)
        if poison is not None:
            output += poison[..., None]
            lse += poison
        if spec.query_bias is not None:
            lse = lse + spec.query_bias
        return output.to(query.dtype), rounded_lse(spec, query, lse), saved, moderate

    def differentiate(spec: Spec, saved: Tensors, inputs: BackwardInputs) -> Gradients:
        query, key, value = inputs[:3]
        if inputs.moderate:
            q, k, v = in_rows(query, key, value)
        else:
            q, k, v, *_ = without_bad_numbers(spec, query, key, value)
        grad, lse, grad_lse = row_major(inputs.grad_output.to(q.dtype)), inputs.lse, inputs.grad_lse
        blind = lse == -math.inf
        if inputs.may_see_nothing and bool(blind.any()):
            # The incoming gradient of a query that sees no key has no effect; with lse 0 its weights are exp(−inf) = 0.
            lse, grad = lse.masked_fill(blind, 0.0), grad.masked_fill(blind[..., None], 0.0)
            grad_lse = None if grad_lse is None else grad_lse.masked_fill(blind, 0.0)
        return backward(
            spec, Saved(*saved), inputs._replace(
                query=q, key=k, value=v, output=inputs.output.to(q.dtype), lse=lse, grad_output=grad, grad_lse=grad_lse
            )
        )  # fmt: skip

    return Kernels(
        name, attend, differentiate, lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device), empty_saved
    )


_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int | None: "SymInt?", float: "float"}
_TENSORS = [name for name, kind in get_type_hints(Arguments).items() if kind in (Tensor, Tensor | None)]


def operator(kernels: Kernels) -> Run:
    """The backend's `run`; registers `alibi_attn::{name}_forward` and `alibi_attn::{name}_backward`."""
    saves = len(kernels.saves)
    arguments_schema, saved_schema = _schema(Arguments), ", ".join(f"Tensor {name}" for name in kernels.saves)

    @torch.library.custom_op(
        f"alibi_attn::{kernels.name}_forward", mutates_args=(),
        schema=f"({arguments_schema}) -> ({', '.join(['Tensor'] * (2 + saves))})",
    )  # fmt: skip
    def forward_op(*values: Any) -> tuple[Tensor, ...]:
        arguments = Arguments(*values)
        output, lse, saved, _ = kernels.forward(arguments.spec(), arguments.query, arguments.key, arguments.value)
        return output, lse, *saved

    @forward_op.register_fake
    def fake_forward(*values: Any) -> tuple[Tensor, ...]:
        arguments = Arguments(*values)
        query, dtype = arguments.query, torch.promote_types(arguments.query.dtype, torch.float32)
        if arguments.key_bias is not None:
            dtype = torch.promote_types(dtype, arguments.key_bias.dtype)
        lse = query.new_empty(query.shape[:3], dtype=dtype)
        return kernels.empty_like(query), lse, *kernels.empty_saved(arguments)

    @torch.library.custom_op(
        f"alibi_attn::{kernels.name}_backward", mutates_args=(),
        schema=f"({_schema(Incoming)}, {arguments_schema}, {saved_schema}) -> ({', '.join(['Tensor'] * 7)})",
    )  # fmt: skip
    def backward_op(*values: Any) -> tuple[Tensor, ...]:
        incoming, arguments, saved = _split(values)
        spec = arguments.spec()
        inputs = BackwardInputs(*arguments[:3], **incoming._asdict(), may_see_nothing=arguments.may_see_nothing)
        input_gradients = _input_gradients(spec, inputs, kernels.backward(spec, saved, inputs))
        return _without_none(arguments, input_gradients, torch.zeros_like)

    @backward_op.register_fake
    def fake_backward(*values: Any) -> tuple[Tensor, ...]:
        arguments = _split(values)[1]
        dq, dk, dv = (kernels.empty_like(x) for x in arguments[:3])
        return _without_none(arguments, InputGradients(dq, dk, dv, None, None, None, None), torch.empty_like)

    gradients = transformable(backward_op)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        arguments = Arguments(*inputs)
        ctx.save_for_backward(*(getattr(arguments, name) for name in _TENSORS), *output)
        without: dict[str, Any] = dict.fromkeys(_TENSORS)
        ctx.arguments = arguments._replace(
            **without | {"tolerance": 0.0}
        )  # the visited tiles are saved, so it is not used
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # only once: every access may run hooks that recompute or reload them
        arguments = ctx.arguments._replace(**dict(zip(_TENSORS, saved, strict=False)))
        output, lse, *saved = saved[len(_TENSORS) :]
        wanted: Any = Arguments(*ctx.needs_input_grad)
        incoming = Incoming(
            torch.zeros_like(output) if grad_output is None else grad_output, grad_lse if arguments.return_lse else None,
            output, lse, wanted.slopes or wanted.right_slopes, wanted.key_bias or wanted.query_bias,
        )  # fmt: skip
        input_gradients = _with_none(
            arguments, gradients(*incoming, *arguments, *saved), slopes_wanted=incoming.slopes_wanted
        )
        none: dict[str, Any] = dict.fromkeys(Arguments._fields)
        return tuple((none | {name: x for name, x in input_gradients._asdict().items() if name != "table"}).values())

    forward_op.register_autograd(differentiate, setup_context=save)
    forward_op.register_vmap(functools.partial(_map_forward, forward_op))
    backward_op.register_vmap(functools.partial(_map_backward, backward_op))
    attention = transformable(forward_op, save, differentiate)

    def by_operator(spec: Spec, saved: Tensors, inputs: BackwardInputs) -> InputGradients:
        """The gradients of a call that ran eagerly, for compiled autograd, which traces the backward only."""
        if spec.table is not None:
            raise RuntimeError(
                "the gradient of a table of distances cannot be traced by compiled autograd; compile the forward pass too, "
                "or pass backend='dense'"
            )
        arguments = Arguments.of(spec, inputs.query, inputs.key, inputs.value)
        incoming = Incoming(*(getattr(inputs, name) for name in Incoming._fields))
        return _with_none(arguments, gradients(*incoming, *arguments, *saved), slopes_wanted=inputs.slopes_wanted)

    def run(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, lse), with None for lse unless it is requested."""
        if is_eager(spec, query, key, value):
            output, lse = _attend_eagerly(kernels, by_operator, spec, query, key, value)
        else:
            output, lse, *_ = attention(*Arguments.of(spec, query, key, value))
        return output, lse if spec.return_lse else None

    return run


def is_eager(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all inputs are ordinary tensors, and the call is not being traced, transformed or profiled."""
    if not are_ordinary(query, key, value, *_tensors(spec).values()):
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and not torch._C._are_functorch_transforms_active()


def slope_gradients(sides: Tensor, slopes: Tensor, right_slopes: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of slopes and right slopes, [H] or [B, H] as the slopes are, from the gradients of both sides, [2, B, H]."""
    if right_slopes is None:  # one slope for both sides
        sides = sides.sum(0, keepdim=True)
    of_sides = [
        (side.clone() if m.ndim == 2 else side.sum(0)).to(slopes.dtype)
        for side, m in zip(sides, (slopes, right_slopes), strict=False)
        if m is not None
    ]
    return of_sides[0], of_sides[1] if right_slopes is not None else None


def _input_gradients(spec: Spec, inputs: BackwardInputs, gradients: Gradients) -> InputGradients:
    left, right = None, None
    if inputs.slopes_wanted:
        left, right = slope_gradients(gradients.slopes, spec.slopes, spec.right_slopes)
    of_key_bias, of_query_bias, of_table = (
        None if b is None or of_b is None else of_b.to(b.dtype)
        for b, of_b in zip((spec.key_bias, spec.query_bias, spec.table), gradients[4:], strict=True)
    )
    dq, dk, dv = (x.to(inputs.query.dtype) for x in gradients[:3])
    return InputGradients(dq, dk, dv, left, right, of_key_bias, of_query_bias, of_table)


def _without_none(
    arguments: Arguments, input_gradients: InputGradients, like: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """The gradients as tensors only, as an operator returns them: `like` the input if not wanted, empty if there is no input."""
    slopes, batch = arguments.slopes, arguments.query.shape[0]
    given = arguments.slopes, arguments.right_slopes, arguments.key_bias, arguments.query_bias
    absent = slopes, slopes.new_empty(slopes.shape[-1:]), *(arguments.query.new_empty((batch, 0)) for _ in range(2))
    biases = (
        like(nothing if x is None else x) if of_x is None else of_x
        for x, of_x, nothing in zip(given, input_gradients[3:7], absent, strict=True)
    )
    return *input_gradients[:3], *biases


def _with_none(arguments: Arguments, returned: tuple[Tensor, ...], *, slopes_wanted: bool) -> InputGradients:
    """The inverse of `_without_none`: None for missing and unwanted gradients."""
    left, right, of_key_bias, of_query_bias = (
        None if getattr(arguments, name) is None else x
        for name, x in zip(("slopes", "right_slopes", "key_bias", "query_bias"), returned[3:], strict=True)
    )
    if not slopes_wanted:
        left = right = None
    dq, dk, dv = returned[:3]
    return InputGradients(dq, dk, dv, left, right, of_key_bias, of_query_bias)


def _split(values: tuple[Any, ...]) -> tuple[Incoming, Arguments, Tensors]:
    """Splits the arguments of the backward operator into their parts."""
    first, last = len(Incoming._fields), len(Incoming._fields) + len(Arguments._fields)
    return Incoming(*values[:first]), Arguments(*values[first:last]), values[last:]


def _schema(fields: type[tuple[Any, ...]]) -> str:
    return ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(fields).items())


def _map_forward(
    forward_op: Any, info: Any, axes: tuple[Any, ...], *values: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule for torch.func.vmap: the mapped axis is folded into the batch, together with its dropout seeds."""
    arguments = Arguments(*values)
    at: Any = Arguments(*axes)
    mapped = Mapped.of(info.batch_size, arguments.query, at.query)
    outputs = mapped.out_of_batch(forward_op(*_in_batch(mapped, arguments, at)))
    return outputs, (0,) * len(outputs)


def _map_backward(
    backward_op: Any, info: Any, axes: tuple[Any, ...], *values: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    incoming, arguments, saved = _split(values)
    incoming_at, at, saved_at = cast("tuple[Any, Any, Any]", _split(axes))
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


ByOperator = Callable[[Spec, Tensors, BackwardInputs], InputGradients]


def _attend_eagerly(
    kernels: Kernels, by_operator: ByOperator, spec: Spec, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    if query.is_cpu:
        spec = with_plain_offset(spec)
    inputs = query, key, value, *(getattr(spec, name) for name in DIFFERENTIABLE)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _apply_eagerly(kernels, by_operator, spec, *inputs)
    return kernels.forward(spec, query, key, value)[:2]


def _tensors(spec: Spec) -> dict[str, Tensor]:
    """The fields of a spec that are tensors."""
    fields = (
        *DIFFERENTIABLE,
        "query_offset",
        "query_start",
        "key_mask",
        "query_segments",
        "key_segments",
        "dropout_seed",
    )
    return {name: x for name in fields if isinstance(x := getattr(spec, name), Tensor)}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, by_operator: ByOperator, spec: Spec, query: Tensor, key: Tensor, value: Tensor,
        *biases: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        output, lse, saved, ctx.moderate = kernels.forward(spec, query, key, value)
        # Only autograd holds tensors: it detects in-place changes and frees them in time.
        tensors = _tensors(spec)
        ctx.kernels, ctx.by_operator, ctx.names = kernels, by_operator, list(tensors)
        without: dict[str, Any] = dict.fromkeys(tensors)
        ctx.spec = dataclasses.replace(spec, tolerance=0.0, **without)  # the visited tiles are saved, so it is not used
        ctx.save_for_backward(query, key, value, output, lse, *tensors.values(), *saved)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, *rest = ctx.saved_tensors  # only once: every access may run hooks
        spec = dataclasses.replace(ctx.spec, **dict(zip(ctx.names, rest, strict=False)))
        saved = tuple(rest[len(ctx.names) :])
        *_, slopes, right_slopes, key_bias, query_bias, table = ctx.needs_input_grad
        inputs = BackwardInputs(
            query, key, value, output, lse, torch.zeros_like(output) if grad_output is None else grad_output, grad_lse,
            slopes or right_slopes, key_bias or query_bias or table, may_see_nothing(spec), ctx.moderate,
        )  # fmt: skip
        if are_ordinary(output, saved[0]):
            input_gradients = _input_gradients(spec, inputs, ctx.kernels.backward(spec, saved, inputs))
        else:
            input_gradients = ctx.by_operator(spec, saved, inputs)
        return None, None, None, *input_gradients


_apply_eagerly: Callable[..., tuple[Tensor, Tensor]] = _Attention.apply
