"""What the modules of both of Flax's APIs share: checks of sizes, the growing cache, attention with or without gates, and weights
that travel to PyTorch and back.

The modules are `flax.py` (nnx) and `linen.py`.
"""

from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from alibi_attn.jax.attention import alibi_attention
from alibi_attn.jax.forgetting import attend_gated
from alibi_attn.jax.tiles import Array
from alibi_attn.jax.validation import Slopes, checked_dropout_key, make_spec
from alibi_attn.slopes import alibi_slopes

QK_NORM_EPS = 1e-6  # those of alibi_attn.nn and of torch.nn.LayerNorm
LAYER_NORM_EPS = 1e-5
# What torch.nn.Linear draws, U(−1/√E, 1/√E), as `alibi_attn.nn` begins a gate; Flax's own default is √3 times as wide.
GATE_INITIALIZER = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

Weights: TypeAlias = "Mapping[str, Array | NDArray[np.generic] | Weights]"

_FLAX_NAMES = {"ffn.0": "ffn_in", "ffn.3": "ffn_out", "slopes.values": "slopes"}
_TORCH_NAMES = {flax: torch for torch, flax in _FLAX_NAMES.items()}
_LINEAR = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "ffn_in", "ffn_out")
_NORMS = ("attention_norm", "ffn_norm", "q_norm", "k_norm")


def converted_weights(weights: Weights) -> dict[str, object]:
    """Weights of `alibi_attn.nn` as Flax's parameters, and Flax's parameters as a state dict of `alibi_attn.nn`.

    A flat dictionary ("attention.q_proj.weight": [out, in]) is a PyTorch state dict, of a block or an attention layer or of
    anything that holds some; a nested one ({"attention": {"q_proj": {"kernel": [in, out]}}}) is Flax's, the same for nnx and
    linen. Values are arrays; nothing is copied but by transposing.

    Raises:
        ValueError: a name that has no counterpart.

    >>> converted_weights({"q_proj.weight": np.zeros((6, 4))})["q_proj"]["kernel"].shape
    (4, 6)
    >>> list(converted_weights({"q_proj": {"kernel": np.zeros((4, 6))}}))
    ['q_proj.weight']
    """
    if any(isinstance(value, Mapping) for value in weights.values()):
        return dict(_torch_entries(weights, ""))
    nested: dict[str, object] = {}
    for name, value in weights.items():
        *path, leaf = _flax_path(name)
        place = nested
        for part in path:
            place = place.setdefault(part, {})  # type: ignore[assignment]
        place[leaf] = value.T if leaf == "kernel" else value  # type: ignore[union-attr]
    return nested


def _flax_path(name: str) -> list[str]:
    for torch, flax in _FLAX_NAMES.items():
        name = name.removesuffix(torch) + flax if name.endswith(torch) else name.replace(f"{torch}.", f"{flax}.")
    *path, leaf = name.split(".")
    module = path[-1] if path else ""
    if leaf == "weight" and module in _LINEAR:
        return [*path, "kernel"]
    if leaf == "weight" and module in _NORMS:
        return [*path, "scale"]
    if leaf == "slopes" or (leaf == "bias" and module in (*_LINEAR, *_NORMS)):
        return [*path, leaf]
    raise ValueError(
        f"{name} has no counterpart in Flax: converted are the slopes, and weight and bias of {', '.join((*_LINEAR, *_NORMS))}"
    )


def _torch_entries(weights: Weights, prefix: str) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for name, value in weights.items():
        if isinstance(value, Mapping):
            entries += _torch_entries(value, f"{prefix}{_TORCH_NAMES.get(name, name)}.")
        elif name in ("kernel", "scale"):
            entries.append((f"{prefix}weight", value.T if name == "kernel" else value))
        elif name in ("bias", "slopes"):
            entries.append((f"{prefix}{_TORCH_NAMES.get(name, name)}", value))
        else:
            raise ValueError(
                f"{prefix}{name} has no counterpart in PyTorch: converted are kernel, scale, bias and slopes"
            )
    return entries


