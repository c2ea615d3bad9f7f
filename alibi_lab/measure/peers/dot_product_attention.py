"""`jax.nn.dot_product_attention`, with a dense bias and without a bias. Arrays are [B, T, H, D]."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from alibi_lab.measure.peers import Peer

Attention = Callable[..., jax.Array]


def dense(query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array) -> Attention:
    """With the bias [1, H, n, n], built once."""
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(query.shape[1])
    bias = jnp.where(distance >= 0, -slopes[:, None, None] * distance, -jnp.inf)[None]
    return bound(jax.nn.dot_product_attention, bias=bias)


def causal(query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array) -> Attention:
    """Causal, without a bias."""
    return bound(_CAUSAL)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array) -> Attention:
    """Causal, without a bias, by cuDNN's kernel."""
    return bound(_CUDNN)


def bound(function: Callable[..., Any], **arrays: jax.Array) -> Attention:
    """The function with these arrays bound. Passed to a jitted function, they are traced and not constants."""
    partial: Attention = jax.tree_util.Partial(function, **arrays)  # type: ignore[no-untyped-call]
    return partial


_CAUSAL = functools.partial(jax.nn.dot_product_attention, is_causal=True)
_CUDNN = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
DENSE = Peer("dense bias", dense, "dot_product_attention with a bias that is built once", longest=8192)
CAUSAL = Peer(
    "causal, no bias", causal, "dot_product_attention is_causal=True; no ALiBi at all", longest=8192, biased=False
)
