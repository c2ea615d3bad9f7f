"""The Triton kernels called from JAX, on a CPU: Triton's interpreter launches them where JAX's launcher would on a device."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

from alibi_attn.attention.api import alibi_attention as in_torch
from alibi_attn.attention.backends.fused import launch as in_pytorch
from alibi_attn.attention.backends.fused.kernels.arguments import Tiling
from alibi_attn.jax import alibi_attention, attention
from alibi_attn.jax.backends import launching
from alibi_attn.jax.backends.launching import Changed, Fixed, Launch

OF = "query", "key", "value", "slopes", "right slopes"
NAMES = "output", "lse", *(f"gradient of {name}" for name in OF)


@contextlib.contextmanager
def launched_by(launch: Any, capability: int = 90) -> Iterator[None]:
    """Inside, every array is said to be on a CUDA device, and `launch` launches."""
    with (
        mock.patch.object(launching, "launch", launch),
        mock.patch.object(launching, "missing", return_value=None),
        mock.patch.object(launching, "capability", return_value=capability),
        mock.patch.object(attention, "platforms", return_value={"gpu"}),
    ):
        yield


def interpreted(
    kernel: Any, programs: int, arguments: Sequence[Any], *, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> list[jax.Array]:
    """`launching.launch`, interpreted on the host."""
    asked = Launch(kernel, arguments, constants, {"num_warps": num_warps, "num_stages": num_stages})

    def run(*arrays: Any) -> list[np.ndarray]:
        tensors = [torch.from_numpy(np.array(x)) for x in arrays]
        remaining = iter(tensors)
        kernel[(programs, 1, 1)](
            *(_filled(x, remaining) for x in arguments), **constants, num_warps=num_warps, num_stages=num_stages
        )
        return [tensors[at].numpy() for at in asked.changed]

    results = [jax.ShapeDtypeStruct(asked.arrays[at].shape, asked.arrays[at].dtype) for at in asked.changed]
    return list(jax.pure_callback(run, results, *asked.arrays))


def _filled(argument: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The argument for the interpreter, with the next tensors in place of arrays."""
    if isinstance(argument, Tiling):
        return in_pytorch.interpreted(Tiling(*[x.number for x in argument]))
    if isinstance(argument, tuple):
        return type(argument)(*[_filled(x, tensors) for x in argument])
    if isinstance(argument, Changed):
        tensor = next(tensors)
        return tensor if argument.type is None else tensor.view(torch.int64)
    if isinstance(argument, Fixed):
        return argument.number
    return next(tensors) if isinstance(argument, jax.Array) else argument


def both(
    shape: tuple[int, int, int, int], kv_heads: int, keys: int, dtype: str = "float32", **options: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(in JAX, in PyTorch) the output, lse, and gradients of query, key, value and slopes, by the same kernels."""
    b, t, h, d = shape
    generator = np.random.default_rng(0)
    sizes = (shape, (b, keys, kv_heads, d), (b, keys, kv_heads, d), shape, (b, h, t))
    query, key, value, grad, of_lse = (generator.standard_normal(size).astype(dtype) for size in sizes)
    slopes = np.geomspace(0.5, 0.02, h).astype(np.float32)
    right = options.pop("right_slopes", None)
    given = [query, key, value, slopes, *([] if right is None else [right])]

    def loss(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        named = dict(zip(("slopes", "right_slopes"), arrays[3:], strict=False))
        output, lse = alibi_attention(*arrays[:3], **named, return_lse=True, backend="fused", **options)
        return (output * grad).astype(jnp.float32).sum() + (lse * of_lse).sum(), (output, lse)

    with launched_by(interpreted):
        gradients, results = jax.jit(jax.grad(loss, tuple(range(len(given))), has_aux=True))(*given)
    leaves = [torch.from_numpy(x).requires_grad_() for x in given]
    heads = [x.transpose(1, 2) for x in leaves[:3]]
    named = dict(zip(("slopes", "right_slopes"), leaves[3:], strict=False))
    output, lse = in_torch(*heads, **named, return_lse=True, backend="fused", **options)
    found = torch.autograd.grad(
        [output, lse], leaves, [torch.from_numpy(grad).transpose(1, 2), torch.from_numpy(of_lse).float()]
    )
    ours, theirs = (*results, *gradients), (output.transpose(1, 2).detach(), lse.detach(), *found)
    return [(np.asarray(x), y.numpy()) for x, y in zip(ours, theirs, strict=True)]
