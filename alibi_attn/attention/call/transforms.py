"""The contexts that a call can run in: tracing, torch.func, autocast, and tensors without values."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

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


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as torch.autocast does for scaled_dot_product_attention: fp16, bf16 and fp32 become the autocast dtype."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not autocasts(device):
        return tensors
    low = torch.get_autocast_dtype(device)
    return tuple(x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Turns torch.autocast off, if it is active for the type of device."""
    if autocasts(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


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
