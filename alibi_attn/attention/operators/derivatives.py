"""Attention is differentiable once, in reverse mode; anything else is an error, because some backends would be silently wrong.

`differentiable_once` marks the inputs of a call, `once` any tensors. `transformable` adapts a custom operator to torch.func, see
pytorch.org/docs/stable/notes/extending.func.html.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual

from alibi_attn.attention.call.spec import DIFFERENTIABLE, AttentionSpec
from alibi_attn.attention.call.transforms import transforms


def differentiable_once(
    spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[AttentionSpec[Tensor], Tensor, Tensor, Tensor]:
    """The call, marked so that second derivatives and forward mode raise."""
    names = [name for name in DIFFERENTIABLE if getattr(spec, name) is not None]
    before: list[Tensor] = [getattr(spec, name) for name in names]
    query, key, value, *after = once(query, key, value, *before)
    if any(x is not y for x, y in zip(before, after, strict=True)):
        changed: dict[str, Any] = dict(zip(names, after, strict=True))
        spec = dataclasses.replace(spec, **changed)
    return spec, query, key, value


def once(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, marked so that second derivatives and forward mode raise."""
    if torch.compiler.is_compiling():
        return tensors  # torch itself raises for second derivatives of compiled code
    has_grad = torch.is_grad_enabled()
    marked = [
        at
        for at, x in enumerate(tensors)
        if (has_grad and x.requires_grad) or is_functorch_wrapped_tensor(x) or unpack_dual(x).tangent is not None
    ]
    if not marked:
        return tensors
    mark = _ONCE_TRANSFORMED if transforms() else _Once
    outputs = mark.apply(*(tensors[at] for at in marked))
    result = list(tensors)
    for at, output in zip(marked, outputs[:-1], strict=True):
        result[at] = output
    return tuple(result)


def last_gradients(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, connected to the inputs so that differentiating them again raises an error."""
    return tuple(None if gradient is None else _LAST.apply(gradient, *inputs) for gradient in gradients)


def transformable(
    operator: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Wraps an operator: the call is unchanged, but inside torch.func it goes through an autograd.Function.

    torch.func cannot differentiate custom operators: it does not support the functions that `register_autograd` creates.

    Args:
        operator: accepts tensors and numbers, no lists; everything it calls has a vmap rule.
        save, differentiate: the arguments of `register_autograd`; without them its gradient raises an error.
    """
    function = _function(operator, save or _save_no_tensors, differentiate or _refuse_second_derivatives)

    def call(*inputs: Any) -> Any:
        if not torch.compiler.is_compiling() and transforms():
            return function.apply(*inputs)
        return operator(*inputs)

    return call


def _function(
    operator: Callable[..., Any], save: Callable[..., None], differentiate: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """An autograd.Function in the style that torch.func requires; the older style is three times faster elsewhere."""

    def forward(*inputs: Any) -> Any:
        return operator(*inputs)

    attributes = {
        "generate_vmap_rule": True,
        "forward": staticmethod(forward),
        "setup_context": staticmethod(save),
        "backward": staticmethod(differentiate),
        "jvp": staticmethod(_refuse_forward_mode),
    }
    return type("AlibiAttention", (torch.autograd.Function,), attributes)


def _views(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of the tensors, and an empty tensor that depends on all of them for autograd and costs nothing to save."""
    return *(tensor.view_as(tensor) for tensor in tensors), tensors[0].new_empty(0)


def _save_empty(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[-1])
    ctx.set_materialize_grads(False)


def _save_no_tensors(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _pass_back(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients. With grad enabled they stay connected to the inputs, so that differentiating them again raises an error."""
    if not torch.is_grad_enabled():
        return gradients[:-1]
    return last_gradients(gradients[:-1], ctx.saved_tensors)


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise RuntimeError(
        "alibi_attention is differentiable once and in reverse mode, but forward mode was requested (jvp, jacfwd, hessian); "
        "use torch.func.grad, vjp or jacrev, or write out softmax(scale·q·kᵀ + alibi_bias(...))·v"
    )


def _refuse_second_derivatives(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "alibi_attention is differentiable once, but second derivatives were requested; "
        "for those write out softmax(scale·q·kᵀ + alibi_bias(...))·v"
    )


class _Once(torch.autograd.Function):
    """The mark that `once` applies outside torch.func."""

    jvp = staticmethod(_refuse_forward_mode)
    backward = staticmethod(_pass_back)

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        output = _views(*tensors)
        _save_empty(ctx, tensors, output)
        return output


_ONCE_TRANSFORMED = _function(_views, _save_empty, _pass_back)
_LAST = _function(lambda gradient, *_: gradient.view_as(gradient), _save_no_tensors, _refuse_second_derivatives)
