"""`jax.nn.dot_product_attention`, with a dense bias and without a bias, and how peers in JAX are called.

Arrays are [B, T, H, D]. Calls are compiled functions that wait for their results, because JAX dispatches asynchronously.
"""

import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch computes the truth on the same device

import jax
import jax.numpy as jnp

from alibi_attn.jax import alibi_attention
from alibi_lab.measure.harness import Call
from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Peer

Attention = Callable[..., jax.Array]


def ours(**options: Any) -> Callable[..., Attention]:
    """Our JAX attention with these options, as a peer's `prepare`."""
    return lambda inputs: bound(functools.partial(alibi_attention, **options))


def causal(**options: Any) -> Callable[..., Attention]:
    """`dot_product_attention`, causal and without a bias, with these options, as a peer's `prepare`."""
    return lambda inputs: bound(functools.partial(jax.nn.dot_product_attention, is_causal=True, **options))


def dense(inputs: Inputs) -> Attention:
    """With the bias [1, H, n, n], built once."""
    slopes, places = jnp.asarray(inputs.slopes.cpu().numpy()), jnp.arange(inputs.key.shape[2])
    distance = places[:, None] - places
    bias = jnp.where(distance >= 0, -slopes[:, None, None] * distance, -jnp.inf)[None]
    return bound(jax.nn.dot_product_attention, bias=bias)


def bound(function: Callable[..., Any], **arrays: jax.Array) -> Attention:
    """The function with these arrays bound. Passed to a jitted function, they are traced and not constants."""
    return jax.tree_util.Partial(function, **arrays)  # type: ignore[no-untyped-call]


def jax_call(peer: Peer, inputs: Inputs, *, backward: bool) -> Call:
    """The peer on these inputs, in JAX's layout [B, T, H, D]. A step is compiled as a whole, forward and backward."""
    *arrays, grad = (
        jnp.from_dlpack(x.transpose(1, 2).contiguous()) for x in (inputs.query, inputs.key, inputs.value, inputs.grad)
    )
    attention = peer.prepare(inputs)
    of_forward = functools.partial(_finished, jax.jit(operator.call), attention, *arrays)
    of_step = functools.partial(_finished, jax.jit(_step), attention, grad, *arrays)

    def results() -> Sequence[Tensor]:
        found = jax.tree.leaves(of_step() if backward else of_forward())
        return [torch.utils.dlpack.from_dlpack(x).transpose(1, 2) for x in found]

    return Call(results, of_forward, of_step if backward else None)


def _finished(function: Callable[..., object], *arguments: object) -> object:
    return jax.block_until_ready(function(*arguments))  # type: ignore[no-untyped-call]


def _step(attention: Attention, grad: jax.Array, *arrays: jax.Array) -> tuple[object, object]:
    output, pull = jax.vjp(attention, *arrays)
    return output, pull(grad)
