"""Wraps a backend as a torch operator that works with autograd, torch.func, torch.compile, torch.export and vmap.

A backend provides `Kernels`: a forward and a backward over a spec. `Arguments` (`schema.py`) is the schema of the resulting
operator: arguments, gradients and mapped axes are always accessed by name. Ordinary tensors in eager code skip the operator
(`eager.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from alibi_attn.attention.call.spec import DIFFERENTIABLE
from alibi_attn.attention.operators.derivatives import differentiable_once, transformable
from alibi_attn.attention.operators.eager import attend_eagerly, is_eager
from alibi_attn.attention.operators.schema import (
    READS,
    Arguments,
    BackwardInputs,
    Incoming,
    InputGradients,
    Kernels,
    Spec,
    Tensors,
    split,
)
from alibi_attn.attention.operators.vmap import map_backward, map_forward

Run = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int | None: "SymInt?", float: "float"}
_TENSORS = [name for name, kind in get_type_hints(Arguments).items() if kind in (Tensor, Tensor | None)]


def operator(kernels: Kernels, reads: frozenset[str]) -> Run:
    """The backend's `run`; registers `alibi_attn::{name}_forward` and `alibi_attn::{name}_backward`.

    Args:
        reads: the fields of a spec that the kernels compute.
    """
    assert reads <= READS, f"{kernels.name} reads {sorted(reads - READS)}, which its operator's schema does not have"
    forward_op, backward_op = _forward_operator(kernels), _backward_operator(kernels)
    gradients = transformable(backward_op)
    differentiate = functools.partial(_differentiate, gradients)
    forward_op.register_autograd(differentiate, setup_context=_save)
    forward_op.register_vmap(functools.partial(map_forward, forward_op))
    backward_op.register_vmap(functools.partial(map_backward, backward_op))
    attention = transformable(forward_op, _save, differentiate)
    traced_gradients = functools.partial(_traced_gradients, gradients)

    def run(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, lse), with None for lse unless it is requested."""
        if is_eager(spec, query, key, value):
            output, lse = attend_eagerly(kernels, traced_gradients, spec, query, key, value)
        else:
            spec, query, key, value = differentiable_once(spec, query, key, value)
            output, lse, *_ = attention(*Arguments.of(spec, query, key, value))
        return output, lse if spec.return_lse else None

    return run


def _forward_operator(kernels: Kernels) -> CustomOpDef:
    @torch.library.custom_op(
        f"alibi_attn::{kernels.name}_forward",
        mutates_args=(),
        schema=f"({_schema(Arguments)}) -> ({', '.join(['Tensor'] * (2 + len(kernels.saves)))})",
    )
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

    return forward_op


def _backward_operator(kernels: Kernels) -> CustomOpDef:
    saved_schema = ", ".join(f"Tensor {name}" for name in kernels.saves)

    @torch.library.custom_op(
        f"alibi_attn::{kernels.name}_backward",
        mutates_args=(),
        schema=f"({_schema(Incoming)}, {_schema(Arguments)}, {saved_schema}) -> ({', '.join(['Tensor'] * 8)})",
    )
    def backward_op(*values: Any) -> tuple[Tensor, ...]:
        incoming, arguments, saved = split(values)
        spec = arguments.spec()
        inputs = BackwardInputs(*arguments[:3], **incoming._asdict(), may_see_nothing=arguments.may_see_nothing)
        input_gradients = InputGradients.of(spec, inputs, kernels.backward(spec, saved, inputs))
        return _without_none(arguments, input_gradients, torch.zeros_like)

    @backward_op.register_fake
    def fake_backward(*values: Any) -> tuple[Tensor, ...]:
        arguments = split(values)[1]
        dq, dk, dv = (kernels.empty_like(x) for x in arguments[:3])
        return _without_none(arguments, InputGradients(dq, dk, dv, *[None] * 5), torch.empty_like)

    return backward_op


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments = Arguments(*inputs)
    ctx.save_for_backward(*(getattr(arguments, name) for name in _TENSORS), *output)
    without: dict[str, Any] = dict.fromkeys(_TENSORS)
    ctx.arguments = arguments._replace(**without)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(
    gradients: Callable[..., Any], ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # only once: every access may run hooks that recompute or reload them
    arguments = ctx.arguments._replace(**dict(zip(_TENSORS, saved, strict=False)))
    output, lse, *saved = saved[len(_TENSORS) :]
    wanted: Any = Arguments(*ctx.needs_input_grad)
    incoming = Incoming(
        torch.zeros_like(output) if grad_output is None else grad_output,
        grad_lse if arguments.return_lse else None,
        output,
        lse,
        wanted.slopes or wanted.right_slopes,
        wanted.key_bias or wanted.query_bias or wanted.table,
    )
    input_gradients = _with_none(
        arguments, gradients(*incoming, *arguments, *saved), slopes_wanted=incoming.slopes_wanted
    )
    none: dict[str, Any] = dict.fromkeys(Arguments._fields)
    return tuple((none | input_gradients._asdict()).values())


def _traced_gradients(
    gradients: Callable[..., Any], spec: Spec, saved: Tensors, inputs: BackwardInputs
) -> InputGradients:
    """The gradients of a call that ran eagerly, for compiled autograd, which traces the backward only."""
    arguments = Arguments.of(spec, inputs.query, inputs.key, inputs.value)
    incoming = Incoming(*(getattr(inputs, name) for name in Incoming._fields))
    return _with_none(arguments, gradients(*incoming, *arguments, *saved), slopes_wanted=inputs.slopes_wanted)


def _without_none(
    arguments: Arguments, input_gradients: InputGradients, like: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """The gradients as tensors only, as an operator returns them: `like` the input if not wanted, empty if there is no input."""
    slopes, batch = arguments.slopes, arguments.query.shape[0]
    given = [getattr(arguments, name) for name in DIFFERENTIABLE]
    absent = slopes, slopes.new_empty(slopes.shape[-1:]), *(arguments.query.new_empty((batch, 0)) for _ in range(3))
    biases = (
        like(nothing if x is None else x) if of_x is None else of_x
        for x, of_x, nothing in zip(given, input_gradients[3:], absent, strict=True)
    )
    return *input_gradients[:3], *biases


def _with_none(arguments: Arguments, returned: tuple[Tensor, ...], *, slopes_wanted: bool) -> InputGradients:
    """The inverse of `_without_none`: None for missing and unwanted gradients."""
    left, right, *of_biases = (
        None if getattr(arguments, name) is None else x for name, x in zip(DIFFERENTIABLE, returned[3:], strict=True)
    )
    if not slopes_wanted:
        left = right = None
    dq, dk, dv = returned[:3]
    return InputGradients(dq, dk, dv, left, right, *of_biases)


def _schema(fields: type[tuple[Any, ...]]) -> str:
    return ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(fields).items())
