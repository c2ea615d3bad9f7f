"""The calls of a JAX peer: compiled functions that wait for their results, because JAX dispatches asynchronously."""

import functools
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch computes the truth on the same device

import jax
import jax.numpy as jnp

from alibi_lab.measure.harness import Call
from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Peer


def jax_call(peer: Peer, inputs: Inputs, *, backward: bool) -> Call:
    """The peer on these inputs, in JAX's layout [B, T, H, D]. A step is compiled as a whole, forward and backward."""
    *arrays, grad = (
        jnp.from_dlpack(x.transpose(1, 2).contiguous()) for x in (inputs.query, inputs.key, inputs.value, inputs.grad)
    )
    attention = peer.prepare(inputs)
    of_forward = functools.partial(_finished, jax.jit(forward), attention, *arrays)
    of_step = functools.partial(_finished, jax.jit(step), attention, grad, *arrays)

    def results() -> Sequence[Tensor]:
        found = jax.tree.leaves(of_step() if backward else of_forward())
        return [torch.utils.dlpack.from_dlpack(x).transpose(1, 2) for x in found]

    return Call(results, of_forward, of_step if backward else None)


def _finished(function: Callable[..., object], *arguments: object) -> object:
    return jax.block_until_ready(function(*arguments))  # type: ignore[no-untyped-call]


def forward(attention: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attention(query, key, value)


def step(
    attention: Callable[..., jax.Array], grad: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[object, object]:
    output, pull = jax.vjp(attention, query, key, value)
    return output, pull(grad)
