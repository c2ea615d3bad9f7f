"""Handles the contexts a call can run in: torch.func transforms, forward mode, second derivatives, and tensors without values.

Attention is differentiable once and in reverse mode. `once` makes anything else an error on every backend, because some would
be silently wrong. `transformable` adapts a custom operator to torch.func; `Mapped` folds a vmapped axis into the batch.
See pytorch.org/docs/stable/notes/extending.func.html.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd.forward_ad import unpack_dual

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """Like `torch.compiler.assume_constant_result`, but without the slow import of torch's compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def transforms() -> tuple[str, ...]:
    """The active transforms of torch.func, outermost first: Grad, Vmap, Jvp."""
    return tuple(level.key().name for level in retrieve_all_functorch_interpreters())


@constant_when_compiled
def _has_autocast(device: str) -> bool:
    """Not traceable itself before torch 2.13."""
    return torch.amp.is_autocast_available(device)


def autocasts(device: str) -> bool:
    """Whether torch.autocast is active for a type of device; torch raises an error for types that do not have it."""
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def why_not_compiled() -> str | None:
    """Why torch.compile cannot trace this call of a custom operator: inside torch.func it would lose the derivatives."""
    if not torch.compiler.is_compiling() or set(transforms()) <= {"Vmap"}:
        return None
    return "torch.compile traces custom operators outside torch.func or inside vmap only, not inside grad, vjp or jvp"


def are_ordinary(*tensors: Tensor) -> bool:
    """Whether all are ordinary tensors with values, on a CPU or a GPU, and nothing is being traced."""
    if is_traced():
        return False
    return all(
        type(x) in (Tensor, torch.nn.Parameter) and (x.is_cpu or x.is_cuda) and not is_functorch_wrapped_tensor(x)
        for x in tensors
    )


def may_read(*tensors: Tensor) -> bool:
    """Whether reading the values is possible and free: ordinary CPU tensors outside tracing."""
    return all(x.is_cpu for x in tensors) and are_ordinary(*tensors)


def in_memory(x: Tensor) -> Tensor:
    """The same numbers, materialized for a data pointer: torch keeps some signs and zeros as a flag of the tensor."""
    if x.is_neg() or x._is_zerotensor():
        return x.clone()
    return x


def is_traced() -> bool:
    """Whether operations are being recorded to run on other values: by torch.compile, make_fx or torch.jit.trace."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def surely(condition: bool) -> bool:
    """The condition; for the symbolic shapes of torch.export, True only if it holds for all of them. Adds no guard."""
    if not torch.compiler.is_exporting():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


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
    function = _function(operator, save or _save_nothing, differentiate or _refuse_second_derivatives)

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
        "generate_vmap_rule": True, "forward": staticmethod(forward), "setup_context": staticmethod(save),
        "backward": staticmethod(differentiate), "jvp": staticmethod(_refuse_forward_mode),
    }  # fmt: skip
    return type("AlibiAttention", (torch.autograd.Function,), attributes)


def _views(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of the tensors, and an empty tensor that depends on all of them for autograd and costs nothing to save."""
    return *(tensor.view_as(tensor) for tensor in tensors), tensors[0].new_empty(0)


def _save_empty(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[-1])
    ctx.set_materialize_grads(False)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _pass_back(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients. With grad enabled they stay connected to the inputs, so that differentiating them again raises an error."""
    if not torch.is_grad_enabled():
        return gradients[:-1]
    (empty,) = ctx.saved_tensors
    return tuple(None if g is None else _LAST.apply(g, empty) for g in gradients[:-1])


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
_LAST = _function(lambda gradient, _: gradient.view_as(gradient), _save_nothing, _refuse_second_derivatives)


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
