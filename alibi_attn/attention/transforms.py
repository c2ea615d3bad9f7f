"""What torch does around a call: the transforms of torch.func, forward mode, second derivatives, and tensors without values.

Attention is differentiable once and in reverse mode. `once` makes all else an error on every backend, where some would be
silently wrong. `transformable` makes of a custom operator what torch.func wants; `Mapped` puts an axis of vmap into the batch.
See pytorch.org/docs/stable/notes/extending.func.html.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transforms() -> tuple[str, ...]:
    """The transforms of torch.func that the call is inside of, the outermost first: Grad, Vmap, Jvp."""
    return tuple(level.key().name for level in retrieve_all_functorch_interpreters())


def why_not_compiled() -> str | None:
    """Why torch.compile cannot trace this call of a custom operator: inside of torch.func it loses the derivatives."""
    if not torch.compiler.is_compiling() or set(transforms()) <= {"Vmap"}:
        return None
    return "torch.compile traces custom operators outside of torch.func, or in vmap alone, and not in grad, vjp or jvp"


def is_mapped(tensor: Tensor) -> bool:
    """Whether it may have an axis of torch.func.vmap, which its shape does not show: no writing into others from it."""
    return not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(tensor)


def may_read(tensor: Tensor) -> bool:
    """Whether it has values, and looking at them is free: an ordinary tensor on a CPU that nobody traces."""
    ordinary = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return ordinary and not is_traced() and not is_functorch_wrapped_tensor(tensor)


def is_traced() -> bool:
    """Whether operations are being written down, for other values than these: by torch.compile, make_fx or torch.jit.trace."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def surely(condition: bool) -> bool:
    """The condition; but where torch.export leaves shapes open, True only if it holds for all of them: without a guard."""
    if not torch.compiler.is_exporting():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


def once(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, such that second derivatives and forward mode raise."""
    if torch.compiler.is_compiling():
        return tensors  # second derivatives of compiled code are an error of torch's own
    marked = [at for at, tensor in enumerate(tensors) if _is_tracked(tensor)]
    if not marked:
        return tensors
    *outputs, _ = _Once.apply(*(tensors[at] for at in marked))  # type: ignore[no-untyped-call]
    found = dict(zip(marked, outputs, strict=True))
    return tuple(found.get(at, tensor) for at, tensor in enumerate(tensors))


def _is_tracked(tensor: Tensor) -> bool:
    """Whether somebody may differentiate by it."""
    if is_functorch_wrapped_tensor(tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise RuntimeError(
        "alibi_attention is differentiable once and in reverse mode, and forward mode was asked for (jvp, jacfwd, hessian); "
        "take torch.func.grad, vjp or jacrev, or write out softmax(scale·q·kᵀ + alibi_bias(...))·v"
    )


def _refuse_second_derivatives(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "alibi_attention is differentiable once, and second derivatives were asked for; "
        "write out softmax(scale·q·kᵀ + alibi_bias(...))·v for those"
    )


class _Once(torch.autograd.Function):
    """The same tensors, differentiable once, and an empty one.

    What is empty depends on all of them, as far as autograd knows, and costs nothing to keep.
    """

    generate_vmap_rule = True
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return *(tensor.view_as(tensor) for tensor in tensors), tensors[0].new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[-1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return gradients[:-1]
        (empty,) = ctx.saved_tensors
        return tuple(None if g is None else _Last.apply(g, empty) for g in gradients[:-1])  # type: ignore[no-untyped-call]


class _Last(torch.autograd.Function):
    """A gradient that stays connected to the inputs, so that whoever differentiates it again is told."""

    generate_vmap_rule = True
    jvp = staticmethod(_refuse_forward_mode)
    backward = staticmethod(_refuse_second_derivatives)

    @staticmethod
    def forward(gradient: Tensor, empty: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass


def transformable(
    operator: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] = _refuse_second_derivatives,
) -> Callable[..., Any]:
    """The operator to be called instead of itself: the same, and inside of torch.func an autograd.Function.

    torch.func takes no gradients of custom operators, whose `register_autograd` makes functions that it does not know.

    Args:
        operator: takes tensors and numbers, no lists; all it calls has rules for vmap.
        save, differentiate: what `register_autograd` takes; without them its gradient is an error.
    """

    def forward(*inputs: Any) -> Any:
        return operator(*inputs)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        if save is not None:
            save(ctx, inputs, output)

    attributes = {
        "generate_vmap_rule": True, "forward": staticmethod(forward), "setup_context": staticmethod(keep),
        "backward": staticmethod(differentiate), "jvp": staticmethod(_refuse_forward_mode),
    }  # fmt: skip
    transformed = type("AlibiAttention", (torch.autograd.Function,), attributes)

    def call(*inputs: Any) -> Any:
        if not torch.compiler.is_compiling() and transforms():
            return transformed.apply(*inputs)  # type: ignore[attr-defined]
        return operator(*inputs)

    return call


@dataclasses.dataclass(frozen=True)
class Mapped:
    """An axis of vmap with `count` entries and a batch of B: how tensors go into one batch, and come back."""

    count: int
    batch: int

    @classmethod
    def of(cls, count: int, query: Tensor, axis: int | None) -> "Mapped":
        """By query, [B, …] beside the axis."""
        return cls(count, query.shape[0 if axis is None or axis > 0 else 1])

    def into_batch(self, tensor: Tensor | None, axis: int | None) -> Tensor | None:
        """[B, …] beside the axis -> [count·B, …]."""
        if tensor is None:
            return None
        tensor = tensor.expand(self.count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        return tensor.flatten(0, 1)

    def slopes(self, slopes: Tensor | None, axis: int | None) -> Tensor | None:
        """[H] or [B, H] beside the axis -> [count·B, H]."""
        if slopes is not None and slopes.ndim == (1 if axis is None else 2):
            slopes = slopes[None] if axis is None else slopes.movedim(axis, 0)[:, None]
            return slopes.expand(self.count, self.batch, -1).flatten(0, 1)
        return self.into_batch(slopes, axis)

    def first(self, first: Tensor, axis: int | None) -> Tensor:
        """[1] or [B] beside the axis -> [count·B]; [1] stays what it is without one."""
        if axis is None and first.numel() == 1:
            return first
        first = first[None] if axis is None else first.movedim(axis, 0)
        return first.expand(self.count, self.batch).flatten()

    def out_of_batch(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[count·B, …] -> [count, B, …]."""
        return tuple(tensor.unflatten(0, (self.count, self.batch)) for tensor in tensors)