def log_gates(logits: Array) -> Array:
    """[B, H, T] in the dtype of logits [B, T, H]: ln of the gates, ln sigmoid (Lin et al. 2025, arXiv:2503.02130, eq. 9)."""
    return jax.nn.log_sigmoid(logits).swapaxes(1, 2)


def at_least_fp32(x: Array) -> Array:
    """What gates are made of: they are added up over the whole text."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def attended(
    query: Array,
    key: Array,
    value: Array,
    slopes: Slopes,
    log_fgate: Array | None,
    *,
    causal: bool,
    window: int | None,
    query_offset: Array | None,
    key_mask: Array | None,
    segment_ids: Array | None,
    dropout_p: float,
    dropout_key: Array | None,
) -> Array:
    """[B, T, H·D]: `alibi_attention`, or with gates [B, H, S] `forgetting_attention`, whose offset may be traced here."""
    if log_fgate is None:
        output = alibi_attention(
            query, key, value, slopes, causal=causal, window=window, query_offset=query_offset, key_mask=key_mask,
            segment_ids=segment_ids, dropout_p=dropout_p, dropout_key=dropout_key,
        )  # fmt: skip
        assert isinstance(output, jax.Array)  # no lse was asked for
    else:
        spec = make_spec(
            query, key, value, slopes, causal=True, right_slopes=None, window=window, scale=None, query_offset=query_offset,
            key_mask=key_mask, segment_ids=segment_ids, key_bias=None, dropout_p=dropout_p, tolerance=None, return_lse=False,
        )  # fmt: skip
        first = 0 if query_offset is None else query_offset
        output, _ = attend_gated(spec, query, key, value, log_fgate, first, checked_dropout_key(dropout_p, dropout_key))
    return output.reshape(*output.shape[:2], -1)


def appended(cached: Array, new: Array, length: Array, *, axis: int = 1) -> Array:
    """[B, capacity, K, D]: the cache with new keys or values [B, T, K, D] from position `length` on; gates have them on axis 2.

    Raises:
        ValueError: more than the cache has room for. Where the length is traced nothing can be raised: what is appended is
            NaN then, and so is every output that sees it.
    """
    capacity, end = cached.shape[axis], length + new.shape[axis]
    if not isinstance(length, jax.core.Tracer) and int(end) > capacity:
        raise ValueError(
            f"the cache holds {int(length)} of {capacity} positions and {new.shape[axis]} more do not fit; make a larger one"
        )
    new = jnp.where(end > capacity, jnp.nan, new.astype(cached.dtype))
    return lax.dynamic_update_slice_in_dim(cached, new, length, axis=axis)


def check_sizes(
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int | None,
    dropout_p: float,
    *,
    causal: bool,
    cached: bool,
    forget_gate: bool,
) -> int:
    """The number of key/value heads, after the sizes were checked."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if size < 1:
            raise ValueError(f"{name} is {size} but must be at least 1")
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim is {embed_dim} but must be a multiple of num_heads, {num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads is {num_heads} but must be a multiple of num_kv_heads, {num_kv_heads}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p} but must be a probability in [0, 1)")
    if forget_gate and not causal:
        raise ValueError("forget_gate needs causal=True: gates multiply from a key to the queries after it")
    if cached and not causal:
        raise ValueError("a cache needs causal=True: without it the keys to come would change outputs already given")
    return num_kv_heads


def checked_slopes(slopes: Slopes | None, num_heads: int) -> tuple[float, ...]:
    """The slopes as numbers, [H]."""
    values = np.asarray(alibi_slopes(num_heads) if slopes is None else slopes, np.float64)
    if values.shape != (num_heads,):
        raise ValueError(f"slopes has shape {list(values.shape)} but must be [H] = [{num_heads}]")
    return tuple(values.tolist())


def check_input(x: Array, embed_dim: int) -> None:
    """x is [B, T, embed_dim]."""
    if x.ndim != 3 or x.shape[-1] != embed_dim:
        raise ValueError(f"x has shape {list(x.shape)} but must be [B, T, embed_dim] = [B, T, {embed_dim}]")
