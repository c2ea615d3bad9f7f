"""Wraps a backend as a torch operator that works with autograd, torch.func, torch.compile, torch.export and vmap.

A backend provides `Kernels`: a forward and a backward over a spec. `Arguments` (`schema.py`) is the schema of the resulting
operator: arguments, gradients and mapped axes are always accessed by name. Eager calls of ordinary tensors skip the operator: an
autograd.Function calls the same kernels with less overhead.
"""

import functools
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

from alibi_attn.attention.call.spec import ARRAYS, DIFFERENTIABLE
from alibi_attn.attention.call.transforms import are_ordinary
from alibi_attn.attention.call.visibility import may_see_nothing, with_plain_offset
from alibi_attn.attention.operators.derivatives import differentiable_once, last_gradients, transformable
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
TracedGradients = Callable[[Spec, Tensors, BackwardInputs], InputGradients]

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
        found = _attend_eagerly(kernels, traced_gradients, spec, query, key, value)
        if found is None:
            spec, query, key, value = differentiable_once(spec, query, key, value)
            found = attention(*Arguments.of(spec, query, key, value))[:2]
        output, lse = found
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


def _attend_eagerly(
    kernels: Kernels, traced_gradients: TracedGradients, spec: Spec, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor] | None:
    """(output, lse); None unless all inputs are ordinary tensors without tangents, and nothing traces, transforms or profiles.

    Args:
        traced_gradients: computes the gradients if compiled autograd traces them.
    """
    tensors = query, key, value, *_tensors(spec).values()
    with_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not are_ordinary(*tensors):
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return None
    if query.is_cpu and isinstance(spec.query_offset, Tensor):
        spec = with_plain_offset(spec)
    if with_gradients:
        return _attend_with_gradients(
            kernels, traced_gradients, spec, query, key, value, *(getattr(spec, x) for x in DIFFERENTIABLE)
        )
    if kernels.infer is not None:
        return kernels.infer(spec, query, key, value)
    return kernels.forward(spec, query, key, value)[:2]


def requires_gradient(spec: Spec, *tensors: Tensor | None) -> bool:
    """Whether one of these tensors or of the spec's requires a gradient."""
    return any(x is not None and x.requires_grad for x in (*tensors, *(getattr(spec, x) for x in DIFFERENTIABLE)))


def _tensors(spec: Spec) -> dict[str, Tensor]:
    fields = vars(spec)
    return {name: x for name in ARRAYS if (x := fields[name]) is not None and isinstance(x, Tensor)}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        traced_gradients: TracedGradients,
        spec: Spec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *biases: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        output, lse, saved, ctx.moderate = kernels.forward(spec, query, key, value)
        # Only autograd holds tensors: it detects in-place changes and frees them in time.
        tensors = _tensors(spec)
        ctx.kernels, ctx.traced_gradients, ctx.names = kernels, traced_gradients, list(tensors)
        ctx.spec = spec.changed(**dict.fromkeys(tensors))
        ctx.save_for_backward(query, key, value, output, lse, *tensors.values(), *saved)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # only once: every access may run hooks
        if not torch.is_grad_enabled():
            return None, None, None, *_eager_gradients(ctx, saved, grad_output, grad_lse)
        with torch.no_grad():
            gradients = _eager_gradients(ctx, saved, grad_output, grad_lse)
        return None, None, None, *last_gradients(gradients, (grad_output, grad_lse, *saved[: 5 + len(ctx.names)]))


def _eager_gradients(ctx: Any, saved: Tensors, grad_output: Tensor | None, grad_lse: Tensor | None) -> InputGradients:
    query, key, value, output, lse, *rest = saved
    spec = ctx.spec.changed(**dict(zip(ctx.names, rest, strict=False)))
    visited = tuple(rest[len(ctx.names) :])
    *_, slopes, right_slopes, key_bias, query_bias, table = ctx.needs_input_grad
    inputs = BackwardInputs(
        query,
        key,
        value,
        output,
        lse,
        torch.zeros_like(output) if grad_output is None else grad_output,
        grad_lse,
        slopes or right_slopes,
        key_bias or query_bias or table,
        may_see_nothing(spec),
        ctx.moderate,
    )
    if are_ordinary(output, visited[0]):
        return InputGradients.of(spec, inputs, ctx.kernels.backward(spec, visited, inputs))
    return ctx.traced_gradients(spec, visited, inputs)


_attend_with_gradients: Callable[..., tuple[Tensor, Tensor]] = _Attention.apply
