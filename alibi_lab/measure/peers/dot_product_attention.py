"""`jax.nn.dot_product_attention`, with a dense bias and without a bias. Arrays are [B, T, H, D]."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from alibi_attn.jax import alibi_attention
from alibi_lab.measure.inputs import Inputs

Attention = Callable[..., jax.Array]


def ours(**options: Any) -> Callable[..., Attention]:
    """Our JAX attention with these options, as a peer's `prepare`."""
    return lambda inputs: bound(functools.partial(alibi_attention, **options))


def dense(inputs: Inputs) -> Attention:
    """With the bias [1, H, n, n], built once."""
    slopes, places = jnp.asarray(inputs.slopes.cpu().numpy()), jnp.arange(inputs.key.shape[2])
    distance = places[:, None] - places
    bias = jnp.where(distance >= 0, -slopes[:, None, None] * distance, -jnp.inf)[None]
    return bound(jax.nn.dot_product_attention, bias=bias)


def causal(inputs: Inputs) -> Attention:
    """Causal, without a bias."""
    return bound(_CAUSAL)


def cudnn(inputs: Inputs) -> Attention:
    """Causal, without a bias, by cuDNN's kernel."""
    return bound(_CUDNN)


def bound(function: Callable[..., Any], **arrays: jax.Array) -> Attention:
    """The function with these arrays bound. Passed to a jitted function, they are traced and not constants."""
    partial: Attention = jax.tree_util.Partial(function, **arrays)  # type: ignore[no-untyped-call]
    return partial


_CAUSAL = functools.partial(jax.nn.dot_product_attention, is_causal=True)
_CUDNN = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
