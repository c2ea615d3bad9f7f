"""Runs the random calls of `differential_calls.py` in JAX, in a few shapes, because compilation dominates the time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch
from differential_arrays import Arrays
from differential_calls import Call, settled, wanted
from differential_checks import Answer
from dropout_oracle import drawn_seed

from alibi_attn.jax.attention import alibi_attention
from alibi_attn.jax.forgetting import forgetting_attention

SHAPES = {
    "jax-native": {"batch": 2, "heads": 4, "kv_heads": 2, "query_len": 150, "key_len": 210, "head_dim": 20},
    "jax-dense": {"batch": 2, "heads": 4, "kv_heads": 2, "query_len": 23, "key_len": 37, "head_dim": 7},
    "jax-loop": {"batch": 1, "heads": 2, "kv_heads": 1, "query_len": 190, "key_len": 260, "head_dim": 16},
}
NO_WINDOW, MAX_POSITION = 10**7, 2**27


def of_shape(call: Call, backend: str) -> Call:
    """The call in the shape that a backend uses, in fp32 and contiguous: JAX has no strides."""
    layouts = {f"layout_{name}": "contiguous" for name in ("query", "key", "value", "masks", "key_bias", "gates")}
    alike = call.layout_grad if call.layout_grad in ("zero", "one number") else "contiguous"
    changes = layouts | {
        "layout_grad": alike,
        "dtype": "float32",
        "slopes_as": "float32",
        "key_bias_as": "float32",
        "gates_as": "float32",
        "integers": "int64",
        "value_is_key": False,
        "dropout_p": 0.5 if call.dropout_p else 0.0,  # a single value, since each is compiled
    }
    if call.offset is not None and abs(call.offset) > MAX_POSITION:  # JAX rejects it: positions are int32
        changes["offset"] = call.offset % MAX_POSITION
    if call.gates in ("cuts", "both"):
        # A cut of a single head becomes a gate of −2²⁰ in JAX: it hides earlier keys only while scores stay much smaller.
        changes |= dict.fromkeys(("bad", "key_bias", "mask", "segments")) | {"size_query": 1.0, "size_key": 1.0}
        changes |= {"outlier_key": min(call.outlier_key, 10.0), "peaked": max(-4.0, min(4.0, call.peaked))}
    if call.slopes == "extreme" and call.key_bias == "isolated" and backend != "jax-native":
        # Scores and biases beyond 10³⁰ each: XLA has no fp64 for the order of keys whose scores overflow fp32.
        changes["slopes"] = "huge"
    shape = SHAPES[backend] | ({"batch": 0} if call.batch == 0 else {})
    return settled(dataclasses.replace(call, **shape, **changes))


def jax_answer(call: Call, numbers: Arrays, backend: str) -> Answer:
    """Output, lse and the requested gradients. Absent masks are replaced by masks that hide nothing."""
    b, t, s = call.batch, call.query_len, call.key_len
    given = {
        name: jnp.asarray(np.swapaxes(getattr(numbers, name), 1, 2), jnp.float32) for name in ("query", "key", "value")
    }
    for name in ("slopes", "right_slopes", "key_bias", "log_fgate", "sink_logits"):
        if getattr(numbers, name) is not None:
            given[name] = jnp.asarray(getattr(numbers, name), jnp.float32)
    pair = numbers.query_segments, numbers.key_segments
    if pair[1] is None:
        pair = np.zeros((b, t), np.int64), np.zeros((b, s), np.int64)
    rest = {
        "window": call.window or NO_WINDOW,
        "scale": call.factor,
        "segment_ids": pair,
        "key_mask": np.ones((b, s), bool) if numbers.key_mask is None else numbers.key_mask,
        "tolerance": call.share,
        "backend": backend.removeprefix("jax-"),
        "dropout_p": call.dropout_p,
    }
    attention = alibi_attention if call.gates is None else forgetting_attention
    rest["query_offset"] = numbers.first if call.gates is None else call.offset
    if call.gates is None:
        rest["causal"] = call.causal
    if call.dropout_p:
        seed = drawn_seed(call.torch_seed)
        rest["dropout_key"] = jnp.array([seed >> 32, seed % 2**32], jnp.uint32)
    (output, lse), pull = jax.vjp(lambda arrays: attention(**arrays, **rest, return_lse=True), given)
    results = {"output": _torch(output)} | ({"lse": _torch(lse)} if call.return_lse else {})
    if wanted(call):
        blind = ~numbers.seen(call).any(-1) if call.wild_blind else np.zeros(lse.shape, bool)
        grad = np.where(blind[..., None], np.nan, numbers.grad_output * (call.through != "lse"))
        grad_lse = np.where(blind, np.nan, numbers.grad_lse * (call.through != "output"))
        (found,) = pull((jnp.asarray(np.swapaxes(grad, 1, 2), jnp.float32), jnp.asarray(grad_lse, jnp.float32)))
        results |= {name: _torch(found[name]) for name in wanted(call)}
    return Answer(results)


def _torch(x: jax.Array) -> torch.Tensor:
    """[B, T, H, D] -> [B, H, T, D]; other arrays keep their axes."""
    array = np.array(x)
    return torch.from_numpy(np.swapaxes(array, 1, 2).copy() if array.ndim == 4 else array)
